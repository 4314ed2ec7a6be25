"""Draws the steps of several traces of `hotrec train profiler=trace` one under the other.

    python benchmarks/trace_picture.py -o picture.png \
        "sparse_dist=runs/a/traces/rank0.json.gz" "look_ahead=runs/b/traces/rank0.json.gz"

Each trace has a lane of the main thread, coloured by stage, hatched where it waits for other ranks,
and a lane of what communicates behind it: the named ranges of hotrec's communication thread if
there is one, else the collectives of gloo's threads or NCCL's kernels. All traces have the same
scale; one that makes faster steps shows more of them. With --merge the traces are put into one
file for Perfetto instead, which shows all ranks of a run together.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import blended_transform_factory

from hotrec.report.style import GRID, INK, SOFT_INK, report_style, to_png
from hotrec.report.units import show_frac, show_seconds
from hotrec.runtime.stages import EXPOSED_STAGES
from hotrec.train.trace import RANGE, STAGE, STEP, merge_traces, read_trace, write_trace
from hotrec.types import STAGES

# Computing in cool and earthen colours, exchanges in warm ones: waiting stands out.
COLORS = {
    "route": "#999933",
    "row_lookup": "#44AA99",
    "pool": "#117733",
    "dense": "#4477AA",
    "row_update": "#6FB1D8",
    "optimizer": "#332288",
    "other": "#C9CED4",
    "ids_exchange": "#E69F00",
    "rows_exchange": "#D55E00",
    "grads_exchange": "#AA3377",
    "hot_exchange": "#E377A2",
}
# What the communication thread calls what has no stage of its own.
SPARE_COLORS = ("#882255", "#F4A582", "#B2182B", "#DDCC77", "#7B3294", "#8C510A")
COLLECTIVE, COLLECTIVE_COLOR = "collective", "#8A949E"
COLLECTIVES = re.compile(r"^(gloo:|nccl)")
MAIN_LANE, COMMUNICATION_LANE = (0.86, 0.62), (0.0, 0.62)  # lower edge and height
US = 1e6


@dataclass(frozen=True)
class Bar:
    """A stretch of a lane, in seconds from the first step's start."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Lanes:
    """A trace as it is drawn.

    Args:
        steps: number and bar of each step.
        stages: of the main thread.
        communication: what other threads communicate.
        thread: who does that.
    """

    label: str
    steps: Sequence[tuple[int, Bar]]
    stages: Sequence[Bar]
    communication: Sequence[Bar]
    thread: str

    @property
    def step_s(self) -> float:
        """Median from the start of a step to that of the next; of one step its own."""
        starts = [bar.start_s for _, bar in self.steps]
        if len(starts) == 1:
            return self.steps[0][1].end_s
        return float(np.median(np.diff(starts)))

    @property
    def exposed_s(self) -> float:
        """Median over the steps of what the main thread waits for other ranks."""
        sums = [
            sum(
                bar.end_s - bar.start_s
                for bar in self.stages
                if bar.name in EXPOSED_STAGES and step.start_s <= bar.start_s < step.end_s
            )
            for _, step in self.steps
        ]
        return float(np.median(sums))


def lanes_of(label: str, document: Mapping[str, Any]) -> Lanes:
    """Read the lanes from a trace.

    Raises:
        ValueError: if it holds no steps.
    """
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    whole = sorted((e for e in events if e["cat"] == STEP), key=lambda e: e["ts"])
    if not whole:
        raise ValueError(f"trace {label}: expected events {STEP!r}, got none of {len(events)}.")
    zero_us = whole[0]["ts"]
    end_us = whole[-1]["ts"] + whole[-1]["dur"]

    def bar(event: Mapping[str, Any]) -> Bar:
        start_us = event["ts"] - zero_us
        return Bar(event["name"], start_us / US, (start_us + event["dur"]) / US)

    main = _main_thread(document["traceEvents"])
    behind = [
        e for e in events if e["tid"] != main and e["ts"] < end_us and e["ts"] + e["dur"] > zero_us
    ]
    ranges = [bar(e) for e in behind if e["cat"] == RANGE]
    collectives = [
        Bar(COLLECTIVE, found.start_s, found.end_s)
        for e in behind
        if e["cat"] in ("user_annotation", "kernel") and COLLECTIVES.match(e["name"])
        for found in [bar(e)]
    ]
    stages = sorted((bar(e) for e in events if e["cat"] == STAGE), key=lambda b: b.start_s)
    return Lanes(
        label,
        [(int(e["name"].split()[-1]), bar(e)) for e in whole],
        _joined(stages),
        # What is inside of something else is drawn over it.
        sorted(ranges or collectives, key=lambda b: (b.start_s, -b.end_s)),
        "communication thread" if ranges else "collectives",
    )


