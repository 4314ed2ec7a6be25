"""What each hot reduction sends, and the reducer of one rank alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hotrec.embedding.hot_reduce import HotReducer, estimate_unions, hot_bytes
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import count_sent_bytes
from hotrec.runtime.wire import Wire
from hotrec.types import HotExchange, WireType

TOUCHED, OWNERS, DENSE = HotExchange.touched_rows, HotExchange.owners, HotExchange.dense
SHAPES = [(20, 8), (5, 4)]


def test_bytes_by_hand() -> None:
    """W=4, 100 hot rows of 8 values and 10 of 2; ranks touch 20 and 5, one of them 40 and 10."""
    counts = [[20, 5], [20, 5], [40, 10], [20, 5]]
    most, union = 40 * 36 + 10 * 12, 60 * 36 + 10 * 12
    assert hot_bytes([(100, 8), (10, 2)], counts, [60, 10], 4) == {
        TOUCHED: 3 * most,
        OWNERS: 0.75 * most + 0.75 * union,
        DENSE: 1.5 * (100 * 33 + 10 * 9),
    }
    halved = hot_bytes([(100, 8), (10, 2)], counts, [60, 10], 2)
    assert halved[TOUCHED] == 3 * (40 * 20 + 10 * 8)
    assert halved[DENSE] == 1.5 * (100 * 17 + 10 * 5)


@given(
    world_size=st.integers(2, 16),
    num_touched=st.integers(0, 500),
    overlap=st.floats(0, 1),
    dim=st.sampled_from([1, 8, 64]),
)
def test_owners_send_less_where_enough_ranks_touch_a_row(
    world_size: int, num_touched: int, overlap: float, dim: int
) -> None:
    total = world_size * num_touched
    union = max(num_touched, round(overlap * total))
    sent = hot_bytes([(10**6, dim)], [[num_touched]] * world_size, [union], 4)
    per_row = total * (world_size - 1) - world_size * union
    assert (sent[OWNERS] < sent[TOUCHED] - 1e-6) == (per_row > 0)
    assert world_size > 2 or sent[OWNERS] >= sent[TOUCHED]


@pytest.mark.parametrize(
    ("num_touched", "world_size", "union_frac", "expected"),
    [
        (200, 4, 1.0, TOUCHED),  # as if no row had been touched twice
        (200, 4, 250 / 800, OWNERS),
        (900, 4, 1.0, OWNERS),  # the union has at most H rows
        (900, 2, 1.0, TOUCHED),
        (1000, 2, 1.0, DENSE),
        (0, 3, 1.0, TOUCHED),  # nothing is sent
    ],
)
def test_least_bytes_by_the_estimated_union(
    num_touched: int, world_size: int, union_frac: float, expected: HotExchange
) -> None:
    shapes, counts = [(1000, 64)], [[num_touched]] * world_size
    sent = hot_bytes(shapes, counts, estimate_unions(shapes, counts, [union_frac]))
    assert min(sent, key=lambda exchange: sent[exchange]) is expected


def test_the_union_is_at_least_what_one_rank_touched() -> None:
    assert estimate_unions([(1000, 64)], [[100], [0], [0], [0]], [0.25]) == [100]


@pytest.mark.parametrize("exchange", list(HotExchange))
def test_one_rank_gets_what_it_gave(one_rank: Ranks, exchange: HotExchange) -> None:
    touched = [
        (torch.tensor([1, 7, 19]), torch.randn(3, 8) / 3),
        (torch.tensor([], dtype=torch.int64), torch.randn(0, 4)),
    ]
    expected = [(slots.clone(), grad.clone()) for slots, grad in touched]
    with count_sent_bytes() as traffic:
        wire = Wire(dist.group.WORLD, WireType.bf16)
        found = HotReducer(SHAPES, wire, exchange).reduce(touched, [[3, 0]])
    assert traffic.total_bytes == 0
    for (slots, grad), (wanted_slots, wanted) in zip(found, expected, strict=True):
        assert torch.equal(slots, wanted_slots)
        assert torch.equal(grad, wanted)
