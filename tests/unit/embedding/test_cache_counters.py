"""Figures of device caches from FBGEMM's counters, on its own module with counters set by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
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


def test_state_as_long_as_a_row_crosses_the_bus_for_hits_too() -> None:
    module = make_module(state_floats=DIM)
    counters = CacheCounters([module])
    count(module, 50, 40, 0, 0, 0, num_filled=0)
    figures = counters.end_line()
    assert (figures.num_hits, figures.num_misses) == (40, 0)
    assert figures.read_bytes == figures.written_bytes == pytest.approx(40 * 4 * DIM)


def test_caches_and_ranks_add_up() -> None:
    modules = [make_module(), make_module()]
    counters = CacheCounters(modules)
    for module in modules:
        count(module, 9, 7, 5, 0, 0, num_filled=5)
    found = counters.end_line()
    assert (found.num_lookups, found.num_hits, found.num_misses) == (18, 4, 10)


def test_a_cache_that_was_emptied_counts_no_negative_evictions() -> None:
    module = make_module()
    counters = CacheCounters([module])
    count(module, 60, 60, 60, 0, 0, num_filled=60)
    counters.end_line()
    module.lxu_cache_state.fill_(-1)
    count(module, 10, 10, 10, 0, 0, num_filled=10)
    assert counters.end_line().num_evictions == 10


def test_counts_of_a_prefetching_stream_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    stats = torch.zeros(6, dtype=torch.int64)
    module: Any = SimpleNamespace(
        lxu_cache_weights=SimpleNamespace(numel=lambda: 1, device=device),
        lxu_cache_state=torch.full((2, 32), -1),
        get_uvm_cache_stats=lambda: stats,
        max_D_cache=DIM,
        total_cache_hash_size=NUM_ROWS,
    )
    late = {device: torch.tensor([1, 9, 7, 0, 0, 0])}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda of: stats.copy_(late[of]))
    assert CacheCounters([module]).end_line() == CacheFigures(9, 7, 7)
