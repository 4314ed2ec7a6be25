"""The door: turns a configuration into the values that planning and training take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hotrec.assemble.constraints import cold_tier_for
from hotrec.assemble.model import ModelSpec
from hotrec.assemble.policies import choose_partition
from hotrec.assemble.replay import SlotReplay, TrainingOrder
from hotrec.config.groups import (
    CostPlacement,
    HotColdConfig,
    OptimizerConfig,
    PlacementConfig,
    ScarsPlacement,
    TieredConfig,
    TimeOrder,
    TorchrecPlacement,
)
from hotrec.config.roots import Config, Device, PlannerConfig, TrainerConfig
from hotrec.cost_model.costs import Costs
from hotrec.cost_model.forms import Workload
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.profile import Profile
from hotrec.data.chunks import Dataset
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.shape import architecture_of, work_of
from hotrec.planner.counted import num_overridden
from hotrec.planner.machine import Machine
from hotrec.planner.plan import TorchrecTables
from hotrec.planner.policies import choose_popular_rows
from hotrec.planner.request import (
    ByCost,
    GivenTables,
    PlanRequest,
    SlotRequest,
    check_pipeline,
)
from hotrec.planner.situation import Loader, Situation, TableShape, build_situation, choose_costs
from hotrec.runtime.cores import choose_workers
from hotrec.runtime.memory import GIB, MIB, read_fingerprint, read_memory
from hotrec.types import (
    DEFAULT_LOAD_FRAC,
    TIER_OF_KERNEL,
    ColdTier,
    HotExchange,
    OptimizerKind,
    Partition,
    PipelineSpec,
    Placement,
    PopularRows,
    RowFetch,
    Schema,
    WireType,
)

# Device memory that `hotrec plan` assumes without a GPU: an H100's.
ASSUMED_DEVICE_GIB = 80.0


def chosen_device(device: Device) -> str:
    """The device's type: "cpu" or "cuda"."""
    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.name


# ------------------------------------------------------------------ the model


