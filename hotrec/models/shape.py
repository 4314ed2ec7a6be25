"""The architecture of a configured model on a dataset, and the work of its layers."""

from __future__ import annotations

from hotrec.config.groups import Dcnv2Config, DlrmConfig, ModelConfig, OwnModelConfig
from hotrec.models.flops import DenseWork, count_work, dense_flops
from hotrec.models.plain import Architecture
from hotrec.models.zoo import make_checked_layers
from hotrec.types import Schema

_SHARED = {"dense_layer_sizes", "over_layer_sizes", "cross_num_layers", "cross_low_rank_dim"}


def architecture_of(model: ModelConfig, schema: Schema) -> Architecture:
    """The shape of a model on the columns of a dataset."""
    keys = {name: value for name, value in vars(model).items() if name not in vars(ModelConfig())}
    shared = {name: keys.pop(name, [] if "sizes" in name else 0) for name in sorted(_SHARED)}
    target = ""
    if isinstance(model, OwnModelConfig):
        target, keys = model._target_, model.args
    return Architecture(
        kind=model.kind.name,
        embedding_dim=model.embedding_dim,
        pooling=model.pooling.name,
        dense=list(schema.dense),
        # As the collection of tables has them: by table.
        features=[
            [feature.name, table.name]
            for table in schema.tables
            for feature in schema.features_of(table.name)
        ],
        labels=list(schema.labels),
        target=target,
        args=keys,
        **shared,
    )


def work_of(model: ModelConfig, schema: Schema) -> DenseWork:
    """The work of a model's dense layers, by formula where there is one, else counted."""
    if isinstance(model, DlrmConfig | Dcnv2Config):
        num_labels = len(schema.labels)
        return dense_flops(model, len(schema.dense), len(schema.features), num_labels)
    shape = architecture_of(model, schema)
    return count_work(shape, make_checked_layers(shape, seed=0))
