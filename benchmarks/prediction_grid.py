"""Compares predicted and measured steps: calibrates the machine, then runs a grid of cells.

    benchmarks/prediction_grid.sh         creates the networks and runs this in each of them
    torchrun ... benchmarks/prediction_grid.py --network NAME --output FILE
    python benchmarks/prediction_grid.py --page DIRECTORY

A cell is a Zipf exponent and a batch size. In each cell the predicted plans are run in interleaved
blocks of steps, whose first two steps are not timed: the cost model's choice of hot and cold rows,
1,000 and 20,000 hot rows, all cold, the choice of TorchRec's planner, and TorchRec tuned by hand.
Costs come from `hotrec calibrate`'s own code, run in the same process group just before; nothing is
fitted to the cells. One JSON file per network and number of ranks; --page writes their page.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotrec.assemble.torchrec_plan import shardings_of
from hotrec.bench.cases import Case, build_runner, split_case
from hotrec.bench.figures import gather_measured, summarize
from hotrec.bench.job import make_subject, make_turns, subject_of
from hotrec.bench.machine import machine_facts
from hotrec.bench.measure import run_cases
from hotrec.bench.samples import ZipfTables, table_per_feature
from hotrec.calibrate.measure import measure_costs
from hotrec.calibrate.workload import CalibrationTarget
from hotrec.cli.output import quiet_torch
from hotrec.cli.store import build_config, compose_config
from hotrec.config.roots import CompareConfig
from hotrec.cost_model.histogram import CountHistogram, build_histogram
from hotrec.planner.partition import most_accessed
from hotrec.planner.plan import Plan, SplitTables, TorchrecTables
from hotrec.planner.policies import choose_all_cold, choose_fraction
from hotrec.planner.predict import Prediction, predict
from hotrec.planner.propose import fastest_split
from hotrec.planner.request import ByCost, PlanRequest
from hotrec.planner.situation import Situation
from hotrec.runtime.ranks import Ranks, broadcast_object, process_group
from hotrec.types import PipelineKind, PipelineSpec, Placement, TorchrecPlan

logger = logging.getLogger("prediction_grid")
HOT_COLD = "hot_cold"
EXPONENTS = (0.8, 1.05, 1.2)
BATCH_SIZES = (512, 2048)
# Those of conf/plans/criteo_like_b2048.yaml, the largest cut so that six plans fit side by side.
LARGEST_TABLE = 200_000
HOT_ROWS = (1_000, 20_000)
PROFILE_SAMPLES = 1_000_000
# Steps of a plan in a row, as in training, which finds its own rows in the cache; the first refill
# it and what overlaps.
BLOCK_STEPS, BLOCK_SKIP = 6, 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", help="the network of the ranks, for the page")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=8, help="timed steps of each plan")
    parser.add_argument(
        "--pipeline",
        choices=["sparse_dist", "look_ahead"],
        default="sparse_dist",
        help="of hot and cold rows; TorchRec's plans are run with sparse_dist",
    )
    parser.add_argument("--exponents", type=float, nargs="+", default=EXPONENTS)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--page", type=Path, help="directory of such files: write their page")
    return parser.parse_args()


def compose(num_timed: int) -> CompareConfig:
    words = [
        f"plans.rounds={-(-num_timed // (BLOCK_STEPS - BLOCK_SKIP))}",
        *(f"plans.block_steps={BLOCK_STEPS}", f"plans.block_skip={BLOCK_SKIP}"),
        *("plans.counted_steps=1", "plans.warmup_rounds=2"),
    ]
    composed = compose_config("compare", words)
    config: CompareConfig = build_config(composed)
    config.plans.table_rows = [min(rows, LARGEST_TABLE) for rows in config.plans.table_rows]
    return config


def run_grid(arguments: argparse.Namespace) -> None:
    config = compose(arguments.rounds)
    with process_group(device="cpu", timeout_s=600) as ranks:
        start = time.perf_counter()
        subject = make_subject(
            config.model,
            config.optimizer,
            table_per_feature(config.plans.table_rows, config.plans.num_dense),
            batch_size=max(arguments.batch_sizes),
            seed=1,
        )
        costs = measure_costs(ranks, CalibrationTarget(subject))
        calibrated_s = time.perf_counter() - start
        say(ranks, f"calibrated in {calibrated_s:.0f} s")
        cells = []
        for exponent in arguments.exponents:
            for batch_size in arguments.batch_sizes:
                config.plans.zipf_exponent, config.plans.batch_size = exponent, batch_size
                cells.append(run_cell(config, arguments.pipeline, costs, ranks))
                if ranks.is_first:
                    write(arguments, ranks, costs, cells, calibrated_s)


def write(
    arguments: argparse.Namespace, ranks: Ranks, costs: Any, cells: Any, seconds: float
) -> None:
    document = {
        "network": arguments.network,
        "num_ranks": ranks.world_size,
        "ranks_per_host": ranks.local_world_size,
        "pipeline": arguments.pipeline,
        "rounds": arguments.rounds,
        "block": [BLOCK_STEPS, BLOCK_SKIP],
        "calibrated_s": seconds,
        "costs": costs.to_json(),
        "machine": machine_facts(),
        "cells": cells,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")


def say(ranks: Ranks, text: str) -> None:
    if ranks.is_first:
        print(text, file=sys.stderr, flush=True)


def run_cell(config: CompareConfig, pipeline: str, costs: Any, ranks: Ranks) -> dict[str, Any]:
    bench = config.plans
    samples = ZipfTables(
        bench.table_rows, exponent=bench.zipf_exponent, num_dense=bench.num_dense, seed=bench.seed
    )
    counts = samples.count(PROFILE_SAMPLES)
    histograms = {table: build_histogram(c) for table, c in counts.items()}
    subject, turns = subject_of(config, samples.schema), make_turns(bench)
    situation = subject.situation(histograms, PROFILE_SAMPLES, costs, ranks)
    spec = PipelineSpec(PipelineKind[pipeline])
    cases = make_cases(spec, situation, counts, histograms)
    batches = samples.batches(
        turns.num_batches,
        batch_size=bench.batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    runners = [build_runner(subject, case, batches, ranks) for case in cases]
    predicted = dict[str, Prediction]()
    for runner in runners:
        sharding = broadcast_object(runner.trainable.sharding)
        shardings = None if runner.case.plan.is_hotrec else shardings_of(sharding, counts)
        predicted[runner.case.name] = predict(runner.case.plan, situation, shardings)
    run_cases(runners, turns, ranks)
    measured = summarize(
        gather_measured(runners, ranks),
        global_batch_size=bench.batch_size * ranks.world_size,
        dim=config.model.embedding_dim,
        baselines=(),
    )
    cell = {
        "zipf_exponent": bench.zipf_exponent,
        "batch_size": bench.batch_size,
        "plans": {
            case.name: compare(case.plan, predicted[case.name], measured[case.name])
            for case in cases
        },
    }
    del runners, batches
    gc.collect()
    report(ranks, cell)
    return cell


def make_cases(
    pipeline: PipelineSpec,
    situation: Situation,
    counts: Mapping[str, Any],
    histograms: Mapping[str, CountHistogram],
) -> list[Case]:
    """The plans to run."""
    total_rows = sum(rows.size for rows in counts.values())
    by_cost = ByCost(may_pool=False)
    chosen, _ = fastest_split(PlanRequest(by_cost), by_cost, pipeline, situation)
    assert isinstance(chosen.tables, SplitTables)
    placements = {
        HOT_COLD: most_accessed(chosen.tables, counts, histograms, "cost"),
        **{
            f"hot_{rows}": Placement.alike(choose_fraction(counts, hot_frac=rows / total_rows))
            for rows in HOT_ROWS
        },
        "all_cold": Placement.alike(choose_all_cold(counts)),
    }
    cases = [split_case(name, placement, pipeline) for name, placement in placements.items()]
    for plan in (TorchrecPlan.planner, TorchrecPlan.hand_tuned):
        cases.append(Case(plan.name, Plan(TorchrecTables(plan))))
    return cases


def compare(plan: Plan, predicted: Prediction, measured: Mapping[str, Any]) -> dict[str, Any]:
    step = predicted.step
    return {
        "predicted_s": step.step_s,
        "measured_s": measured["step_p50_s"],
        "error_frac": step.step_s / measured["step_p50_s"] - 1,
        "predicted_bytes": step.total_sent_bytes,
        "measured_bytes": measured["sent_bytes"],
        "bytes_error_frac": step.total_sent_bytes / measured["sent_bytes"] - 1,
        "predicted_stage_s": dict(step.stage_s),
        "measured_stage_s": measured["stage_s"],
        "hot_rows": plan.num_hot,
    }


def report(ranks: Ranks, cell: Mapping[str, Any]) -> None:
    plans = cell["plans"]
    words = [
        f"{name} {1e3 * p['predicted_s']:.0f}/{1e3 * p['measured_s']:.0f} ms "
        f"({p['error_frac']:+.0%}, bytes {p['bytes_error_frac']:+.1%})"
        for name, p in plans.items()
    ]
    say(ranks, f"zipf {cell['zipf_exponent']} B {cell['batch_size']}: " + "; ".join(words))


def main() -> None:
    warnings.filterwarnings("ignore", module="torch|torchrec|fbgemm_gpu")
    arguments = parse()
    if arguments.page is not None:
        from benchmarks.prediction_page import write_page

        write_page(arguments.page)
        return
    quiet_torch()
    # TorchRec has warnings for every replicated table.
    logging.getLogger().setLevel(logging.ERROR)
    run_grid(arguments)


if __name__ == "__main__":
    main()
