"""What a prediction is for: costs, ranks, pipeline, workload, tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotrec.config.groups import HotColdConfig, TorchrecPlacement
from hotrec.config.roots import Config
from hotrec.cost_model.builtin import BUILTIN, NEAREST_BUILTIN
from hotrec.cost_model.costs import Costs, CostsError, World
from hotrec.cost_model.demand import TableDemand, build_demand
from hotrec.cost_model.forms import SPARSE_DIST, PipelineSpec, StepPrediction, Workload
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.locality import TableLocality, step_draws
from hotrec.cost_model.step import with_loader
from hotrec.cost_model.store import check_host, fit_to_world, read_costs
from hotrec.models.shape import work_of
from hotrec.planning.machine import DEVICE_RESERVED_FRAC, HOST_RESERVED_FRAC, Machine
from hotrec.planning.unsharded import row_bytes
from hotrec.runtime.memory import read_fingerprint
from hotrec.types import ColdTier, PipelineKind, Schema, Tier

# Samples per rank from which look-ahead pays on one host. Smaller steps have little to hide, and
# its thread competes with the loader's workers for the cores: the quickstart (two ranks on two
# cores, 256 samples) takes 25 ms a step with look-ahead and 20 ms without.
LEAST_BATCH_ON_ONE_HOST = 2048


@dataclass(frozen=True)
class Loader:
    """The loader of each rank, which shares the host's cores with the ranks."""

    num_workers: int
    cores_per_host: float


@dataclass(frozen=True)
class Scenario:
    """Everything that a prediction depends on except the placement."""

    costs: Costs
    note: str | None  # caveat about the costs for the user
    world: World
    workload: Workload
    demands: tuple[TableDemand, ...]  # in the schema's order
    machine: Machine  # for TorchRec's planner
    pipeline: PipelineSpec = SPARSE_DIST  # of hot/cold placements
    loader: Loader | None = None  # None where batches are made beforehand, as in a benchmark

    @property
    def memory_bytes(self) -> tuple[float, float]:
        """Device and host memory that a rank may fill; no device memory on CPU."""
        machine = self.machine
        device = (1 - DEVICE_RESERVED_FRAC) * machine.device_bytes
        host = (1 - HOST_RESERVED_FRAC) * machine.host_bytes / machine.local_world_size
        return (device if machine.device == "cuda" else 0.0), host

    @property
    def cold_tier(self) -> Tier:
        """The default memory tier of cold rows."""
        return Tier.DEVICE if self.machine.device == "cpu" else Tier.HOST

    def with_pipeline(self, kind: PipelineKind) -> Scenario:
        """Returns the scenario with another pipeline of the placements with hot rows."""
        return dataclasses.replace(self, pipeline=dataclasses.replace(self.pipeline, kind=kind))

    def beside_loader(self, step: StepPrediction, *, is_routed: bool) -> StepPrediction:
        """Returns a step with what the loader takes, on cores that ranks and workers share.

        ``is_routed`` is whether the ids are routed somewhere, which the loader's workers may do.
        """
        if self.loader is None:
            return step
        batch = self.workload.batch_size
        is_routed_there = is_routed and self.workload.is_routed_by_loader
        lookups = sum(d.lookups_per_sample for d in self.demands) if is_routed_there else 0.0
        cores, num_workers = self.loader.cores_per_host, self.loader.num_workers
        measured_ranks = self.costs.facts.get("ranks_per_host", 1)
        return with_loader(
            step,
            loader_s=self.costs.loader_s(batch, batch * lookups, num_workers) or (0.0, 0.0),
            num_workers=num_workers,
            ranks_per_host=self.world.ranks_per_host,
            # A GPU's computing takes none of the cores that workers run on.
            cores_per_host=cores if self.costs.device == "cpu" else math.inf,
            overlap=self.costs.overlap,
            slowdown=max(1.0, measured_ranks / cores),
        )

    @property
    def global_batch_size(self) -> int:
        return self.workload.batch_size * self.world.num_ranks


def candidate_pipelines(config: Config, machine: Machine) -> tuple[PipelineKind, ...]:
    """Returns the pipelines among which predictions and a trial choose.

    Raises:
        ValueError: If the configured one cannot train the placement.
    """
    if config.pipeline.kind is not PipelineKind.auto or _has_slots(config):
        return (choose_pipeline(config, machine),)
    return auto_pipelines(machine, is_own=isinstance(config.placement, HotColdConfig))


