"""The shape of a model from the columns that it names, and the work of its layers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hotrec.models.flops import DenseWork, count_work, dense_flops
from hotrec.models.plain import Architecture
from hotrec.models.zoo import OF_TORCHREC, make_checked_layers
from hotrec.types import Schema


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
