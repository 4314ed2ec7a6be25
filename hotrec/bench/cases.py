"""The cases of a benchmark: each a placement and a pipeline of the same code."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hotrec.assemble.job import architecture_of, optimizer_specs
from hotrec.assemble.machine import make_machine
from hotrec.assemble.model import ModelSpec
from hotrec.assemble.order import by_owner
from hotrec.assemble.plan_job import shapes_of
from hotrec.assemble.policies import ColdRows
from hotrec.assemble.trainable import Trainable, assemble
from hotrec.bench.machine import resident_bytes
from hotrec.bench.samples import ZipfTables, assigned_batches
from hotrec.config.groups import OrderAssign
from hotrec.config.roots import (
    HOT_COLD_CASES,
    BenchCase,
    BenchConfig,
    BenchRootConfig,
    BenchRouting,
    BenchVariant,
    HotRowsRule,
)
from hotrec.cost_model.costs import Costs
from hotrec.cost_model.forms import Workload
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.profile import Profile, Sampling
from hotrec.data.batch import Batch
from hotrec.models.shape import work_of
from hotrec.planner.machine import Machine
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.planner.policies import (
    choose_all_cold,
    choose_all_hot,
    choose_fraction,
    choose_min_accesses,
    choose_popular_rows,
)
from hotrec.planner.propose import split_of
from hotrec.planner.request import GivenTables, PlanRequest
from hotrec.planner.situation import Situation, build_situation
from hotrec.runtime.ranks import Ranks, barrier, broadcast_object
from hotrec.runtime.stages import StageClock
from hotrec.train.pipelines import Pipeline
from hotrec.types import (
    HotExchange,
    Partition,
    PipelineSpec,
    Placement,
    PopularRows,
    Rows,
    Schema,
    TorchrecPlan,
    WireType,
)

IN_LINE = PipelineSpec()


@dataclass(frozen=True)
class Case:
    """A plan to measure, as ``hotrec train`` would train it.

    Args:
        name: Its name.
        plan: The plan.
        placement: The hot rows of split tables and the place of the others; None for TorchRec's
            plans.
        assign: Which rank computes which sample.
    """

    name: str
    plan: Plan
    placement: Placement | None = None
    assign: OrderAssign = OrderAssign.as_read

    @property
    def partition(self) -> Partition | None:
        return None if self.placement is None else self.placement.partition

    @property
    def is_exact(self) -> bool:
        """Whether it must have the same losses as the other exact cases."""
        return self.plan.pipeline.wire is WireType.fp32


def split_case(
    name: str,
    placement: Placement,
    pipeline: PipelineSpec = IN_LINE,
    *,
    hot_exchange: HotExchange = HotExchange.auto,
    is_routed_by_loader: bool = False,
    assign: OrderAssign = OrderAssign.as_read,
) -> Case:
    """The case of a placement with hot and cold rows."""
    request = PlanRequest(
        GivenTables(placement),
        pipeline,
        hot_exchange=hot_exchange,
        is_routed_by_loader=is_routed_by_loader,
    )
    return Case(name, Plan(split_of(request, placement), pipeline), placement, assign)


def choose_hot_rows(bench: BenchConfig, counts: Mapping[str, Rows], world_size: int) -> Partition:
    """The hot rows of the case hot_cold."""
    if bench.hot_rows is HotRowsRule.break_even:
        return choose_min_accesses(
            counts,
            min_accesses_per_step=bench.min_accesses_per_step,
            global_batch_size=bench.batch_size * world_size,
            num_samples=bench.profile_samples,
        )
    total_rows = sum(bench.table_rows)
    if bench.num_hot_rows > total_rows:
        raise ValueError(
            f"bench.num_hot_rows: expected at most the tables' {total_rows} rows, got "
            f"{bench.num_hot_rows}."
        )
    chosen = choose_fraction(counts, hot_frac=bench.num_hot_rows / total_rows)
    return dataclasses.replace(chosen, policy=f"the {chosen.total_hot} most accessed rows")


def make_cases(
    bench: BenchConfig, counts: Mapping[str, Rows], world_size: int, device: str
) -> list[Case]:
    """The chosen cases, in the configuration's order."""
    variants = {name: bench.variants.get(name) for name in bench.cases}
    return [
        _make_case(
            name, variant or BenchVariant(BenchCase[name]), bench, counts, world_size, device
        )
        for name, variant in variants.items()
    ]


