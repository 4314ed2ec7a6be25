"""Converts placements to constraints for TorchRec's planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.types import (
    CacheAlgorithm,
    CacheParams,
    CacheStatistics,
    ShardingType,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from hotrec.cost_model.caches import lru_miss_ratios
from hotrec.cost_model.demand import Floats, expected_distinct
from hotrec.planner.situation import Situation
from hotrec.routing.features import hot_name
from hotrec.types import (
    DEFAULT_LOAD_FRAC,
    KERNEL_OF_TIER,
    TIER_OF_KERNEL,
    ColdTier,
    Exchange,
    Partition,
    Placement,
    Sharding,
    Tier,
    TorchrecPlan,
)

# Of the histogram. A bin is read at its upper end, so this bounds how much the curve loses: what it
# falls within R / 4096 rows. TorchRec copies the statistics with every option it considers.
MAX_BINS = 4096
NUM_CURVE_SIZES = 64
# FBGEMM's modules hold the rows behind our slots, in host memory.
KERNEL_BEHIND_SLOTS = {"cpu": ColdTier.fused, "cuda": ColdTier.fused_uvm}


def offload_stats(
    sizes: Floats, miss_ratio: Floats, expected_lookups: float, num_rows: int
) -> EmbeddingOffloadStats:
    """Converts the miss-ratio curve of a device cache to TorchRec's statistics.

    The curve is forced through (0, 1) and (num_rows, 0): a cache of all rows misses each of them
    once, which TorchRec's curve omits.

    Args:
        sizes: float64 (S,), cached rows, rising.
        miss_ratio: float64 (S,), misses / lookups at each size, in 0..1, not rising.
        expected_lookups: Distinct rows of the table that a global batch reads from it.
        num_rows: R, rows of the table.

    Returns:
        Statistics whose ``expected_miss_rate(c)`` is the curve at ``c * num_rows`` rows, exact
        where that is a multiple of ``num_rows / MAX_BINS``, below it by less than the curve falls
        within one bin elsewhere. ``cacheability`` is the area under the curve.
    """
    inside = (sizes > 0) & (sizes < num_rows)
    known = np.concatenate([[0.0], sizes[inside], [num_rows]])
    ratios = np.concatenate([[1.0], miss_ratio[inside], [0.0]])
    edges = np.linspace(0, num_rows, min(num_rows, MAX_BINS) + 1)
    misses = np.interp(edges, known, ratios)
    # Less than one lookup a step would round to 0; only the shape of the histogram matters.
    first_served = -np.diff(misses) * max(expected_lookups, 1.0)
    return EmbeddingOffloadStats(
        cacheability=float(((misses[1:] + misses[:-1]) / 2).mean()),
        expected_lookups=round(expected_lookups),
        mrc_hist_counts=torch.from_numpy(first_served).double(),
        height=num_rows,
    )


def cold_tier_for(
    device: str,
    tier: ColdTier,
    key: str = "placement.cold_tier",
    on_cuda: ColdTier = ColdTier.fused,
) -> ColdTier:
    """Returns the tier of sharded rows: ``on_cuda`` or fused for auto.

    Args:
        key: Configuration key that the error names.

    Raises:
        ValueError: If the tier is a UVM tier on CPU.
    """
    if tier is ColdTier.auto:
        return on_cuda if device == "cuda" else ColdTier.fused
    if device == "cpu" and tier in (ColdTier.fused_uvm, ColdTier.fused_uvm_caching):
        raise ValueError(
            f"{key}: expected fused on CPU (UVM kernels need CUDA), got {tier.value}."
            f" Set {key}=fused, or train on CUDA."
        )
    return tier


def placement_constraints(
    placement: Placement,
    stats: Mapping[str, CacheStatistics] | None = None,
    device: str = "cpu",
) -> dict[str, ParameterConstraints]:
    """Returns constraints that leave TorchRec's planner only the choice of ranks.

    Hot tables are data-parallel. The others are row-wise or table-wise on the kernel of their tier,
    those whose exchange is pooled table-wise. A host tier behind a device cache gets the cache's
    share of the rows, and its statistics.

    Args:
        stats: Statistics of device caches by table, where known.
        device: "cpu" or "cuda", which determines the kernel of rows behind our slots.

    Raises:
        ValueError: If a pooled table is to be row-wise, or a cache has no size.
    """
    constraints = {}
    partition = placement.partition
    for name, num_rows in partition.num_rows.items():
        table, num_hot = placement.tables[name], partition.num_hot(name)
        if num_hot > 0:
            constraints[hot_name(name)] = _replicated()
        if num_hot == num_rows:
            continue
        if table.exchange is Exchange.POOLED and table.sharding is not Sharding.TABLE_WISE:
            raise ValueError(
                f"placement table {name}: expected sharding table_wise for an exchange that is "
                f"pooled (row-wise ships the pooled vectors once per rank), got "
                f"{table.sharding.value}. Place it table-wise, or exchange its rows."
            )
        cache, fraction = None, table.cache_load_frac
        if table.tier is Tier.HOST_CACHED:
            if fraction is None or not 0 < fraction < 1:
                raise ValueError(
                    f"placement table {name} cache_load_frac: expected between 0 and 1 in tier "
                    f"host_cached, got {fraction}. Set a size of the cache, or use tier host."
                )
            cache = _cache_params(fraction, (stats or {}).get(name))
        kernel = KERNEL_OF_TIER[table.tier]
        if kernel is ColdTier.cached:
            kernel = KERNEL_BEHIND_SLOTS[device]
        constraints[name] = ParameterConstraints(
            sharding_types=[table.sharding.value],
            compute_kernels=[kernel.value],
            cache_params=cache,
        )
    return constraints


def _replicated() -> ParameterConstraints:
    return ParameterConstraints(
        sharding_types=[ShardingType.DATA_PARALLEL.value],
        compute_kernels=[EmbeddingComputeKernel.DENSE.value],
    )


def _cache_params(
    load_factor: float | None, stats: CacheStatistics | None = None, *, is_prefetched: bool = False
) -> CacheParams:
    """Returns the parameters of an LRU device cache of a host table.

    LFU would exclude prefetching (FBGEMM asserts it), need 8 bytes for every row instead of every
    slot, and never evict rows that were popular once.
    """
    return CacheParams(
        algorithm=CacheAlgorithm.LRU,
        load_factor=load_factor,
        stats=stats,
        prefetch_pipeline=True if is_prefetched else None,
    )


def hot_cold_constraints(
    tables: Sequence[BaseEmbeddingConfig],
    partition: Partition,
    *,
    cold_tier: ColdTier = ColdTier.fused,
    cache_load_factor: float = DEFAULT_LOAD_FRAC,
) -> dict[str, ParameterConstraints]:
    """Constraints that make hot tables data-parallel and cold tables row-wise on one tier.

    Args:
        cold_tier: Compute kernel of the cold tables.
        cache_load_factor: Cached fraction of the cold rows in tier fused_uvm_caching.
    """
    num_rows = {table.name: table.num_embeddings for table in tables}
    of_these = Partition(num_rows, {name: partition.hot(name) for name in num_rows})
    tier = TIER_OF_KERNEL[cold_tier]
    return placement_constraints(Placement.alike(of_these, tier, cache_load_factor))


def torchrec_constraints(
    tables: Sequence[BaseEmbeddingConfig],
    variant: TorchrecPlan,
    *,
    batch_size: int,
    tier: ColdTier = ColdTier.fused,
    cache_load_factor: float | None = None,
    is_prefetched: bool = False,
    may_replicate: bool = True,
) -> dict[str, ParameterConstraints] | None:
    """Constraints of a plan for unsplit tables; None leaves every choice to the planner.

    ``HAND_TUNED``: tables with fewer rows than the batch data-parallel, the rest table-wise.

    Args:
        batch_size: Batch of a rank, read by ``HAND_TUNED``.
        tier: Memory tier of the rows.
        cache_load_factor: Cached fraction of the rows. None for FBGEMM's default.
        is_prefetched: Whether TorchRec's prefetch pipeline fills the UVM cache.
        may_replicate: Whether tables may be data-parallel.

    Raises:
        ValueError: If the plan needs data-parallel tables, and there may be none.
    """
    if variant is TorchrecPlan.planner and tier is ColdTier.fused and may_replicate:
        return None
    if variant is TorchrecPlan.hand_tuned and not may_replicate:
        raise ValueError(
            "placement.plan: expected planner or table_wise for sequences on CPU, where FBGEMM "
            "looks data-parallel tables up in another order, got hand_tuned. Set "
            "placement.plan=table_wise."
        )
    is_cached = tier is ColdTier.fused_uvm_caching
    types: list[str] | None = [ShardingType.TABLE_WISE.value]
    if variant is TorchrecPlan.planner:
        sharded = ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE
        types = None if may_replicate else [kind.value for kind in sharded]
    return {
        table.name: _replicated()
        if variant is TorchrecPlan.hand_tuned and table.num_embeddings < batch_size
        else ParameterConstraints(
            sharding_types=types,
            compute_kernels=[tier.value],
            cache_params=_cache_params(cache_load_factor, is_prefetched=is_prefetched)
            if is_cached
            else None,
        )
        for table in tables
    }


def cache_statistics(situation: Situation, placement: Placement) -> dict[str, CacheStatistics]:
    """Returns statistics of a placement's device caches, by table, for TorchRec's planner."""
    found: dict[str, CacheStatistics] = {}
    for demand in situation.demands:
        if placement.tables[demand.name].tier is not Tier.HOST_CACHED:
            continue
        num_hot = placement.partition.num_hot(demand.name)
        sizes = np.unique(np.geomspace(1, demand.num_rows, NUM_CURVE_SIZES).astype(np.int64))
        misses = lru_miss_ratios(demand, sizes, num_hot)
        _, cold, _ = expected_distinct(demand, num_hot)
        found[demand.name] = offload_stats(
            sizes.astype(np.float64), misses, cold * situation.world.num_ranks, demand.num_rows
        )
    return found
