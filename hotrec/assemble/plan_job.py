"""Requests to the planner and situations to predict, made of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hotrec.assemble.job import Job, torchrec_tables_of
from hotrec.assemble.policies import ColdRows, choose_hot
from hotrec.assemble.replay import SlotReplay
from hotrec.config.groups import CostPlacement, OrderKind, ScarsPlacement, TieredConfig
from hotrec.cost_model.costs import Costs
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.profile import Profile
from hotrec.cost_model.reuse import TableReuse
from hotrec.cost_model.step import Workload
from hotrec.embedding.fused import can_update_tables
from hotrec.models.plain import Architecture
from hotrec.models.shape import work_of
from hotrec.planner.counted import num_overridden
from hotrec.planner.machine import Machine
from hotrec.planner.plan import TorchrecTables
from hotrec.planner.policies import choose_popular_rows
from hotrec.planner.request import ByCost, GivenTables, PlanRequest, SlotRequest
from hotrec.planner.situation import (
    Situation,
    TableShape,
    build_situation,
    choose_costs,
)
from hotrec.runtime.cores import choose_workers
from hotrec.runtime.memory import MIB, read_fingerprint
from hotrec.types import Partition, Placement, PopularRows, RowFetch, Schema, TableOutput


def costs_on(job: Job, machine: Machine) -> tuple[Costs, str | None]:
    """The costs, and a caveat about them or None; see ``choose_costs``."""
    config = job.config
    fingerprint = read_fingerprint(machine.device)
    return choose_costs(config.planner.costs, Path(config.paths.costs), machine, fingerprint)


def make_request(
    job: Job, machine: Machine, profile: Profile, saved: Placement | None = None
) -> PlanRequest:
    """The request to the planner.

    Args:
        job: The job.
        machine: The ranks to plan for.
        profile: The profile.
        saved: The saved partition, if the run trains one.

    Raises:
        ValueError: If the policy cannot be satisfied.
    """
    placement = job.config.placement
    if (theirs := torchrec_tables_of(placement)) is not None:
        return request_for(job, theirs)
    if isinstance(placement, CostPlacement):
        budget = placement.hot_budget_mib
        num_rows = {table.name: table.num_rows for table in job.spec.schema.tables}
        by_cost = ByCost(
            hot_budget_bytes=None if budget is None else budget * MIB,
            may_pool=placement.may_pool
            and can_update_tables(job.spec.embedding.kind, machine.device),
            may_decline=placement.may_decline,
            fixed_hot=num_overridden(placement.overrides, num_rows),
        )
        return request_for(job, by_cost)
    return request_for(job, _given_tables(job, machine, profile, saved))


def request_for(job: Job, tables: ByCost | GivenTables | TorchrecTables) -> PlanRequest:
    """The request to the planner for these tables."""
    return PlanRequest(
        tables,
        job.pipeline,
        num_workers=job.order.num_workers,
        name=job.config.placement.kind.name,
        is_routed_by_loader=job.routes_in_loader,
    )


def _given_tables(
    job: Job, machine: Machine, profile: Profile, saved: Placement | None
) -> GivenTables:
    """The split of the policy or the saved one, and how its slots are chosen."""
    placement, world_size, place = job.config.placement, machine.world_size, None
    is_fetch_open = False
    if saved is not None:
        placed = saved
    else:
        assert isinstance(placement, TieredConfig), placement
        rows, dim = job.spec.row_bytes, job.spec.architecture.embedding_dim
        costs = costs_on(job, machine)[0] if isinstance(placement, ScarsPlacement) else None
        partition = choose_hot(placement, profile, machine, rows, dim, costs)
        cold = ColdRows(
            placement.cold_tier,
            placement.cache_load_frac,
            placement.cold_rows,
            placement.row_fetch,
        )
        popular = partial(_popular, job, partition, profile, world_size)
        placed = cold.place(partition, machine.device, popular)
        is_fetch_open = cold.row_fetch is RowFetch.auto
        if cold.cache_load_frac is None:

            def place(load_frac: float) -> Placement:
                with_slots = replace(cold, cache_load_frac=load_frac)
                return with_slots.place(partition, machine.device, popular)

    given = GivenTables(placed)
    if not given.has_slots:
        return given
    read = partial(
        SlotReplay.read,
        job.order.on_one_rank(world_size),
        job.dataset,
        profile,
        placed.partition,
        job.pipeline,
    )
    slots = SlotRequest(
        samples_in_flight(job, world_size),
        lambda min_load_frac: read(min_load_frac=min_load_frac),
        place,
        is_fetch_open=is_fetch_open,
    )
    return replace(given, slots=slots)


def _popular(
    job: Job, partition: Partition, profile: Profile, world_size: int, load_frac: float
) -> dict[str, PopularRows]:
    return choose_popular_rows(
        partition,
        profile,
        load_frac=load_frac,
        global_batch_size=job.order.batch_size * world_size,
        world_size=world_size,
    )


def samples_in_flight(job: Job, world_size: int) -> int:
    """Maximum samples of all ranks whose rows look-ahead holds at once, also in evaluations."""
    trainer = job.config.trainer
    of_rank = max(trainer.batch_size, trainer.eval_batch_size if trainer.eval_splits else 0)
    return of_rank * world_size * job.pipeline.batches_in_slots


def loader_on(job: Job, machine: Machine, costs: Costs) -> tuple[int | None, float | None]:
    """The loader workers of a rank, and the cores of a host if they are in the costs."""
    cores = costs.facts.get("cores_per_host") or costs.host.get("num_cores")
    workers = job.order.num_workers
    if workers is None and cores:
        workers = choose_workers(machine.device, cores, machine.local_world_size)
    return workers, cores


def _reuse_of(job: Job, profile: Profile) -> Mapping[str, TableReuse]:
    """What batches share with those before in the order of this job; empty if not measured."""
    match job.order.kind:
        case OrderKind.time:
            return profile.reuse
        case OrderKind.shuffled:
            return profile.shuffled_reuse
        case OrderKind.all_hot:  # neither: batches of hot and of other rows alternate
            return {}


def situation_of(
    job: Job,
    machine: Machine,
    profile: Profile,
    histograms: Mapping[str, CountHistogram],
    costs: tuple[Costs, str | None],
) -> Situation:
    """The situation to predict.

    Args:
        job: The job.
        machine: The ranks.
        profile: The profile.
        histograms: Its histogram of every table.
        costs: The costs and a caveat about them, or None.

    Raises:
        ValueError: If the profile lacks a table, or counted no sample.
    """
    spec = job.spec
    # For other numbers of ranks, the workers that a run on that machine would have.
    workers, cores = loader_on(job, machine, costs[0])
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
            is_routed_by_loader=job.routes_in_loader and workers != 0,
        ),
        histograms,
        profile.num_samples,
        machine,
        costs,
        profile.locality,
        _reuse_of(job, profile),
    )
    loader = (workers, cores) if cores and workers is not None else None
    return replace(situation, loader=loader)


def policy_parameters(job: Job) -> dict[str, object]:
    """The configuration keys that only this policy uses; reports show them with its name."""
    shared = {item for item in TieredConfig.__dataclass_fields__ if item != "kind"}
    return {
        name: getattr(value, "name", value)
        for name, value in vars(job.config.placement).items()
        if name not in shared
    }


def trial_facts(job: Job) -> dict[str, Any]:
    """Facts that a step depends on besides the candidates and the machine."""
    config = job.config
    trainer, optimizer = config.trainer, config.optimizer
    return {
        "settings": [config.model, config.pipeline, config.placement],
        "optimizer": [optimizer.kind, optimizer.dense_kind],  # a step takes as long at any rate
        "trainer": [
            *(trainer.batch_size, trainer.precision, trainer.compile, trainer.num_workers),
            trainer.grad_clip_norm,
        ],
    }


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