def _main_thread(events: Sequence[Mapping[str, Any]]) -> Any:
    for event in events:
        if event["name"] == "thread_name" and event["args"]["name"] == "main thread":
            return event["tid"]
    return None


def _joined(bars: Sequence[Bar]) -> list[Bar]:
    """Neighbours of one name as one."""
    joined: list[Bar] = []
    for bar in bars:
        if joined and joined[-1].name == bar.name and bar.start_s - joined[-1].end_s < 1e-6:
            joined[-1] = Bar(bar.name, joined[-1].start_s, bar.end_s)
        elif bar.end_s > bar.start_s:
            joined.append(bar)
    return joined


def choose_colors(traces: Sequence[Lanes]) -> dict[str, str]:
    """A colour for every name that is drawn."""
    colors = {**COLORS, COLLECTIVE: COLLECTIVE_COLOR}
    names = dict.fromkeys(bar.name for lanes in traces for bar in lanes.communication)
    spare = [name for name in names if name not in colors]
    for position, name in enumerate(spare):
        colors[name] = SPARE_COLORS[position % len(SPARE_COLORS)]
    return colors


def draw(traces: Sequence[Lanes], *, num_steps: int) -> Figure:
    """The picture.

    Args:
        num_steps: of the slowest trace; the others show as much time, if they have recorded it.
    """
    colors = choose_colors(traces)
    span_s = max(lanes.steps[min(num_steps, len(lanes.steps)) - 1][1].end_s for lanes in traces)
    with report_style():
        figure = Figure(figsize=(13, 0.9 + 1.75 * len(traces)), layout="constrained")
        grid = figure.subplots(len(traces), 1, squeeze=False, sharex=True)[:, 0]
        for axes, lanes in zip(grid, traces, strict=True):
            _draw_trace(axes, lanes, colors, span_s)
        grid[-1].set_xlabel("milliseconds from the start of the first step drawn")
        handles = list(_legend(traces, colors, span_s))
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=-(-len(handles) // 2),
            handlelength=1.6,
            columnspacing=1.6,
        )
    return figure


def _draw_trace(axes: Axes, lanes: Lanes, colors: Mapping[str, str], span_s: float) -> None:
    exposed = show_frac(lanes.exposed_s / lanes.step_s)
    axes.set_title(
        f"{lanes.label}: {show_seconds(lanes.step_s)} a step, of which the main thread waits "
        f"{show_seconds(lanes.exposed_s)} for other ranks ({exposed})",
        pad=16,
    )
    recorded_s = lanes.steps[-1][1].end_s
    for bars, place, may_wait in (
        (lanes.stages, MAIN_LANE, True),
        (lanes.communication, COMMUNICATION_LANE, False),
    ):
        lower, height = place
        axes.broken_barh([(0, min(recorded_s, span_s) * 1e3)], place, facecolor=GRID, alpha=0.45)
        for bar in bars:
            start_s, end_s = max(bar.start_s, 0.0), min(bar.end_s, span_s)
            if end_s <= start_s:
                continue
            color = colors[bar.name]
            is_wait = may_wait and bar.name in EXPOSED_STAGES
            axes.broken_barh(
                [(start_s * 1e3, (end_s - start_s) * 1e3)],
                (lower, height),
                facecolor=_tint(color) if is_wait else color,
                edgecolor=color if is_wait else "none",
                hatch="/////" if is_wait else None,
                linewidth=0,
            )
    _mark_steps(axes, lanes, span_s)
    axes.set_xlim(0, span_s * 1e3)
    axes.set_ylim(-0.06, MAIN_LANE[0] + MAIN_LANE[1] + 0.06)
    axes.set_yticks(
        [lower + height / 2 for lower, height in (MAIN_LANE, COMMUNICATION_LANE)],
        ["main thread", lanes.thread],
    )
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.tick_params(axis="x", length=3, labelbottom=True)
    axes.spines["left"].set_visible(False)


