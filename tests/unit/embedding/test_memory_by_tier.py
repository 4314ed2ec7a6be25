"""Memory by tier: what a model's tables take, to the byte; and what FBGEMM is told of tiers."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.assemble.constraints import torchrec_constraints
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.fused import fused_params
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.table_memory import _tensors_of, fused_modules, memory_by_tier
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.ranks import Ranks
from hotrec.types import (
    Exchange,
    OptimizerKind,
    Partition,
    Placement,
    Sharding,
    TablePlacement,
    TorchrecPlan,
    TorchrecTier,
)
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
        "pooled": TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE),
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
    collection: Any = model.module[0]
    weight = next(iter(collection.hot_replicas()))[1].weight
    weight.grad = torch.zeros_like(weight)
    assert memory_by_tier(model, optimizer)["hot_rows"]["host"] == 2 * 4 * DIM * num_hot
    check_flags(model, 2)


def test_tables_of_a_torchrec_plan(one_rank: Ranks) -> None:
    spec = OptimizerSpec(OptimizerKind.rowwise_adagrad, learning_rate=0.1)
    model: Any = nn.Sequential(EmbeddingBagCollection(TABLES, device=torch.device("meta")))
    constraints = torchrec_constraints(
        TABLES, TorchrecPlan.table_wise, batch_size=8, tier=TorchrecTier.fused
    )
    sharder = EmbeddingBagCollectionSharder(fused_params(spec))
    model = shard_here(model, PLACEMENT, spec, constraints, sharder)
    found = memory_by_tier(model, make_optimizer(model, spec, spec))
    host = {name: places["host"] for name, places in found.items()}
    assert host["cold_rows"] == 4 * DIM * 120
    assert host["hot_rows"] == host["router"] == 0
    assert host["optimizer_state"] == 4 * 120
    check_flags(model, 1)


def test_fbgemms_names_say_what_lies_where() -> None:
    """A module's buffers on a GPU, by name alone."""
    kernel = nn.Module()
    for name in ("weights_dev", "weights_uvm", "momentum1_dev", "momentum2_uvm"):
        kernel.register_buffer(name, torch.zeros(1))
    for name in ("lxu_cache_weights", "lxu_state", "cache_hash_size_cumsum", "rows_per_table"):
        kernel.register_buffer(name, torch.zeros(1))
    places = set(product(("cold_rows", "optimizer_state"), ("device", "host")))
    assert {(kind, place) for kind, _, place in _tensors_of(kernel)} == {*places, ("cache", None)}
