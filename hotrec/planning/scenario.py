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
from hotrec.runtime.fingerprint import read_fingerprint
from hotrec.types import Schema

# For planning without measured costs: what a device most probably stands in.
NEAREST_BUILTIN = {"cpu": "cpu_1gbit", "cuda": "dgx_h100_infiniband"}


@dataclass(frozen=True)
class Scenario:
    """Everything that a prediction depends on but the placement.

    Args:
        costs: of the machine.
        note: what the reader must know about them, or None.
        world: ranks and hosts.
        workload: batch and dense layers.
        demands: of every table, in the schema's order.
        machine: for TorchRec's planner.
        pipeline: of hot and cold rows.
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
        """The step, measured collectives as they are at the message sizes of ``at``."""
        return make_model(
            self.costs,
            self.world,
            self.workload,
            pipeline=self.pipeline,
            is_hot_dense=is_hot_dense,
            at=at,
        )

    def torchrec_model(self, at: Mapping[str, float]) -> StepModel:
        """The step of unsplit tables, which TorchRec's own pipelines train."""
        return make_torchrec_model(
            self.costs, self.world, self.workload, pipeline=self.pipeline, at=at
        )

    @property
    def memory_bytes(self) -> tuple[float, float]:
        """Device and host memory that a rank may fill; on CPU there is but the host's."""
        machine = self.machine
        device = (1 - DEVICE_RESERVED_FRAC) * machine.device_bytes
        host = (1 - HOST_RESERVED_FRAC) * machine.host_bytes / machine.local_world_size
        return (device if machine.device == "cuda" else 0.0), host


def planned_pipeline(config: Config, machine: Machine) -> PipelineSpec:
    """The pipeline that trains the configuration's placement.

    Raises:
        ValueError: if the configured one cannot.
    """
    pipeline = config.pipeline
    kind = choose_pipeline(config, machine)
    return PipelineSpec(kind, pipeline.wire.value, pipeline.depth)


def choose_costs(config: Config, device: str) -> tuple[Costs, str | None]:
    """The costs that ``planner.costs`` names, and a note on where they come from.

    Raises:
        ArtifactError: if measured ones are asked for and missing or altered.
        CostsError: if they are impossible, of another kind of device, or the name is unknown.
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
    """What predictions are for.

    Args:
        histograms: of every table, from the profile.
        num_samples: that the profile counted.
        machine: ranks, memory and batch.
        locality: of every table, from the profile; lookups of tables without one are taken as
            independent.
        pipeline: to predict for hot and cold rows.

    Raises:
        ValueError: if the profile lacks a table, or counted no sample.
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
    """The machine with more or fewer ranks, or another batch per rank.

    Ranks are added as hosts of the same kind, or to the one host where the costs know of no link
    between hosts. A world that would be smaller than a host is a host with fewer ranks.
    """
    world_size = max(1, round(machine.world_size * world_factor))
    local = world_size if costs.inter is None else min(machine.local_world_size, world_size)
    return dataclasses.replace(
        machine,
        world_size=world_size,
        local_world_size=local if world_size % local == 0 else 1,
        batch_size=max(1, round(machine.batch_size * batch_factor)),
    )
