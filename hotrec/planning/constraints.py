"""Placement -> what TorchRec's planner may do with each table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
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
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from hotrec.routing.features import hot_name
from hotrec.types import (
    ColdTier,
    Exchange,
    Partition,
    Placement,
    Sharding,
    TablePlacement,
    Tier,
    TorchrecPlan,
)

# Of the histogram. A bin is read at its upper end, so this bounds how much the curve loses: what it
# falls within R / 4096 rows. TorchRec copies the statistics with every option it considers.
MAX_BINS = 4096

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MissCurve:
    """How often the device cache of a host table misses.

    Args:
        sizes: (S,), cached rows, rising, from 0 or more to the table's rows or fewer.
        miss_ratio: (S,), misses / lookups at each size, in 0..1, not rising.
        expected_lookups: Distinct rows of the table that a global batch reads from it.

    Raises:
        ValueError: If it is not a miss-ratio curve.
    """

    sizes: Floats
    miss_ratio: Floats
    expected_lookups: float

    def __post_init__(self) -> None:
        sizes, misses = np.asarray(self.sizes), np.asarray(self.miss_ratio)
        if sizes.ndim != 1 or sizes.shape != misses.shape or not sizes.size:
            raise ValueError(
                f"miss-ratio curve: expected as many ratios as sizes, at least one, got shapes "
                f"{misses.shape} and {sizes.shape}."
            )
        is_finite = bool(np.isfinite(sizes).all() and np.isfinite(misses).all())
        is_rising = bool((np.diff(sizes) > 0).all() and sizes[0] >= 0)
        is_share = bool((misses >= 0).all() and (misses <= 1).all())
        is_curve = is_finite and is_rising and is_share and bool((np.diff(misses) <= 1e-9).all())
        if not is_curve:
            raise ValueError(
                "miss-ratio curve: expected rising sizes and ratios in 0..1 that do not rise, got "
                f"sizes {sizes[:8].tolist()} and ratios {misses[:8].tolist()} (the first 8)."
            )
        if not (np.isfinite(self.expected_lookups) and self.expected_lookups >= 0):
            raise ValueError(
                f"miss-ratio curve expected_lookups: expected at least 0, got "
                f"{self.expected_lookups}."
            )

    def at(self, sizes: Floats, num_rows: int) -> Floats:
        """The curve between its points, through (0, 1) and (num_rows, 0), whatever was measured.

        A cache of all rows misses each of them once; TorchRec's curve leaves that out.
        """
        inside = (self.sizes > 0) & (self.sizes < num_rows)
        known = np.concatenate([[0.0], np.asarray(self.sizes, np.float64)[inside], [num_rows]])
        ratios = np.concatenate([[1.0], np.asarray(self.miss_ratio, np.float64)[inside], [0.0]])
        return np.interp(sizes, known, ratios)


def offload_stats(curve: MissCurve, num_rows: int) -> EmbeddingOffloadStats:
    """Converts a miss-ratio curve to TorchRec's statistics.

    Args:
        curve: The miss-ratio curve of the table's cache.
        num_rows: R, rows of the table.

    Returns:
        Statistics whose ``expected_miss_rate(c)`` is the curve at ``c * num_rows`` rows, exact
        where that is a multiple of ``num_rows / MAX_BINS``, below it by less than the curve falls
        within one bin elsewhere. ``cacheability`` is the area under the curve.
    """
    num_bins = min(num_rows, MAX_BINS)
    edges = np.linspace(0, num_rows, num_bins + 1)
    misses = curve.at(edges, num_rows)
    area = float(((misses[1:] + misses[:-1]) / 2).mean())
    # Less than one lookup a step would round to 0; only the shape of the histogram matters.
    first_served = -np.diff(misses) * max(curve.expected_lookups, 1.0)
    return EmbeddingOffloadStats(
        cacheability=area,
        expected_lookups=round(curve.expected_lookups),
        mrc_hist_counts=torch.from_numpy(first_served).double(),
        height=num_rows,
    )


KERNEL_OF_TIER: Mapping[Tier, ColdTier] = {
    Tier.DEVICE: ColdTier.fused,
    Tier.HOST: ColdTier.fused_uvm,
    Tier.HOST_CACHED: ColdTier.fused_uvm_caching,
}


def cold_tier_for(device: str, tier: ColdTier, key: str = "placement.cold_tier") -> ColdTier:
    """Checks that the device has the tier.

    Args:
        device: "cpu" or "cuda".
        tier: Tier of sharded rows.
        key: Configuration key that the error names.

    Raises:
        ValueError: If the tier is a UVM tier on CPU.
    """
    if device == "cpu" and tier is not ColdTier.fused:
        raise ValueError(
            f"{key}: expected fused on CPU (UVM kernels need CUDA), got {tier.value}."
            f" Set {key}=fused, or train on CUDA."
        )
    return tier


def _replicated() -> ParameterConstraints:
    return ParameterConstraints(
        sharding_types=[ShardingType.DATA_PARALLEL.value],
        compute_kernels=[EmbeddingComputeKernel.DENSE.value],
    )


def placement_constraints(
    placement: Placement, curves: Mapping[str, MissCurve] | None = None
) -> dict[str, ParameterConstraints]:
    """Returns constraints that leave only the choice of ranks to TorchRec's planner.

    Hot tables are data-parallel. The others are row-wise or table-wise on the kernel of their tier,
    those whose exchange is pooled table-wise. A host tier behind a device cache gets the cache's
    share of the rows, and its statistics.

    Args:
        placement: The placement of the tables.
        curves: Miss curves of device caches by table. Tables without one get no statistics.

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
                f"placement table {name}: expected sharding table_wise where the exchange is "
                f"pooled (row-wise ships the pooled vectors once per rank), got "
                f"{table.sharding.value}. Place it table-wise, or exchange its rows."
            )
        curve = None if curves is None else curves.get(name)
        constraints[name] = ParameterConstraints(
            sharding_types=[table.sharding.value],
            compute_kernels=[KERNEL_OF_TIER[table.tier].value],
            cache_params=_cache_params(name, table, curve, num_rows),
        )
    return constraints


