"""Which rows become hot, from counts of lookups."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotrec.embedding import adapt
from hotrec.embedding.adapt import AdaptiveHotSet, Swaps, choose_swaps
from hotrec.embedding.canonical import TensorPart
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


def test_rows_of_several_owners_get_the_slots_that_were_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On rank 0 of two, of which each owns half of the rows."""
    weights = torch.arange(8.0)[:, None].repeat(1, 2)
    replica = TensorPart("t", (8, 2), torch.zeros(4, 2), (0, 0), rows=torch.arange(4))
    shard = TensorPart("t", (8, 2), weights[:4], (0, 0), is_shard=True)
    rows, slots = np.array([6, 1, 7, 3]), np.array([2, 0, 3, 1])
    hot_set = object.__new__(AdaptiveHotSet)
    hot_set._tables = [SimpleNamespace(key="t", owner_of=lambda rows: rows // 4)]  # type: ignore[list-item]

    def broadcast(packed: torch.Tensor, source: int) -> None:
        if source == 1:
            packed.copy_(weights[[6, 7]].reshape(-1))

    monkeypatch.setattr(adapt, "world_size", lambda: 2)
    monkeypatch.setattr(adapt, "rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast", broadcast)
    num_bytes = hot_set._promote({"t": Swaps(rows, slots, rows)}, [replica], {"t": shard})
    assert replica.value[:, 0].tolist() == [1, 3, 6, 7]
    assert num_bytes == 4 * 2 * 4