def auto_pipelines(machine: Machine, *, is_own: bool) -> tuple[PipelineKind, ...]:
    """Returns what ``auto`` stands for; ``is_own`` is whether the tables may be hot and cold."""
    kinds = (PipelineKind.sparse_dist, PipelineKind.base)
    # look_ahead has not been run on CUDA yet, and one rank exchanges nothing.
    is_ahead = machine.device == "cpu" and machine.world_size > 1
    return (PipelineKind.look_ahead, *kinds) if is_ahead and is_own else kinds


def _has_slots(config: Config) -> bool:
    """Whether the configuration asks for slots, as a saved placement may do too."""
    return getattr(config.placement, "cold_tier", None) is ColdTier.cached


def choose_pipeline(config: Config, machine: Machine) -> PipelineKind:
    """Returns the pipeline that trains the configuration's placement, never auto.

    Without predictions, auto is decided by the number of ranks and the batch size.

    Raises:
        ValueError: If the configured one cannot.
    """
    placement, kind = config.placement, config.pipeline.kind
    if _has_slots(config):
        if kind not in (PipelineKind.auto, PipelineKind.look_ahead):
            raise ValueError(
                "pipeline.kind: expected look_ahead for placement.cold_tier=cached, whose slots it "
                f"fills, got {kind.name}. Set pipeline=look_ahead, or another cold_tier."
            )
        return PipelineKind.look_ahead
    is_torchrec = isinstance(placement, TorchrecPlacement)
    if kind is PipelineKind.auto:
        # look_ahead has not been run on CUDA yet.
        is_ahead = machine.device == "cpu" and not is_torchrec and machine.world_size > 1
        is_large = config.trainer.batch_size >= LEAST_BATCH_ON_ONE_HOST
        is_ahead = is_ahead and (machine.num_hosts > 1 or is_large)
        return PipelineKind.look_ahead if is_ahead else PipelineKind.sparse_dist
    if kind is PipelineKind.look_ahead and is_torchrec:
        raise ValueError(
            "pipeline.kind: expected sparse_dist or base for placement=torchrec, whose tables "
            "TorchRec exchanges, got look_ahead. Set pipeline=sparse_dist."
        )
    if kind is PipelineKind.prefetch:
        found, is_cached = placement.kind.name, False
        if isinstance(placement, TorchrecPlacement):
            found = f"torchrec with tier {placement.tier.name}"
            is_cached = placement.tier is ColdTier.fused_uvm_caching
        if not is_cached or machine.device != "cuda":
            raise ValueError(
                "pipeline.kind: expected placement=torchrec with placement.tier=fused_uvm_caching "
                "on cuda for prefetch, which fills FBGEMM's device caches, got "
                f"placement={found} on {machine.device}. Set these, or pipeline=sparse_dist."
            )
    return kind


def choose_costs(name: str, path: Path, machine: Machine) -> tuple[Costs, str | None]:
    """Returns the costs that ``planner.costs`` names, and a caveat about them or None.

    Args:
        name: "measured" (those at ``path``), a built-in set, or "auto" (measured if there are any
            for this kind of device, else the nearest built-in set).
        path: Where `hotrec calibrate` writes.
        machine: The ranks to predict for.

    The caveat says what is not measured, not of this host, extrapolated to the machine's ranks or
    batch, or not to be trusted. Costs of one host have a built-in link for several.

    Raises:
        ArtifactError: If measured costs are configured, but missing or altered.
        CostsError: If they are invalid, of another kind of device, or the name is unknown.
    """
    device = machine.device
    is_there = name == "measured" or (name == "auto" and path.exists())
    costs = read_costs(path) if is_there else None
    if costs is not None and (name == "measured" or costs.device == device):
        notes = [check_host(costs, read_fingerprint(device)), costs.caveat]
    else:
        chosen = NEAREST_BUILTIN[device] if name == "auto" else name
        if chosen not in BUILTIN:
            raise CostsError(
                f"planner.costs: expected auto, measured or one of {sorted(BUILTIN)}, got {name!r}."
            )
        costs = BUILTIN[chosen]
        notes = [f"built-in costs {chosen}, not measured; `hotrec calibrate` measures this machine"]
    if costs.device != device:
        raise CostsError(
            f"costs {costs.name}: expected costs of {device}, got costs of {costs.device}. "
            f"Calibrate on {device}, or choose a built-in set with planner.costs."
        )
    world = World(machine.world_size, machine.local_world_size)
    costs, of_world = fit_to_world(costs, world, machine.batch_size)
    return costs, "; ".join(note for note in (*notes, *of_world) if note) or None


