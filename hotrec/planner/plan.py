"""Placement -> TorchRec's planner -> an ordinary ``ShardingPlan``.

The partition says which rows are replicated; TorchRec's planner, constrained accordingly, places
the shards and checks storage. Plans for unsplit tables (TorchRec's own choice, table-wise, and
what an expert writes by hand) come from the same function, as baselines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import CacheParams, ModuleSharder, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from hotrec.routing import hot_name
from hotrec.types import Partition


class ColdTier(Enum):
    """Where cold rows live; all but ``FUSED`` need CUDA."""

    FUSED = "fused"
    UVM = "fused_uvm"
    UVM_CACHING = "fused_uvm_caching"


class TorchRecPlan(Enum):
    """Plans for unsplit tables."""

    PLANNER = "planner"
    TABLE_WISE = "table_wise"
    HAND_TUNED = "hand_tuned"


@dataclass(frozen=True)
class Machine:
    """What the planner may use.

    Args:
        world_size: W.
        local_world_size: ranks per host.
        device: "cpu" or "cuda".
        device_bytes: memory of each rank's device; ignored on CPU.
        host_bytes: memory of a host, shared by its ranks.
        batch_size: B.
    """

    world_size: int
    local_world_size: int
    device: str
    device_bytes: int
    host_bytes: int
    batch_size: int

    def topology(self) -> Topology:
        return Topology(
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            compute_device=self.device,
            hbm_cap=self.device_bytes if self.device == "cuda" else 0,
            ddr_cap=self.host_bytes // self.local_world_size,
        )


def cold_tier_for(device: str, tier: ColdTier) -> ColdTier:
    """Check that the device has the tier.

    Raises:
        ValueError: for a UVM tier on CPU.
    """
    if device == "cpu" and tier is not ColdTier.FUSED:
        raise ValueError(
            f"placement.cold_tier: expected fused on CPU (UVM kernels need CUDA), got {tier.value}."
            " Set placement.cold_tier=fused, or train on CUDA."
        )
    return tier


def hot_cold_constraints(
    tables: Sequence[EmbeddingBagConfig],
    partition: Partition,
    *,
    cold_tier: ColdTier = ColdTier.FUSED,
    cache_load_factor: float | None = None,
) -> dict[str, ParameterConstraints]:
    """Constraints that make hot tables data-parallel and cold tables row-wise on their tier.

    Args:
        tables: of the collection.
        partition: which rows are hot.
        cold_tier: compute kernel of the cold tables.
        cache_load_factor: fraction of the cold rows that the UVM cache holds.
    """
    cache = None
    if cold_tier is ColdTier.UVM_CACHING:
        cache = CacheParams(load_factor=cache_load_factor)
    constraints = {}
    for table in tables:
        num_hot = partition.num_hot(table.name)
        if num_hot > 0:
            constraints[hot_name(table.name)] = ParameterConstraints(
                sharding_types=[ShardingType.DATA_PARALLEL.value],
                compute_kernels=[EmbeddingComputeKernel.DENSE.value],
            )
        if num_hot < table.num_embeddings:
            constraints[table.name] = ParameterConstraints(
                sharding_types=[ShardingType.ROW_WISE.value],
                compute_kernels=[cold_tier.value],
                cache_params=cache,
            )
    return constraints


def torchrec_constraints(
    tables: Sequence[EmbeddingBagConfig],
    variant: TorchRecPlan,
    *,
    batch_size: int,
    tier: ColdTier = ColdTier.FUSED,
    cache_load_factor: float | None = None,
) -> dict[str, ParameterConstraints] | None:
    """Constraints of a plan for unsplit tables; None leaves every choice to the planner.

    ``HAND_TUNED``: tables with fewer rows than the batch data-parallel, the rest table-wise.
    """
    if variant is TorchRecPlan.PLANNER and tier is ColdTier.FUSED:
        return None
    cache = CacheParams(load_factor=cache_load_factor) if tier is ColdTier.UVM_CACHING else None
    constraints = {}
    for table in tables:
        if variant is TorchRecPlan.HAND_TUNED and table.num_embeddings < batch_size:
            constraints[table.name] = ParameterConstraints(
                sharding_types=[ShardingType.DATA_PARALLEL.value],
                compute_kernels=[EmbeddingComputeKernel.DENSE.value],
            )
        else:
            types = None if variant is TorchRecPlan.PLANNER else [ShardingType.TABLE_WISE.value]
            constraints[table.name] = ParameterConstraints(
                sharding_types=types, compute_kernels=[tier.value], cache_params=cache
            )
    return constraints


def make_plan(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    machine: Machine,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> ShardingPlan:
    """Run TorchRec's planner; every rank computes the same plan from the same inputs.

    Args:
        model: not sharded yet; may be on the meta device.
        sharders: of its collections.
        machine: ranks and memory.
        constraints: by table, see ``hot_cold_constraints`` and ``torchrec_constraints``.

    Raises:
        ValueError: if the tables do not fit the machine under the constraints.
    """
    for constraint in (constraints or {}).values():
        for kernel in constraint.compute_kernels or []:
            if kernel in {tier.value for tier in ColdTier}:
                cold_tier_for(machine.device, ColdTier(kernel))
    planner = EmbeddingShardingPlanner(
        topology=machine.topology(),
        batch_size=machine.batch_size,
        constraints=dict(constraints) if constraints is not None else None,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.05),
    )
    try:
        return planner.plan(model, list(sharders))
    except PlannerError as error:
        where = f"{machine.world_size} ranks on {machine.device}"
        raise ValueError(
            f"plan for {where}: expected the tables to fit {machine.host_bytes} bytes per host and "
            f"{machine.device_bytes} bytes per device, got TorchRec's {error}. Lower the hot "
            "budget, choose a host tier for cold rows, or use more ranks."
        ) from error
