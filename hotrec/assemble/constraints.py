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
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig

from hotrec.planner.plan import TorchrecTables
from hotrec.routing.features import hot_name
from hotrec.types import (
    Placement,
    Tier,
    TorchrecPlan,
    TorchrecTier,
)

# FBGEMM's modules hold the rows behind our slots, in host memory.
KERNEL_BEHIND_SLOTS = {"cpu": TorchrecTier.fused, "cuda": TorchrecTier.fused_uvm}
_SHARDED = ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE


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


def torchrec_constraints(
    tables: Sequence[BaseEmbeddingConfig],
    asked: TorchrecTables,
    *,
    batch_size: int,
    device: str = "cpu",
    is_prefetched: bool = False,
) -> dict[str, ParameterConstraints] | None:
    """Constraints of one of TorchRec's plans; None leaves every choice to the planner.

    ``hand_tuned``: tables with fewer rows than the batch data-parallel, the rest table-wise. On CPU
    no table of sequences is data-parallel: FBGEMM looks up its single ids in another order.

    Args:
        tables: The unsplit tables.
        asked: The plan.
        batch_size: Batch of a rank, read by ``hand_tuned``.
        device: "cpu" or "cuda".
        is_prefetched: Whether TorchRec's prefetch pipeline fills the UVM cache.

    Raises:
        ValueError: If the device has no such memory.
    """
    check_tier(device, asked.tier)
    is_free = asked.plan is TorchrecPlan.planner
    cache = None
    if asked.tier is TorchrecTier.fused_uvm_caching:
        # LFU would exclude prefetching (FBGEMM asserts it), need 8 bytes for every row instead of
        # every slot, and never evict rows that were popular once.
        prefetch = True if is_prefetched else None
        cache = CacheParams(
            CacheAlgorithm.LRU, load_factor=asked.cache_load_frac, prefetch_pipeline=prefetch
        )
    found = {}
    for table in tables:
        may_replicate = isinstance(table, EmbeddingBagConfig) or device != "cpu"
        is_small = may_replicate and table.num_embeddings < batch_size
        if is_free and may_replicate and asked.tier is TorchrecTier.fused:
            continue
        if asked.plan is TorchrecPlan.hand_tuned and is_small:
            found[table.name] = _replicated()
            continue
        types: list[str] | None = [ShardingType.TABLE_WISE.value]
        if is_free:
            types = None if may_replicate else [kind.value for kind in _SHARDED]
        found[table.name] = ParameterConstraints(
            sharding_types=types, compute_kernels=[asked.tier.value], cache_params=cache
        )
    return found or None
