"""Hot rows that follow the data: what is decided; ``tests/exact`` tests what is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from hotrec.embedding.adapt import HotSetDecision
from tests.exact.case import Case
from tests.exact.training import MAX_MOVED, Training
from tests.helpers.ranks import run_ranks

# The batches read other rows some steps later.
CASE = Case(
    hosts="0", seed=10, partition="half", optimizer="adagrad", pipeline="look_ahead",
    batches="drift", adapt=True, steps=8,
)  # fmt: skip
CASES = [
    replace(CASE, **changes)
    for changes in (
        {}, {"pipeline": "sparse_dist"}, {"is_spread": True}, {"placement": "table_wise"},
        {"tier": "cached", "slots": 1.0},
    )
]  # fmt: skip


def decide() -> list[list[HotSetDecision]]:
    found = []
    for case in CASES:
        with Training(replace(case, hosts="0" * dist.get_world_size())) as training:
            training.train()
            found.append(training.decisions)
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_decide_alike_and_move_no_more_than_they_may(world_size: int) -> None:
    first, *others = run_ranks(decide, world_size)
    for at, (case, decisions) in enumerate(zip(CASES, first, strict=True)):
        moved = [decision.num_moved for decision in decisions]
        assert max(moved) == MAX_MOVED, case
        assert all(0 < found.hot_share <= found.best_share <= 1 for found in decisions), case
        for other in others:
            assert [decision.num_moved for decision in other[at]] == moved, case