def _make_case(
    name: str,
    variant: BenchVariant,
    bench: BenchConfig,
    counts: Mapping[str, Rows],
    world_size: int,
    device: str,
) -> Case:
    pipeline = PipelineSpec(
        variant.pipeline or bench.pipeline,
        variant.wire,
        variant.depth,
        micro_batches=variant.micro_batches,
    )
    if variant.placement not in HOT_COLD_CASES:
        plan = TorchrecPlan[variant.placement.name]
        tables = TorchrecTables(plan, variant.tier, variant.cache_load_frac)
        return Case(name, Plan(tables, pipeline))
    partition = _hot_rows(variant, bench, counts, world_size)
    exchange = variant.hot_exchange or bench.hot_exchange

    def popular(load_frac: float) -> dict[str, PopularRows]:
        return choose_popular_rows(
            partition,
            Profile(bench.profile_samples, 0, bench.profile_samples, Sampling(), counts),
            load_frac=load_frac,
            global_batch_size=bench.batch_size * world_size,
            world_size=world_size,
        )

    cold = ColdRows(variant.tier, variant.cache_load_frac, exchange)
    placement = cold.place(partition, device, popular)
    return split_case(
        name,
        placement,
        pipeline,
        hot_exchange=exchange,
        is_routed_by_loader=bench.routing is BenchRouting.loader,
        assign=variant.assign,
    )


def _hot_rows(
    variant: BenchVariant, bench: BenchConfig, counts: Mapping[str, Rows], world_size: int
) -> Partition:
    if variant.placement is BenchCase.all_cold:
        return choose_all_cold(counts)
    if variant.placement is BenchCase.all_hot:
        return choose_all_hot(counts)
    if variant.num_hot_rows is not None:
        bench = dataclasses.replace(
            bench, hot_rows=HotRowsRule.top, num_hot_rows=variant.num_hot_rows
        )
    return choose_hot_rows(bench, counts, world_size)


def bench_model(config: BenchRootConfig, schema: Schema) -> ModelSpec:
    """What all cases train."""
    embedding, dense = optimizer_specs(config.optimizer)
    shape = architecture_of(config.model, schema)
    return ModelSpec(schema, shape, embedding, dense, seed=config.bench.seed)


def machine_of(config: BenchRootConfig, ranks: Ranks) -> Machine:
    """The machine of these ranks."""
    return make_machine(
        world_size=ranks.world_size,
        ranks_per_host=ranks.local_world_size,
        device=ranks.device.type,
        batch_size=config.bench.batch_size,
        hbm_gib=config.planner.hbm_gib,
        host_gib=config.planner.host_gib,
    )


@dataclass(frozen=True)
class Block:
    """Consecutive steps on one rank, with no communication in flight before and after them.

    If cases took turns step by step, what a pipeline leaves in flight when it returns from a step
    would run in another case's time. Times are seconds since the barrier at the block's start.
    """

    returned_s: Sequence[float]  # when the pipeline returned from each step
    ended_s: float  # when no rank had communication in flight any more
    num_skipped: int  # first steps, which refill the overlap and are not counted
    cpu_s: float  # CPU time of all threads of this process
    main_cpu_s: float  # CPU time of the main thread


