"""Figures of device caches from FBGEMM's counters, on its own module with counters set by hand."""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from hotrec.embedding.fused import fused_params
from hotrec.embedding.table_memory import CacheCounters, CacheFigures
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.types import OptimizerKind

DIM, NUM_ROWS, NUM_SLOTS = 8, 100, 64


def make_module(*, state_floats: int = 0, is_cached: bool = True) -> Any:
    """As it would be on CUDA, where alone FBGEMM makes caches."""
    module: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(NUM_ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        device=torch.device("cpu"),
        **fused_params(OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1)),
    )
    if is_cached:
        module.lxu_cache_weights = torch.zeros(NUM_SLOTS, DIM)
        module.lxu_cache_state = torch.full((NUM_SLOTS // 32, 32), -1)
        module.max_D_cache = DIM
        module.total_cache_hash_size = torch.tensor([NUM_ROWS])
        module.momentum1_uvm = torch.zeros(state_floats * NUM_ROWS)
    return module


def count(module: Any, *numbers: int, num_filled: int) -> None:
    """FBGEMM makes a new tensor in every step: calls, then lookups, rows, misses, conflicts."""
    module.uvm_cache_stats = module.uvm_cache_stats + torch.tensor([1, *numbers])
    module.lxu_cache_state.view(-1)[:num_filled] = 1


def test_figures_by_hand() -> None:
    module = make_module()
    counters = CacheCounters([make_module(is_cached=False), module])
    # 90 lookups of 70 rows, none in the cache: 60 are brought in, 10 (of 15 lookups) find no way.
    count(module, 90, 70, 70, 10, 15, num_filled=60)
    row = 4 * DIM
    assert counters.end_line() == CacheFigures(90, 70, 0, 70, 10, 0, 75 * row, 10 * row)
    # 50 more, 20 missed, none in conflict: 4 free slots, so 16 rows go, and are written back.
    count(module, 80, 50, 20, 0, 0, num_filled=64)
    assert counters.end_line() == CacheFigures(80, 50, 30, 20, 0, 16, 20 * row, 16 * row)
    assert counters.end_line() == CacheFigures()
    # A rank without a cache has figures too, so that all ranks can add theirs up.
    assert CacheCounters([make_module(is_cached=False)]).end_line() == CacheFigures()