@dataclass(frozen=True)
class TableShape:
    """What a prediction needs to know of a table besides its lookups.

    Args:
        name: Name of the table.
        dim: Embedding dimension D.
        row_bytes: Bytes of a row with its optimizer state.
        num_columns: Features that read the table.
    """

    name: str
    dim: int
    row_bytes: int
    num_columns: int


def build_scenario(
    shapes: Sequence[TableShape],
    workload: Workload,
    histograms: Mapping[str, CountHistogram],
    num_samples: int,
    machine: Machine,
    costs: Costs,
    note: str | None = None,
    locality: Mapping[str, TableLocality] | None = None,
    pipeline: PipelineSpec = SPARSE_DIST,
) -> Scenario:
    """Builds the scenario of a model with these tables; see ``describe_scenario``.

    Raises:
        ValueError: If the profile lacks a table, or counted no sample.
    """
    names = [shape.name for shape in shapes]
    missing = [name for name in names if name not in histograms]
    if missing or num_samples < 1:
        raise ValueError(
            f"profile: expected counts of the tables {names}, got none "
            f"of {missing or 'any: it counted no sample'}. Make the profile again from this "
            "dataset."
        )
    demands = []
    for shape in shapes:
        histogram = histograms[shape.name]
        per_sample = histogram.num_lookups / num_samples
        demands.append(
            build_demand(
                shape.name,
                histogram,
                dim=shape.dim,
                row_bytes=shape.row_bytes,
                lookups_per_sample=per_sample,
                num_columns=shape.num_columns,
                batch_size=machine.batch_size,
                world_size=machine.world_size,
                num_draws=step_draws(
                    histogram,
                    (locality or {}).get(shape.name),
                    batch_size=machine.batch_size,
                    world_size=machine.world_size,
                    lookups_per_sample=per_sample,
                ),
            )
        )
    return Scenario(
        costs=costs,
        note=note,
        world=World(machine.world_size, machine.local_world_size),
        workload=workload,
        demands=tuple(demands),
        machine=machine,
        pipeline=pipeline,
    )


def describe_scenario(
    config: Config,
    schema: Schema,
    histograms: Mapping[str, CountHistogram],
    num_samples: int,
    machine: Machine,
    costs: Costs,
    note: str | None = None,
    locality: Mapping[str, TableLocality] | None = None,
) -> Scenario:
    """Describes a configuration's scenario.

    Args:
        histograms: The profile's histogram of every table.
        num_samples: The number of samples that the profile counted.
        note: Caveat about the costs, or None.
        locality: The profile's locality by table. Lookups of other tables are independent.

    Raises:
        ValueError: If the profile lacks a table, or counted no sample, or the configured pipeline
            cannot train the placement.
    """
    placement, pipeline = config.placement, config.pipeline
    dense = work_of(config.model, schema)
    bytes_of_row = row_bytes(schema, config)
    return build_scenario(
        [
            TableShape(
                name=table.name,
                dim=config.model.embedding_dim,
                row_bytes=bytes_of_row[table.name],
                num_columns=len(schema.features_of(table.name)),
            )
            for table in schema.tables
        ],
        Workload(
            batch_size=machine.batch_size,
            dense_flops=dense.flops,
            bottom_frac=dense.bottom_frac,
            num_dense_values=dense.num_dense_values,
            is_routed_by_loader=isinstance(placement, HotColdConfig)
            and placement.routes_in_loader
            and config.trainer.num_workers != 0,
        ),
        histograms,
        num_samples,
        machine,
        costs,
        note,
        locality,
        PipelineSpec(choose_pipeline(config, machine), pipeline.wire.value, pipeline.depth),
    )


def resized(machine: Machine, costs: Costs, world_factor: float, batch_factor: float) -> Machine:
    """Returns the machine with more or fewer ranks, or another batch per rank.

    Ranks are added as hosts of the same kind, or to the one host where the costs have no link
    between hosts. A world smaller than a host is one host with fewer ranks.
    """
    world_size = max(1, round(machine.world_size * world_factor))
    local = world_size if costs.inter is None else min(machine.local_world_size, world_size)
    return dataclasses.replace(
        machine,
        world_size=world_size,
        local_world_size=local if world_size % local == 0 else 1,
        batch_size=max(1, round(machine.batch_size * batch_factor)),
    )
