"""Build the sharded model, pipeline and loaders from a configuration and a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import (
    CacheStatistics,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ShardingPlan,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer

from hotrec.config.groups import AllHotOrder, HotColdConfig, OrderAssign, TimeOrder
from hotrec.config.roots import Config
from hotrec.data.all_hot import (
    AllHotSamples,
    SampleSubset,
    count_steps_of_kinds,
    read_all_hot,
    write_all_hot,
)
from hotrec.data.batch import Batch
from hotrec.data.chunks import Dataset
from hotrec.data.days import check_time_order, days_of
from hotrec.data.loader import make_loader, num_steps, step_sequence
from hotrec.data.locality import Assign, ByOwner, Shard
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import shard
from hotrec.embedding.initialize import initialize_embeddings
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.prefetch.row_ahead import RowsAhead
from hotrec.embedding.torchrec import ddp_modules
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.dense import check_compiler, use_precision
from hotrec.planning.machine import Machine
from hotrec.planning.scenario import choose_pipeline
from hotrec.planning.torchrec_plan import host_tier_bytes
from hotrec.planning.training_plan import TrainingPlan
from hotrec.planning.unsharded import build_unsharded, hot_exchange_of, optimizer_specs
from hotrec.routing.features import RoutedFeatures
from hotrec.runtime.codecs import compress_dense
from hotrec.runtime.cores import num_workers
from hotrec.runtime.memory import check_mappable, read_memory
from hotrec.runtime.ranks import Ranks, all_gather_object, same_verdict
from hotrec.runtime.traffic import BatchFacts, count_distinct_rows
from hotrec.train.alternate import AlternatingLoader, Alternation
from hotrec.train.pipelines import LookAhead, Pipeline, make_pipeline
from hotrec.types import Exchange, HotExchange, PipelineKind, Placement, Schema, Sharding, Tier

logger = logging.getLogger(__name__)

SPLIT, ALL_HOT = "train", "all_hot"


@dataclass(frozen=True)
class Sharded:
    """The sharded model of a rank with its optimizer, and the inputs of its pipeline.

    Args:
        model: Sharded model.
        optimizer: Optimizer of all parameters.
        plan: TorchRec's sharding plan.
        transform: Router for the loader's workers; None if ids are routed on the device.
        inspect_batch: Counts the rows that a batch reads, for the traffic bound.
        pipeline_kind: Kind of pipeline that the model is sharded for.
        look_ahead: Settings of the pipeline look_ahead; None for other pipelines.
        grad_clip_norm: Largest norm of the dense layers' gradients; None for no clipping.
        has_slots: Whether rows of the host are in slots that look-ahead fills.
    """

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    plan: ShardingPlan
    transform: Callable[[Any], Any] | None
    inspect_batch: Callable[[Batch], BatchFacts]
    pipeline_kind: str
    look_ahead: LookAhead | None
    grad_clip_norm: float | None
    has_slots: bool = False

    def make_pipeline(self, device: torch.device) -> Pipeline:
        """The model's pipeline; a collective."""
        return make_pipeline(
            self.pipeline_kind,
            self.model,
            self.optimizer,
            device,
            self.look_ahead,
            self.grad_clip_norm,
        )


def build_sharded(
    config: Config,
    schema: Schema,
    placed: Placement | None,
    machine: Machine,
    device: torch.device,
    cache_stats: Mapping[str, CacheStatistics] | None = None,
) -> Sharded:
    """Build, plan and shard the model on every rank of the process group; collective.

    Raises:
        ValueError: If the device does not support the precision, or cannot train the placement.
        RuntimeError: If a rank has no compiler for the dense layers; raised on every rank.
    """
    same_verdict(lambda: use_precision(config.trainer.precision, device))
    if config.trainer.compile:
        same_verdict(lambda: check_compiler(device))
    unsharded = build_unsharded(
        config,
        schema,
        placed,
        machine,
        dense_device=device,
        cache_stats=cache_stats,
    )
    plan = unsharded.plan(machine)
    embedding, dense = optimizer_specs(config.optimizer)
    if device.type == "cuda":
        check_host_memory(plan, machine, embedding)
    kind = choose_pipeline(config, machine)
    is_ahead = kind is PipelineKind.look_ahead
    tiers = {table.tier for table in placed.tables.values()} if placed is not None else set()
    if Tier.CACHED in tiers and not is_ahead:
        raise ValueError(
            f"pipeline.kind: expected look_ahead for a placement in tier cached, got {kind.name}. "
            "Set pipeline=look_ahead."
        )
    model = shard(
        unsharded.task,
        plan,
        unsharded.sharders,
        device,
        data_parallel=not is_ahead,
        broadcast_hot=False,
    )
    wire_type = config.pipeline.wire
    if not is_ahead:
        compress_dense(ddp_modules(model), wire_type)
    initialize_embeddings(model, config.trainer.seed)  # by row, so replicas are equal
    optimizer = make_optimizer(model, embedding, dense)
    placement, embeddings = config.placement, unsharded.embeddings
    transform = None
    if isinstance(embeddings, HotColdEmbeddingBagCollection):
        assert isinstance(placement, HotColdConfig)
        if placement.routes_in_loader:
            transform = embeddings.router
    look_ahead = None
    if is_ahead:
        assert placed is not None
        hot_exchange = hot_exchange_of(placement, placed)
        look_ahead = make_look_ahead(config, model, device, hot_exchange)
    return Sharded(
        model,
        optimizer,
        plan,
        transform,
        _inspector(embeddings),
        kind.name,
        look_ahead,
        config.trainer.grad_clip_norm,
        Tier.CACHED in tiers,
    )


