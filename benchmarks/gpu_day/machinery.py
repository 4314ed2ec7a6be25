"""Stage 4: the overhead of hotrec's machinery if there is nothing to gain.

On one GPU with enough memory for every table, nothing is exchanged and replicas are useless, so
TorchRec's own plan is the best one. It is interleaved in one run with all rows cold, with and
without look-ahead; the ratios are those of neighbouring blocks. The models are DLRM on Criteo-like
tables and MLPerf's DCNv2 with its multi-hot features, whose largest tables are cut so that all
cases fit into memory at the same time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.gpu_day.record import DoesNotFitError, Parts, Summary, Table
from benchmarks.gpu_day.stage import Day, bench_config, bus_traffic, free_memory, main
from hotrec.bench.cases import Case, build_runner, split_case
from hotrec.bench.figures import gather_measured, losses_apart
from hotrec.bench.figures import summarize as sum_up
from hotrec.bench.job import make_turns, subject_of
from hotrec.bench.measure import run_cases
from hotrec.bench.samples import ZipfTables
from hotrec.config.roots import CompareConfig
from hotrec.data.batch import Batch
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.planner.policies import choose_all_cold
from hotrec.report.units import show_bytes, show_count, show_seconds
from hotrec.runtime.ranks import Ranks, process_group
from hotrec.types import PipelineKind, PipelineSpec, Placement, Rows

BASELINE = "TorchRec's planner"
# MLPerf Training, DLRM-DCNv2 on Criteo 1TB: rows and ids per sample of its 26 features.
MLPERF_ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209,
    11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
MLPERF_IDS = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)  # fmt: skip
MLPERF_MODEL = (
    "model=dcnv2", "model.embedding_dim=128", "model.dense_layer_sizes=[512,256,128]",
    "model.over_layer_sizes=[1024,1024,512,256,1]", "model.cross_num_layers=3",
    "model.cross_low_rank_dim=512",
)  # fmt: skip
# Memory of the activations and batches of a case, besides its tables.
SPARE_BYTES = 4e9


class MultiHotTables(ZipfTables):
    """Tables whose features read a fixed number of ids per sample.

    Args:
        ids_per_sample: of each feature.
    """

    def __init__(self, table_rows: Sequence[int], ids_per_sample: Sequence[int]) -> None:
        super().__init__(table_rows, exponent=1.05, num_dense=13, seed=0)
        self._ids_per_sample = ids_per_sample

    def _batch(self, rng: np.random.Generator, batch_size: int, world_size: int) -> Batch:
        batch = super()._batch(rng, batch_size, world_size)
        ids = [
            rows[np.searchsorted(cumulative, rng.random(batch_size * num), side="right")]
            for cumulative, rows, num in zip(
                self._cumulative, self._rows_by_rank, self._ids_per_sample, strict=True
            )
        ]
        lengths = torch.tensor(self._ids_per_sample, dtype=torch.int32)
        batch.sparse = KeyedJaggedTensor(
            keys=batch.sparse.keys(),
            values=torch.from_numpy(np.concatenate(ids)),
            lengths=lengths.repeat_interleave(batch_size),
        )
        return batch


def make_cases(counts: Mapping[str, Rows]) -> list[Case]:
    """TorchRec's plan, and all rows cold in two ways; every row in the device's memory."""
    cold, ahead = Placement.alike(choose_all_cold(counts)), PipelineSpec(PipelineKind.look_ahead)
    return [
        Case(BASELINE, Plan(TorchrecTables())),
        split_case("all cold", cold, is_routed_by_loader=True),
        split_case("all cold, look_ahead", cold, ahead, is_routed_by_loader=True),
    ]


def cut_rows(table_rows: Sequence[int], most_bytes: float, row_bytes: int) -> list[int]:
    """The tables, the largest cut to one size, so that their weights fit into this many bytes."""
    low, high = 1, max(table_rows)
    while low < high:
        most = (low + high + 1) // 2
        fits = row_bytes * sum(min(rows, most) for rows in table_rows) <= most_bytes
        low, high = (most, high) if fits else (low, most - 1)
    return [min(rows, low) for rows in table_rows]


def measure(
    config: CompareConfig,
    samples: ZipfTables,
    cases: Sequence[Case],
    ranks: Ranks,
    baselines: Sequence[str] = (BASELINE,),
    num_watched: int = 0,
) -> dict[str, Any]:
    """Run the cases interleaved, like ``hotrec compare``; figures by case.

    Args:
        config: of the benchmark.
        samples: that all train on.
        cases: what to run.
        ranks: this one.
        baselines: cases that the others are compared with.
        num_watched: steps before the timed ones, in whose second half the bus is watched.
    """
    bench = config.plans
    subject, turns = subject_of(config, samples.schema), make_turns(bench)
    batches = samples.batches(
        num_watched + turns.num_batches, batch_size=bench.batch_size, rank=0, world_size=1
    )
    runners = [build_runner(subject, c, batches, ranks, samples) for c in cases]
    bus: dict[str, dict[str, float]] = {}
    for runner in runners if num_watched else ():
        for _ in range(num_watched // 2):
            runner.step()
        with bus_traffic() as moved:
            for _ in range(num_watched // 2):
                runner.step()
        bus[runner.case.name] = {way: 2 * total / num_watched for way, total in moved.items()}
    run_cases(runners, turns, ranks)
    figures = sum_up(
        gather_measured(runners, ranks), global_batch_size=bench.batch_size,
        dim=config.model.embedding_dim, baselines=baselines,
    )  # fmt: skip
    del runners
    free_memory()
    return {
        "bus": bus,
        "cases": figures,
        "losses_apart": losses_apart(figures, bench.loss_tolerance),
        "num_rows": sum(bench.table_rows),
        "embedding_dim": config.model.embedding_dim,
        "batch_size": bench.batch_size,
        "num_ids": batches[0].sparse.values().numel(),
    }


def measure_machinery(config: CompareConfig, samples: ZipfTables, ranks: Ranks) -> dict[str, Any]:
    """The cases of this stage.

    Raises:
        DoesNotFitError: if the models do not fit the GPU side by side.
    """
    cases = make_cases({t.name: np.ones(t.num_rows, np.int64) for t in samples.schema.tables})
    needed = len(cases) * (
        4 * (config.model.embedding_dim + 1) * sum(config.plans.table_rows) + SPARE_BYTES
    )
    free, _ = torch.cuda.mem_get_info(ranks.device)
    if needed > free:
        raise DoesNotFitError(f"needs {show_bytes(needed)} of {show_bytes(free)} free GPU memory")
    return measure(config, samples, cases, ranks)


def dlrm(day: Day, ranks: Ranks) -> dict[str, Any]:
    config = bench_config(f"plans={day.pick('criteo_like_b8192', 'smoke')}", *_words(day))
    samples = ZipfTables(config.plans.table_rows, exponent=1.05, num_dense=13, seed=0)
    return measure_machinery(config, samples, ranks)


def dcnv2(day: Day, ranks: Ranks) -> dict[str, Any]:
    small = ("model=dcnv2", "model.embedding_dim=16", "model.dense_layer_sizes=[32,16]")
    config = bench_config("plans=criteo_like_b8192", *day.pick(MLPERF_MODEL, small), *_words(day))
    most_bytes = day.pick(12e9, 1e6)
    config.plans.table_rows = cut_rows(MLPERF_ROWS, most_bytes, 4 * config.model.embedding_dim)
    return measure_machinery(config, MultiHotTables(config.plans.table_rows, MLPERF_IDS), ranks)


def _words(day: Day) -> list[str]:
    block_steps, skipped = day.pick((10, 2), (3, 1))
    return [
        f"plans.batch_size={day.pick(8192, 32)}", f"plans.rounds={day.pick(3, 1)}",
        f"plans.block_steps={block_steps}", f"plans.block_skip={skipped}",
        f"plans.warmup_rounds={day.pick(6, 2)}", "plans.counted_steps=1",
    ]  # fmt: skip


def summarize(parts: Parts) -> Summary:
    done = {name: part for name, part in parts.items() if part["status"] == "ok"}
    tables = [_table(name, part) for name, part in done.items()]
    ratios = [
        f"{name}: " + ", ".join(f"{case} {ratio:.2f}" for case, ratio in _ratios(part).items())
        for name, part in done.items()
    ]
    said = "; ".join(ratios) or "nothing was measured"
    is_ok = not any(part["losses_apart"] for part in done.values())
    return Summary(f"Step over that of {BASELINE} on one GPU: {said}.", tables, is_ok)


def _ratios(part: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: case["against"][BASELINE]["step_ratio"]
        for name, case in part["cases"].items()
        if name != BASELINE
    }


def _table(name: str, part: Mapping[str, Any]) -> Table:
    rows = []
    for case_name, case in part["cases"].items():
        against = case["against"].get(BASELINE)
        ratio = (
            "-"
            if against is None
            else f"{against['step_ratio']:.2f} ({against['step_ratio_p25']:.2f} to "
            f"{against['step_ratio_p75']:.2f})"
        )
        times = [show_seconds(case[f"step_p{share}_s"]) for share in (50, 10, 90)]
        host = show_seconds(case["main_cpu_s"])
        rows.append([case_name, *times, ratio, host, show_bytes(case["memory_bytes"])])
    header = ["case", "step p50", "p10", "p90", "ratio (quartiles)", "host", "memory"]
    note = (
        f"{show_count(part['num_rows'])} rows, D = {part['embedding_dim']}, batch "
        f"{show_count(part['batch_size'])}, {show_count(part['num_ids'])} ids a step. Step: time "
        "of the device between returns from steps. Ratio: median over the rounds of the ratio of "
        "two blocks' median steps. Host: processor time of the thread that trains, a step."
    )
    if part["losses_apart"]:
        note += f" **Losses differ: {', '.join(part['losses_apart'])}.**"
    return Table(name, header, rows, note)


def run(day: Day) -> None:
    logging.basicConfig(level=logging.INFO)
    with process_group(device="cuda") as ranks:
        for name, model in (("DLRM", dlrm), ("MLPerf DCNv2", dcnv2)):
            day.record.part(name, lambda m=model: m(day, ranks))


if __name__ == "__main__":
    sys.exit(main(run, summarize))
