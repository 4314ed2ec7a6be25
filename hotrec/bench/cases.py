"""The cases of a benchmark: each a placement and a pipeline of the same code."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import torch

from hotrec.bench.machine import resident_bytes
from hotrec.bench.samples import ZipfTables, assigned_batches
from hotrec.build import Sharded, build_sharded, by_owner
from hotrec.config.groups import (
    AllColdPlacement,
    AllHotPlacement,
    FractionPlacement,
    HotColdConfig,
    OrderAssign,
    PlacementConfig,
    Routing,
    ShuffledOrder,
    TorchrecPlacement,
)
from hotrec.config.roots import (
    HOT_COLD_CASES,
    BenchCase,
    BenchConfig,
    BenchRootConfig,
    BenchRouting,
    BenchVariant,
    Config,
    HotRowsRule,
    PipelineConfig,
    TrainerConfig,
)
from hotrec.cost_model.costs import Costs
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.profile import Profile, Sampling
from hotrec.data.batch import Batch
from hotrec.planning.machine import Machine
from hotrec.planning.policies import (
    choose_all_cold,
    choose_all_hot,
    choose_fraction,
    choose_min_accesses,
    choose_popular_rows,
)
from hotrec.planning.scenario import Scenario, describe_scenario
from hotrec.planning.unsharded import as_placement, make_machine
from hotrec.runtime.ranks import Ranks, barrier, broadcast_object
from hotrec.runtime.stages import StageClock
from hotrec.train.pipelines import Pipeline
from hotrec.types import (
    ColdTier,
    Partition,
    PipelineKind,
    PopularRows,
    Rows,
    Schema,
    TorchrecPlan,
    WireType,
)


@dataclass(frozen=True)
class Case:
    """A configuration to measure, as ``hotrec train`` would train it."""

    name: str
    placement: PlacementConfig
    partition: Partition | None  # hot rows; None for TorchRec's plans on unsplit tables
    pipeline: PipelineKind | None = None  # other than auto; None for ``bench.pipeline``
    wire: WireType = WireType.fp32  # type in which rows and gradients are sent
    depth: int = 1  # number of batches that look_ahead prefetches
    micro_batches: bool = False  # look_ahead first computes the samples whose rows have arrived
    assign: OrderAssign = OrderAssign.as_read  # which rank computes which sample
    popular_rows: Mapping[str, PopularRows] = field(default_factory=dict)  # that begin in slots

    @property
    def is_exact(self) -> bool:
        """Whether it must have the same losses as the other exact cases."""
        return self.wire is WireType.fp32


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


def make_cases(bench: BenchConfig, counts: Mapping[str, Rows], world_size: int) -> list[Case]:
    """The chosen cases, in the configuration's order."""
    cases = []
    for name in bench.cases:
        variant = bench.variants.get(name) or BenchVariant(BenchCase[name])
        placement, partition = _place(variant, bench, counts, world_size)
        pipeline = variant.pipeline or bench.pipeline
        same = {key: getattr(variant, key) for key in ("wire", "depth", "micro_batches", "assign")}
        popular = {}
        if variant.tier is ColdTier.cached and partition is not None:
            popular = choose_popular_rows(
                partition,
                Profile(bench.profile_samples, 0, bench.profile_samples, Sampling(), counts),
                load_frac=variant.cache_load_frac,
                global_batch_size=bench.batch_size * world_size,
                world_size=world_size,
            )
        cases.append(Case(name, placement, partition, pipeline, **same, popular_rows=popular))
    return cases


def _place(
    variant: BenchVariant, bench: BenchConfig, counts: Mapping[str, Rows], world_size: int
) -> tuple[PlacementConfig, Partition | None]:
    if variant.placement not in HOT_COLD_CASES:
        plan = TorchrecPlan[variant.placement.name]
        return TorchrecPlacement(
            plan=plan, tier=variant.tier, cache_load_frac=variant.cache_load_frac
        ), None
    shared: dict[str, Any] = {
        "cold_tier": variant.tier,
        "cache_load_frac": variant.cache_load_frac,
        "hot_exchange": variant.hot_exchange or bench.hot_exchange,
        "routing": Routing.loader if bench.routing is BenchRouting.loader else Routing.device,
    }
    if variant.placement is BenchCase.all_cold:
        return AllColdPlacement(**shared), choose_all_cold(counts)
    if variant.placement is BenchCase.all_hot:
        return AllHotPlacement(**shared), choose_all_hot(counts)
    if variant.num_hot_rows is not None:
        bench = dataclasses.replace(
            bench, hot_rows=HotRowsRule.top, num_hot_rows=variant.num_hot_rows
        )
    # The policy's own keys are not read: the partition is given.
    return FractionPlacement(**shared), choose_hot_rows(bench, counts, world_size)


def case_config(config: BenchRootConfig, case: Case) -> Config:
    """The configuration with which ``hotrec train`` would train the case."""
    return Config(
        dataset_name=config.bench.name,
        run_name=case.name,
        model=config.model,
        placement=case.placement,
        optimizer=config.optimizer,
        planner=config.planner,
        pipeline=PipelineConfig(
            kind=case.pipeline or config.bench.pipeline,
            wire=case.wire,
            depth=case.depth,
            micro_batches=case.micro_batches,
        ),
        order=ShuffledOrder(assign=case.assign),
        trainer=TrainerConfig(batch_size=config.bench.batch_size, seed=config.bench.seed),
    )


def machine_of(config: BenchRootConfig, ranks: Ranks) -> Machine:
    """The machine of these ranks."""
    return make_machine(
        config.planner,
        world_size=ranks.world_size,
        ranks_per_host=ranks.local_world_size,
        device=ranks.device.type,
        batch_size=config.bench.batch_size,
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
    sharded: Sharded
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
    placed = None
    if case.partition is not None:
        assert isinstance(case.placement, HotColdConfig)
        device = ranks.device.type
        placed = as_placement(case.placement, case.partition, device, lambda _: case.popular_rows)
    sharded = build_sharded(case_config(config, case), schema, placed, machine, ranks.device)
    pipeline = sharded.make_pipeline(ranks.device)
    if case.assign is OrderAssign.by_owner:
        assert placed is not None, case.name
        assert samples is not None, case.name
        batches = assigned_batches(
            samples,
            by_owner(schema, placed, sharded.plan),
            len(batches),
            batch_size=config.bench.batch_size,
            ranks=ranks,
        )
    fed = list(batches)
    if isinstance(case.placement, HotColdConfig) and sharded.transform is not None:
        fed = [
            dataclasses.replace(batch, sparse=route(batch.sparse))
            for batch, route in zip(batches, repeat(sharded.transform))
        ]
    if ranks.device.type == "cuda":
        # As a loader hands them over, of which routing has made new tensors.
        fed = [batch.pin_memory() for batch in fed]
    runner = Runner(case, sharded, pipeline, StageClock(ranks.device), iter(fed), batches)
    runner.step()
    runner.drain()
    gc.collect()
    runner.memory_bytes = resident_bytes(ranks.device) - before
    return runner


def case_scenario(
    config: BenchRootConfig,
    case: Case,
    schema: Schema,
    histograms: Mapping[str, CountHistogram],
    num_samples: int,
    costs: Costs,
    ranks: Ranks,
) -> Scenario:
    """The scenario in which the case is run; see ``describe_scenario``."""
    machine, trained = machine_of(config, ranks), case_config(config, case)
    return describe_scenario(
        trained,
        schema,
        histograms,
        num_samples,
        machine,
        costs,
    )
