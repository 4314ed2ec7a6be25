"""Stage 9: the time of a step by stage, and how often the host waits for the device.

Whole steps of the program, cut into stages by the marks of ``hotrec/runtime/stages.py``, with
torch's profiler for kernels and for waits of the host. It only explains and checks nothing, so it
comes last.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu_day.record import OK, Parts, Summary, Table
from benchmarks.gpu_day.stage import (
    REPOSITORY,
    Day,
    Laps,
    bench_config,
    free_memory,
    main,
    quantiles,
    show,
)
from hotrec.bench.cases import Case, Runner, build_runner, split_case
from hotrec.bench.job import subject_of
from hotrec.bench.samples import ZipfTables
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.planner.policies import choose_all_cold
from hotrec.report.units import show_seconds
from hotrec.runtime.ranks import Ranks, process_group
from hotrec.types import PipelineKind, PipelineSpec, Placement

# Calls of CUDA's runtime in which the host waits, by the names that the profiler gives them.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
# A copy to memory that is not pinned: the host waits in cudaMemcpyAsync itself.
WAITING_COPY = "Memcpy DtoH (Device -> Pageable)"
NUM_KERNELS, STEPS = 12, "## steps of gpu_day"
CASES: dict[str, tuple[PipelineKind, bool]] = {
    "all cold, sparse_dist": (PipelineKind.sparse_dist, True),
    "all cold, look_ahead": (PipelineKind.look_ahead, True),
    "TorchRec's planner": (PipelineKind.sparse_dist, False),
}


def make_case(name: str, samples: ZipfTables) -> Case:
    kind, is_cold = CASES[name]
    pipeline = PipelineSpec(kind)
    if not is_cold:
        return Case(name, Plan(TorchrecTables(), pipeline))
    cold = Placement.alike(choose_all_cold(samples.count(1)))
    return split_case(name, cold, pipeline, is_routed_by_loader=True)


def profile_case(name: str, day: Day, ranks: Ranks) -> dict[str, Any]:
    """Stages, kernels and waits of one case."""
    num_warm, num_timed, num_profiled = day.pick((8, 20, 5), (2, 4, 2))
    config = bench_config(f"plans={day.pick('criteo_like_b8192', 'smoke')}")
    samples = ZipfTables(config.plans.table_rows, exponent=1.05, num_dense=13, seed=0)
    batches = samples.batches(
        num_warm + num_timed + num_profiled + 10,
        batch_size=config.plans.batch_size, rank=0, world_size=1,
    )  # fmt: skip
    subject = subject_of(config, samples.schema)
    runner = build_runner(subject, make_case(name, samples), batches, ranks, samples)
    for _ in range(num_warm - 1):
        runner.step()
    runner.drain()
    on_host, on_device = ProfilerActivity.CPU, ProfilerActivity.CUDA
    activities = day.pick([on_host, on_device], [on_host])  # the stand-in starts no kernels
    laps = Laps()
    for _ in range(num_timed):
        with laps.lap("step"), runner.clock.step():
            runner.step()
    runner.drain()
    figures = {
        **laps.quantiles()["step"],
        "stages": {stage: quantiles(s) for stage, s in runner.clock.seconds().items() if s.any()},
        **_profiled(runner, num_profiled, activities),
        # The stand-in has no such mode; its own log says where the host waits.
        "waits_by_line": day.pick(_waits_by_line, lambda _: {})(runner),
    }
    runner.pipeline.close()
    del runner
    free_memory()
    return figures


def _profiled(
    runner: Runner, num_steps: int, activities: Sequence[ProfilerActivity]
) -> dict[str, Any]:
    """Kernels and waits of a step, as the profiler saw them."""
    with profile(activities=activities) as profiler:
        with record_function(STEPS):
            for _ in range(num_steps):
                runner.step()
        runner.drain()
        torch.cuda.synchronize()
    events: Any = profiler.events()
    kernels: dict[str, list[float]] = {}
    for event in events:
        # Annotated blocks are drawn on the device's line as well, over the kernels in them.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
    longest = sorted(kernels.items(), key=lambda kernel: -sum(kernel[1]))[:NUM_KERNELS]
    return {
        "kernels": [
            {"name": n, "calls": len(t) / num_steps, "step_s": sum(t) / 1e6 / num_steps}
            for n, t in longest
        ],
        "num_kernels": sum(map(len, kernels.values())) / num_steps,
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


def _waits_by_line(runner: Runner) -> dict[str, int]:
    """Lines for which torch warns that an operation waits for the device, in one step."""
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


def summarize(parts: Parts) -> Summary:
    cases = {name: part for name, part in parts.items() if part["status"] == OK}
    if not cases:
        return Summary("Nothing was measured.", [])
    said = "Stages alone: the stand-in starts no kernels, and its log says where the host waits."
    if any(part["num_kernels"] for part in cases.values()):
        waits = [f"{name} {sum(part['waits'].values()):.0f}" for name, part in cases.items()]
        said = f"Waits of the host a step: {', '.join(waits)}."
    tables = [_stage_table(cases), _wait_table(cases)]
    tables += [_kernel_table(name, part) for name, part in cases.items()]
    return Summary(said, [table for table in tables if table.rows])


def _stage_table(cases: Parts) -> Table:
    stages = list(dict.fromkeys(stage for part in cases.values() for stage in part["stages"]))
    rows = [["step, device", *[show(part["device"]) for part in cases.values()]]]
    rows.append(["step, host", *[show(part["host"]) for part in cases.values()]])
    rows.append(["kernels", *[f"{part['num_kernels']:.0f}" for part in cases.values()]])
    rows.append(["time in kernels", *[show_seconds(part["kernels_s"]) for part in cases.values()]])
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


def run(day: Day) -> None:
    with process_group(device="cuda") as ranks:
        for name in CASES:
            day.record.part(name, lambda n=name: profile_case(n, day, ranks))


if __name__ == "__main__":
    sys.exit(main(run, summarize))
