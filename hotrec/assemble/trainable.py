"""A sharded model on a rank: made from a plan, with everything that training needs of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import (
    ShardingPlan,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.keyed import CombinedOptimizer

from hotrec.assemble.model import Embeddings, ModelSpec, build_unsharded
from hotrec.assemble.torchrec_plan import host_tier_bytes, plan_document
from hotrec.data.batch import Batch
from hotrec.embedding.collection import HotColdCollection
from hotrec.embedding.convert import check_replicas, shard
from hotrec.embedding.initialize import initialize_embeddings
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.table_memory import (
    CacheCounters,
    SlotCounters,
    fused_modules,
    memory_by_tier,
)
from hotrec.embedding.torchrec import ddp_modules
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.dense import check_compiler, use_precision
from hotrec.planner.machine import Machine
from hotrec.planner.plan import Plan, SplitTables
from hotrec.routing.features import RoutedFeatures
from hotrec.runtime.codecs import compress_dense
from hotrec.runtime.memory import check_mappable, read_memory
from hotrec.runtime.ranks import all_gather_object, same_verdict
from hotrec.runtime.traffic import BatchFacts, find_distinct_rows
from hotrec.train.meters import Tables
from hotrec.train.pipelines import Pipeline, make_pipeline
from hotrec.types import Placement, TorchrecTier


@dataclass(frozen=True)
class Trainable:
    """The sharded model of a rank with its optimizer.

    Args:
        plan: The plan that it was made from.
        model: Sharded model.
        optimizer: Optimizer of all parameters.
        sharding: TorchRec's sharding plan.
        device: Device of this rank.
        route: Router for the loader's workers; None if ids are routed on the device.
        facts: Finds the rows that a batch reads, for the traffic bounds.
        grad_clip_norm: Maximum norm of the dense layers' gradients; None for no clipping.
    """

    plan: Plan
    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    sharding: ShardingPlan
    device: torch.device
    route: Callable[[Any], Any] | None
    facts: Callable[[Batch], BatchFacts]
    grad_clip_norm: float | None = None

    def pipeline(self) -> Pipeline:
        """A pipeline that trains the model and evaluates it; a collective."""
        return make_pipeline(
            self.plan.pipeline, self.model, self.optimizer, self.device, self.grad_clip_norm
        )

    def check_replicas(self) -> None:
        """Checks that replicated rows are the same on all ranks; collective.

        Raises:
            RuntimeError: On every rank, if they differ.
        """
        check_replicas(self.model)

    def memory(self) -> Tables:
        """The memory of this rank's tables by tier."""
        return memory_by_tier(self.model, self.optimizer)

    def cache_counters(self) -> Callable[[], Mapping[str, float]] | None:
        """Counters of the device caches since the last call; None, on all ranks alike, without any.

        The decision follows the plan, which all ranks share, even if a rank's own shards have no
        cache. FBGEMM has no caches on CPU under any plan; look-ahead's slots are on any device.
        """
        tables = self.plan.tables
        if isinstance(tables, SplitTables) and tables.has_slots:
            slots = SlotCounters(self.model)
            return lambda: asdict(slots.end_line())
        modules = plan_document(self.sharding).values()
        kernels = {facts["compute_kernel"] for tables in modules for facts in tables.values()}
        if self.device.type == "cpu" or TorchrecTier.fused_uvm_caching.value not in kernels:
            return None
        counters = CacheCounters(fused_modules(self.model))
        return lambda: asdict(counters.end_line())


def assemble(
    spec: ModelSpec,
    plan: Plan,
    placed: Placement | None,
    machine: Machine,
    device: torch.device,
) -> Trainable:
    """Builds, plans and shards the model on every rank of the process group; collective.

    Args:
        spec: The model and its training rules.
        plan: The plan of its tables.
        placed: The hot rows of split tables and the place of the others; None for TorchRec's plans.
        machine: The ranks; the same on all of them.
        device: Device of this rank.

    Raises:
        ValueError: If the device does not support the precision, or cannot train the plan.
        RuntimeError: If a rank has no compiler for the dense layers; raised on every rank.
    """
    same_verdict(lambda: use_precision(spec.precision, device))
    if spec.is_compiled:
        same_verdict(lambda: check_compiler(device))
    unsharded = build_unsharded(spec, plan, placed, machine, dense_device=device)
    sharding = unsharded.plan(machine)
    if device.type == "cuda":
        check_host_memory(sharding, machine, spec.embedding)
    is_ahead = plan.pipeline.is_look_ahead
    if not is_ahead:
        _check_no_slots(plan)
    model = shard(
        unsharded.task,
        sharding,
        unsharded.sharders,
        device,
        data_parallel=not is_ahead,
        broadcast_hot=False,
    )
    if not is_ahead:
        compress_dense(ddp_modules(model), plan.pipeline.wire)
    initialize_embeddings(model, spec.seed)  # by row, so replicas are equal
    optimizer = make_optimizer(model, spec.embedding, spec.dense)
    embeddings = unsharded.embeddings
    return Trainable(
        plan,
        model,
        optimizer,
        sharding,
        device,
        route=embeddings.router
        if isinstance(embeddings, HotColdCollection)
        and isinstance(plan.tables, SplitTables)
        and plan.tables.is_routed_by_loader
        else None,
        facts=_facts_of(embeddings, spec.tables),
        grad_clip_norm=spec.grad_clip_norm,
    )


def _check_no_slots(plan: Plan) -> None:
    if isinstance(plan.tables, SplitTables) and plan.tables.has_slots:
        raise ValueError(
            "pipeline.kind: expected look_ahead for a placement in tier cached, got "
            f"{plan.pipeline.kind.name}. Set pipeline=look_ahead."
        )


def check_host_memory(plan: ShardingPlan, machine: Machine, rule: OptimizerSpec) -> None:
    """Refuse host tiers that no host can map for its devices; collective.

    Raises:
        ValueError: If they exceed the free memory.
    """
    mapped = host_tier_bytes(plan, machine.local_world_size, rule)
    # The smallest free memory of all hosts, so that all ranks decide alike.
    check_mappable("plan host tiers", mapped, min(all_gather_object(read_memory()[1])))


def _facts_of(
    embeddings: Embeddings, configs: Sequence[BaseEmbeddingConfig]
) -> Callable[[Batch], BatchFacts]:
    if isinstance(embeddings, HotColdCollection):
        router = embeddings.router

        def of_routed(batch: Batch) -> BatchFacts:
            sparse: Any = batch.sparse
            routed = sparse if isinstance(sparse, RoutedFeatures) else router(sparse.to("cpu"))
            return BatchFacts(
                rows=router.find_distinct(routed),
                num_lookups=routed.num_lookups,
                num_hot_lookups=routed.num_hot_lookups(),
            )

        return of_routed
    tables = {
        feature: (table.name, table.embedding_dim)
        for table in configs
        for feature in table.feature_names
    }

    def of_unrouted(batch: Batch) -> BatchFacts:
        rows = find_distinct_rows(batch.sparse, tables)
        return BatchFacts(rows, int(batch.sparse.values().numel()), 0)

    return of_unrouted
