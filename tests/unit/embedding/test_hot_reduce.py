"""The reducer of one rank alone."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hotrec.embedding.hot_reduce import HotReducer
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import count_sent_bytes
from hotrec.runtime.wire import Wire
from hotrec.types import WireType


def test_one_rank_gets_what_it_gave(one_rank: Ranks) -> None:
    touched = [
        (torch.tensor([1, 7, 19]), torch.randn(3, 8) / 3),
        (torch.tensor([], dtype=torch.int64), torch.randn(0, 4)),
    ]
    with count_sent_bytes() as traffic:
        wire = Wire(dist.group.WORLD, WireType.bf16)
        found = HotReducer([(20, 8), (5, 4)], wire).reduce(touched)
    assert traffic.total_bytes == 0
    for (slots, grad), (wanted_slots, wanted) in zip(found, touched, strict=True):
        assert torch.equal(slots, wanted_slots)
        assert torch.equal(grad, wanted)
