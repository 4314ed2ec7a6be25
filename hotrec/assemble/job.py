"""The door: turns a configuration into the values that planning and training use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch

from hotrec.artifact import Artifact
from hotrec.assemble.model import ModelSpec
from hotrec.assemble.order import Adaptation, AllHotBlocks, TrainingOrder
from hotrec.assemble.plan_job import PlanJob, PolicySplit, SavedSplit
from hotrec.assemble.policies import ColdRows, Policy, PolicyInputs
from hotrec.config.groups import (
    AllColdPlacement,
    AllHotOrder,
    AllHotPlacement,
    BudgetPlacement,
    CostPlacement,
    CoveragePlacement,
    DinConfig,
    FaePlacement,
    FractionPlacement,
    FreqCachePlacement,
    HotColdConfig,
    ModelConfig,
    NegativesKind,
    OptimizerConfig,
    OwnModelConfig,
    PlacementConfig,
    PolicyConfig,
    RetrievalConfig,
    RetrievalLoss,
    SavedPlacement,
    ScarsPlacement,
    ScheduleConfig,
    SequenceConfig,
    TieredConfig,
    TimeOrder,
    TorchrecPlacement,
    TraceProfiler,
)
from hotrec.config.roots import Config, Device, TrainerConfig
from hotrec.data.chunks import Dataset
from hotrec.data.encode import tables_of_row_numbers
from hotrec.data.groups import GroupBy, group_by_of
from hotrec.data.items import ItemColumn, Negatives, items_to_rank
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.plain import Architecture
from hotrec.models.shape import attention_places, check_roles
from hotrec.planner.counted import CountedTables, num_overridden
from hotrec.planner.paper_policies import choose_fae, choose_freq_cache, choose_scars
from hotrec.planner.plan import TorchrecTables
from hotrec.planner.policies import (
    choose_all_cold,
    choose_all_hot,
    choose_budget,
    choose_coverage,
    choose_fraction,
)
from hotrec.planner.request import ByCost, check_pipeline
from hotrec.runtime.memory import MIB
from hotrec.runtime.run_dir import CHECKPOINTS, TRACES
from hotrec.train.best import BestQuality
from hotrec.train.checkpoint import Checkpoints
from hotrec.train.evaluation import Evaluation
from hotrec.train.metrics import Metrics, Record
from hotrec.train.saver import Saver
from hotrec.train.schedule import Schedule
from hotrec.train.trace import TraceWindow
from hotrec.train.watch import Watch
from hotrec.types import ColdTier, OptimizerKind, Partition, PipelineSpec, Schema

# Keys of models that are fields of an architecture; the others are arguments of its layers.
_SHARED = {"dense_layer_sizes", "over_layer_sizes", "cross_num_layers", "cross_low_rank_dim"}


@dataclass(frozen=True)
class Job:
    """A training run as plain values.

    It makes the parts of the run, except for what only exists later, such as the sharded model.

    Args:
        name: Name of the run.
        dataset_name: Name of its dataset; None without one.
        dataset: Its dataset.
        planned: The planner's inputs, with the model and the order of samples.
        placement: The settings of the placement, as the run records them.
        model: The settings of the model, which a checkpoint must agree with.
        eval_splits: Splits to evaluate.
        eval_batch_size: Samples of a rank's batch in evaluations, of days ahead too.
        group_by: The groups of the samples in evaluations; None for none.
        item: The items to rank in evaluations; None for no ranking.
        ranked_ks: Lengths of the lists in evaluations.
        max_steps: Upper bound on steps; None for none.
        new_only: Whether to skip samples that the run of a warm start has already read.
        adaptation: How the hot rows follow the data; None if they do not.
        trial_s: Seconds of a trial of plans; None for as long as it pays, 0 for no trial.
        schedule: The learning rate for a number of steps.
        best: Makes the tracker of the best quality; None if it is not needed.
        checkpoints: Makes the directory of checkpoints.
        record: Makes the records.
        metrics: Makes the part that measures.
        evaluation: Makes the part that evaluates.
        saver: Makes the part that saves.
        watch: Makes the part that checks.
    """

    name: str
    dataset_name: str | None
    dataset: Dataset
    planned: PlanJob
    placement: Mapping[str, Any]
    model: Mapping[str, Any]
    eval_splits: tuple[str, ...]
    eval_batch_size: int
    group_by: GroupBy | None
    item: ItemColumn | None
    ranked_ks: tuple[int, ...]
    max_steps: int | None
    new_only: bool
    adaptation: Adaptation | None
    trial_s: float | None
    schedule: Callable[[int], Schedule]
    best: Callable[[], BestQuality] | None
    checkpoints: Callable[..., Checkpoints]
    record: Callable[..., Record]
    metrics: Callable[..., Metrics]
    evaluation: Callable[..., Evaluation]
    saver: Callable[..., Saver]
    watch: Callable[..., Watch]

    @property
    def spec(self) -> ModelSpec:
        return self.planned.spec

    @property
    def order(self) -> TrainingOrder:
        return self.planned.order

    def facts(self, partition: Artifact | None) -> dict[str, Any]:
        """Settings that a run must share with the checkpoint that it loads."""
        facts = {
            "dataset": self.dataset.artifact.content_hash,
            "model": dict(self.model),
            "optimizer": self.spec.embedding.kind.name,
        }
        if self.order.blocks is not None:
            assert partition is not None
            # The order of samples depends on the hot rows.
            facts |= {"order": self.order.kind.name, "partition": partition.content_hash}
        return facts


def make_job(config: Config, run_dir: Path, dataset: Dataset) -> Job:
    """Convert a configuration for a dataset to values.

    Args:
        config: A validated configuration.
        run_dir: Directory of the run.
        dataset: Its dataset.

    Raises:
        ValueError: If the configuration names a column or table that the dataset lacks.
    """
    trainer, order, profiler = config.trainer, config.order, config.profiler
    trace = None
    if isinstance(profiler, TraceProfiler):
        trace = TraceWindow(
            profiler.first_step, profiler.num_steps, run_dir / TRACES, profiler.warn_of_syncs
        )
    best = None
    if trainer.early_stop_patience is not None or trainer.keeps_best:
        best = partial(
            BestQuality,
            trainer.early_stop_patience,
            is_kept=trainer.keeps_best,
            by=trainer.best_by.name,
            split=next(iter(trainer.eval_splits), None),
        )
    return Job(
        name=config.run_name,
        dataset_name=config.dataset_name,
        dataset=dataset,
        planned=plan_job(config, dataset.schema, tables_of_row_numbers(dataset)),
        placement=_plain_values(asdict(config.placement)),
        model=_plain_values(dict(sorted(_settings_of(config.model).items()))),
        eval_splits=tuple(trainer.eval_splits),
        eval_batch_size=trainer.eval_batch_size,
        group_by=group_by_of(dataset, trainer.eval_group_by),
        item=item_to_rank(config, dataset),
        ranked_ks=tuple(trainer.eval_ranking),
        max_steps=trainer.max_steps,
        new_only=isinstance(order, TimeOrder) and order.new_only,
        adaptation=adaptation_of(config.placement),
        trial_s=config.plan.trial_s if config.plan.trial else 0.0,
        schedule=partial(schedule_of, config.optimizer.schedule),
        best=best,
        checkpoints=partial(Checkpoints, run_dir / CHECKPOINTS, keep_last=trainer.keep_checkpoints),
        record=partial(Record, run_dir=run_dir, callbacks=trainer.callbacks, trace=trace),
        metrics=partial(
            Metrics, log_every_steps=trainer.log_every_steps, warmup_steps=trainer.warmup_steps
        ),
        evaluation=partial(Evaluation, every_steps=trainer.eval_every_steps),
        saver=partial(
            Saver,
            every_steps=trainer.save_every_steps,
            every_s=trainer.save_every_s,
        ),
        watch=partial(
            Watch,
            every_steps=trainer.check_every_steps,
            check_replicas_every=trainer.check_replicas_every_steps,
        ),
    )


def _plain_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as types that YAML and JSON have."""
    return {
        name: value.name if isinstance(value, Enum) else value for name, value in settings.items()
    }