def check_host_memory(plan: ShardingPlan, machine: Machine, rule: OptimizerSpec) -> None:
    """Refuse host tiers that no host can map for its devices; collective.

    Raises:
        ValueError: If they exceed the free memory.
    """
    mapped = host_tier_bytes(plan, machine.local_world_size, rule.state_bytes_per_row)
    # The smallest free memory of all hosts, so that all ranks reach the same verdict.
    check_mappable("plan host tiers", mapped, min(all_gather_object(read_memory()[1])))


def _inspector(
    embeddings: EmbeddingBagCollection | HotColdEmbeddingBagCollection,
) -> Callable[[Batch], BatchFacts]:
    if isinstance(embeddings, HotColdEmbeddingBagCollection):
        router = embeddings.router

        def inspect_routed(batch: Batch) -> BatchFacts:
            sparse: Any = batch.sparse
            routed = sparse if isinstance(sparse, RoutedFeatures) else router(sparse.to("cpu"))
            return BatchFacts(
                num_distinct=router.count_distinct(routed),
                num_lookups=routed.num_lookups,
                num_hot_lookups=routed.num_hot_lookups(),
            )

        return inspect_routed
    tables = {
        feature: (table.name, table.embedding_dim)
        for table in embeddings.embedding_bag_configs()
        for feature in table.feature_names
    }

    def inspect_unrouted(batch: Batch) -> BatchFacts:
        num_distinct = count_distinct_rows(batch.sparse, tables)
        return BatchFacts(num_distinct, int(batch.sparse.values().numel()), 0)

    return inspect_unrouted


def make_look_ahead(
    config: Config,
    model: nn.Module,
    device: torch.device,
    hot_exchange: HotExchange,
) -> LookAhead:
    """Settings of the pipeline look_ahead for a model that was sharded for it.

    Args:
        config: Configuration of the run.
        model: Sharded model.
        device: Device of this rank.
        hot_exchange: How gradients of hot rows are reduced.
    """
    wire_type = config.pipeline.wire

    def make_rows() -> RowsAhead:
        return RowsAhead(
            model,
            device,
            depth=config.pipeline.depth,
            window=config.pipeline.window,
            wire_type=wire_type,
            hot_exchange=hot_exchange,
        )

    return LookAhead(make_rows, config.pipeline.micro_batches, wire_type)


def owned_tables(placement: Placement) -> list[str]:
    """Tables whose cold rows are sent to the ranks that read them.

    Tables with a pooled exchange are excluded: they send a vector per remote sample, whatever its
    rows.
    """
    partition = placement.partition
    return [
        name
        for name, num_rows in partition.num_rows.items()
        if partition.num_hot(name) < num_rows and placement.tables[name].exchange is Exchange.ROWS
    ]


def check_assign(config: Config, placement: Placement | None) -> None:
    """Refuse order.assign=by_owner where no row has an owner.

    Args:
        config: Configuration of the run.
        placement: Planned placement; None for TorchRec's plans.

    Raises:
        ValueError: If no table has cold rows that are exchanged as rows.
    """
    if config.order.assign is not OrderAssign.by_owner:
        return
    if placement is not None and owned_tables(placement):
        return
    found = "TorchRec's own plan"
    if placement is not None:
        found = f"{placement.partition.policy}: none"
    raise ValueError(
        "order.assign: expected a placement with cold rows that are exchanged as rows for "
        f"by_owner, got {found}. Choose order.assign=as_read, or a placement such as "
        "placement=coverage."
    )