def _cache_params(
    name: str, table: TablePlacement, curve: MissCurve | None, num_rows: int
) -> CacheParams | None:
    if table.tier is not Tier.HOST_CACHED:
        return None
    fraction = table.cache_load_frac
    if fraction is None or not 0 < fraction < 1:
        raise ValueError(
            f"placement table {name} cache_load_frac: expected between 0 and 1 in tier "
            f"host_cached, got {fraction}. Give the cache a size, or take tier host."
        )
    stats = None if curve is None else offload_stats(curve, num_rows)
    return cache_params(fraction, stats=stats)


def cache_params(
    load_factor: float | None,
    *,
    stats: CacheStatistics | None = None,
    is_prefetched: bool = False,
) -> CacheParams:
    """Returns the parameters of an LRU device cache of a host table.

    LFU would exclude prefetching (FBGEMM asserts it), need 8 bytes for every row instead of every
    slot, and never evict rows that were popular once.

    Args:
        load_factor: Cached fraction of the rows. None takes FBGEMM's default.
        stats: Cache statistics for TorchRec's estimates.
        is_prefetched: Whether TorchRec's prefetch pipeline fills the cache.
    """
    return CacheParams(
        algorithm=CacheAlgorithm.LRU,
        load_factor=load_factor,
        stats=stats,
        prefetch_pipeline=True if is_prefetched else None,
    )


def hot_cold_constraints(
    tables: Sequence[EmbeddingBagConfig],
    partition: Partition,
    *,
    cold_tier: ColdTier = ColdTier.fused,
    cache_load_factor: float | None = None,
) -> dict[str, ParameterConstraints]:
    """Constraints that make hot tables data-parallel and cold tables row-wise on one tier.

    Args:
        tables: The tables of the collection.
        partition: The partition into hot and cold rows.
        cold_tier: Compute kernel of the cold tables.
        cache_load_factor: Cached fraction of the cold rows. None takes FBGEMM's default.
    """
    num_rows = {table.name: table.num_embeddings for table in tables}
    of_these = Partition(num_rows, {name: partition.hot(name) for name in num_rows})
    constraints = placement_constraints(Placement.alike(of_these))
    for table in tables:
        if table.name in constraints:
            constraints[table.name].compute_kernels = [cold_tier.value]
            if cold_tier is ColdTier.fused_uvm_caching:
                constraints[table.name].cache_params = cache_params(cache_load_factor)
    return constraints


def torchrec_constraints(
    tables: Sequence[EmbeddingBagConfig],
    variant: TorchrecPlan,
    *,
    batch_size: int,
    tier: ColdTier = ColdTier.fused,
    cache_load_factor: float | None = None,
    is_prefetched: bool = False,
) -> dict[str, ParameterConstraints] | None:
    """Constraints of a plan for unsplit tables; None leaves every choice to the planner.

    ``HAND_TUNED``: tables with fewer rows than the batch data-parallel, the rest table-wise.

    Args:
        tables: The tables of the collection.
        variant: The plan.
        batch_size: Batch of a rank, read by ``HAND_TUNED``.
        tier: Memory tier of the rows.
        cache_load_factor: Cached fraction of the rows. None takes FBGEMM's default.
        is_prefetched: Whether TorchRec's prefetch pipeline fills the UVM cache.
    """
    if variant is TorchrecPlan.planner and tier is ColdTier.fused:
        return None
    cache = None
    if tier is ColdTier.fused_uvm_caching:
        cache = cache_params(cache_load_factor, is_prefetched=is_prefetched)
    constraints = {}
    for table in tables:
        if variant is TorchrecPlan.hand_tuned and table.num_embeddings < batch_size:
            constraints[table.name] = _replicated()
        else:
            types = None if variant is TorchrecPlan.planner else [ShardingType.TABLE_WISE.value]
            constraints[table.name] = ParameterConstraints(
                sharding_types=types, compute_kernels=[tier.value], cache_params=cache
            )
    return constraints
