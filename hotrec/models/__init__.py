"""Models and the training task."""

from hotrec.models.task import ClickTask
from hotrec.models.zoo import ModelKind, build_model

__all__ = ["ClickTask", "ModelKind", "build_model"]