def adapts(config: Config, placement: Placement | None) -> HotColdConfig | None:
    """How the hot rows follow the data; None if they do not, or if the plan has none that can.

    Raises:
        ValueError: If batches are packed or assigned by the hot rows of the plan.
    """
    placed, order = config.placement, config.order
    if not isinstance(placed, HotColdConfig) or placed.adapt_every_steps == 0:
        return None
    by_hot_rows = isinstance(order, AllHotOrder) or order.assign is OrderAssign.by_owner
    if by_hot_rows:
        found = f"order={order.kind.name} order.assign={order.assign.name}"
        raise ValueError(
            f"order: expected shuffled or time and samples as read where hot rows follow the data, "
            f"got {found}. Set placement.adapt_every_steps=0, or another order."
        )
    partition = None if placement is None else placement.partition
    if partition is not None and any(
        0 < partition.num_hot(table) < rows for table, rows in partition.num_rows.items()
    ):
        return placed
    logger.warning(
        "placement.adapt_every_steps=%d has no effect: no table of the plan has hot and cold rows",
        placed.adapt_every_steps,
    )
    return None


def choose_assign(
    config: Config, schema: Schema, placement: Placement | None, plan: ShardingPlan
) -> ByOwner | None:
    """The assignment of training samples to ranks; None if they stay as read.

    Args:
        config: Configuration of the run.
        schema: Features and tables of the dataset.
        placement: Placement that passed ``check_assign``.
        plan: Sharding plan of the tables.
    """
    if config.order.assign is not OrderAssign.by_owner:
        return None
    assert placement is not None
    logger.info(
        "order.assign=by_owner: each training sample goes to the rank that holds most of its cold "
        "rows; loader workers read the ids of the whole global batch"
    )
    return by_owner(schema, placement, plan)


def by_owner(schema: Schema, placement: Placement, plan: ShardingPlan) -> ByOwner:
    """``ByOwner`` for the tables of a plan.

    Raises:
        RuntimeError: If the plan shards a table neither row-wise nor table-wise.
    """
    shards = {table: _shards(table, plan) for table in owned_tables(placement)}
    hot_rows = {table: placement.partition.hot(table) for table in shards}
    return ByOwner(schema, shards, hot_rows)


def _shards(table: str, plan: ShardingPlan) -> list[Shard]:
    """The non-empty shards of a table, ordered by row."""
    found = [
        (shard, sharding.sharding_type)
        for module_plan in plan.plan.values()
        if isinstance(module_plan, EmbeddingModuleShardingPlan)
        for name, sharding in module_plan.items()
        if name == table and isinstance(sharding.sharding_spec, EnumerableShardingSpec)
        for shard in sharding.sharding_spec.shards
    ]
    types = {sharding_type for _, sharding_type in found}
    if len(types) != 1 or not types <= {Sharding.ROW_WISE.value, Sharding.TABLE_WISE.value}:
        raise RuntimeError(
            f"plan table {table}: expected it row-wise or table-wise once, got "
            f"{sorted(types) or 'no shards'}. Use the pinned torchrec (see `hotrec doctor`)."
        )
    shards = []
    for found_shard, _ in found:
        assert found_shard.placement is not None, table
        if found_shard.shard_sizes[0]:
            shards.append(Shard(found_shard.shard_offsets[0], found_shard.placement.rank()))
    return sorted(shards, key=lambda shard: shard.first_row)


def find_all_hot(
    config: Config,
    dataset: Dataset,
    training_plan: TrainingPlan,
    run_dir: Path,
    staged: Path,
    *,
    is_resumed: bool,
) -> AllHotSamples | None:
    """The all-hot samples for order=all_hot, None for another order; collective.

    Args:
        config: Configuration of the run.
        dataset: Dataset of the run.
        training_plan: Plan of the run.
        run_dir: Directory of the run, with the samples that it saved before.
        staged: Directory to save the samples in.
        is_resumed: Whether the run resumes its own checkpoint and must use its saved samples.

    Raises:
        ValueError: If the placement has no hot rows.
        ArtifactError: If the saved samples belong to another dataset or partition.
    """
    if not isinstance(config.order, AllHotOrder):
        return None
    partition, artifact = training_plan.partition, training_plan.artifact
    if partition is None or artifact is None or partition.total_hot == 0:
        found = "TorchRec's own plan" if partition is None else f"{partition.policy}: 0 hot rows"
        raise ValueError(
            f"order: expected a placement with hot rows for order=all_hot, got {found}. "
            "Choose order=shuffled, or a placement that replicates rows, such as "
            "placement=coverage."
        )
    path = run_dir / ALL_HOT
    if is_resumed and path.exists():
        return read_all_hot(dataset, SPLIT, partition_hash=artifact.content_hash, path=path)
    return write_all_hot(
        dataset, SPLIT, partition, partition_hash=artifact.content_hash, output=staged / ALL_HOT
    )


