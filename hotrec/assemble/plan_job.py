"""The planner's inputs from a job, and the requests and situations made of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hotrec.assemble.model import ModelSpec
from hotrec.assemble.order import TrainingOrder
from hotrec.assemble.policies import ColdRows, Policy, PolicyInputs
from hotrec.assemble.replay import SlotReplay
from hotrec.config.groups import OrderKind
from hotrec.cost_model.costs import Costs
from hotrec.cost_model.forms import Workload
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.profile import Profile
from hotrec.cost_model.reuse import TableReuse
from hotrec.data.chunks import Dataset
from hotrec.models.plain import Architecture
from hotrec.models.shape import work_of
from hotrec.planner.machine import Machine
from hotrec.planner.plan import TorchrecTables
from hotrec.planner.policies import choose_popular_rows
from hotrec.planner.request import ByCost, GivenTables, PlanRequest, SlotRequest
from hotrec.planner.situation import (
    LoaderWorkers,
    Situation,
    TableShape,
    build_situation,
    choose_costs,
)
from hotrec.runtime.cores import choose_workers
from hotrec.runtime.memory import read_fingerprint
from hotrec.types import (
    Partition,
    PipelineSpec,
    Placement,
    PopularRows,
    RowFetch,
    Schema,
    TableOutput,
)


@dataclass(frozen=True)
class PolicySplit:
    """A split whose hot rows a policy chooses.

    Args:
        policy: Chooses the hot rows.
        cold: Memory of the cold rows.
    """

    policy: Policy
    cold: ColdRows


@dataclass(frozen=True)
class SavedSplit:
    """A saved split with its placement.

    Args:
        directory: Its directory.
    """

    directory: Path


@dataclass(frozen=True)
class PlanJob:
    """The planner's inputs from a job.

    Args:
        name: The placement as the user configured it, for messages.
        spec: The model and its training rules.
        tables: The placement of the tables, or the allowed choices.
        pipeline: The pipeline; its kind may be auto.
        order: The order of training samples.
        eval_batch_size: Samples of a rank's batch in evaluations of splits; 0 without any.
        routes_in_loader: Whether loader workers split ids.
        costs: Name of the costs to predict with.
        folders: Directories of the measured "costs", of the "profile" and of the "trials".
        parameters: Settings of the policy, which reports show with a new partition.
        trial_facts: Facts that a step depends on besides the candidates and the machine.
        spread: Tables whose rows are spread over their owners; None for those of a saved partition.
    """

    name: str
    spec: ModelSpec
    tables: ByCost | PolicySplit | SavedSplit | TorchrecTables
    pipeline: PipelineSpec
    order: TrainingOrder
    eval_batch_size: int
    routes_in_loader: bool
    costs: str
    folders: Mapping[str, Path]
    parameters: Mapping[str, object] = field(default_factory=dict)
    trial_facts: Mapping[str, Any] = field(default_factory=dict)
    spread: Collection[str] | None = ()

    def costs_on(self, machine: Machine) -> tuple[Costs, str | None]:
        """The costs, and a caveat about them or None; see ``choose_costs``."""
        fingerprint = read_fingerprint(machine.device)
        return choose_costs(self.costs, self.folders["costs"], machine, fingerprint)

    def request(
        self,
        dataset: Dataset,
        machine: Machine,
        profile: Profile | None,
        saved: Placement | None = None,
    ) -> PlanRequest:
        """The request to the planner.

        Args:
            dataset: The dataset.
            machine: The ranks to plan for.
            profile: The profile; None is enough for a saved partition and for TorchRec's plans.
            saved: The saved partition, if the run trains one.

        Raises:
            ValueError: If the policy cannot be satisfied.
        """
        tables = self.tables
        if isinstance(tables, PolicySplit | SavedSplit):
            return self.request_for(self._given_tables(dataset, machine, profile, saved))
        return self.request_for(tables)

    def request_for(self, tables: ByCost | GivenTables | TorchrecTables) -> PlanRequest:
        """The request to the planner for these tables."""
        return PlanRequest(
            tables,
            self.pipeline,
            num_workers=self.order.num_workers,
            name=self.name,
            is_routed_by_loader=self.routes_in_loader,
        )

    def _given_tables(
        self,
        dataset: Dataset,
        machine: Machine,
        profile: Profile | None,
        saved: Placement | None,
    ) -> GivenTables:
        """The split of the policy or the saved one, and how its slots are chosen."""
        cold = self.tables.cold if isinstance(self.tables, PolicySplit) else None
        placed = saved
        if placed is None:
            assert profile is not None, self.name
            assert isinstance(self.tables, PolicySplit), self.name
            policy, on = self.tables.policy, machine
            if policy.needs_costs:
                on = replace(machine, costs=self.costs_on(machine)[0])
            dim = self.spec.architecture.embedding_dim
            partition = policy.partition(PolicyInputs(profile, on, self.spec.row_bytes, dim))
            placed = self._place(self.tables.cold, partition, machine, profile)
        elif self.spread is not None:
            placed = placed.spread(self.spread)
        given = GivenTables(placed)
        if not given.has_slots or profile is None:
            return given
        place = None
        if cold is not None and cold.cache_load_frac is None:

            def place(load_frac: float) -> Placement:
                with_slots = replace(cold, cache_load_frac=load_frac)
                return self._place(with_slots, placed.partition, machine, profile)

        read = partial(
            SlotReplay.read,
            self.order.on_one_rank(machine.world_size),
            dataset,
            profile,
            placed.partition,
            self.pipeline,
        )
        return replace(
            given,
            slots=SlotRequest(
                self.samples_in_flight(machine.world_size),
                lambda min_load_frac: read(min_load_frac=min_load_frac),
                place,
                is_fetch_open=cold is not None and cold.row_fetch is RowFetch.auto,
            ),
        )

    def _place(
        self, cold: ColdRows, partition: Partition, machine: Machine, profile: Profile
    ) -> Placement:
        spread = self.spread or ()

        def popular(load_frac: float) -> dict[str, PopularRows]:
            return choose_popular_rows(
                partition,
                profile,
                load_frac=load_frac,
                global_batch_size=self.order.batch_size * machine.world_size,
                world_size=machine.world_size,
                spread=spread,
            )

        return cold.place(partition, machine.device, popular).spread(spread)

    def samples_in_flight(self, world_size: int) -> int:
        """Maximum samples of all ranks whose rows look-ahead holds at once, also in evaluations."""
        of_rank = max(self.order.batch_size, self.eval_batch_size)
        return of_rank * world_size * self.pipeline.batches_in_slots

    def loader_on(self, machine: Machine, costs: Costs) -> tuple[int | None, float | None]:
        """The loader workers of a rank, and the cores of a host if they are in the costs."""
        cores = costs.facts.get("cores_per_host") or costs.host.get("num_cores")
        workers = self.order.num_workers
        if workers is None and cores:
            workers = choose_workers(machine.device, cores, machine.local_world_size)
        return workers, cores

    def reuse_of(self, profile: Profile) -> Mapping[str, TableReuse]:
        """What batches share with those before in the order of this job; empty if not measured."""
        match self.order.kind:
            case OrderKind.time:
                return profile.reuse
            case OrderKind.shuffled:
                return profile.shuffled_reuse
            case OrderKind.all_hot:  # neither: batches of hot and of other rows alternate
                return {}

    def situation(
        self,
        machine: Machine,
        profile: Profile,
        histograms: Mapping[str, CountHistogram],
        costs: tuple[Costs, str | None],
    ) -> Situation:
        """The situation to predict.

        Args:
            machine: The ranks.
            profile: The profile.
            histograms: Its histogram of every table.
            costs: The costs and a caveat about them, or None.

        Raises:
            ValueError: If the profile lacks a table, or counted no sample.
        """
        spec = self.spec
        # For other numbers of ranks, the workers that a run on that machine would have.
        workers, cores = self.loader_on(machine, costs[0])
        work = work_of(
            spec.architecture,
            {
                table: float(profile.counts[table].sum())
                / max(1, profile.num_samples * len(spec.schema.features_of(table)))
                for table in profile.counts
            },
        )
        situation = build_situation(
            shapes_of(spec.schema, spec.architecture, spec.row_bytes),
            Workload(
                batch_size=machine.batch_size,
                dense_flops=work.flops,
                bottom_frac=work.bottom_frac,
                num_dense_values=work.num_dense_values,
                is_routed_by_loader=self.routes_in_loader and workers != 0,
            ),
            histograms,
            profile.num_samples,
            machine,
            costs,
            profile.locality,
            self.reuse_of(profile),
        )
        return replace(
            situation,
            loader=LoaderWorkers(workers, cores) if cores and workers is not None else None,
        )


def shapes_of(
    schema: Schema, architecture: Architecture, bytes_of_row: Mapping[str, int]
) -> list[TableShape]:
    """The shapes of a dataset's tables in a model, in the schema's order."""
    is_expanded = architecture.reads_sequences
    return [
        TableShape(
            name=table.name,
            dim=architecture.embedding_dim,
            row_bytes=bytes_of_row[table.name],
            num_columns=len(schema.features_of(table.name)),
            output=TableOutput.expanded if is_expanded else TableOutput.pooled,
        )
        for table in schema.tables
    ]
