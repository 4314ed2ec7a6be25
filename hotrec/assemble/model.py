"""The model before sharding, with its sharders and constraints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from hotrec.assemble.constraints import placement_constraints, torchrec_constraints
from hotrec.assemble.torchrec_plan import make_plan
from hotrec.embedding.collection import (
    HotColdCollection,
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
)
from hotrec.embedding.fused import check_optimizer, fused_params
from hotrec.embedding.sharding import HotColdSequenceSharder, HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.dense import set_up_dense_layers
from hotrec.models.plain import Architecture
from hotrec.models.task import ClickTask, RetrievalTask
from hotrec.models.zoo import ClickModel, build_architecture
from hotrec.planner.machine import Machine
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.runtime.codecs import wire_codecs
from hotrec.train.dense_sync import check_modules
from hotrec.types import Exchange, PipelineKind, Placement, Precision, Schema

META = torch.device("meta")
# Where the tables of a model are, before sharding.
Embeddings: TypeAlias = EmbeddingBagCollection | EmbeddingCollection | HotColdCollection[Any]


@dataclass(frozen=True)
class ModelSpec:
    """The model and its training rules, independent of the plan.

    Args:
        schema: Features and tables of the dataset.
        architecture: Shape of the model.
        embedding: Update rule of the rows.
        dense: Update rule of the dense layers.
        seed: Seed of the first weights.
        label_weights: Weights of several labels; None for one.
        precision: Precision of the dense layers' products.
        is_compiled: Whether torch.compile compiles the dense layers.
        grad_clip_norm: Maximum norm of the dense layers' gradients; None for no clipping.
        softmax_temperature: Temperature of the sampled softmax; None for the cross entropy.
    """

    schema: Schema
    architecture: Architecture
    embedding: OptimizerSpec
    dense: OptimizerSpec
    seed: int = 0
    label_weights: Mapping[str, float] | None = None
    precision: Precision = Precision.fp32
    is_compiled: bool = False
    grad_clip_norm: float | None = None
    softmax_temperature: float | None = None

    @property
    def tables(self) -> Sequence[BaseEmbeddingConfig]:
        """The tables as TorchRec describes them."""
        shape = self.architecture
        make: Any = EmbeddingConfig
        if not shape.reads_sequences:
            make = partial(EmbeddingBagConfig, pooling=PoolingType[shape.pooling.upper()])
        return [
            make(
                name=table.name,
                num_embeddings=table.num_rows,
                embedding_dim=shape.embedding_dim,
                feature_names=[feature.name for feature in self.schema.features_of(table.name)],
            )
            for table in self.schema.tables
        ]

    @property
    def row_bytes(self) -> dict[str, int]:
        """Bytes of one row with its optimizer state, by table."""
        num_bytes = self.embedding.bytes_per_row(self.architecture.embedding_dim)
        return {table.name: num_bytes for table in self.schema.tables}


@dataclass(frozen=True)
class Unsharded:
    """The unsharded model, without a device, and how to shard it."""

    task: nn.Module  # model and loss
    embeddings: Embeddings
    sharders: list[ModuleSharder[nn.Module]]
    constraints: dict[str, ParameterConstraints] | None

    def plan(self, machine: Machine) -> ShardingPlan:
        return make_plan(self.task, self.sharders, machine, self.constraints)


def build_unsharded(
    spec: ModelSpec,
    plan: Plan,
    placed: Placement | None,
    machine: Machine,
    *,
    dense_device: torch.device = META,
) -> Unsharded:
    """Builds the model, its sharders and their constraints.

    Args:
        spec: The model and its training rules.
        plan: The plan of its tables.
        placed: The hot rows of split tables and the place of the others; None for TorchRec's plans.
        machine: The ranks and their device, which need not exist for planning.
        dense_device: Device of the dense layers; "meta" to plan only.

    Raises:
        ValueError: If the device has no exact kernel for the optimizer, no such memory tier, or
            the model does not fit.
    """
    tables, pipeline = spec.tables, plan.pipeline
    kinds = [] if placed is None else [table.exchange for table in placed.tables.values()]
    has_tables = placed is None or Exchange.POOLED in kinds
    check_optimizer(spec.embedding, torch.device(machine.device), has_tables=has_tables)
    embeddings: Embeddings
    sharders: list[ModuleSharder[nn.Module]]
    constraints: dict[str, ParameterConstraints] | None
    is_pooled = not spec.architecture.reads_sequences
    made: Any
    if isinstance(plan.tables, TorchrecTables):
        made = EmbeddingBagCollection if is_pooled else EmbeddingCollection
        embeddings = made(tables=tables, device=META)
        codecs = wire_codecs(pipeline.wire)
        made = EmbeddingBagCollectionSharder if is_pooled else EmbeddingCollectionSharder
        sharders = [made(fused_params(spec.embedding), codecs)]
        constraints = torchrec_constraints(
            tables,
            plan.tables,
            batch_size=machine.batch_size,
            device=machine.device,
            is_prefetched=pipeline.kind is PipelineKind.prefetch,
        )
    else:
        assert placed is not None, plan.label
        made = HotColdEmbeddingBagCollection if is_pooled else HotColdEmbeddingCollection
        embeddings = made(tables, placed, device=META)
        made = HotColdSharder if is_pooled else HotColdSequenceSharder
        sharders = [made(spec.embedding, pipeline.wire, pipeline.levels)]
        constraints = placement_constraints(placed, machine.device)
    built = build_architecture(spec.architecture, embeddings, spec.seed, dense_device)
    check_modules(built)
    set_up_dense_layers(built, dense_device, spec.precision, is_compiled=spec.is_compiled)
    task = _make_task(spec, built, machine.world_size)
    return Unsharded(task, embeddings, sharders, constraints)


def _make_task(spec: ModelSpec, built: ClickModel, world_size: int) -> nn.Module:
    layers: Any = getattr(built, "layers", None)
    if getattr(layers, "gives_vectors", None) is not None:
        layers.gives_vectors = True
        return RetrievalTask(built, world_size, spec.softmax_temperature)
    return ClickTask(built, world_size, spec.label_weights)
