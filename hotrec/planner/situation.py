"""Inputs of a prediction besides the plan: machine, tables, workload, costs, loader."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotrec.cost_model.builtin import BUILTIN, NEAREST_BUILTIN
from hotrec.cost_model.costs import Costs, CostsError, World
from hotrec.cost_model.demand import Floats, TableDemand, build_demand
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.locality import (
    TableLocality,
    effective_draws,
    step_draws,
)
from hotrec.cost_model.reuse import (
    TableReuse,
    excess_reuse,
    read_again,
)
from hotrec.cost_model.step import StepPrediction, Workload, with_loader
from hotrec.cost_model.store import check_host, fit_to_world, read_costs
from hotrec.planner.machine import DEVICE_RESERVED_FRAC, HOST_RESERVED_FRAC, Machine
from hotrec.types import TableOutput


@dataclass(frozen=True)
class Situation:
    """Everything that a prediction depends on except the plan.

    Args:
        machine: The ranks.
        demands: The demand of a step on each table, in the schema's order.
        workload: The batch and the dense layers.
        costs: The costs of the machine.
        note: Caveat about the costs for the user, or None.
        loader: Loader workers of a rank, and the cores of a host that they share with the ranks;
            None if batches are made beforehand, as in a benchmark.
    """

    machine: Machine
    demands: tuple[TableDemand, ...]
    workload: Workload
    costs: Costs
    note: str | None = None
    loader: tuple[int, float] | None = None

    @property
    def world(self) -> World:
        return self.machine.world

    @property
    def memory_bytes(self) -> tuple[float, float]:
        """Device and host memory available to a rank; no device memory on CPU."""
        machine = self.machine
        device = (1 - DEVICE_RESERVED_FRAC) * machine.device_bytes
        host = (1 - HOST_RESERVED_FRAC) * machine.host_bytes / machine.local_world_size
        return (device if machine.device == "cuda" else 0.0), host

    def beside_loader(self, step: StepPrediction, *, is_routed: bool) -> StepPrediction:
        """Returns a step with the loader's time, on cores that ranks and workers share.

        ``is_routed`` is whether ids are routed at all, possibly by the loader's workers.
        """
        if self.loader is None:
            return step
        batch = self.workload.batch_size
        is_routed_there = is_routed and self.workload.is_routed_by_loader
        lookups = sum(d.lookups_per_sample for d in self.demands) if is_routed_there else 0.0
        num_workers, cores = self.loader
        measured_ranks = self.costs.facts.get("ranks_per_host", 1)
        return with_loader(
            step,
            loader_s=self.costs.loader_s(batch, batch * lookups, num_workers) or (0.0, 0.0),
            num_workers=num_workers,
            ranks_per_host=self.machine.local_world_size,
            # Computation on a GPU uses none of the workers' cores.
            cores_per_host=cores if self.costs.device == "cpu" else math.inf,
            overlap=self.costs.overlap,
            slowdown=max(1.0, measured_ranks / cores),
        )

    @property
    def global_batch_size(self) -> int:
        return self.workload.batch_size * self.world.num_ranks


def choose_costs(
    name: str, path: Path, machine: Machine, fingerprint: Mapping[str, Any]
) -> tuple[Costs, str | None]:
    """Returns the costs selected by ``planner.costs``, and a caveat about them or None.

    Args:
        name: "measured" (those at ``path``), a built-in set, or "auto" (measured if there are any
            for this kind of device, else the nearest built-in set).
        path: Where `hotrec calibrate` writes.
        machine: The ranks to predict for.
        fingerprint: Of this host (``hotrec.runtime.memory``).

    The caveat lists what is unmeasured, from another host, extrapolated to the machine's ranks or
    batch, or untrusted. Costs of one host get a built-in link for several. Ranks of hosts that are
    not alike share the link (``Machine.ranks_per_link``).

    Raises:
        ArtifactError: If measured costs are configured, but missing or altered.
        CostsError: If they are invalid, of another kind of device, or the name is unknown.
    """
    device = machine.device
    is_there = name == "measured" or (name == "auto" and path.exists())
    costs = read_costs(path) if is_there else None
    if costs is not None and (name == "measured" or costs.device == device):
        notes = [check_host(costs, fingerprint), costs.caveat]
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
    costs, of_world = fit_to_world(costs, machine.world, machine.batch_size)
    if machine.ranks_per_link > 1 and costs.inter is not None:
        rate = costs.inter.bytes_per_s / machine.ranks_per_link
        # A curve of hosts of one rank has the link for itself.
        costs = dataclasses.replace(
            costs, inter=dataclasses.replace(costs.inter, bytes_per_s=rate), curves=()
        )
        of_world.append(
            f"predicted {machine.irregular or 'in one level'}: an upper bound, as if each rank had "
            f"a host of its own and 1/{machine.ranks_per_link} of a link"
        )
    return costs, "; ".join(note for note in (*notes, *of_world) if note) or None


@dataclass(frozen=True)
class TableShape:
    """Properties of a table, besides its lookups, that a prediction needs.

    Args:
        name: Name of the table.
        dim: Embedding dimension D.
        row_bytes: Bytes of a row with its optimizer state.
        num_columns: Features that read the table.
        output: What the table's collection returns for its ids.
    """

    name: str
    dim: int
    row_bytes: int
    num_columns: int
    output: TableOutput = TableOutput.pooled


def build_situation(
    shapes: Sequence[TableShape],
    workload: Workload,
    histograms: Mapping[str, CountHistogram],
    num_samples: int,
    machine: Machine,
    costs: tuple[Costs, str | None],
    locality: Mapping[str, TableLocality] | None = None,
    reuse: Mapping[str, TableReuse] | None = None,
) -> Situation:
    """Builds the situation of a model with these tables.

    Args:
        shapes: The tables.
        workload: The batch and the dense layers.
        histograms: The profile's histogram of every table.
        num_samples: The number of samples that the profile counted.
        machine: The ranks.
        costs: The costs and a caveat about them, or None (``choose_costs``).
        locality: The profile's locality by table. Lookups of other tables are independent.
        reuse: The profile's reuse by table. Steps that read other tables are independent.

    Raises:
        ValueError: If the profile lacks a table, or counted no sample.
    """
    names = [shape.name for shape in shapes]
    missing = [name for name in names if name not in histograms]
    if missing or num_samples < 1:
        raise ValueError(
            f"profile: expected counts of the tables {names}, got none of "
            f"{missing or 'any: it counted no sample'}. Recreate the profile from this dataset."
        )
    demands = []
    for shape in shapes:
        histogram = histograms[shape.name]
        per_sample = histogram.num_lookups / num_samples
        of_table = (locality or {}).get(shape.name)
        demand = build_demand(
            shape.name,
            histogram,
            dim=shape.dim,
            row_bytes=shape.row_bytes,
            lookups_per_sample=per_sample,
            num_columns=shape.num_columns,
            batch_size=machine.batch_size,
            world=machine.world,
            num_draws=step_draws(
                histogram,
                of_table,
                batch_size=machine.batch_size,
                world_size=machine.world_size,
                lookups_per_sample=per_sample,
            ),
        )
        demand = dataclasses.replace(demand, output=shape.output)
        if reuse and (measured := reuse.get(shape.name)) is not None:
            num_draws = effective_draws(histogram, of_table, measured.batch_size, per_sample)
            num_before = measured.num_between(machine.batch_size, machine.world_size)
            excess = excess_reuse(histogram, num_draws, measured, num_before)
            demand = _with_reuse(demand, excess)
        demands.append(demand)
    return Situation(machine, tuple(demands), workload, *costs)


def _with_reuse(demand: TableDemand, excess: float) -> TableDemand:
    def again(probs_G: Floats | None, both_G: Floats | None) -> Floats | None:
        if probs_G is None or both_G is None:
            return None
        return read_again(probs_G, both_G, excess)

    return dataclasses.replace(
        demand,
        by_both_G=again(demand.by_rank_G, demand.by_both_G),
        by_host_both_G=again(demand.by_host_G, demand.by_host_both_G),
    )