def step_seconds(of_ranks: Sequence[Block]) -> np.ndarray:
    """Seconds of each counted step, float64 (counted steps,).

    A step lasts from the last rank's return from the previous step to the last rank's return from
    this one, so the steps add up to the block. The slowest rank's time of each step would not,
    because ranks do not wait for each other between steps.
    """
    returned = np.max([block.returned_s for block in of_ranks], axis=0)
    return np.diff(returned, prepend=0.0)[of_ranks[0].num_skipped :]


@dataclass
class Runner:
    """A case on this rank, and its measurements so far."""

    case: Case
    trainable: Trainable
    pipeline: Pipeline
    clock: StageClock  # stage times of the timed steps
    batches: Iterator[Batch]  # of the whole run, and some for the pipeline to hold ahead
    unrouted: Sequence[Batch]  # the same with their original ids
    memory_bytes: int = 0  # growth of this process by the model and its first step
    losses: list[torch.Tensor] = field(default_factory=list)  # of every step on this rank, ()
    blocks: dict[int, Block] = field(default_factory=dict)  # timed blocks by round
    sent_bytes: dict[str, int] = field(default_factory=dict)  # of the counted steps, by collective
    wire_bytes: int | None = None  # of these on the network interface; None without one
    counted: list[int] = field(default_factory=list)  # indices of the counted steps and batches

    def step(self) -> None:
        """One training step."""
        loss, _, _ = self.pipeline.progress(self.batches)
        self.losses.append(loss)

    def drain(self) -> None:
        """Wait until no rank has communication of this case in flight; collective.

        ``drain`` waits for the pipeline's own threads, and the barrier for collectives that are
        queued in the process group, such as the ids of TorchRec's next batch.
        """
        self.pipeline.drain()
        barrier()


def build_runner(
    config: BenchRootConfig,
    case: Case,
    schema: Schema,
    batches: Sequence[Batch],
    ranks: Ranks,
    samples: ZipfTables | None = None,
) -> Runner:
    """Build a case and run its first step; collective.

    ``samples`` is the source of ``batches``, this rank's as read; a case that assigns samples by
    owner needs it.
    """
    gc.collect()
    before = resident_bytes(ranks.device)
    # Free device memory differs between ranks, but all must plan the same.
    machine = broadcast_object(machine_of(config, ranks))
    spec, placed = bench_model(config, schema), case.placement
    trainable = assemble(spec, case.plan, placed, machine, ranks.device)
    pipeline = trainable.pipeline()
    if case.assign is OrderAssign.by_owner:
        assert placed is not None, case.name
        assert samples is not None, case.name
        batches = assigned_batches(
            samples,
            by_owner(schema, placed, trainable.sharding),
            len(batches),
            batch_size=config.bench.batch_size,
            ranks=ranks,
        )
    fed = list(batches)
    if (route := trainable.route) is not None:
        fed = [dataclasses.replace(batch, sparse=route(batch.sparse)) for batch in batches]
    if ranks.device.type == "cuda":
        # As a loader hands them over, of which routing has made new tensors.
        fed = [batch.pin_memory() for batch in fed]
    runner = Runner(case, trainable, pipeline, StageClock(ranks.device), iter(fed), batches)
    runner.step()
    runner.drain()
    gc.collect()
    runner.memory_bytes = resident_bytes(ranks.device) - before
    return runner


def bench_situation(
    config: BenchRootConfig,
    schema: Schema,
    histograms: Mapping[str, CountHistogram],
    num_samples: int,
    costs: Costs,
    ranks: Ranks,
) -> Situation:
    """What the cases are run in; see ``build_situation``."""
    machine, spec = machine_of(config, ranks), bench_model(config, schema)
    shapes = shapes_of(schema, config.model.embedding_dim, spec.row_bytes)
    work = work_of(spec.architecture)
    workload = Workload(
        batch_size=machine.batch_size,
        dense_flops=work.flops,
        bottom_frac=work.bottom_frac,
        num_dense_values=work.num_dense_values,
    )
    return build_situation(shapes, workload, histograms, num_samples, machine, (costs, None))
