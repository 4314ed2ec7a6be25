"""The shape of a model from the columns that it names, and the work of its layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hotrec.data.tokens import SampleWork
from hotrec.models.flops import DenseWork, count_sequence_work, count_work
from hotrec.models.plain import OWN, SEQUENCE_KINDS, Architecture, make_layers
from hotrec.models.zoo import make_checked_layers, zero_rows
from hotrec.types import Schema

# What an id costs besides layers over tokens, in operations per dimension of its row: the row is
# read, its vector written, its gradient read and the row updated, 4 bytes each, in whose time
# processors and GPUs do about 10 operations per byte.
ID_FLOPS_PER_DIM = 160
# Work that was counted: predictions of the same layers ask for it many times.
_COUNTED: dict[str, DenseWork] = {}


def attention_places(attention: Mapping[str, str], schema: Schema) -> list[tuple[str, list[str]]]:
    """Each feature that attends, and the features of the sequence that it attends to.

    Args:
        attention: The feature that attends, by sequence.
        schema: Features of the dataset.

    Raises:
        ValueError: If the dataset lacks one of them.
    """
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


def check_roles(
    history: Mapping[str, str], side: Sequence[str], context: Sequence[str], schema: Schema
) -> None:
    """Check the roles of features in a model of sequences.

    Args:
        history: The feature to predict, by the feature of its history.
        side: Features with an id for each id of the history.
        context: Features of one id that describe the whole sample.
        schema: Features of the dataset.

    Raises:
        ValueError: If the dataset lacks one of them or has it with another number of ids, two
            that are compared read different tables, or a feature has two roles.
    """
    features = {feature.name: feature for feature in schema.features}
    named = [
        *(("history", name, True) for name in history),
        *(("history", name, False) for name in history.values()),
        *(("side", name, True) for name in side),
        *(("context", name, False) for name in context),
    ]
    for role, name, is_list in named:
        kind = "categorical_list" if is_list else "categorical"
        if name not in features or features[name].is_multi_hot is not is_list:
            fitting = [f.name for f in schema.features if f.is_multi_hot is is_list]
            raise ValueError(
                f"model.{role}: expected a column of kind {kind} of the dataset, one of {fitting}, "
                f"got {name!r}. Correct the name, or set that kind for the column and prepare the "
                "dataset again."
            )
    for name, candidate in history.items():
        table, other = features[name].table, features[candidate].table
        if table != other:
            raise ValueError(
                f"model.history.{name}: expected a feature of table {table}, as {name} is, got "
                f"{candidate!r} of table {other}. Set data.source.columns.{name}.table={other}."
            )
    first: dict[str, str] = {}
    for role, name, _ in named:
        if name in first:
            raise ValueError(
                f"model.{role}: expected features without another role, got {name!r}, which is in "
                f"model.{first[name]} too. Remove it from one of them."
            )
        first[name] = role


def work_of(shape: Architecture, means: Mapping[str, float] | None = None) -> DenseWork:
    """The work of a model's dense layers.

    Args:
        shape: The architecture.
        means: The mean number of ids of a feature in a sample, by table, see ``ids_per_sample``.
    """
    ids = ids_per_sample(shape, means or {})
    key = repr((shape, ids))
    if key not in _COUNTED:
        layers, num_samples = make_checked_layers(shape, seed=0), 2
        rows = zero_rows(shape, {name: [number] * num_samples for name, number in ids.items()})
        _COUNTED[key] = count_work(shape, layers, num_samples, rows)
    return _COUNTED[key]


def ids_per_sample(shape: Architecture, means: Mapping[str, float]) -> dict[str, int]:
    """The number of ids of each feature in the samples by which layers are counted and timed.

    Args:
        shape: The architecture.
        means: The mean number in a sample, by table; one without it.

    Returns:
        The largest number that the model reads of a sequence, otherwise the mean, at least one.
    """
    found = {name: max(1, round(means.get(table, 1))) for name, table in shape.features}
    if shape.kind in SEQUENCE_KINDS:
        for name, _ in shape.features:
            is_long = name in shape.args["history"] or name in shape.args["side"]
            found[name] = shape.args["max_length"] if is_long else 1
    return found


def sample_work_of(shape: Architecture) -> SampleWork:
    """The work of a sample from its lengths, in operations of forward and backward.

    It has the operations of the dense layers per sample and ``ID_FLOPS_PER_DIM`` D for each id.
    Layers over the ids of whole sequences tell more: the operations per id and per pair of ids, by
    feature, a model of one's own in ``sequence_flops``. Those of features that make one token
    together add up, so only one of them has the operations of the token.
    """
    per_id = dict.fromkeys(
        (name for name, _ in shape.features), ID_FLOPS_PER_DIM * shape.embedding_dim
    )
    if shape.kind in SEQUENCE_KINDS:
        of_sequences: Any = make_layers(shape)
        work, history = count_sequence_work(of_sequences), next(iter(shape.args["history"]))
        per_id[history] += round(work.per_position)
        per_pair = {history: round(work.per_pair)}
        return SampleWork(max(1, round(work.fixed)), per_id, per_pair, shape.args["max_length"])
    layers = make_layers(shape) if shape.kind == OWN else None
    told: Mapping[str, tuple[float, float]] = getattr(layers, "sequence_flops", {})
    return SampleWork(
        max(1, round(work_of(shape).flops)),
        {name: flops + round(told.get(name, (0, 0))[0]) for name, flops in per_id.items()},
        {name: round(per_pair) for name, (_, per_pair) in told.items()},
    )
