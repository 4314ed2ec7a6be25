"""Whether a run counts device caches: as its plan says, alike on ranks with a cache and without."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

from hotrec.embedding.table_memory import CacheFigures
from hotrec.runs.train import cache_counts

CUDA = torch.device("cuda", 0)


def sharded(*kernels: str, has_slots: bool = False) -> Any:
    """A model of this rank without a fused module."""
    tables = {
        f"t{i}": ParameterSharding(sharding_type="table_wise", compute_kernel=kernel, ranks=[1])
        for i, kernel in enumerate(kernels)
    }
    plan = ShardingPlan({"tables": EmbeddingModuleShardingPlan(tables)})
    return SimpleNamespace(plan=plan, model=nn.Linear(1, 1), has_slots=has_slots)


def test_a_rank_whose_shards_have_no_cache_counts_zeros() -> None:
    count = cache_counts(sharded("fused", "fused_uvm_caching"), CUDA)
    assert count is not None
    assert count() == asdict(CacheFigures())


def test_slots_are_counted_on_any_device() -> None:
    count = cache_counts(sharded("fused", has_slots=True), torch.device("cpu"))
    assert count is not None
    assert count() == asdict(CacheFigures())


@pytest.mark.parametrize(
    ("kernels", "device"),
    [
        (["fused", "fused_uvm", "dense"], CUDA),
        (["fused_uvm_caching"], torch.device("cpu")),
    ],
)
def test_nothing_is_counted_where_no_rank_has_a_cache(
    kernels: list[str], device: torch.device
) -> None:
    assert cache_counts(sharded(*kernels), device) is None