def chosen_device(device: Device) -> str:
    """The device's type: "cpu" or "cuda"."""
    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.name


# ------------------------------------------------------------------ the model


def model_spec(config: Config, schema: Schema) -> ModelSpec:
    """The model of a configuration on the columns of a dataset, and how it is trained.

    Raises:
        ValueError: If the model names a column that the dataset lacks, or a label has no weight.
    """
    trainer = config.trainer
    embedding, dense = optimizer_specs(config.optimizer)
    return ModelSpec(
        schema,
        architecture_of(config.model, schema),
        embedding,
        dense,
        seed=trainer.seed,
        label_weights=label_weights_of(trainer, schema),
        precision=trainer.precision,
        is_compiled=trainer.compile,
        grad_clip_norm=trainer.grad_clip_norm,
        softmax_temperature=config.model.temperature if _has_softmax(config.model) else None,
    )


def _has_softmax(model: ModelConfig) -> TypeGuard[RetrievalConfig]:
    return isinstance(model, RetrievalConfig) and model.loss is RetrievalLoss.sampled_softmax


def negatives_of(config: Config) -> Negatives | None:
    """The items that the loss compares samples with; None if it does not."""
    model = config.model
    if not _has_softmax(model):
        return None
    assert model.item_id is not None
    num_uniform = model.num_negatives if model.negatives is NegativesKind.uniform else 0
    return Negatives(model.item_id, num_uniform, config.trainer.seed)


