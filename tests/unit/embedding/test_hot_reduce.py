"""One rank alone: its own gradients, bit for bit, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hotrec.embedding.hot_reduce import HotReducer
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import count_sent_bytes
from hotrec.runtime.wire import Wire
from hotrec.types import HotExchange, WireType

SHAPES = [(20, 8), (5, 4)]


def make_reducer(
    exchange: HotExchange = HotExchange.auto, wire_type: WireType = WireType.fp32
) -> HotReducer:
    return HotReducer(SHAPES, Wire(dist.group.WORLD, wire_type), exchange)


@pytest.mark.parametrize("wire_type", list(WireType))
@pytest.mark.parametrize("exchange", list(HotExchange))
def test_one_rank_gets_what_it_gave(
    one_rank: Ranks, exchange: HotExchange, wire_type: WireType
) -> None:
    touched = [
        (torch.tensor([1, 7, 19]), torch.randn(3, 8) / 3),
        (torch.tensor([], dtype=torch.int64), torch.randn(0, 4)),
    ]
    expected = [(slots.clone(), grad.clone()) for slots, grad in touched]
    reducer = make_reducer(exchange, wire_type)
    counts = reducer.exchange_counts([3, 0])
    assert counts == [[3, 0]]
    with count_sent_bytes() as traffic:
        found = reducer.reduce(touched, counts)
    assert traffic.total_bytes == 0
    for (slots, grad), (wanted_slots, wanted) in zip(found, expected, strict=True):
        assert torch.equal(slots, wanted_slots)
        assert torch.equal(grad, wanted)


def test_gradients_of_other_slots_are_refused(one_rank: Ranks) -> None:
    reducer = make_reducer()
    plan = reducer.plan([torch.tensor([1, 2]), torch.tensor([3])])
    with pytest.raises(ValueError, match=r"^hot gradients \(5 hot rows of dimension 4\): expected"):
        reducer.reduce_planned([torch.zeros(2, 8), torch.zeros(2, 4)], plan)
    with pytest.raises(ValueError, match=r"expected float32 \(2, 8\).*got torch.float64"):
        reducer.reduce_planned([torch.zeros(2, 8).double(), torch.zeros(1, 4)], plan)
    with pytest.raises(ValueError, match="expected one for each of 2 embedding dimensions, got 1"):
        reducer.plan([torch.tensor([1])])
    with pytest.raises(ValueError, match="hot exchange counts: expected one for each of 2"):
        reducer.exchange_counts([1])