def model_spec(config: Config, schema: Schema) -> ModelSpec:
    """What a configuration trains on the columns of a dataset.

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


def row_bytes(schema: Schema, config: Config) -> dict[str, int]:
    """Bytes of one row with its optimizer state, by table."""
    embedding, _ = optimizer_specs(config.optimizer)
    num_bytes = embedding.bytes_per_row(config.model.embedding_dim)
    return {table.name: num_bytes for table in schema.tables}


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


# ------------------------------------------------------------------ the plan


def make_machine(
    planner: PlannerConfig, *, world_size: int, ranks_per_host: int, device: str, batch_size: int
) -> Machine:
    """The machine to plan for: as configured, else as detected."""
    return detect_machine(
        planner.hbm_gib,
        planner.host_gib,
        world_size=world_size,
        ranks_per_host=ranks_per_host,
        device=device,
        batch_size=batch_size,
    )


def detect_machine(
    hbm_gib: float | None = None,
    host_gib: float | None = None,
    *,
    world_size: int,
    ranks_per_host: int,
    device: str,
    batch_size: int,
) -> Machine:
    """The machine to plan for, with this memory of a device and of a host; None as detected."""
    if hbm_gib is None and device == "cuda" and torch.cuda.is_available():
        device_bytes = free_device_bytes()
    else:
        device_bytes = int((hbm_gib or ASSUMED_DEVICE_GIB) * GIB)
    return Machine(
        world_size=world_size,
        local_world_size=ranks_per_host,
        device=device,
        device_bytes=device_bytes,
        host_bytes=read_memory()[0] if host_gib is None else int(host_gib * GIB),
        batch_size=batch_size,
    )


def free_device_bytes() -> int:
    """Free memory of this process's CUDA device, what torch holds in reserve included.

    Call it before the model is built. The CUDA context and other processes are accounted for.
    """
    free_bytes, _ = torch.cuda.mem_get_info()
    return int(free_bytes + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


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


def torchrec_tables_of(placement: PlacementConfig) -> TorchrecTables | None:
    """The configured plan of TorchRec; None for hot and cold rows."""
    if not isinstance(placement, TorchrecPlacement):
        return None
    return TorchrecTables(placement.plan, placement.tier, placement.cache_load_frac)


def costs_of(config: Config, machine: Machine) -> tuple[Costs, str | None]:
    """The configured costs, and a caveat about them or None; see ``choose_costs``."""
    path, fingerprint = Path(config.paths.costs), read_fingerprint(machine.device)
    return choose_costs(config.planner.costs, path, machine, fingerprint)


def plan_request(
    config: Config,
    dataset: Dataset,
    machine: Machine,
    profile: Profile | None,
    saved: Placement | None = None,
) -> PlanRequest:
    """What a configuration asks of the planner.

    Args:
        config: The configuration.
        dataset: Its dataset.
        machine: The ranks to plan for.
        profile: The profile; None is enough for a saved partition and for TorchRec's plans.
        saved: The saved partition of placement=saved.

    Raises:
        ValueError: If the policy cannot be satisfied, or an override names no table.
    """
    placement = config.placement
    tables: ByCost | GivenTables | TorchrecTables | None = torchrec_tables_of(placement)
    if isinstance(placement, CostPlacement):
        budget = placement.hot_budget_mib
        num_rows = {table.name: table.num_rows for table in dataset.schema.tables}
        tables = ByCost(
            hot_budget_bytes=None if budget is None else budget * MIB,
            may_pool=placement.may_pool,
            may_decline=placement.may_decline,
            fixed_hot=num_overridden(placement.overrides, num_rows),
        )
    elif tables is None:
        tables = _given_tables(config, dataset, machine, profile, saved)
    return request_for(config, tables)


def request_for(config: Config, tables: ByCost | GivenTables | TorchrecTables) -> PlanRequest:
    """What a configuration asks of the planner for these tables."""
    placement = config.placement
    exchange = placement.hot_exchange if isinstance(placement, TieredConfig) else HotExchange.auto
    return PlanRequest(
        tables,
        pipeline_spec(config),
        num_workers=config.trainer.num_workers,
        name=placement.kind.name,
        hot_exchange=exchange,
        is_routed_by_loader=isinstance(placement, HotColdConfig) and placement.routes_in_loader,
    )


def _given_tables(
    config: Config,
    dataset: Dataset,
    machine: Machine,
    profile: Profile | None,
    saved: Placement | None,
) -> GivenTables:
    """The split of the configured policy or saved partition, and how its slots are chosen."""
    kind, placed = config.placement, saved
    assert isinstance(kind, HotColdConfig)
    if placed is None:
        assert profile is not None, kind.kind
        if isinstance(kind, ScarsPlacement):
            machine = replace(machine, costs=costs_of(config, machine)[0])
        partition = choose_partition(
            kind,
            profile,
            machine,
            row_bytes=row_bytes(dataset.schema, config),
            dim=config.model.embedding_dim,
        )
        placed = _place(kind, partition, config, machine, profile)
    given = GivenTables(placed)
    if not given.has_slots or profile is None:
        return given
    place = None
    if isinstance(kind, TieredConfig) and kind.cache_load_frac is None:

        def place(load_frac: float) -> Placement:
            with_slots = replace(kind, cache_load_frac=load_frac)
            return _place(with_slots, placed.partition, config, machine, profile)

    read = partial(
        SlotReplay.read,
        training_order(config, machine.world_size),
        dataset,
        profile,
        placed.partition,
        pipeline_spec(config),
        num_batches=config.cache.num_batches,
        skip_frac=config.cache.skip_frac,
    )
    return replace(
        given,
        slots=SlotRequest(
            samples_in_flight(config, machine.world_size),
            lambda min_load_frac: read(min_load_frac=min_load_frac),
            place,
            is_fetch_open=isinstance(kind, TieredConfig) and kind.row_fetch is RowFetch.auto,
        ),
    )


def training_order(config: Config, world_size: int) -> TrainingOrder:
    """How training reads global batches."""
    trainer = config.trainer
    return TrainingOrder(
        config.paths.dataset,
        trainer.batch_size * world_size,
        trainer.seed,
        trainer.num_epochs,
        is_shuffled=not isinstance(config.order, TimeOrder),
    )


def _place(
    kind: HotColdConfig, partition: Partition, config: Config, machine: Machine, profile: Profile
) -> Placement:
    def popular(load_frac: float) -> dict[str, PopularRows]:
        return choose_popular_rows(
            partition,
            profile,
            load_frac=load_frac,
            global_batch_size=config.trainer.batch_size * machine.world_size,
            world_size=machine.world_size,
        )

    return as_placement(kind, partition, machine.device, popular)


def as_placement(
    placement: HotColdConfig,
    partition: Partition,
    device: str,
    popular: Callable[[float], Mapping[str, PopularRows]] | None = None,
) -> Placement:
    """The placement of a partition with the configured exchange and tier.

    Args:
        placement: The configured placement.
        partition: The hot rows.
        device: "cpu" or "cuda".
        popular: Chooses the rows with which slots begin, by the fraction of rows that have one;
            None for none.

    Raises:
        ValueError: If the device has no such memory tier, or reads no mapped memory.
    """
    assert isinstance(placement, TieredConfig), placement
    return place(
        partition,
        device,
        tier=placement.cold_tier,
        cache_load_frac=placement.cache_load_frac,
        hot_exchange=placement.hot_exchange,
        row_type=placement.cold_rows,
        row_fetch=placement.row_fetch,
        popular=popular,
    )


def place(
    partition: Partition,
    device: str,
    *,
    tier: ColdTier = ColdTier.auto,
    cache_load_frac: float | None = None,
    hot_exchange: HotExchange = HotExchange.auto,
    row_type: WireType = WireType.fp32,
    row_fetch: RowFetch = RowFetch.auto,
    popular: Callable[[float], Mapping[str, PopularRows]] | None = None,
) -> Placement:
    """The placement of a partition with all cold rows in one tier.

    Args:
        partition: The hot rows.
        device: "cpu" or "cuda".
        tier: Memory of the cold rows.
        cache_load_frac: Cached fraction of the rows; None for the default.
        hot_exchange: How gradients of hot rows are reduced.
        row_type: Type of the rows behind slots.
        row_fetch: How these rows come to the device.
        popular: Chooses the rows with which slots begin, by the fraction of rows that have one;
            None for none.

    Raises:
        ValueError: If the device has no such memory tier, or reads no mapped memory.
    """
    if row_fetch is RowFetch.mapped and device == "cpu":
        raise ValueError(
            "placement.row_fetch: expected staged or auto on CPU, where slots are host memory too, "
            "got mapped. Leave it out, or train on CUDA."
        )
    tier = cold_tier_for(device, tier, on_cuda=ColdTier.fused_uvm_caching)
    load_frac = DEFAULT_LOAD_FRAC if cache_load_frac is None else cache_load_frac
    placed = Placement.alike(
        partition,
        TIER_OF_KERNEL[tier],
        load_frac,
        is_hot_dense=hot_exchange is HotExchange.dense,
        row_type=row_type,
        row_fetch=RowFetch.mapped if row_fetch is RowFetch.mapped else RowFetch.staged,
    )
    if tier is not ColdTier.cached or popular is None:
        return placed
    return replace(placed, popular_rows=popular(load_frac))


def samples_in_flight(config: Config, world_size: int) -> int:
    """Most samples of all ranks whose rows look-ahead holds at once, in training and evaluation."""
    trainer = config.trainer
    of_rank = max(trainer.batch_size, trainer.eval_batch_size if trainer.eval_splits else 0)
    return of_rank * world_size * pipeline_spec(config).batches_in_slots


def describe_situation(
    config: Config,
    schema: Schema,
    histograms: Mapping[str, CountHistogram],
    profile: Profile,
    machine: Machine,
    costs: tuple[Costs, str | None],
    workers_and_cores: tuple[int | None, float | None],
) -> Situation:
    """What a configuration is predicted for.

    Args:
        config: The configuration.
        schema: Features and tables of its dataset.
        histograms: The profile's histogram of every table.
        profile: The profile.
        machine: The ranks.
        costs: The costs and a caveat about them, or None.
        workers_and_cores: The loader workers of a rank and the cores of a host, of ``loader_of``.
            A machine with other ranks is predicted with the same workers.

    Raises:
        ValueError: If the profile lacks a table, or counted no sample.
    """
    dense, placement = work_of(config.model, schema), config.placement
    bytes_of_row = row_bytes(schema, config)
    workers, cores = workers_and_cores
    situation = build_situation(
        shapes_of(schema, config.model.embedding_dim, bytes_of_row),
        Workload(
            batch_size=machine.batch_size,
            dense_flops=dense.flops,
            bottom_frac=dense.bottom_frac,
            num_dense_values=dense.num_dense_values,
            is_routed_by_loader=isinstance(placement, HotColdConfig)
            and placement.routes_in_loader
            and workers != 0,
        ),
        histograms,
        profile.num_samples,
        machine,
        costs,
        profile.locality,
    )
    loader = Loader(workers, cores) if cores and workers is not None else None
    return replace(situation, loader=loader)


def shapes_of(
    schema: Schema, embedding_dim: int, bytes_of_row: Mapping[str, int]
) -> list[TableShape]:
    """The shapes of a dataset's tables, in the schema's order."""
    return [
        TableShape(
            name=table.name,
            dim=embedding_dim,
            row_bytes=bytes_of_row[table.name],
            num_columns=len(schema.features_of(table.name)),
        )
        for table in schema.tables
    ]


def loader_of(config: Config, machine: Machine, costs: Costs) -> tuple[int | None, float | None]:
    """The loader workers of a rank, and the cores of a host, where the costs know them."""
    cores = costs.facts.get("cores_per_host") or costs.host.get("num_cores")
    workers = config.trainer.num_workers
    if workers is None and cores:
        workers = choose_workers(machine.device, cores, machine.local_world_size)
    return workers, cores
