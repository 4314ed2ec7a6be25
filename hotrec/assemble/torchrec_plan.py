"""Runs TorchRec's planner and writes its ``ShardingPlan`` as JSON and as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
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
    ShardingPlan,
    ShardingType,
)

from hotrec.assemble.constraints import check_tier
from hotrec.cost_model.memory import NUM_REPLICA_GRADIENTS
from hotrec.cost_model.quantities import TableSharding
from hotrec.cost_model.step import BYTES_PER_FLOAT
from hotrec.embedding.collection import HotColdCollection
from hotrec.embedding.fused import kind_of_kernel
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planner.machine import DEVICE_RESERVED_FRAC, Machine
from hotrec.planner.plan import TorchrecTables
from hotrec.planner.predict import Shardings
from hotrec.planner.propose import ShardingsOf
from hotrec.types import (
    TIER_OF_KERNEL,
    OptimizerKind,
    PipelineKind,
    PipelineSpec,
    Tier,
    TorchrecTier,
)

_TIERS = {"dense": Tier.DEVICE, **{kernel.value: tier for kernel, tier in TIER_OF_KERNEL.items()}}
HOST_KERNELS = (TorchrecTier.fused_uvm.value, TorchrecTier.fused_uvm_caching.value)


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
        ValueError: If the tables do not fit the machine under the constraints.
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
        return planner.plan(model, list(sharders))
    except PlannerError as error:
        # The last of its twenty lines names the shard that was too large.
        theirs = " ".join(str(error).rpartition("Last planner error:")[2].split()).rstrip(".")
        memory = topology.devices[0].storage
        raise ValueError(
            f"plan for {machine.world_size} ranks on {machine.device}: expected tables that fit "
            f"{memory.hbm} bytes of device and {memory.ddr} bytes of host memory per rank, got "
            f"{theirs}. Use fewer hot rows, more ranks, another tier, or row-wise sharding of the "
            "largest table."
        ) from error


def topology_of(machine: Machine) -> Topology:
    """TorchRec's description of a machine, with TorchRec's own figures of bandwidths."""
    return Topology(
        world_size=machine.world_size,
        local_world_size=machine.local_world_size,
        compute_device=machine.device,
        hbm_cap=machine.device_bytes if machine.device == "cuda" else 0,
        ddr_cap=machine.host_bytes // machine.local_world_size,
    )


def shardings_by(
    make: Callable[[TorchrecTables, PipelineSpec], ShardingPlan],
    names: Collection[str],
    machine: Machine,
    rule: OptimizerSpec,
    *,
    is_exact: bool = True,
) -> ShardingsOf:
    """How the planner of plans finds TorchRec's shardings of unsplit tables, or why there are none.

    Args:
        make: Runs TorchRec's planner.
        names: The tables.
        machine: The ranks.
        rule: The update rule of the rows.
        is_exact: Whether the tables must train the unsplit model: a choice must not change what is
            trained, but who asks for a plan of TorchRec's gets it.
    """

    def find(tables: TorchrecTables, pipeline: PipelineSpec) -> Shardings | str:
        try:
            plan = make(tables, pipeline)
        except ValueError as error:
            return str(error)
        is_prefetched = pipeline.kind is PipelineKind.prefetch
        found = shardings_of(plan, names, tables.cache_load_frac, is_prefetched=is_prefetched)
        is_cut = any(len(of.blocks(machine.world)) > 1 for of in found.values())
        if is_exact and is_cut and rule.kind is OptimizerKind.rowwise_adagrad:
            return (
                "its column-wise shards have one state for each part of a row, so that it would "
                "not train the weights of the unsplit model"
            )
        return found

    return find


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

        replica         the state; of TorchRec's own also 4 R D of gradients, twice at first
        shard           the state, where its rows are: FBGEMM's device cache holds none of it; one
                        float a row is on the device, for any location of the rows
    """

    def __init__(self, topology: Topology, *given: Any, **named: Any) -> None:
        super().__init__(topology, *given, **named)
        self._is_on_cpu = topology.compute_device == "cpu"

    def estimate(self, sharding_options: list[ShardingOption], *given: Any, **named: Any) -> None:
        """Estimates the storage of every shard of every option.

        The map from an option's module to its sharder comes by position in TorchRec 1.6, by keyword
        in 1.8.
        """
        super().estimate(sharding_options, *given, **named)
        [sharders] = [*given, *named.values()]
        for option in sharding_options:
            params = getattr(sharders[option.module_type_key], "fused_params", None) or {}
            is_replica = option.sharding_type == ShardingType.DATA_PARALLEL.value
            is_hot = isinstance(option.module[1], HotColdCollection)
            rule = OptimizerSpec(kind_of_kernel(params.get("optimizer")), learning_rate=0.0)
            for shard in option.shards:
                assert shard.storage is not None, option.name
                num_rows, dim = shard.size
                state = num_rows * rule.state_bytes_per_row(dim)
                is_on_host = option.compute_kernel in HOST_KERNELS and not _is_by_row(rule)
                if is_replica and not is_hot:
                    state += NUM_REPLICA_GRADIENTS * BYTES_PER_FLOAT * num_rows * dim
                shard.storage += (
                    Storage(hbm=0, ddr=state)
                    if self._is_on_cpu or is_on_host
                    else Storage(hbm=state, ddr=0)
                )


def _is_by_row(rule: OptimizerSpec) -> bool:
    """Whether FBGEMM keeps the optimizer state on the device, for any location of the rows."""
    return rule.kind is OptimizerKind.rowwise_adagrad


def host_tier_bytes(plan: ShardingPlan, ranks_per_host: int, rule: OptimizerSpec) -> int:
    """Returns the host memory that the devices of the fullest host map for a plan's host tiers.

    Args:
        ranks_per_host: Ranks of a host, which are consecutive.
        rule: The update rule of the rows.
    """
    hosts: dict[int, int] = defaultdict(int)
    for tables in plan_document(plan).values():
        for facts in tables.values():
            for shard in facts["shards"] if facts["compute_kernel"] in HOST_KERNELS else ():
                num_rows, dim = shard["sizes"]
                row_bytes = BYTES_PER_FLOAT * dim if _is_by_row(rule) else rule.bytes_per_row(dim)
                hosts[rank_of_shard(shard) // ranks_per_host] += num_rows * row_bytes
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