def item_to_rank(config: Config, dataset: Dataset) -> ItemColumn | None:
    """The items that evaluations rank; None for none.

    Raises:
        ValueError: If the dataset has no such column.
    """
    trainer, model = config.trainer, config.model
    if not trainer.eval_ranking:
        return None
    assert isinstance(model, RetrievalConfig), model
    assert model.item_id is not None
    return items_to_rank(dataset, model.item_id, trainer.eval_ranking_without)


def _settings_of(model: ModelConfig) -> dict[str, Any]:
    """The settings of a model's layers, without those of its loss."""
    of_loss = vars(RetrievalConfig()).keys() - vars(ModelConfig()).keys()
    settings = {name: value for name, value in vars(model).items() if name not in of_loss}
    if isinstance(model, SequenceConfig) and model.multiplies_vectors:
        settings["over_layer_sizes"] = []
    return settings


def architecture_of(model: ModelConfig, schema: Schema) -> Architecture:
    """The shape of a model on the columns of a dataset.

    Raises:
        ValueError: If a column that it names is not in the dataset.
    """
    settings = _settings_of(model)
    keys = {name: value for name, value in settings.items() if name not in vars(ModelConfig())}
    shared = {name: keys.pop(name, [] if "sizes" in name else 0) for name in sorted(_SHARED)}
    target = ""
    if isinstance(model, OwnModelConfig):
        target, keys = model._target_, model.args
    if isinstance(model, DinConfig):
        keys["attention"] = attention_places(model.attention, schema)
    if isinstance(model, SequenceConfig):
        check_roles(model.history, model.side, model.context, schema)
    return Architecture(
        kind=model.kind.name,
        embedding_dim=model.embedding_dim,
        pooling=model.pooling.name,
        dense=list(schema.dense),
        # By table, like the collection of tables.
        features=[
            [feature.name, table.name]
            for table in schema.tables
            for feature in schema.features_of(table.name)
        ],
        labels=list(schema.labels),
        target=target,
        args=keys,
        **shared,
    )


def schedule_of(schedule: ScheduleConfig, num_steps: int) -> Schedule:
    """The learning rate over a run of ``num_steps``.

    Raises:
        ValueError: If warm-up or decay do not fit the run.
    """
    for holds, message in schedule.rules_in(num_steps):
        if not holds:
            raise ValueError(f"optimizer.schedule.{message}")
    first = schedule.first_decay_step
    return Schedule(
        schedule.decay,
        schedule.warmup_steps,
        first,
        schedule.num_decay_steps or num_steps - first,
        schedule.end_factor,
        schedule.power,
    )


def optimizer_specs(optimizer: OptimizerConfig) -> tuple[OptimizerSpec, OptimizerSpec]:
    """The rules of the embedding rows and of the dense layers."""
    constants = {
        name: getattr(optimizer, name)
        for name in ("eps", "beta1", "beta2")
        if hasattr(optimizer, name)
    }
    embedding = OptimizerSpec(optimizer.kind, optimizer.learning_rate, **constants)
    kind = optimizer.dense_kind or optimizer.kind
    if kind is OptimizerKind.rowwise_adagrad:
        kind = OptimizerKind.adagrad  # a dense layer has no rows
    rate = optimizer.dense_learning_rate
    dense = OptimizerSpec(kind, optimizer.learning_rate if rate is None else rate, **constants)
    return embedding, dense


def label_weights_of(trainer: TrainerConfig, schema: Schema) -> dict[str, float] | None:
    """The weights of several labels, in their order; None for one.

    Raises:
        ValueError: If a weight names no label, or there is only one label.
    """
    several = schema.labels if len(schema.labels) > 1 else ()
    for name in trainer.label_weights:
        if name not in several:
            raise ValueError(
                f"trainer.label_weights.{name}: expected one of the dataset's several labels, "
                f"{list(several)}, got {name!r}. Correct the name, or remove it."
            )
    return {name: trainer.label_weights.get(name, 1.0) for name in several} or None


