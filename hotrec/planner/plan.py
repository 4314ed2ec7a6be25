"""Constraints -> TorchRec's planner -> an ordinary ``ShardingPlan``.

The placement says which rows are replicated and how the others are sharded; TorchRec's planner,
constrained accordingly, chooses the ranks and checks storage. Plans for unsplit tables (TorchRec's
own choice, table-wise, and what an expert writes by hand) come from the same function, as
baselines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from torch import nn
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardEstimator
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ShardingPlan,
)

from hotrec.planner.constraints import ColdTier, cold_tier_for
from hotrec.planner.machine import DEVICE_RESERVED_FRAC, Machine
from hotrec.planner.storage import (
    BYTES_PER_FLOAT,
    HOST_KERNELS,
    Shortfall,
    TrainedStorageEstimator,
    describe_shortfall,
    table_storage,
)

# FBGEMM's device cache: its associativity, the sets it can count, the share of the rows that it
# holds where nothing is said (split_table_batched_embeddings_ops_training.py).
CACHE_WAYS = 32
MOST_CACHE_SETS = 2**24 - 1
DEFAULT_CACHE_LOAD_FACTOR = 0.2


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
    estimators: list[ShardEstimator] = [
        EmbeddingPerfEstimator(topology, given),
        TrainedStorageEstimator(topology, given),
    ]
    enumerator = EmbeddingEnumerator(topology, batch_size, given, estimators)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=enumerator,
        constraints=given,
        storage_reservation=FixedPercentageStorageReservation(percentage=DEVICE_RESERVED_FRAC),
    )
    try:
        plan = planner.plan(model, list(sharders))
    except PlannerError as error:
        options = enumerator.enumerate(model, list(sharders))
        of_device = topology.compute_device != "cpu"
        memory = topology.devices[0].storage
        shortfall = Shortfall(
            tables=table_storage(options, on_device=of_device),
            world_size=topology.world_size,
            device_bytes=int((1 - DEVICE_RESERVED_FRAC) * memory.hbm) if of_device else 0,
            host_bytes=memory.ddr,
        )
        where = f"{topology.world_size} ranks on {topology.compute_device}"
        raise ValueError(
            f"plan for {where}: expected the tables to fit {describe_shortfall(shortfall)} "
            f"TorchRec says: {error}"
        ) from error
    check_caches(plan)
    return plan


def check_caches(plan: ShardingPlan) -> None:
    """Refuse device caches with more sets than FBGEMM can tell apart.

    All tables that TorchRec puts into one of FBGEMM's modules share one cache, of 32 slots a set.

    Raises:
        ValueError: if a rank's caches of one collection have too many.
    """
    for path, tables in plan.plan.items():
        assert isinstance(tables, EmbeddingModuleShardingPlan), type(tables)
        rows: dict[int, float] = defaultdict(float)
        for sharding in tables.values():
            spec = sharding.sharding_spec
            if sharding.compute_kernel != ColdTier.UVM_CACHING.value:
                continue
            assert isinstance(spec, EnumerableShardingSpec), type(spec)
            cache = sharding.cache_params
            load_factor = None if cache is None else cache.load_factor
            share = DEFAULT_CACHE_LOAD_FACTOR if load_factor is None else load_factor
            for shard, rank in zip(spec.shards, sharding.ranks or [], strict=True):
                rows[rank] += share * shard.shard_sizes[0]
        for rank, num_cached in rows.items():
            num_sets = math.ceil(num_cached / CACHE_WAYS)
            if num_sets >= MOST_CACHE_SETS:
                raise ValueError(
                    f"plan device caches of {path or 'the model'} on rank {rank}: expected fewer "
                    f"than {MOST_CACHE_SETS} sets of {CACHE_WAYS} rows, got {num_sets} for "
                    f"{int(num_cached)} cached rows. Cache a smaller share of them, or use more "
                    "ranks."
                )


def host_tier_bytes(
    plan: ShardingPlan, ranks_per_host: int, state_bytes: Callable[[int], int]
) -> int:
    """Host memory that the devices of a host map for the host tiers of a plan, on the fullest one.

    Args:
        plan: for all ranks.
        ranks_per_host: consecutive ranks are on one host.
        state_bytes: of D, bytes of a row's optimizer state; one of a float stays on the device.
    """
    hosts: dict[int, int] = defaultdict(int)
    for tables in plan.plan.values():
        assert isinstance(tables, EmbeddingModuleShardingPlan), type(tables)
        for sharding in tables.values():
            spec = sharding.sharding_spec
            if sharding.compute_kernel not in HOST_KERNELS:
                continue
            assert isinstance(spec, EnumerableShardingSpec), type(spec)
            for shard, rank in zip(spec.shards, sharding.ranks or [], strict=True):
                num_rows, dim = shard.shard_sizes
                state = state_bytes(dim)
                row_bytes = BYTES_PER_FLOAT * dim + (state if state > BYTES_PER_FLOAT else 0)
                hosts[rank // ranks_per_host] += num_rows * row_bytes
    return max(hosts.values(), default=0)
