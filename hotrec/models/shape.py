"""The architecture of a configured model on a dataset, and the work of its layers."""

from __future__ import annotations

import re

from hotrec.config.groups import Dcnv2Config, DinConfig, DlrmConfig, ModelConfig, OwnModelConfig
from hotrec.models.flops import DenseWork, count_work, dense_flops
from hotrec.models.plain import Architecture
from hotrec.models.zoo import make_checked_layers
from hotrec.types import Schema

_SHARED = {"dense_layer_sizes", "over_layer_sizes", "cross_num_layers", "cross_low_rank_dim"}


def architecture_of(model: ModelConfig, schema: Schema) -> Architecture:
    """The shape of a model on the columns of a dataset.

    Raises:
        ValueError: If a column that it names is not in the dataset.
    """
    keys = {name: value for name, value in vars(model).items() if name not in vars(ModelConfig())}
    shared = {name: keys.pop(name, [] if "sizes" in name else 0) for name in sorted(_SHARED)}
    target = ""
    if isinstance(model, OwnModelConfig):
        target, keys = model._target_, model.args
    if isinstance(model, DinConfig):
        keys["attention"] = _places(model.attention, schema)
    return Architecture(
        kind=model.kind.name,
        embedding_dim=model.embedding_dim,
        pooling=model.pooling.name,
        dense=list(schema.dense),
        # In the order of the collection of tables: by table.
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


def _places(attention: dict[str, str], schema: Schema) -> list[tuple[str, list[str]]]:
    """Each feature that attends, and the features of the sequence that it attends to."""
    found = []
    for sequence, query in attention.items():
        # As hotrec.config.data.features_of names them.
        is_place = re.compile(re.escape(sequence) + r"_[0-9]+").fullmatch
        places = [name for name in schema.feature_names if is_place(name)]
        for name, is_known, what in (
            (sequence, bool(places), "column of kind sequence"),
            (query, query in schema.feature_names, "feature"),
        ):
            if not is_known:
                raise ValueError(
                    f"model.attention: expected a {what} of the dataset, got {name!r}, and "
                    f"features {list(schema.feature_names)}. Correct the name, or set that kind "
                    "for the column and prepare the dataset again."
                )
        found.append((query, places))
    return found


def work_of(model: ModelConfig, schema: Schema) -> DenseWork:
    """The work of a model's dense layers, by formula if there is one, otherwise counted."""
    if isinstance(model, DlrmConfig | Dcnv2Config):
        num_labels = len(schema.labels)
        return dense_flops(model, len(schema.dense), len(schema.features), num_labels)
    shape = architecture_of(model, schema)
    return count_work(shape, make_checked_layers(shape, seed=0))