def _mark_steps(axes: Axes, lanes: Lanes, span_s: float) -> None:
    above = blended_transform_factory(axes.transData, axes.transAxes)
    for step, bar in lanes.steps:
        if bar.start_s < span_s:
            axes.axvline(bar.start_s * 1e3, color=INK, linewidth=0.9, zorder=3)
            axes.text(
                bar.start_s * 1e3,
                1.03,
                f" step {step}",
                transform=above,
                fontsize=7.5,
                color=SOFT_INK,
                clip_on=False,
            )
    if lanes.steps[-1][1].end_s < span_s:
        axes.axvline(lanes.steps[-1][1].end_s * 1e3, color=INK, linewidth=0.9, zorder=3)


def _tint(color: str) -> tuple[float, float, float]:
    """The colour on white paper, thin."""
    red, green, blue = (1 - 0.22 * (1 - part) for part in to_rgb(color))
    return red, green, blue


def _legend(traces: Sequence[Lanes], colors: Mapping[str, str], span_s: float) -> Iterator[Patch]:
    """What is to be seen: a stage that takes no visible time is left out."""
    seen = {
        bar.name
        for lanes in traces
        for bar in (*lanes.stages, *lanes.communication)
        if bar.start_s < span_s and bar.end_s - bar.start_s > span_s / 1500
    }
    order = [*(s for s in STAGES if s not in EXPOSED_STAGES), *EXPOSED_STAGES]
    order += [name for name in colors if name not in order]
    for name in order:
        if name in seen:
            yield Patch(facecolor=colors[name], label=name.replace("_", " "))
    yield Patch(
        facecolor="white", edgecolor=INK, hatch="/////", linewidth=0.5, label="waits (exposed)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", metavar="LABEL=FILE", help="traces, in order")
    parser.add_argument("-o", "--output", type=Path, required=True, help="PNG, or with --merge gz")
    parser.add_argument("--steps", type=int, default=2, help="steps of the slowest trace")
    parser.add_argument("--skip", type=int, default=1, help="first steps to leave out")
    parser.add_argument("--merge", action="store_true", help="write one file for Perfetto")
    options = parser.parse_args()
    named = [text.partition("=") for text in options.traces]
    documents = [read_trace(Path(path or label)) for label, _, path in named]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if options.merge:
        write_trace(merge_traces(documents), options.output)
        return
    traces = [
        lanes_of(label, without_first(document, options.skip))
        for (label, _, _), document in zip(named, documents, strict=True)
    ]
    options.output.write_bytes(to_png(draw(traces, num_steps=options.steps)))
    figures = {
        lanes.label: {
            "step_s": lanes.step_s,
            "exposed_communication_s": lanes.exposed_s,
            "num_steps": len(lanes.steps),
        }
        for lanes in traces
    }
    print(json.dumps(figures))


def without_first(document: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """The trace without its first steps, in which the profiler warms up."""
    starts = sorted(e["ts"] for e in document["traceEvents"] if e.get("cat") == STEP)
    if len(starts) <= num_steps:
        raise ValueError(
            f"trace: expected more than {num_steps} steps, got {len(starts)}. Lower --skip, or "
            "record more with profiler.num_steps."
        )
    first_us = starts[num_steps]
    kept = [
        event
        for event in document["traceEvents"]
        if event.get("cat") not in (STEP, STAGE) or event["ts"] >= first_us
    ]
    return {**document, "traceEvents": kept}


if __name__ == "__main__":
    main()
