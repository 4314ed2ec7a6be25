"""Builds the model before sharding, with its sharders and constraints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import CacheStatistics, ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.config.groups import (
    HotColdConfig,
    OptimizerConfig,
    PlacementConfig,
    TieredConfig,
    TorchrecPlacement,
)
from hotrec.config.roots import Config, Device, PlannerConfig, TrainerConfig
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.fused import check_optimizer, fused_params
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.dense import set_up_dense_layers
from hotrec.models.shape import architecture_of
from hotrec.models.task import ClickTask
from hotrec.models.zoo import build_architecture
from hotrec.planning.constraints import (
    TIER_OF_KERNEL,
    cold_tier_for,
    placement_constraints,
    torchrec_constraints,
)
from hotrec.planning.machine import Machine, free_device_bytes
from hotrec.planning.torchrec_plan import make_plan
from hotrec.runtime.codecs import wire_codecs
from hotrec.runtime.memory import read_memory
from hotrec.train.dense_sync import check_modules
from hotrec.types import (
    DEFAULT_LOAD_FRAC,
    ColdTier,
    HotExchange,
    OptimizerKind,
    Partition,
    PipelineKind,
    Placement,
    PopularRows,
    RowFetch,
    Schema,
)

GIB = 1 << 30
META = torch.device("meta")
# Device memory that `hotrec plan` assumes without a GPU: an H100's.
ASSUMED_DEVICE_GIB = 80.0


def chosen_device(device: Device) -> str:
    """The device's type: "cpu" or "cuda"."""
    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.name


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


def row_bytes(schema: Schema, config: Config) -> dict[str, int]:
    """Bytes of one row with its optimizer state, by table."""
    dim = config.model.embedding_dim
    embedding, _ = optimizer_specs(config.optimizer)
    num_bytes = 4 * dim + embedding.state_bytes_per_row(dim)
    return {table.name: num_bytes for table in schema.tables}


def make_machine(
    planner: PlannerConfig, *, world_size: int, ranks_per_host: int, device: str, batch_size: int
) -> Machine:
    """Returns the machine to plan for: as configured, else as detected."""
    if planner.hbm_gib is None and device == "cuda" and torch.cuda.is_available():
        device_bytes = free_device_bytes()
    else:
        device_bytes = int((planner.hbm_gib or ASSUMED_DEVICE_GIB) * GIB)
    host_gib = planner.host_gib
    return Machine(
        world_size=world_size,
        local_world_size=ranks_per_host,
        device=device,
        device_bytes=device_bytes,
        host_bytes=read_memory()[0] if host_gib is None else int(host_gib * GIB),
        batch_size=batch_size,
    )


@dataclass(frozen=True)
class Unsharded:
    """The model before sharding, on no device yet, and how to shard it."""

    task: nn.Module  # model and loss
    embeddings: EmbeddingBagCollection | HotColdEmbeddingBagCollection
    sharders: list[ModuleSharder[nn.Module]]
    constraints: dict[str, ParameterConstraints] | None

    def plan(self, machine: Machine) -> ShardingPlan:
        return make_plan(self.task, self.sharders, machine, self.constraints)


