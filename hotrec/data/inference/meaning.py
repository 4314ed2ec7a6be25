"""Whether integers are ids or a quantity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotrec.data.alone import Bools
from hotrec.data.columns import Float64s
from hotrec.data.inference.evidence import order_of
from hotrec.data.inference.look import Column
from hotrec.data.inference.names import names_ids

_FEW_VALUES = 50
# AUC by which ids must be better than numbers, besides three standard errors.
_MORE_AS_IDS, _NUM_ERRORS = 0.02, 3.0
# Negative numbers this small are not hashes.
_SMALL = 1e6
# Sufficient rows for the AUC of a column.
MOST_ROWS = 50_000


@dataclass(frozen=True)
class Meaning:
    """Classifies integers as ids or quantities.

    Args:
        are_ids: Whether they are ids; otherwise a quantity.
        why: The evidence; empty if it is obvious.
    """

    are_ids: bool
    why: str = ""


def meaning_of(column: Column, clicks: list[Bools]) -> Meaning:
    """Whether the values of a column of numbers are ids.

    The name decides if it suggests either. Columns with few distinct values are ids. Otherwise the
    labels decide: if the values themselves predict them better than their order, they are ids, else
    a quantity. Without evidence they are ids, unless most of the values are small and a few large.
    """
    numbers = column.numbers
    if column.kind != "integer":
        return Meaning(column.kind != "number")
    by_name = names_ids(column.name)
    if column.num_values <= 2:
        return Meaning(True)
    if by_name is not None:
        return Meaning(by_name, "" if by_name else "by its name")
    if column.num_values <= _FEW_VALUES:
        return Meaning(True)
    for is_click in clicks:
        if (order := order_of(column, is_click)) is None:
            continue
        seen = f"alone: AUC {order.as_ids:.2f} as ids, {order.as_numbers:.2f} in order"
        least = _NUM_ERRORS * order.error
        if order.as_ids - order.as_numbers > max(_MORE_AS_IDS, least):
            return Meaning(True, seen)
        if order.as_numbers - 0.5 > least and order.as_ids - order.as_numbers < order.error:
            return Meaning(False, seen)
    if _is_long_tailed(numbers) or ((numbers < -1).any() and np.abs(numbers).max() < _SMALL):
        return Meaning(False, "by its values")
    return Meaning(True, "kind: dense if they are amounts")


def _is_long_tailed(numbers: Float64s) -> bool:
    """Whether they start near 0 with gaps that grow with the values, as counts do."""
    values = np.sort(numbers)
    span = values[-1] - values[0]
    half, most = values[values.size // 2] - values[0], values[3 * values.size // 4] - values[0]
    return bool(abs(values[0]) <= 3 and half < 0.2 * span and most < 0.5 * span)
