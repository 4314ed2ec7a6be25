"""TorchRec's own plans in every memory, on one GPU."""

from __future__ import annotations

import pytest
import torch

from hotrec.embedding.canonical import gather_tables
from hotrec.runtime.ranks import Ranks
from hotrec.types import OptimizerKind, TorchrecPlan, TorchrecTier
from tests.distributed.setups import PARTITIONS, Setup, build, make_batch

pytestmark = pytest.mark.gpu
NUM_STEPS = 5
KIND = OptimizerKind.rowwise_adagrad


def steps(setup: Setup, num: int, device: torch.device) -> list[float]:
    return [setup.step(make_batch(step).to(device)) for step in range(num)]


@pytest.mark.parametrize("tier", list(TorchrecTier), ids=lambda tier: tier.value)
@pytest.mark.parametrize("plan", list(TorchrecPlan), ids=lambda plan: plan.value)
def test_torchrec_plans_reach_the_same_losses(
    gpu: Ranks, tier: TorchrecTier, plan: TorchrecPlan
) -> None:
    hot_cold = build(KIND, PARTITIONS["mixed"], device="cuda")
    unsplit = build(KIND, plan, device="cuda", tier=tier)
    expected = steps(hot_cold, NUM_STEPS, gpu.device)
    assert steps(unsplit, NUM_STEPS, gpu.device) == pytest.approx(expected, abs=1e-5)
    of_split, weights = gather_tables(hot_cold.model), gather_tables(unsplit.model)
    for table, weight in of_split.items():
        assert float((weight - weights[table]).abs().max()) <= 1e-5, table