def build_unsharded(
    config: Config,
    schema: Schema,
    placed: Placement | None,
    machine: Machine,
    *,
    dense_device: torch.device = META,
    cache_stats: Mapping[str, CacheStatistics] | None = None,
) -> Unsharded:
    """Builds the model, its sharders and their constraints.

    Args:
        placed: The placement, or None for TorchRec's plans on unsplit tables.
        machine: The ranks and their device, which need not be there to plan.
        dense_device: Device of the dense layers; "meta" to plan only.
        cache_stats: Statistics of the device caches of host tables, for TorchRec's planner.

    Raises:
        ValueError: If the device has no exact kernel for the optimizer, no such memory tier, or
            the model does not fit.
    """
    tables = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_rows,
            embedding_dim=config.model.embedding_dim,
            feature_names=[feature.name for feature in schema.features_of(table.name)],
            pooling=PoolingType[config.model.pooling.name.upper()],
        )
        for table in schema.tables
    ]
    spec, _ = optimizer_specs(config.optimizer)
    placement, wire_type = config.placement, config.pipeline.wire
    has_sharded = placed is None or placed.partition.total_hot < placed.partition.total_rows
    check_optimizer(spec, torch.device(machine.device), has_cold=has_sharded)
    embeddings: EmbeddingBagCollection | HotColdEmbeddingBagCollection
    sharders: list[ModuleSharder[nn.Module]]
    constraints: dict[str, ParameterConstraints] | None
    if isinstance(placement, TorchrecPlacement):
        embeddings = EmbeddingBagCollection(tables=tables, device=META)
        codecs = wire_codecs(wire_type, [config.model.embedding_dim])
        sharders = [EmbeddingBagCollectionSharder(fused_params(spec), codecs)]
        constraints = torchrec_constraints(
            tables,
            placement.plan,
            batch_size=config.trainer.batch_size,
            tier=_torchrec_tier(machine.device, placement.tier),
            cache_load_factor=placement.cache_load_frac,
            is_prefetched=config.pipeline.kind is PipelineKind.prefetch,
        )
    else:
        assert placed is not None
        embeddings = HotColdEmbeddingBagCollection(tables, placed, device=META)
        sharders = [HotColdSharder(spec, hot_exchange_of(placement, placed), wire_type)]
        constraints = placement_constraints(placed, cache_stats, machine.device)
    trainer, shape = config.trainer, architecture_of(config.model, schema)
    built = build_architecture(shape, embeddings, trainer.seed, dense_device)
    check_modules(built)
    set_up_dense_layers(built, dense_device, trainer.precision, is_compiled=trainer.compile)
    task = ClickTask(built, machine.world_size, label_weights_of(trainer, schema))
    return Unsharded(task, embeddings, sharders, constraints)


def label_weights_of(trainer: TrainerConfig, schema: Schema) -> dict[str, float] | None:
    """The weights of several labels, in their order; None for one.

    Raises:
        ValueError: If a weight is given for no label, or for the only one.
    """
    several = schema.labels if len(schema.labels) > 1 else ()
    for name in trainer.label_weights:
        if name not in several:
            raise ValueError(
                f"trainer.label_weights.{name}: expected one of the dataset's several labels, "
                f"{list(several)}, got {name!r}. Correct the name, or leave it out."
            )
    return {name: trainer.label_weights.get(name, 1.0) for name in several} or None


def _torchrec_tier(device: str, tier: ColdTier) -> ColdTier:
    """Returns the tier of the rows of TorchRec's own plans."""
    if tier is ColdTier.cached:
        raise ValueError(
            "placement.tier: expected a compute kernel of TorchRec for placement=torchrec, got "
            "cached. Set placement.tier=fused_uvm_caching, or a placement with hot and cold rows."
        )
    return cold_tier_for(device, tier, "placement.tier")


def as_placement(
    placement: HotColdConfig,
    partition: Partition,
    device: str,
    popular: Callable[[float], Mapping[str, PopularRows]] | None = None,
) -> Placement:
    """Returns the placement of a partition with the configured exchange and tier.

    Args:
        device: "cpu" or "cuda".
        popular: Chooses the rows with which slots begin, by the fraction of rows that have one;
            None for none.

    Raises:
        ValueError: If the device has no such memory tier, or reads no mapped memory.
    """
    assert isinstance(placement, TieredConfig), placement
    if placement.row_fetch is RowFetch.mapped and device == "cpu":
        raise ValueError(
            "placement.row_fetch: expected staged or auto on CPU, where slots are host memory too, "
            "got mapped. Leave it out, or train on CUDA."
        )
    tier = cold_tier_for(device, placement.cold_tier, on_cuda=ColdTier.fused_uvm_caching)
    load_frac = placement.cache_load_frac
    if load_frac is None:
        load_frac = DEFAULT_LOAD_FRAC
    placed = Placement.alike(
        partition,
        TIER_OF_KERNEL[tier],
        load_frac,
        is_hot_dense=placement.hot_exchange is HotExchange.dense,
        row_type=placement.cold_rows,
        row_fetch=RowFetch.mapped if placement.row_fetch is RowFetch.mapped else RowFetch.staged,
    )
    if tier is not ColdTier.cached or popular is None:
        return placed
    return replace(placed, popular_rows=popular(load_frac))


def hot_exchange_of(placement: PlacementConfig, placed: Placement) -> HotExchange:
    """Returns how hot gradients are exchanged: dense if the placement is, else as configured."""
    if placed.is_hot_dense:
        return HotExchange.dense
    return placement.hot_exchange if isinstance(placement, TieredConfig) else HotExchange.auto
