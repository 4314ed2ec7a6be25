"""The door: turns a configuration into the values that planning and training use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, TypeGuard

import torch

from hotrec.artifact import Artifact
from hotrec.assemble.model import ModelSpec
from hotrec.assemble.order import Adaptation, TrainingOrder
from hotrec.config.groups import (
    AdagradConfig,
    AllHotOrder,
    DinConfig,
    HotColdConfig,
    ModelConfig,
    NegativesKind,
    OptimizerConfig,
    OwnModelConfig,
    PlacementConfig,
    RetrievalConfig,
    RetrievalLoss,
    ScheduleConfig,
    SequenceConfig,
    TimeOrder,
    TorchrecPlacement,
)
from hotrec.config.roots import Config, Device, TrainerConfig
from hotrec.data.chunks import Dataset
from hotrec.data.groups import GroupBy, group_by_of
from hotrec.data.items import ItemColumn, Negatives, items_to_rank
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.plain import Architecture
from hotrec.models.shape import attention_places, check_roles
from hotrec.planner.plan import TorchrecTables
from hotrec.planner.request import check_pipeline
from hotrec.train.schedule import Schedule
from hotrec.types import ColdTier, OptimizerKind, PipelineSpec, Schema

# Keys of models that are fields of an architecture; the others are arguments of its layers.
_SHARED = {"dense_layer_sizes", "over_layer_sizes", "cross_num_layers", "cross_low_rank_dim"}

# The factor applied to lookup counts at each decision on hot rows.
DECAY = 0.5
ADAPT_MAX_ROWS = 65_536  # that a decision makes hot


@dataclass(frozen=True)
class Job:
    """A training run: a configuration on a dataset.

    Args:
        config: A validated configuration.
        dataset: The dataset.
    """

    config: Config
    dataset: Dataset

    @cached_property
    def spec(self) -> ModelSpec:
        """The model, and how it is trained."""
        return model_spec(self.config, self.dataset.schema)

    @cached_property
    def order(self) -> TrainingOrder:
        return order_of(self.config)

    @property
    def pipeline(self) -> PipelineSpec:
        """The configured pipeline; its kind may be auto."""
        return PipelineSpec(**vars(self.config.pipeline))

    @property
    def routes_in_loader(self) -> bool:
        """Whether loader workers split ids."""
        placement = self.config.placement
        return isinstance(placement, HotColdConfig) and placement.routes_in_loader

    @property
    def adaptation(self) -> Adaptation | None:
        """How the hot rows follow the data; None if they do not."""
        asked = self.config.placement
        if not isinstance(asked, HotColdConfig) or asked.adapt_every_steps == 0:
            return None
        return Adaptation(asked.adapt_every_steps, DECAY, ADAPT_MAX_ROWS)

    @property
    def group_by(self) -> GroupBy | None:
        """The groups of the samples in evaluations; None for none."""
        return group_by_of(self.dataset, self.config.trainer.eval_group_by)

    @property
    def item(self) -> ItemColumn | None:
        """The items to rank in evaluations; None for no ranking."""
        return item_to_rank(self.config, self.dataset)

    def facts(self, partition: Artifact | None) -> dict[str, Any]:
        """Settings that a run must share with the checkpoint that it loads."""
        facts = {
            "dataset": self.dataset.artifact.content_hash,
            "model": plain_values(dict(sorted(_settings_of(self.config.model).items()))),
            "optimizer": self.spec.embedding.kind.name,
        }
        if self.order.blocks is not None:
            assert partition is not None
            # The order of samples depends on the hot rows.
            facts |= {"order": self.order.kind.name, "partition": partition.content_hash}
        return facts


def make_job(config: Config, dataset: Dataset) -> Job:
    """The run of a configuration on a dataset.

    Raises:
        ValueError: If the configuration names a column or table that the dataset lacks.
    """
    job = Job(config, dataset)
    assert job.spec
    return job


def plain_values(settings: Mapping[str, Any]) -> dict[str, Any]:
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
    )


def optimizer_specs(optimizer: OptimizerConfig) -> tuple[OptimizerSpec, OptimizerSpec]:
    """The rules of the embedding rows and of the dense layers."""
    constants = {"eps": optimizer.eps} if isinstance(optimizer, AdagradConfig) else {}
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
    return TrainingOrder(
        config.paths.dataset,
        trainer.batch_size,
        seed=trainer.seed,
        num_epochs=trainer.num_epochs,
        num_workers=trainer.num_workers,
        kind=order.kind,
        assign=order.assign,
        by_day=isinstance(order, TimeOrder) and order.evaluate_ahead,
        blocks=order if isinstance(order, AllHotOrder) else None,
        negatives=negatives_of(config),
    )


# ------------------------------------------------------------------ the plan


def torchrec_tables_of(placement: PlacementConfig) -> TorchrecTables | None:
    """The configured plan of TorchRec; None for hot and cold rows."""
    if not isinstance(placement, TorchrecPlacement):
        return None
    return TorchrecTables(placement.plan, placement.tier, placement.cache_load_frac)


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
