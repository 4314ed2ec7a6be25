"""NCCL wants the collectives of all groups of a device in one order, the same on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stand_in.build import why_not
from tests.stand_in.order import DEVICE, Calls, differences
from tests.stand_in.ranks import run_on_device

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(300),
]

LOOK_AHEAD: dict[str, Any] = {"pipeline": "look_ahead", "optimizer": "adagrad"}
RUNS = {
    "look_ahead": LOOK_AHEAD,
    "look_ahead-parts": {**LOOK_AHEAD, "dims": 2, "micro_batches": True},
    "look_ahead-slots": {**LOOK_AHEAD, "tier": "cached"},
    "look_ahead-pooled": {**LOOK_AHEAD, "pooled": "c"},
    "sparse_dist": {"pipeline": "sparse_dist"},
    "base": {"pipeline": "base"},
}
OfRank = tuple[list[float], Calls]


@pytest.fixture(scope="module")
def trained() -> dict[str, list[OfRank]]:
    """By name of the training, what each of two ranks says of it."""
    of_ranks = run_on_device(
        "tests.stand_in.one_order:train", 2, timeout_s=200, runs=[*RUNS.values()], num_steps=6
    )
    return {name: [ranks[at] for ranks in of_ranks] for at, name in enumerate(RUNS)}


@pytest.mark.parametrize("name", list(RUNS))
def test_all_threads_of_a_rank_share_one_order(trained: dict[str, list[OfRank]], name: str) -> None:
    of_ranks = [found for _, found in trained[name]]
    groups = {group for _, group, _ in of_ranks[0][DEVICE]}
    # TorchRec's pipelines call those of all threads in one group, which the device puts in order.
    assert len(groups) == (2 if name.startswith("look_ahead") else 1)
    assert differences(of_ranks, of_device=True) == []
