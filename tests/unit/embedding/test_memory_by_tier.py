"""Memory by tier: what a model's tables take, to the byte; and what FBGEMM is told of tiers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.table_memory import fused_modules, memory_by_tier
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.ranks import Ranks
from hotrec.types import Exchange, OptimizerKind, Partition, Placement, TablePlacement
from tests.unit.embedding.setups import bag, shard_here

NUM_ROWS = {"t": 50, "u": 30, "pooled": 40}
DIM = 8
STATE_FLOATS = {OptimizerKind.sgd: 0, OptimizerKind.adagrad: DIM, OptimizerKind.rowwise_adagrad: 1}
TABLES = [bag(t, n, [f"f_{t}"], DIM) for t, n in NUM_ROWS.items()]
PLACEMENT = Placement(
    Partition(NUM_ROWS, {"t": np.arange(7), "u": np.arange(30)}),
    {
        "t": TablePlacement(),
        "u": TablePlacement(),
        "pooled": TablePlacement(Exchange.POOLED),
    },
)


def check_flags(model: nn.Module, num_modules: int) -> None:
    """Managed memory, FBGEMM's default, can hang a device that has not enough of it free."""
    modules = fused_modules(model)
    assert len(modules) == num_modules
    assert all(module.uvm_host_mapped and module.gather_uvm_cache_stats for module in modules)


@pytest.mark.parametrize("kind", list(STATE_FLOATS))
def test_hot_cold_and_pooled_rows(one_rank: Ranks, kind: OptimizerKind) -> None:
    spec = OptimizerSpec(kind, learning_rate=0.1)
    meta = torch.device("meta")
    model = nn.Sequential(HotColdEmbeddingBagCollection(TABLES, PLACEMENT, device=meta))
    model = shard_here(model, PLACEMENT, spec)
    optimizer = make_optimizer(model, spec, spec)
    found = memory_by_tier(model, optimizer)
    assert all(places["device"] == 0 for places in found.values())
    host = {name: places["host"] for name, places in found.items()}
    num_hot, num_cold = 37, 90  # a cold table keeps all its rows; a wholly hot one has none
    assert host["hot_rows"] == 4 * DIM * num_hot
    assert host["cold_rows"] == 4 * DIM * num_cold
    counters = 8  # of the hot rows' updates
    state_bytes = 4 * STATE_FLOATS[kind] * (num_hot + num_cold)
    assert state_bytes <= host["optimizer_state"] <= state_bytes + counters
    assert 4 * 80 <= host["router"] <= 4 * 80 + 1024
    check_flags(model, 1)
