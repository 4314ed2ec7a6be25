"""The cases: hot/cold in three forms, and TorchRec's plans; all configurations of the same code."""

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

from hotrec.batch import Batch
from hotrec.cli.assemble import Sharded, as_placement, build_sharded, make_machine
from hotrec.cli.bench.machine import resident_bytes
from hotrec.cli.schema import (
    AllColdPlacement,
    AllHotPlacement,
    BenchCase,
    BenchConfig,
    BenchRootConfig,
    BenchRouting,
    Config,
    FractionPlacement,
    HotColdConfig,
    HotRowsRule,
    PlacementConfig,
    Routing,
    TorchrecPlacement,
    TorchrecPlan,
    TrainerConfig,
)
from hotrec.distributed import Ranks
from hotrec.placement.policies import (
    choose_all_cold,
    choose_all_hot,
    choose_fraction,
    choose_min_accesses,
)
from hotrec.train.pipeline import Pipeline, make_pipeline
from hotrec.types import Partition, Rows, Schema

logger = logging.getLogger("hotrec.bench")


@dataclass(frozen=True)
class Case:
    """A configuration to be measured.

    Args:
        name: in the results.
        placement: as ``hotrec train`` takes it.
        partition: None for TorchRec's plans on unsplit tables.
    """

    name: str
    placement: PlacementConfig
    partition: Partition | None


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
    routing = Routing.loader if bench.routing is BenchRouting.loader else Routing.device
    shared: dict[str, Any] = {"hot_exchange": bench.hot_exchange, "routing": routing}
    cases = []
    for case in bench.cases:
        placement: PlacementConfig
        partition: Partition | None = None
        match case:
            case BenchCase.hot_cold:
                # The policy's own keys are not read: the partition is given.
                placement = FractionPlacement(**shared)
                partition = choose_hot_rows(bench, counts, world_size)
            case BenchCase.all_cold:
                placement, partition = AllColdPlacement(**shared), choose_all_cold(counts)
            case BenchCase.all_hot:
                placement, partition = AllHotPlacement(**shared), choose_all_hot(counts)
            case _:
                placement = TorchrecPlacement(plan=TorchrecPlan[case.name])
        cases.append(Case(case.name, placement, partition))
    return cases


def case_config(config: BenchRootConfig, case: Case) -> Config:
    """The configuration with which ``hotrec train`` would train the case."""
    return Config(
        dataset_name=config.bench.name,
        run_name=case.name,
        model=config.model,
        placement=case.placement,
        optimizer=config.optimizer,
        planner=config.planner,
        trainer=TrainerConfig(batch_size=config.bench.batch_size, seed=config.bench.seed),
    )


@dataclass
class Runner:
    """A case under way on this rank: what it runs with, and what was measured so far.

    Args:
        case: what it is.
        sharded: model, optimizer, plan.
        pipeline: of the model.
        batches: of the whole run, in order, and some that the pipeline may hold ahead.
        memory_bytes: growth of this process while the model was built and made its first step.
        losses: this rank's loss () of every step.
        step_s: time of every timed step, by round.
        sent_bytes: of every counted step, by collective.
        wire_bytes: of every counted step, as the network interface counts.
        counted: numbers of the counted steps, which are those of their batches.
    """

    case: Case
    sharded: Sharded
    pipeline: Pipeline
    batches: Iterator[Batch]
    memory_bytes: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    step_s: dict[int, float] = field(default_factory=dict)
    sent_bytes: list[dict[str, int]] = field(default_factory=list)
    wire_bytes: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Steps made so far."""
        return len(self.losses)

    def step(self) -> None:
        """One training step."""
        loss, _, _ = self.pipeline.progress(self.batches)
        self.losses.append(loss)


def build_runner(
    config: BenchRootConfig,
    case: Case,
    schema: Schema,
    batches: Sequence[Batch],
    ranks: Ranks,
) -> Runner:
    """Build a case and make its first step; collective."""
    start = time.perf_counter()
    gc.collect()
    before = resident_bytes(ranks.device)
    machine = make_machine(
        config.planner,
        world_size=ranks.world_size,
        ranks_per_host=ranks.local_world_size,
        device=ranks.device.type,
        batch_size=config.bench.batch_size,
    )
    placed = None
    if case.partition is not None:
        assert isinstance(case.placement, HotColdConfig)
        placed = as_placement(case.placement, case.partition, ranks.device.type)
    sharded = build_sharded(case_config(config, case), schema, placed, machine, ranks.device)
    pipeline = make_pipeline(
        config.bench.pipeline.name, sharded.model, sharded.optimizer, ranks.device
    )
    fed = list(batches)
    if isinstance(case.placement, HotColdConfig) and sharded.transform is not None:
        fed = [
            dataclasses.replace(batch, sparse=route(batch.sparse))
            for batch, route in zip(batches, repeat(sharded.transform))
        ]
    runner = Runner(case, sharded, pipeline, iter(fed))
    runner.step()
    gc.collect()
    runner.memory_bytes = resident_bytes(ranks.device) - before
    if ranks.is_first:
        logger.info("built %s in %.1f s", case.name, time.perf_counter() - start)
    return runner
