"""New rows in the UVM cache, and TorchRec's own plans in every memory, on one GPU."""

from __future__ import annotations

import pytest
import torch

from hotrec.embedding.initialize import initial_rows, initialize_embeddings
from hotrec.embedding.tables import gather_tables
from hotrec.runtime.ranks import Ranks
from hotrec.types import ColdTier, OptimizerKind, TorchrecPlan
from tests.distributed.setups import DIMS, NUM_ROWS, PARTITIONS, Setup, build, make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize(
        "tier",  # slots are look-ahead's alone
        [tier for tier in ColdTier if tier not in (ColdTier.auto, ColdTier.cached)],
        ids=lambda tier: tier.value,
    ),
]
NUM_STEPS = 5
KIND = OptimizerKind.rowwise_adagrad


def steps(setup: Setup, num: int, device: torch.device) -> list[float]:
    return [setup.step(make_batch(step).to(device)) for step in range(num)]


def test_initialize_reaches_rows_in_the_cache(gpu: Ranks, tier: ColdTier) -> None:
    setup = build(KIND, PARTITIONS["mixed"], device="cuda", tier=tier)
    steps(setup, 2, gpu.device)  # now the cache holds rows
    initialize_embeddings(setup.model, seed=8)
    found = gather_tables(setup.model)
    for table, num_rows in NUM_ROWS.items():
        rows = torch.arange(num_rows)
        assert torch.equal(found[table], initial_rows(8, table, rows, DIMS[table], num_rows))


@pytest.mark.parametrize("plan", list(TorchrecPlan), ids=lambda plan: plan.value)
def test_torchrec_plans_reach_the_same_losses(
    gpu: Ranks, tier: ColdTier, plan: TorchrecPlan
) -> None:
    hot_cold, unsplit = (
        build(KIND, split, device="cuda", tier=tier) for split in (PARTITIONS["mixed"], plan)
    )
    expected = steps(hot_cold, NUM_STEPS, gpu.device)
    assert steps(unsplit, NUM_STEPS, gpu.device) == pytest.approx(expected, abs=1e-5)
    of_split, weights = gather_tables(hot_cold.model), gather_tables(unsplit.model)
    for table, weight in of_split.items():
        assert float((weight - weights[table]).abs().max()) <= 1e-5, table
