"""Stage 2: where the time of a step goes, and how often the host waits for the device.

Whole steps of the program at two batch sizes, cut into stages by the marks of
``hotrec/runtime/stages.py``, with torch's profiler for kernels and for what makes the host wait;
then lookup, update, id exchange and pooling alone, with one long bag or segment for a table and
with many short ones.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu_day.record import Parts, Summary, Table
from benchmarks.gpu_day.stage import (
    Day,
    Laps,
    bench_config,
    free_memory,
    main,
    quantiles,
    show,
)
from benchmarks.gpu_day.tbe import DEVICE, Tables
from hotrec.bench.cases import Case, Runner, build_runner
from hotrec.bench.samples import ZipfTables
from hotrec.config.groups import AllColdPlacement, Routing, TorchrecPlacement
from hotrec.embedding.flat import MOST_BAG_IDS, cut_lengths
from hotrec.embedding.pooling import MOST_IDS, sum_in_pieces
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planning.policies import choose_all_cold
from hotrec.report.units import show_count, show_seconds
from hotrec.runtime.ranks import Ranks, process_group
from hotrec.types import ColdTier, OptimizerKind, PipelineKind, TorchrecPlan

REPOSITORY = Path(__file__).resolve().parents[2]
# Calls of CUDA's runtime in which the host waits, by the names that the profiler gives them.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
# A copy to memory that is not pinned: the host waits in cudaMemcpyAsync itself.
WAITING_COPY = "Memcpy DtoH (Device -> Pageable)"
NUM_KERNELS, NUM_RANKS, STEPS = 12, 8, "## steps of gpu_day"
CASES: dict[str, tuple[PipelineKind, bool]] = {
    "all cold, base": (PipelineKind.base, True),
    "all cold, sparse_dist": (PipelineKind.sparse_dist, True),
    "all cold, look_ahead": (PipelineKind.look_ahead, True),
    "TorchRec's planner": (PipelineKind.sparse_dist, False),
}


def make_case(name: str, samples: ZipfTables) -> Case:
    pipeline, is_cold = CASES[name]
    if not is_cold:
        placement = TorchrecPlacement(plan=TorchrecPlan.planner, tier=ColdTier.fused)
        return Case(name, placement, None, pipeline)
    cold = AllColdPlacement(cold_tier=ColdTier.fused, routing=Routing.loader)
    return Case(name, cold, choose_all_cold(samples.count(1)), pipeline)


def profile_case(name: str, batch_size: int, day: Day, ranks: Ranks) -> dict[str, Any]:
    """Stages, kernels and waits of one case."""
    bench = day.pick("criteo_like_b2048", "smoke")
    num_warm, num_timed, num_profiled = day.pick((8, 20, 5), (2, 4, 2))
    config = bench_config(
        f"bench={bench}", f"bench.batch_size={batch_size}", f"bench.device={day.device.type}"
    )
    samples = ZipfTables(config.bench.table_rows, exponent=1.05, num_dense=13, seed=0)
    batches = samples.batches(
        num_warm + num_timed + num_profiled + 10, batch_size=batch_size, rank=0, world_size=1
    )
    if day.device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    runner = build_runner(config, make_case(name, samples), samples.schema, batches, ranks, samples)
    for _ in range(num_warm - 1):
        runner.step()
    runner.drain()
    laps = Laps(day.device)
    for _ in range(num_timed):
        with laps.lap("step"), runner.clock.step():
            runner.step()
    runner.drain()
    figures = {
        **laps.quantiles()["step"],
        "stages": {stage: quantiles(s) for stage, s in runner.clock.seconds().items() if s.any()},
        **_profiled(runner, num_profiled, day.device),
        "waits_by_line": _waits_by_line(runner, day.device),
    }
    runner.pipeline.close()
    free_memory(day.device)
    return figures


def _profiled(runner: Runner, num_steps: int, device: torch.device) -> dict[str, Any]:
    """Kernels and waits of a step, as the profiler saw them."""
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda
    with profile(activities=activities) as profiler:
        with record_function(STEPS):
            for _ in range(num_steps):
                runner.step()
        runner.drain()
        if is_cuda:
            torch.cuda.synchronize(device)
    events: Any = profiler.events()
    wanted = DeviceType.CUDA if is_cuda else DeviceType.CPU
    kernels: dict[str, list[float]] = {}
    for event in events:
        # Annotated blocks are drawn on the device's line as well, over the kernels in them.
        if event.device_type == wanted and not event.is_user_annotation:
            time_us = event.time_range.elapsed_us() if is_cuda else event.self_cpu_time_total
            kernels.setdefault(event.name, []).append(time_us)
    longest = sorted(kernels.items(), key=lambda kernel: -sum(kernel[1]))[:NUM_KERNELS]
    return {
        "kernels": [
            {"name": n, "calls": len(t) / num_steps, "step_s": sum(t) / 1e6 / num_steps}
            for n, t in longest
        ],
        "kernels_s": sum(map(sum, kernels.values())) / 1e6 / num_steps,
        "waits": {name: count / num_steps for name, count in count_waits(events).items()},
    }


def count_waits(events: Sequence[Any]) -> Counter[str]:
    """Calls of the profiled steps in which the host waits; not those of the profiler's own end."""
    block = next(e for e in events if e.name == STEPS and e.device_type == DeviceType.CPU)
    begin, end = block.time_range.start, block.time_range.end
    return Counter(
        event.name
        for event in events
        if begin <= event.time_range.start <= end
        and (event.name in WAITS or event.name == WAITING_COPY)
    )