def check_order(config: Config, dataset: Dataset) -> None:
    """Check that the dataset has the order that the configuration asks for.

    Raises:
        ArtifactError: If its samples are not in order of time, or its days are needed and unknown.
        ValueError: If there is no day to evaluate ahead.
    """
    if not isinstance(config.order, TimeOrder):
        return
    if not check_time_order(dataset):
        logger.warning("order=time: the dataset has no times; samples are in the order of the log")
    if config.order.evaluate_ahead and len(days := days_of(dataset, SPLIT)) < 2:
        raise ValueError(
            "order.evaluate_ahead: expected two days or more in the training split of "
            f"{dataset.artifact.path}, got {[day.name for day in days]}. Prepare it with a split "
            "by time, or from a file for each day."
        )


def evaluates_ahead(config: Config) -> bool:
    """Whether each day is evaluated before it is trained on, so that steps end with days."""
    return isinstance(config.order, TimeOrder) and config.order.evaluate_ahead


def count_epoch_steps(
    config: Config, dataset: Dataset, samples: AllHotSamples | None, world_size: int
) -> int:
    """Steps of an epoch, the same on every rank."""
    batch_size = config.trainer.batch_size
    if evaluates_ahead(config):
        return step_sequence(dataset, SPLIT, batch_size * world_size, by_day=True).count_steps(1)
    if samples is None:
        return num_steps(dataset, SPLIT, batch_size, world_size)
    return sum(count_steps_of_kinds(samples, batch_size=batch_size, world_size=world_size))


def make_alternation(
    config: Config, samples: AllHotSamples | None, world_size: int
) -> Alternation | None:
    """The alternation of all-hot and mixed batches, None without all-hot samples."""
    order, trainer = config.order, config.trainer
    if samples is None or not isinstance(order, AllHotOrder):
        return None
    all_hot, mixed = count_steps_of_kinds(
        samples, batch_size=trainer.batch_size, world_size=world_size
    )
    logger.info(
        "order=all_hot: training samples are reordered: %d of %d (%.1f%%) are all-hot and come in "
        "batches of their own; an epoch is %d all-hot and %d mixed steps, in blocks of %.3g of "
        "each kind's at first%s",
        sum(samples.num_all_hot),
        samples.num_samples,
        100 * samples.frac,
        all_hot,
        mixed,
        order.start_rate,
        "" if trainer.eval_every_steps and trainer.eval_splits else "; no evaluation changes that",
    )
    if all_hot == 0:
        logger.warning("order=all_hot: no sample is all-hot, so no step saves the cold exchange")
    return Alternation(
        all_hot,
        mixed,
        start_rate=order.start_rate,
        least_rate=order.least_rate,
        patience=order.patience,
    )


def make_train_loader(
    config: Config,
    ranks: Ranks,
    transform: Callable[[Any], Any] | None,
    samples: AllHotSamples | None,
    alternation: Alternation | None,
    assign: Assign | None,
) -> Any:
    """The loader of all training steps; collective.

    Args:
        config: Configuration of the run.
        ranks: Ranks of the process group.
        transform: Router that the workers apply; None to route on the device.
        samples: Result of ``find_all_hot``.
        alternation: Result of ``make_alternation``.
        assign: Result of ``choose_assign``.
    """
    trainer = config.trainer
    workers = num_workers(trainer.num_workers, ranks)

    def make(subset: SampleSubset | None) -> Any:
        return make_loader(
            config.paths.dataset,
            SPLIT,
            batch_size=trainer.batch_size,
            rank=ranks.rank,
            world_size=ranks.world_size,
            seed=trainer.seed,
            epochs=trainer.num_epochs,
            shuffle=not isinstance(config.order, TimeOrder),
            by_day=evaluates_ahead(config),
            num_workers=workers,
            transform=transform,
            pin_memory=ranks.device.type == "cuda",
            subset=subset,
            assign=assign,
        )

    if samples is None or alternation is None:
        return same_verdict(lambda: make(None))
    subsets = {kind: samples.subset(is_all_hot=kind) for kind in (True, False)}
    loaders = same_verdict(
        lambda: {kind: make(subset) for kind, subset in subsets.items() if subset.num_samples}
    )
    return AlternatingLoader(loaders.get(True), loaders.get(False), alternation)
