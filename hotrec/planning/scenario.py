"""What a prediction is for: costs, ranks, workload, tables; from configuration and profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hotrec.config.groups import HotColdConfig, Routing
from hotrec.config.roots import Config
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import Costs, CostsError, World
from hotrec.cost_model.demand import TableDemand, build_demand
from hotrec.cost_model.forms import SPARSE_DIST, PipelineSpec, Workload
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.locality import TableLocality, step_draws
from hotrec.cost_model.look_ahead import LookAheadModel
from hotrec.cost_model.step import StepModel, make_model, make_torchrec_model
from hotrec.cost_model.store import check_host, read_costs
from hotrec.models.flops import dense_flops
from hotrec.planning.machine import DEVICE_RESERVED_FRAC, HOST_RESERVED_FRAC, Machine
from hotrec.planning.pipelines import choose_pipeline
from hotrec.planning.unsharded import row_bytes
from hotrec.runtime.memory import read_fingerprint
from hotrec.types import Schema

# Built-in costs for planning without measured ones, by device.
NEAREST_BUILTIN = {"cpu": "cpu_1gbit", "cuda": "dgx_h100_infiniband"}


@dataclass(frozen=True)
class Scenario:
    """Everything that a prediction depends on except the placement.

    Args:
        costs: Costs of the machine.
        note: Caveat about the costs for the user, or None.
        world: Ranks and hosts.
        workload: Batch and dense layers.
        demands: Demand of every table, in the schema's order.
        machine: The machine for TorchRec's planner.
        pipeline: Pipeline of hot/cold placements.
    """

    costs: Costs
    note: str | None
    world: World
    workload: Workload
    demands: tuple[TableDemand, ...]
    machine: Machine
    pipeline: PipelineSpec = SPARSE_DIST

    def model(
        self, at: Mapping[str, float], *, is_hot_dense: bool = False
    ) -> StepModel | LookAheadModel:
        """Returns the step model, with measured collectives at the message sizes of ``at``."""
        return make_model(
            self.costs,
            self.world,
            self.workload,
            pipeline=self.pipeline,
            is_hot_dense=is_hot_dense,
            at=at,
        )

    def torchrec_model(self, at: Mapping[str, float]) -> StepModel:
        """Returns the step model of TorchRec's own pipelines on unsplit tables."""
        return make_torchrec_model(
            self.costs, self.world, self.workload, pipeline=self.pipeline, at=at
        )

    @property
    def memory_bytes(self) -> tuple[float, float]:
        """Device and host memory that a rank may fill; no device memory on CPU."""
        machine = self.machine
        device = (1 - DEVICE_RESERVED_FRAC) * machine.device_bytes
        host = (1 - HOST_RESERVED_FRAC) * machine.host_bytes / machine.local_world_size
        return (device if machine.device == "cuda" else 0.0), host


def planned_pipeline(config: Config, machine: Machine) -> PipelineSpec:
    """Returns the pipeline that trains the configuration's placement.

    Raises:
        ValueError: If the configured one cannot.
    """
    pipeline = config.pipeline
    kind = choose_pipeline(config, machine)
    return PipelineSpec(kind, pipeline.wire.value, pipeline.depth)


def choose_costs(config: Config, device: str) -> tuple[Costs, str | None]:
    """Returns the costs that ``planner.costs`` names, and a caveat about them or None.

    Raises:
        ArtifactError: If measured costs are configured, but missing or altered.
        CostsError: If they are invalid, of another kind of device, or the name is unknown.
    """
    name, path = config.planner.costs, Path(config.paths.costs)
    measured = (
        read_costs(path) if name == "measured" or (name == "auto" and path.exists()) else None
    )
    if measured is not None and (name == "measured" or measured.device == device):
        costs, note = measured, check_host(measured, read_fingerprint(device))
    else:
        chosen = NEAREST_BUILTIN[device] if name == "auto" else name
        if chosen not in BUILTIN:
            raise CostsError(
                f"planner.costs: expected auto, measured or one of {sorted(BUILTIN)}, got {name!r}."
            )
        costs = BUILTIN[chosen]
        note = f"built-in costs {chosen}, not measured; `hotrec calibrate` measures this machine"
    if costs.device != device:
        raise CostsError(
            f"costs {costs.name}: expected costs of {device}, got costs of {costs.device}. "
            f"Calibrate on {device}, or choose a built-in set with planner.costs."
        )
    return costs, note


def describe_scenario(
    config: Config,
    schema: Schema,
    histograms: Mapping[str, CountHistogram],
    num_samples: int,
    machine: Machine,
    costs: Costs,
    note: str | None,
    locality: Mapping[str, TableLocality] | None = None,
    pipeline: PipelineSpec = SPARSE_DIST,
) -> Scenario:
    """Describes a configuration's scenario.

    Args:
        config: The configuration.
        schema: The dataset's tables and features.
        histograms: The profile's histogram of every table.
        num_samples: The number of samples that the profile counted.
        machine: Ranks, memory and batch.
        costs: Costs of the machine.
        note: Caveat about the costs, or None.
        locality: The profile's locality by table. Lookups of other tables are independent.
        pipeline: Pipeline of hot/cold placements.

    Raises:
        ValueError: If the profile lacks a table, or counted no sample.
    """
    missing = [table.name for table in schema.tables if table.name not in histograms]
    if missing or num_samples < 1:
        raise ValueError(
            f"profile: expected counts of the tables {[t.name for t in schema.tables]}, got none "
            f"of {missing or 'any: it counted no sample'}. Make the profile again from this "
            "dataset."
        )
    placement = config.placement
    is_routed_by_loader = (
        isinstance(placement, HotColdConfig)
        and placement.routing is Routing.loader
        and config.trainer.num_workers > 0
    )
    dense = dense_flops(config.model, len(schema.dense), len(schema.features))
    bytes_of_row = row_bytes(schema, config)
    demands = []
    for table in schema.tables:
        histogram = histograms[table.name]
        per_sample = histogram.num_lookups / num_samples
        demands.append(
            build_demand(
                table.name,
                histogram,
                dim=config.model.embedding_dim,
                row_bytes=bytes_of_row[table.name],
                lookups_per_sample=per_sample,
                num_columns=len(schema.features_of(table.name)),
                batch_size=machine.batch_size,
                world_size=machine.world_size,
                num_draws=step_draws(
                    histogram,
                    (locality or {}).get(table.name),
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
        workload=Workload(
            batch_size=machine.batch_size,
            dense_flops=dense.flops,
            bottom_frac=dense.bottom_frac,
            num_dense_values=dense.num_dense_values,
            is_routed_by_loader=is_routed_by_loader,
        ),
        demands=tuple(demands),
        machine=machine,
        pipeline=pipeline,
    )


def resized(
    machine: Machine, costs: Costs, *, world_factor: float = 1, batch_factor: float = 1
) -> Machine:
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
