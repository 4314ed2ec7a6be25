"""Constraints -> TorchRec's planner -> an ordinary ``ShardingPlan``.

The placement says which rows are replicated and how the others are sharded; TorchRec's planner,
constrained accordingly, chooses the ranks and checks storage. Plans for unsplit tables (TorchRec's
own choice, table-wise, and what an expert writes by hand) come from the same function, as
baselines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from hotrec.planner.constraints import ColdTier, cold_tier_for
from hotrec.planner.machine import Machine
from hotrec.planner.storage import Shortfall, describe_shortfall, table_storage

# Of the device's memory, for what is not in a table.
RESERVED_FRAC = 0.05


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
        machine: ranks and memory, and what they take.
        constraints: by table, see ``placement_constraints`` and ``torchrec_constraints``.

    Raises:
        ValueError: if the tables do not fit the machine under the constraints, or the machine's
            costs are of another kind of machine.
    """
    return plan_on(model, sharders, machine.topology(), machine.batch_size, constraints)


def plan_on(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    topology: Topology,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> ShardingPlan:
    """``make_plan`` for a topology of one's own.

    Raises:
        ValueError: if the tables do not fit the topology under the constraints.
    """
    for constraint in (constraints or {}).values():
        for kernel in constraint.compute_kernels or []:
            if kernel in {tier.value for tier in ColdTier}:
                cold_tier_for(topology.compute_device, ColdTier(kernel))
    given = dict(constraints) if constraints is not None else None
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        constraints=given,
        storage_reservation=FixedPercentageStorageReservation(percentage=RESERVED_FRAC),
    )
    try:
        return planner.plan(model, list(sharders))
    except PlannerError as error:
        enumerator = EmbeddingEnumerator(topology, batch_size, given)
        options = enumerator.enumerate(model, list(sharders))
        of_device = topology.compute_device != "cpu"
        memory = topology.devices[0].storage
        shortfall = Shortfall(
            tables=table_storage(options, on_device=of_device),
            world_size=topology.world_size,
            device_bytes=int((1 - RESERVED_FRAC) * memory.hbm) if of_device else 0,
            host_bytes=memory.ddr,
        )
        where = f"{topology.world_size} ranks on {topology.compute_device}"
        raise ValueError(
            f"plan for {where}: expected the tables to fit {describe_shortfall(shortfall)} "
            f"TorchRec says: {error}"
        ) from error
