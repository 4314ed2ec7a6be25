"""Converts placements to constraints for TorchRec's planner."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import (
    CacheAlgorithm,
    CacheParams,
    ShardingType,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from hotrec.routing.features import hot_name
from hotrec.types import (
    Exchange,
    Placement,
    Sharding,
    Tier,
    TorchrecPlan,
    TorchrecTier,
)

# FBGEMM's modules hold the rows behind our slots, in host memory.
KERNEL_BEHIND_SLOTS = {"cpu": TorchrecTier.fused, "cuda": TorchrecTier.fused_uvm}


def check_tier(device: str, tier: TorchrecTier) -> None:
    """Checks that a device has the memory of TorchRec's rows.

    Raises:
        ValueError: If the tier is a UVM tier on CPU.
    """
    if device == "cpu" and tier is not TorchrecTier.fused:
        raise ValueError(
            f"placement.tier: expected fused on CPU (UVM kernels need CUDA), got {tier.value}. Set "
            "placement.tier=fused, or train on CUDA."
        )


def placement_constraints(
    placement: Placement, device: str = "cpu"
) -> dict[str, ParameterConstraints]:
    """Returns constraints that leave TorchRec's planner only the choice of ranks.

    Hot tables are data-parallel. The others are row-wise or table-wise on the kernel of their tier,
    those whose exchange is pooled table-wise.

    Args:
        placement: The placement.
        device: "cpu" or "cuda", which determines the kernel of rows behind our slots.

    Raises:
        ValueError: If a pooled table is to be row-wise.
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
        has_slots = table.tier is Tier.CACHED
        kernel = KERNEL_BEHIND_SLOTS[device] if has_slots else TorchrecTier.fused
        constraints[name] = ParameterConstraints(
            sharding_types=[table.sharding.value], compute_kernels=[kernel.value]
        )
    return constraints


def _replicated() -> ParameterConstraints:
    return ParameterConstraints(
        sharding_types=[ShardingType.DATA_PARALLEL.value],
        compute_kernels=[EmbeddingComputeKernel.DENSE.value],
    )


def _cache_params(load_factor: float | None, *, is_prefetched: bool) -> CacheParams:
    """Returns the parameters of an LRU device cache of a host table.

    LFU would exclude prefetching (FBGEMM asserts it), need 8 bytes for every row instead of every
    slot, and never evict rows that were popular once.
    """
    return CacheParams(
        algorithm=CacheAlgorithm.LRU,
        load_factor=load_factor,
        prefetch_pipeline=True if is_prefetched else None,
    )


def torchrec_constraints(
    tables: Sequence[BaseEmbeddingConfig],
    variant: TorchrecPlan,
    *,
    batch_size: int,
    tier: TorchrecTier = TorchrecTier.fused,
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
    if variant is TorchrecPlan.planner and tier is TorchrecTier.fused and may_replicate:
        return None
    if variant is TorchrecPlan.hand_tuned and not may_replicate:
        raise ValueError(
            "placement.plan: expected planner or table_wise for sequences on CPU, where FBGEMM "
            "looks data-parallel tables up in another order, got hand_tuned. Set "
            "placement.plan=table_wise."
        )
    is_cached = tier is TorchrecTier.fused_uvm_caching
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