# ------------------------------------------------------------------ the order


def order_of(config: Config) -> TrainingOrder:
    """The order of training samples."""
    trainer, order = config.trainer, config.order
    blocks = None
    if isinstance(order, AllHotOrder):
        blocks = AllHotBlocks(
            order.start_rate,
            order.least_rate,
            order.patience,
            has_evaluations=bool(trainer.eval_every_steps and trainer.eval_splits),
        )
    return TrainingOrder(
        config.paths.dataset,
        trainer.batch_size,
        seed=trainer.seed,
        num_epochs=trainer.num_epochs,
        num_workers=trainer.num_workers,
        kind=order.kind,
        assign=order.assign,
        by_day=isinstance(order, TimeOrder) and order.evaluate_ahead,
        blocks=blocks,
        negatives=negatives_of(config),
    )


def adaptation_of(placement: PlacementConfig) -> Adaptation | None:
    """How the hot rows follow the data; None if they do not."""
    if not isinstance(placement, HotColdConfig) or placement.adapt_every_steps == 0:
        return None
    return Adaptation(placement.adapt_every_steps, placement.adapt_decay, placement.adapt_max_rows)


# ------------------------------------------------------------------ the plan


def plan_job(config: Config, schema: Schema, ordered: Collection[str] = ()) -> PlanJob:
    """The planner's inputs from a configuration, on the columns of a dataset.

    Args:
        config: The configuration.
        schema: The columns.
        ordered: Tables whose row numbers are the ids of the log, see ``tables_of_row_numbers``.

    Raises:
        ValueError: If it names a column or a table that the dataset lacks.
    """
    placement, trainer, paths = config.placement, config.trainer, config.paths
    spread = _spread_of(placement, schema, ordered)
    return PlanJob(
        placement.kind.name,
        model_spec(config, schema),
        _tables_of(placement, schema, spread or ()),
        pipeline_spec(config),
        order_of(config),
        eval_batch_size=trainer.eval_batch_size if trainer.eval_splits else 0,
        routes_in_loader=isinstance(placement, HotColdConfig) and placement.routes_in_loader,
        costs=config.planner.costs,
        folders={
            "costs": Path(paths.costs),
            "profile": Path(paths.profile),
            "trials": Path(paths.trials),
        },
        parameters=_policy_parameters(placement),
        trial_facts=_trial_facts(config),
        spread=spread,
    )


def _spread_of(
    placement: PlacementConfig, schema: Schema, ordered: Collection[str]
) -> tuple[str, ...] | None:
    """Tables whose rows are spread over their owners; None for those of a saved partition."""
    if not isinstance(placement, HotColdConfig):
        return ()
    if placement.spread_rows is None:
        return None if isinstance(placement, SavedPlacement) else tuple(sorted(ordered))
    return tuple(table.name for table in schema.tables) if placement.spread_rows else ()


def _tables_of(
    placement: PlacementConfig, schema: Schema, spread: Collection[str]
) -> ByCost | PolicySplit | SavedSplit | TorchrecTables:
    torchrec = torchrec_tables_of(placement)
    if torchrec is not None:
        return torchrec
    if isinstance(placement, CostPlacement):
        budget = placement.hot_budget_mib
        num_rows = {table.name: table.num_rows for table in schema.tables}
        return ByCost(
            hot_budget_bytes=None if budget is None else budget * MIB,
            may_pool=placement.may_pool,
            may_decline=placement.may_decline,
            fixed_hot=num_overridden(placement.overrides, num_rows),
            spread=spread,
        )
    if isinstance(placement, SavedPlacement):
        return SavedSplit(Path(placement.partition_dir))
    assert isinstance(placement, TieredConfig), placement
    return PolicySplit(policy_of(placement), cold_rows_of(placement))


def torchrec_tables_of(placement: PlacementConfig) -> TorchrecTables | None:
    """The configured plan of TorchRec; None for hot and cold rows."""
    if not isinstance(placement, TorchrecPlacement):
        return None
    return TorchrecTables(placement.plan, placement.tier, placement.cache_load_frac)


