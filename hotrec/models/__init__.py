"""Models and the training task."""

from hotrec.models.dense import check_compiler, set_up_dense_layers, use_precision
from hotrec.models.task import ClickTask
from hotrec.models.zoo import ModelKind, build_model

__all__ = [
    "ClickTask",
    "ModelKind",
    "build_model",
    "check_compiler",
    "set_up_dense_layers",
    "use_precision",
]
