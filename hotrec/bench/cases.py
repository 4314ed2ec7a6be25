"""The cases: a placement and a pipeline each; all configurations of the same code."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch

from hotrec.bench.blocks import Block
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
from hotrec.data.batch import Batch
from hotrec.planning.machine import Machine
from hotrec.planning.policies import (
    choose_all_cold,
    choose_all_hot,
    choose_fraction,
    choose_min_accesses,
)
from hotrec.planning.scenario import Scenario, describe_scenario, planned_pipeline
from hotrec.planning.unsharded import as_placement, make_machine
from hotrec.runtime.ranks import Ranks, barrier, broadcast_object
from hotrec.runtime.stages import StageClock
from hotrec.train.pipelines import Pipeline
from hotrec.types import Partition, PipelineKind, Rows, Schema, TorchrecPlan, WireType

logger = logging.getLogger("hotrec.bench")


@dataclass(frozen=True)
class Case:
    """A configuration to be measured.

    Args:
        name: in the results.
        placement: as ``hotrec train`` takes it.
        partition: None for TorchRec's plans on unsplit tables.
        pipeline: how its steps overlap; None for ``bench.pipeline``.
        wire: type in which rows and gradients travel.
        depth: batches whose rows travel ahead, of look_ahead.
        micro_batches: compute the samples first whose rows are here, of look_ahead.
        assign: which rank computes which sample of the same global batches.
    """

    name: str
    placement: PlacementConfig
    partition: Partition | None
    pipeline: PipelineKind | None = None
    wire: WireType = WireType.fp32
    depth: int = 1
    micro_batches: bool = False
    assign: OrderAssign = OrderAssign.as_read

    @property
    def is_exact(self) -> bool:
        """Whether its losses are those of the model that all exact cases train."""
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
    return dataclasses.replace(chosen, policy=f"the {chosen.total_hot} most looked-up rows")


def make_cases(bench: BenchConfig, counts: Mapping[str, Rows], world_size: int) -> list[Case]:
    """The chosen cases, in the configuration's order."""
    cases = []
    for name in bench.cases:
        variant = bench.variants.get(name) or BenchVariant(BenchCase[name])
        placement, partition = _place(variant, bench, counts, world_size)
        cases.append(
            Case(
                name,
                placement,
                partition,
                variant.pipeline or bench.pipeline,
                variant.wire,
                variant.depth,
                variant.micro_batches,
                variant.assign,
            )
        )
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


@dataclass
class Runner:
    """A case under way on this rank: what it runs with, and what was measured so far.

    Args:
        case: what it is.
        sharded: model, optimizer, plan.
        pipeline: of the model.
        clock: of the counted steps' stages.
        batches: of the whole run, in order, and some that the pipeline may hold ahead.
        unrouted: the same, with the ids as they were drawn.
        memory_bytes: growth of this process while the model was built and made its first step.
        losses: this rank's loss () of every step.
        blocks: the timed ones, by round.
        sent_bytes: of the steps whose bytes were counted, together, by collective.
        wire_bytes: of the same steps, as the network interface counts; None without one.
        counted: numbers of those steps, which are those of their batches.
    """

    case: Case
    sharded: Sharded
    pipeline: Pipeline
    clock: StageClock
    batches: Iterator[Batch]
    unrouted: Sequence[Batch]
    memory_bytes: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    wire_bytes: int | None = None
    counted: list[int] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Steps made so far."""
        return len(self.losses)

    def step(self) -> None:
        """One training step."""
        loss, _, _ = self.pipeline.progress(self.batches)
        self.losses.append(loss)

    def drain(self) -> None:
        """Wait until nothing of this case is under way on any rank; collective.

        What pipelines do in threads of their own ``settle`` waits for; what the process group has
        been given, such as the ids of TorchRec's next batch, its barrier waits for.
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
    """Build a case and make its first step; collective.

    Args:
        batches: of this rank, as read.
        samples: what they were drawn from; only a case that assigns samples needs it.
    """
    start = time.perf_counter()
    gc.collect()
    before = resident_bytes(ranks.device)
    # What is free of a device differs a little between ranks; they must plan alike.
    machine = broadcast_object(machine_of(config, ranks))
    placed = None
    if case.partition is not None:
        assert isinstance(case.placement, HotColdConfig)
        placed = as_placement(case.placement, case.partition, ranks.device.type)
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
    runner = Runner(case, sharded, pipeline, StageClock(ranks.device), iter(fed), batches)
    runner.step()
    runner.drain()
    gc.collect()
    runner.memory_bytes = resident_bytes(ranks.device) - before
    if ranks.is_first:
        logger.info("built %s in %.1f s", case.name, time.perf_counter() - start)
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
        None,
        pipeline=planned_pipeline(trained, machine),
    )
