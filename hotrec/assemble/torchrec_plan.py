"""Runs TorchRec's planner and writes its ``ShardingPlan`` as JSON and as text."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardEstimator, ShardingOption, Storage
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)

from hotrec.assemble.constraints import check_tier
from hotrec.assemble.topology import topology_of
from hotrec.cost_model.forms import BYTES_PER_FLOAT
from hotrec.cost_model.memory import NUM_REPLICA_GRADIENTS
from hotrec.cost_model.quantities import TableSharding
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planner.machine import DEVICE_RESERVED_FRAC, Machine
from hotrec.planner.predict import Shardings
from hotrec.types import (
    DEFAULT_LOAD_FRAC,
    TIER_OF_KERNEL,
    OptimizerKind,
    Tier,
    TorchrecTier,
)

# FBGEMM's device cache: its associativity, and the sets it can count
# (split_table_batched_embeddings_ops_training.py).
CACHE_WAYS = 32
MAX_CACHE_SETS = 2**24 - 1
_TIERS = {"dense": Tier.DEVICE, **{kernel.value: tier for kernel, tier in TIER_OF_KERNEL.items()}}
HOST_KERNELS = (TorchrecTier.fused_uvm.value, TorchrecTier.fused_uvm_caching.value)
# State of FBGEMM's optimizers: floats per float of a row, and floats per row.
STATE_FLOATS: Mapping[str, tuple[int, int]] = {
    "SGD": (0, 0),
    "EXACT_SGD": (0, 0),
    "LARS_SGD": (1, 0),
    "EXACT_ADAGRAD": (1, 0),
    "EXACT_ROWWISE_ADAGRAD": (0, 1),
    "ADAM": (2, 0),
    "PARTIAL_ROWWISE_ADAM": (1, 1),
    "LAMB": (2, 0),
    "PARTIAL_ROWWISE_LAMB": (1, 1),
}


def make_plan(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    machine: Machine,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> ShardingPlan:
    """Runs TorchRec's planner; every rank computes the same plan from the same inputs.

    Args:
        model: Not sharded yet; may be on the meta device.
        constraints: Constraints by table (``placement_constraints``, ``torchrec_constraints``).

    Raises:
        ValueError: If the tables do not fit the machine under the constraints, or the machine's
            costs are of another kind of machine.
    """
    topology, batch_size = topology_of(machine), machine.batch_size
    for constraint in (constraints or {}).values():
        for kernel in constraint.compute_kernels or []:
            if kernel in HOST_KERNELS:
                check_tier(topology.compute_device, TorchrecTier(kernel))
    given = dict(constraints) if constraints is not None else None
    estimators: list[ShardEstimator] = [
        EmbeddingPerfEstimator(topology, given),
        TrainedStorageEstimator(topology, given),
    ]
    enumerator = OrderedEnumerator(topology, batch_size, given, estimators)
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
        shortfall = _describe_shortfall(enumerator.enumerate(model, list(sharders)), topology)
        # The last of its twenty lines names the shard that was too large.
        theirs = " ".join(str(error).rpartition("Last planner error:")[2].split())
        raise ValueError(
            f"plan for {topology.world_size} ranks on {topology.compute_device}: {shortfall} "
            f"TorchRec's planner: {theirs}"
        ) from error
    check_caches(plan)
    return plan


def why_inexact(shardings: Shardings, machine: Machine, rule: OptimizerSpec) -> str | None:
    """Why unsplit tables, sharded like this, do not train the unsplit model; None if they do."""
    is_cut = any(len(of.blocks(machine.world)) > 1 for of in shardings.values())
    if is_cut and rule.kind is OptimizerKind.rowwise_adagrad:
        return (
            "its column-wise shards have one state for each part of a row, so that it would not "
            "train the weights of the unsplit model"
        )
    return None


def shardings_of(
    plan: ShardingPlan,
    names: Collection[str],
    cache_load_frac: float | None = None,
    *,
    is_prefetched: bool = False,
) -> Shardings:
    """The sharding of these unsplit tables in a plan.

    Args:
        plan: TorchRec's plan.
        names: The tables; all others belong to modules that are not predicted.
        cache_load_frac: Cached fraction of the rows of tables with a device cache.
        is_prefetched: Whether TorchRec's prefetch pipeline fills the caches.

    Raises:
        ValueError: If a table has a kernel without a cost model.
    """
    shardings = {}
    for tables in plan_document(plan).values():
        for name, facts in tables.items():
            if name not in names:
                continue
            kernel = facts["compute_kernel"]
            if (tier := _TIERS.get(kernel)) is None:
                raise ValueError(
                    f"plan of table {name}: expected a kernel of {', '.join(_TIERS)}, got "
                    f"{kernel}. Constrain TorchRec's planner to these."
                )
            is_cached = tier is Tier.HOST_CACHED
            shardings[name] = TableSharding(
                kind=facts["sharding_type"],
                ranks=tuple(facts["ranks"] or ()),
                tier=tier,
                cache_load_frac=cache_load_frac if is_cached else None,
                is_prefetched=is_prefetched and is_cached,
            )
    return shardings


def _describe_shortfall(options: Sequence[ShardingOption], topology: Topology) -> str:
    """Describes the memory with the largest deficit, with the needs of the smallest options."""
    memory, world_size = topology.devices[0].storage, topology.world_size
    capacity = {"host": memory.ddr}
    if topology.compute_device != "cpu":
        capacity = {"device": int((1 - DEVICE_RESERVED_FRAC) * memory.hbm), **capacity}
    least: dict[str, dict[str, int]] = {}
    for option in options:
        storages = [shard.storage for shard in option.shards if shard.storage is not None]
        sizes = {"device": sum(s.hbm for s in storages), "host": sum(s.ddr for s in storages)}
        found = least.setdefault(option.name, sizes)
        least[option.name] = min(found, sizes, key=lambda sizes: [sizes[kind] for kind in capacity])
    need = {kind: -(-sum(s[kind] for s in least.values()) // world_size) for kind in capacity}
    kind = max(capacity, key=lambda kind: need[kind] - capacity[kind])
    return (
        f"expected the tables to fit {capacity[kind]} bytes of {kind} memory per rank, got "
        f"{need[kind]} bytes on average over the ranks. Use fewer hot rows, more ranks, another "
        "tier, or row-wise sharding of the largest table."
    )


class OrderedEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, whose options have the same order in every process.

    It intersects sets of strings. Where options take the same time, ranks with other hash seeds
    would plan other shards, and wait for each other forever.
    """

    _SHARDING_TYPES = [of.value for of in ShardingType]
    _KERNELS = [of.value for of in EmbeddingComputeKernel]

    def enumerate(self, *given: Any, **named: Any) -> list[ShardingOption]:
        return sorted(super().enumerate(*given, **named), key=self._place)

    def _place(self, option: ShardingOption) -> tuple[int, int]:
        kind, kernel = option.sharding_type, option.compute_kernel
        return self._SHARDING_TYPES.index(kind), self._KERNELS.index(kernel)


class TrainedStorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's estimator plus the optimizer states and gradients that it omits.

    TorchRec looks for states on the parameters, but they are in the sharder's ``fused_params``.
    With R rows of D floats on a rank:

        replica         4 R D of gradients, and as much again at the first steps: in iteration 3
                        DDP recreates its bucket while the old one still exists; the state
        element-wise    state of a shard, where its rows are: FBGEMM's device cache holds none of it
        row-wise        state of a shard, 4 R: on the device, for any location of the rows
    """

    def __init__(self, topology: Topology, *given: Any, **named: Any) -> None:
        super().__init__(topology, *given, **named)
        self._is_on_cpu = topology.compute_device == "cpu"

    def estimate(self, sharding_options: list[ShardingOption], *given: Any, **named: Any) -> None:
        """Estimates the storage of every shard of every option.

        The map from an option's module to its sharder comes by position in TorchRec 1.6, by keyword
        in 1.8.

        Raises:
            ValueError: If a sharder's optimizer has a state of unknown size.
        """
        super().estimate(sharding_options, *given, **named)
        [sharders] = [*given, *named.values()]
        for option in sharding_options:
            params = getattr(sharders[option.module_type_key], "fused_params", None) or {}
            state = state_floats(params.get("optimizer"))
            for shard in option.shards:
                assert shard.storage is not None, option.name
                shard.storage += self._beside(option, shard.size, state)

    def _beside(self, option: ShardingOption, size: list[int], state: tuple[int, int]) -> Storage:
        num_rows, dim = size
        by_element = BYTES_PER_FLOAT * num_rows * dim
        element_wise, row_wise = state[0] * by_element, state[1] * BYTES_PER_FLOAT * num_rows
        if option.sharding_type == ShardingType.DATA_PARALLEL.value:
            row_wise += NUM_REPLICA_GRADIENTS * by_element
        if self._is_on_cpu:
            return Storage(hbm=0, ddr=element_wise + row_wise)
        if option.compute_kernel in HOST_KERNELS:
            return Storage(hbm=row_wise, ddr=element_wise)
        return Storage(hbm=element_wise + row_wise, ddr=0)


def state_floats(optimizer: Any) -> tuple[int, int]:
    """Floats of state of FBGEMM's OptimType (None: SGD), per float of a row and per row."""
    name = "EXACT_SGD" if optimizer is None else optimizer.name
    if name not in STATE_FLOATS:
        raise ValueError(
            f"sharder fused_params optimizer: expected one of {sorted(STATE_FLOATS)} (of known "
            f"memory), got {name}. Train with one of these."
        )
    return STATE_FLOATS[name]


