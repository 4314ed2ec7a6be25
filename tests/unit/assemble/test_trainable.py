"""Whether a run counts device caches: as its plan says, alike on ranks with a cache and without."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

from hotrec.assemble.trainable import Trainable
from hotrec.embedding.table_memory import CacheFigures
from hotrec.planner.plan import Plan, SplitTables, TorchrecTables
from hotrec.types import TablePlacement, Tier

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def trainable(device: torch.device, *kernels: str, has_slots: bool = False) -> Trainable:
    """A model of this rank without a fused module."""
    tables = {
        f"t{i}": ParameterSharding(sharding_type="table_wise", compute_kernel=kernel, ranks=[1])
        for i, kernel in enumerate(kernels)
    }
    sharding = ShardingPlan({"tables": EmbeddingModuleShardingPlan(tables)})
    slots = TablePlacement(tier=Tier.CACHED, cache_load_frac=0.5)
    split = SplitTables(dict.fromkeys(tables, 0), dict.fromkeys(tables, slots))
    model: Any = nn.Linear(1, 1)
    unused: Any = None
    plan = Plan(split if has_slots else TorchrecTables())
    return Trainable(plan, model, unused, sharding, device, route=None, facts=unused)


def test_a_rank_whose_shards_have_no_cache_counts_zeros() -> None:
    count = trainable(CUDA, "fused", "fused_uvm_caching").cache_counters()
    assert count is not None
    assert count() == asdict(CacheFigures())


def test_slots_are_counted_on_any_device() -> None:
    count = trainable(CPU, "fused", has_slots=True).cache_counters()
    assert count is not None
    assert count() == asdict(CacheFigures())


@pytest.mark.parametrize(
    ("kernels", "device"),
    [
        (["fused", "fused_uvm", "dense"], CUDA),
        (["fused_uvm_caching"], CPU),
    ],
)
def test_nothing_is_counted_where_no_rank_has_a_cache(
    kernels: list[str], device: torch.device
) -> None:
    assert trainable(device, *kernels).cache_counters() is None