def cold_rows_of(placement: TieredConfig) -> ColdRows:
    """The memory of the cold rows."""
    return ColdRows(
        placement.cold_tier,
        placement.cache_load_frac,
        placement.cold_rows,
        placement.row_fetch,
    )


def policy_of(placement: TieredConfig) -> Policy:
    """The policy that chooses the hot rows."""
    given: dict[str, Any] = {}
    if isinstance(placement, PolicyConfig):
        given = {"overrides": placement.overrides, "small_table_rows": placement.small_table_rows}
    match placement:
        case FractionPlacement(hot_frac=hot_frac, per_table=per_table):
            return Policy(
                lambda tables, _: choose_fraction(tables, hot_frac=hot_frac, per_table=per_table),
                **given,
            )
        case CoveragePlacement(coverage_frac=coverage, per_table=per_table):
            return Policy(
                lambda tables, _: choose_coverage(tables, coverage=coverage, per_table=per_table),
                **given,
            )
        case BudgetPlacement(hot_budget_mib=budget):
            return Policy(partial(_choose_budget, int(budget * MIB)), **given)
        case FaePlacement(hot_budget_mib=budget, small_table_mib=small):
            return Policy(
                lambda tables, on: choose_fae(
                    tables,
                    budget_bytes=int(budget * MIB),
                    row_bytes=on.row_bytes,
                    small_table_bytes=int(small * MIB),
                ),
                **given,
            )
        case FreqCachePlacement(cached_frac=frac):
            return Policy(
                lambda tables, on: choose_freq_cache(
                    tables, dims=dict.fromkeys(on.profile.counts, on.dim), cached_frac=frac
                ),
                **given,
            )
        case ScarsPlacement(hot_budget_mib=limit):
            memory_bytes = None if limit is None else int(limit * MIB)
            return Policy(partial(_choose_scars, memory_bytes), **given, needs_costs=True)
        case AllHotPlacement():
            return Policy(lambda _, on: choose_all_hot(on.profile.counts))
        case AllColdPlacement():
            return Policy(lambda _, on: choose_all_cold(on.profile.counts))
    raise AssertionError(placement)


def _choose_budget(budget_bytes: int, tables: CountedTables, on: PolicyInputs) -> Partition:
    if budget_bytes > on.machine.replica_bytes:
        raise ValueError(
            f"budget_bytes: expected at most the {on.machine.replica_bytes} bytes of device "
            f"memory, got {budget_bytes}. Lower the hot budget."
        )
    return choose_budget(tables, budget_bytes=budget_bytes, row_bytes=on.row_bytes)


def _choose_scars(memory_bytes: int | None, tables: CountedTables, on: PolicyInputs) -> Partition:
    cold_row_s, hot_row_s = on.row_seconds
    return choose_scars(
        tables,
        memory_bytes=on.machine.replica_bytes if memory_bytes is None else memory_bytes,
        row_bytes=on.row_bytes,
        num_samples=on.profile.num_samples,
        global_batch_size=on.global_batch_size,
        cold_row_s=cold_row_s,
        hot_row_s=hot_row_s,
    )


def _policy_parameters(placement: PlacementConfig) -> dict[str, object]:
    """The configuration keys that only this policy uses; reports show them with its name."""
    if not isinstance(placement, HotColdConfig):
        return {}
    shared = {item for item in TieredConfig.__dataclass_fields__ if item != "kind"}
    return {
        name: getattr(value, "name", value)
        for name, value in vars(placement).items()
        if name not in shared
    }


def _trial_facts(config: Config) -> dict[str, Any]:
    trainer, optimizer = config.trainer, config.optimizer
    return {
        "settings": [config.model, config.pipeline, config.placement],
        "optimizer": [optimizer.kind, optimizer.dense_kind],  # a step takes as long at any rate
        "trainer": [
            *(trainer.batch_size, trainer.precision, trainer.compile, trainer.num_workers),
            trainer.grad_clip_norm,
        ],
    }


def pipeline_spec(config: Config) -> PipelineSpec:
    """The configured pipeline; its kind may be auto."""
    return PipelineSpec(**vars(config.pipeline))


def check_placement(config: Config, device: str) -> None:
    """Checks, without data, that the configured pipeline can train the placement.

    Raises:
        ValueError: If it cannot.
    """
    placement = config.placement
    check_pipeline(
        config.pipeline.kind,
        device,
        has_slots=getattr(placement, "cold_tier", None) is ColdTier.cached,
        torchrec=torchrec_tables_of(placement),
        name=placement.kind.name,
    )
