"""The shape of a model from the columns that it names, and the work of its layers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hotrec.data.tokens import SampleWork
from hotrec.models.flops import DenseWork, count_work, dense_flops
from hotrec.models.plain import Architecture, make_layers
from hotrec.models.zoo import OF_TORCHREC, make_checked_layers
from hotrec.types import Schema

# What an id costs besides layers over tokens, in operations per dimension of its row: the row is
# read, its vector written, its gradient read and the row updated, 4 bytes each, in whose time
# processors and GPUs do about 10 operations per byte.
ID_FLOPS_PER_DIM = 160


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


def work_of(shape: Architecture) -> DenseWork:
    """The work of a model's dense layers, by formula if there is one, otherwise counted."""
    if shape.kind in OF_TORCHREC:
        return dense_flops(shape)
    return count_work(shape, make_checked_layers(shape, seed=0))


def sample_work_of(shape: Architecture) -> SampleWork:
    """The work of a sample from its lengths, in operations of forward and backward.

    It has the operations of the dense layers per sample and ``ID_FLOPS_PER_DIM`` D for each id.
    Layers over the ids of whole sequences tell more in ``sequence_flops``: the operations per id
    and per pair of ids, by feature. Those of features that make one token together add up, so only
    one of them has the operations of the token.
    """
    per_id = dict.fromkeys(
        (name for name, _ in shape.features), ID_FLOPS_PER_DIM * shape.embedding_dim
    )
    layers = None if shape.kind in OF_TORCHREC else make_layers(shape)
    told: Mapping[str, tuple[float, float]] = getattr(layers, "sequence_flops", {})
    return SampleWork(
        max(1, round(work_of(shape).flops)),
        {name: flops + round(told.get(name, (0, 0))[0]) for name, flops in per_id.items()},
        {name: round(per_pair) for name, (_, per_pair) in told.items()},
    )