def _waits_by_line(runner: Runner, device: torch.device) -> dict[str, int]:
    """Lines at which torch says that an operation waits for the device, in one step."""
    if device.type != "cuda":
        return {}
    runner.drain()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runner.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = Counter(
        f"{_short(warning.filename)}:{warning.lineno}"
        for warning in caught
        if "synchronizing CUDA operation" in str(warning.message)
    )
    return dict(lines.most_common())


def _short(path: str) -> str:
    for marker in (f"{REPOSITORY}/", "site-packages/", "site/"):
        if marker in path:
            return path.partition(marker)[2]
    return path


def measure_layouts(batch_size: int, day: Day) -> dict[str, Any]:
    """Lookup, update and id exchange, a table as one bag or as many; pooling, segments or pieces.

    The rows that a rank asks for are distinct; the segments of pooling's backward are the bags in
    which a row stands, and the most popular row stands in most of them.
    """
    config = bench_config(f"bench={day.pick('criteo_like_b2048', 'smoke')}")
    table_rows, dim = config.bench.table_rows, config.model.embedding_dim
    samples = ZipfTables(table_rows, exponent=1.05, num_dense=1, seed=0)
    (batch,) = samples.batches(1, batch_size=batch_size, rank=0, world_size=1)
    ids = [jagged.values() for jagged in batch.sparse.to_dict().values()]
    distinct, inverses = zip(*(torch.unique(i, return_inverse=True) for i in ids), strict=True)
    spec = OptimizerSpec(OptimizerKind.rowwise_adagrad, learning_rate=0.01)
    tables = Tables(len(ids), max(table_rows), dim, spec, DEVICE)
    module = tables.build(day.device)
    rows = torch.cat(distinct).to(day.device)
    laps = Laps(day.device)
    counts_T = torch.tensor([d.numel() for d in distinct])
    blocks = torch.tensor([-(-n // NUM_RANKS) for n in table_rows], device=day.device)
    grad = torch.randn(rows.numel(), dim, device=day.device)
    for name, lengths_TS in (
        ("one bag", counts_T[:, None]),
        ("many bags", cut_lengths(counts_T, rows.numel())),
    ):
        lengths = lengths_TS.reshape(-1).to(day.device)
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
        for lap in _rounds(laps, day):
            with lap(f"lookup, {name}"):
                out = module(rows, offsets)
            with lap(f"update, {name}"):
                out.backward(grad)
            with lap(f"id exchange, {name}"):
                torch.ops.fbgemm.block_bucketize_sparse_features(
                    lengths, rows, False, True, blocks, NUM_RANKS
                )
    bags, starts, longest = _segments(inverses, counts_T)
    bags, starts = bags.to(day.device), starts.to(day.device)
    grads = torch.randn(batch_size * len(ids), dim, device=day.device)
    for lap in _rounds(laps, day):
        with lap("pooling backward, whole segments"):
            F.embedding_bag(bags, grads, starts, mode="sum")
        with lap("pooling backward, pieces"):
            sum_in_pieces(grads, bags, starts, None, longest)
    del module
    free_memory(day.device)
    return {
        "operations": laps.quantiles(),
        "num_rows": rows.numel(),
        "largest_table": max(d.numel() for d in distinct),
        "longest_segment": longest,
    }


def _rounds(laps: Laps, day: Day) -> Sequence[Callable[[str], Any]]:
    """A lap of each timed round, after rounds whose laps nobody reads."""
    warm, timed = day.pick((5, 30), (1, 3))
    return [Laps(day.device).lap] * warm + [laps.lap] * timed


def _segments(
    inverses: Sequence[torch.Tensor], counts_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Bags by distinct row, where each row's bags begin, and how many the most popular row has."""
    firsts = counts_T.cumsum(0) - counts_T
    keys = torch.cat([inverse + first for inverse, first in zip(inverses, firsts, strict=True)])
    lengths = torch.bincount(keys, minlength=int(counts_T.sum()))
    return keys.argsort(stable=True), lengths.cumsum(0) - lengths, int(lengths.max())


def summarize(parts: Parts) -> Summary:
    done = {name: part for name, part in parts.items() if part["status"] == "ok"}
    layouts = {name: part for name, part in done.items() if "operations" in part}
    cases = {name: part for name, part in done.items() if "stages" in part}
    tables = [_layout_table(layouts)] if layouts else []
    if cases:
        tables += [_stage_table(cases), _wait_table(cases)]
        tables += [_kernel_table(name, part) for name, part in cases.items()]
    return Summary(_verdict(cases, layouts), tables)


def _layout_table(layouts: Parts) -> Table:
    operations = list(next(iter(layouts.values()))["operations"])
    rows = [
        [operation, *[show(part["operations"][operation]["device"]) for part in layouts.values()]]
        for operation in operations
    ]
    facts = "; ".join(
        f"{name}: {show_count(part['num_rows'])} distinct rows, {show_count(part['largest_table'])}"
        f" of the largest table, longest segment {show_count(part['longest_segment'])}"
        for name, part in layouts.items()
    )
    return Table(
        "Kernels alone, device time",
        ["operation", *layouts],
        rows,
        f"P50 (P10 to P90). {facts}. Many bags: of at most {MOST_BAG_IDS} rows; pieces: of at most "
        f"{MOST_IDS} bags.",
    )


def _stage_table(cases: Parts) -> Table:
    stages = list(dict.fromkeys(stage for part in cases.values() for stage in part["stages"]))
    rows = [["step, device", *[show(part["device"]) for part in cases.values()]]]
    rows.append(["step, host", *[show(part["host"]) for part in cases.values()]])
    rows.append(["of it in kernels", *[show_seconds(part["kernels_s"]) for part in cases.values()]])
    rows += [[stage, *[show(p["stages"].get(stage)) for p in cases.values()]] for stage in stages]
    note = (
        "P50 (P10 to P90). Stages: the device's time between the marks of hotrec/runtime/stages.py."
    )
    return Table("Whole steps", ["", *cases], rows, note)


def _wait_table(cases: Parts) -> Table:
    calls = sorted({call for part in cases.values() for call in part["waits"]})
    rows = [
        [call, *[f"{part['waits'].get(call, 0):.1f}" for part in cases.values()]] for call in calls
    ]
    lines = sorted({line for part in cases.values() for line in part["waits_by_line"]})
    rows += [
        [f"`{line}`", *[str(part["waits_by_line"].get(line, 0)) for part in cases.values()]]
        for line in lines
    ]
    note = (
        "Calls in which the host waits, per step, by the profiler; then the lines of one step at "
        "which torch's sync debug mode warns (it does not see FBGEMM's own waits)."
    )
    return Table("Waits of the host", ["", *cases], rows, note)


def _kernel_table(name: str, part: Mapping[str, Any]) -> Table:
    rows = [
        [f"`{kernel['name'][:90]}`", f"{kernel['calls']:.1f}", show_seconds(kernel["step_s"])]
        for kernel in part["kernels"]
    ]
    return Table(f"Longest kernels: {name}", ["kernel", "calls a step", "a step"], rows)


def _verdict(cases: Parts, layouts: Parts) -> str:
    words = []
    for name, part in layouts.items():
        operations = part["operations"]
        slower = [
            operations[f"{what}, {whole}"]["device"]["p50_s"]
            / operations[f"{what}, {cut}"]["device"]["p50_s"]
            for what, whole, cut in (
                ("lookup", "one bag", "many bags"),
                ("id exchange", "one bag", "many bags"),
                ("pooling backward", "whole segments", "pieces"),
            )
        ]
        words.append(
            f"{name}: a table as one bag takes {slower[0]:.1f} times as long to look up and "
            f"{slower[1]:.1f} times as long to exchange ids as in many, whole segments "
            f"{slower[2]:.1f} times as long to pool as pieces"
        )
    waits = [f"{name} {sum(part['waits'].values()):.0f}" for name, part in cases.items()]
    if waits:
        words.append(f"waits of the host a step: {', '.join(waits)}")
    return f"{'; '.join(words) or 'Nothing was measured'}."


def run(day: Day) -> None:
    sizes = day.pick((8192, 65536), (64,))
    for size in sizes:
        day.record.part(f"alone, B={size}", lambda b=size: measure_layouts(b, day))
    with process_group(device=day.device.type) as ranks:
        for size in sizes:
            for name in CASES:
                day.record.part(
                    f"{name}, B={size}", lambda n=name, b=size: profile_case(n, b, day, ranks)
                )


if __name__ == "__main__":
    sys.exit(main(run, summarize))