def _shards(
    plan: ShardingPlan,
) -> Iterator[tuple[str, ParameterSharding, ShardMetadata, int]]:
    """Yields the module, sharding and rank of each shard; replicated tables have none."""
    for path, tables in plan.plan.items():
        assert isinstance(tables, EmbeddingModuleShardingPlan), type(tables)
        for sharding in tables.values():
            spec = sharding.sharding_spec
            if isinstance(spec, EnumerableShardingSpec):
                for shard, rank in zip(spec.shards, sharding.ranks or [], strict=True):
                    yield path, sharding, shard, rank


def check_caches(plan: ShardingPlan) -> None:
    """Checks that no device cache has more sets than FBGEMM can index.

    All tables in one of FBGEMM's modules share one cache, with 32 slots per set.

    Raises:
        ValueError: If a rank's caches of one collection have too many.
    """
    rows: dict[tuple[str, int], float] = defaultdict(float)
    for path, sharding, shard, rank in _shards(plan):
        if sharding.compute_kernel == TorchrecTier.fused_uvm_caching.value:
            cache = sharding.cache_params
            load_factor = None if cache is None else cache.load_factor
            share = DEFAULT_LOAD_FRAC if load_factor is None else load_factor
            rows[path, rank] += share * shard.shard_sizes[0]
    for (path, rank), num_cached in rows.items():
        num_sets = math.ceil(num_cached / CACHE_WAYS)
        if num_sets >= MAX_CACHE_SETS:
            raise ValueError(
                f"plan device caches of {path or 'the model'} on rank {rank}: expected fewer than "
                f"{MAX_CACHE_SETS} sets of {CACHE_WAYS} rows, got {num_sets} for "
                f"{int(num_cached)} cached rows. Cache a smaller share of them, or use more ranks."
            )


def host_tier_bytes(
    plan: ShardingPlan, ranks_per_host: int, state_bytes: Callable[[int], int]
) -> int:
    """Returns the host memory that the devices of the fullest host map for a plan's host tiers.

    Args:
        ranks_per_host: Ranks of a host, which are consecutive.
        state_bytes: Returns the bytes of a row's optimizer state for an embedding dim. A state of
            one float stays on the device.
    """
    hosts: dict[int, int] = defaultdict(int)
    for _, sharding, shard, rank in _shards(plan):
        if sharding.compute_kernel in HOST_KERNELS:
            num_rows, dim = shard.shard_sizes
            state = state_bytes(dim)
            row_bytes = BYTES_PER_FLOAT * dim + (state if state > BYTES_PER_FLOAT else 0)
            hosts[rank // ranks_per_host] += num_rows * row_bytes
    return max(hosts.values(), default=0)


def plan_document(plan: ShardingPlan) -> dict[str, Any]:
    """Returns a plan as plain data: module path -> table -> sharding, kernel, shards."""
    document: dict[str, Any] = {}
    for path, module_plan in plan.plan.items():
        assert isinstance(module_plan, EmbeddingModuleShardingPlan), type(module_plan)
        tables = {}
        for table, sharding in module_plan.items():
            spec = sharding.sharding_spec
            shards = spec.shards if isinstance(spec, EnumerableShardingSpec) else []
            tables[table] = {
                "sharding_type": sharding.sharding_type,
                "compute_kernel": sharding.compute_kernel,
                "ranks": sharding.ranks,
                "shards": [
                    {
                        "offsets": list(shard.shard_offsets),
                        "sizes": list(shard.shard_sizes),
                        "placement": str(shard.placement),
                    }
                    for shard in shards
                ],
            }
        document[path] = tables
    return document


def rank_of_shard(shard: Mapping[str, Any]) -> int:
    """The rank that holds a shard of ``plan_document``, with a placement like "rank:1/cpu"."""
    return int(shard["placement"].split("/")[0].removeprefix("rank:"))


def plan_text(plan: ShardingPlan) -> str:
    """Formats a plan as text, one line for each table."""
    lines = []
    for path, tables in plan_document(plan).items():
        width = max(len(name) for name in tables)
        lines.append(f"module {path or '(root)'}")
        lines.append(f"  {'table':<{width}}  {'sharding':<13}  {'kernel':<17}  rows per rank")
        for name, facts in tables.items():
            rows = ", ".join(str(shard["sizes"][0]) for shard in facts["shards"]) or "all"
            lines.append(
                f"  {name:<{width}}  {facts['sharding_type']:<13}  "
                f"{facts['compute_kernel']:<17}  {rows}"
            )
    return "\n".join(lines) + "\n"
