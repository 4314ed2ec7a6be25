"""Which rows become hot, from counts of lookups."""

from __future__ import annotations

import numpy as np
import pytest

from hotrec.embedding.adapt import choose_swaps
from hotrec.routing.popularity import CountedRows


@pytest.mark.parametrize(
    ("hot", "cold", "least", "expected"),
    [
        # The most popular cold rows take the slots of the least popular hot ones.
        ([50, 0, 9], {4: 100, 6: 70, 8: 1}, 1, {1: 4, 2: 6}),
        # A difference that may be chance moves nothing.
        ([100], {4: 110}, 1, {}),
        ([100], {4: 120}, 1, {0: 4}),
        # Nor does one that does not pay for the move.
        ([0, 0], {4: 9, 5: 5}, 6, {0: 4}),
        ([0], {}, 1, {}),
        # No more rows than there are slots; of equal ones the first row.
        ([0], {9: 30, 3: 30}, 1, {0: 3}),
    ],
)
def test_swaps_pay_and_are_no_chance(
    hot: list[int], cold: dict[int, int], least: float, expected: dict[int, int]
) -> None:
    counted = CountedRows(np.array(list(cold), np.int64), np.array(list(cold.values()), float))
    slots, keys, gains = choose_swaps(np.array(hot, float), counted, least)
    assert dict(zip(slots.tolist(), keys.tolist(), strict=True)) == expected
    assert gains.tolist() == [cold[key] - hot[slot] for slot, key in expected.items()]
