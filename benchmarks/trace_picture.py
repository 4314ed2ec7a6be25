"""Draws the steps of several traces of `hotrec train profiler=trace`, one below the other.

    python benchmarks/trace_picture.py -o picture.png \
        "sparse_dist=runs/a/traces/rank0.json.gz" "look_ahead=runs/b/traces/rank0.json.gz"

The upper lane of a trace has the main thread's stages, hatched while it waits for other ranks. The
lower lane has the named ranges of the communication thread, or without that thread gloo's
collectives or NCCL's kernels. All traces have the same scale, so a faster one shows more steps.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hotrec.report.style import INK, SOFT_INK, report_style, write_png
from hotrec.report.units import show_frac, show_seconds
from hotrec.runtime.stages import EXPOSED_STAGES, RANGE_PREFIX
from hotrec.train.trace import STAGE, STEP_PREFIX

# Computation in cool and earthen colours, exchanges in warm ones, so that waiting stands out.
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
    "collective": "#8A949E",
}
# For ranges of the communication thread that are not named like a stage.
SPARE_COLORS = ("#882255", "#F4A582", "#B2182B", "#DDCC77", "#7B3294", "#8C510A")
COLLECTIVE = re.compile(r"^(gloo:|nccl)")
UPPER, LOWER = (0.86, 0.62), (0.0, 0.62)  # y and height of the lanes


@dataclass(frozen=True)
class Bar:
    """A named stretch of a lane, in milliseconds from the start of the first step drawn."""

    name: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Trace:
    """The drawn parts of one file."""

    label: str
    steps: list[Bar]
    stages: list[Bar]
    communication: list[Bar]

    @property
    def step_s(self) -> float:
        """The median time from the start of a step to that of the next."""
        return float(np.median(np.diff([step.start_ms for step in self.steps]))) / 1e3

    @property
    def exposed_s(self) -> float:
        """The median over the steps of the time that the main thread waits for other ranks."""
        waits = [bar for bar in self.stages if bar.name in EXPOSED_STAGES]
        sums = [
            sum(b.end_ms - b.start_ms for b in waits if s.start_ms <= b.start_ms < s.end_ms)
            for s in self.steps
        ]
        return float(np.median(sums)) / 1e3


def read_trace(label: str, path: Path, *, skip: int = 0) -> Trace:
    """Read the lanes from a trace without its first ``skip`` steps.

    Raises:
        ValueError: if fewer than two steps are left.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))  # what is nested is drawn later
    recorded = [event for event in events if event["name"].startswith(STEP_PREFIX)]
    steps = recorded[skip:]
    if len(steps) < 2:
        raise ValueError(
            f"trace {path}: expected at least {skip + 2} steps, got {len(recorded)}. Record more "
            "with profiler.num_steps, or lower --skip."
        )
    zero_us, end_us = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]

    def bar(event: dict[str, Any]) -> Bar:
        start_ms = (event["ts"] - zero_us) / 1e3
        name = event["name"].removeprefix(RANGE_PREFIX)
        return Bar(
            "collective" if COLLECTIVE.match(name) else name,
            start_ms,
            start_ms + event["dur"] / 1e3,
        )

    inside = [event for event in events if zero_us <= event["ts"] < end_us]
    behind = [
        e
        for e in inside
        if e["tid"] != steps[0]["tid"] and e["cat"] in ("user_annotation", "kernel")
    ]
    ranges = [e for e in behind if e["name"].startswith(RANGE_PREFIX)]
    return Trace(
        label,
        steps=[bar(event) for event in steps],
        stages=[bar(event) for event in inside if event["cat"] == STAGE],
        communication=[bar(e) for e in ranges or behind if ranges or COLLECTIVE.match(e["name"])],
    )


def draw(traces: Sequence[Trace], *, num_steps: int) -> Figure:
    """Draw ``num_steps`` of the slowest trace, and as much time of the others."""
    names = dict.fromkeys(bar.name for trace in traces for bar in trace.communication)
    spare = [name for name in names if name not in COLORS]
    colors = COLORS | {n: SPARE_COLORS[i % len(SPARE_COLORS)] for i, n in enumerate(spare)}
    span_ms = max(trace.steps[:num_steps][-1].end_ms for trace in traces)
    drawn: set[str] = set()
    with report_style():
        figure = Figure(figsize=(13, 0.9 + 1.75 * len(traces)), layout="constrained")
        grid = figure.subplots(len(traces), 1, squeeze=False, sharex=True)[:, 0]
        for axes, trace in zip(grid, traces, strict=True):
            drawn |= _draw_trace(axes, trace, colors, span_ms)
        grid[-1].set_xlabel("milliseconds from the start of the first step drawn")
        handles = [
            Patch(facecolor=color, label=name.replace("_", " "))
            for name, color in colors.items()
            if name in drawn
        ]
        handles.append(Patch(facecolor="white", hatch="/////", label="waits (exposed)"))
        figure.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // 2))
    return figure


def _draw_trace(axes: Axes, trace: Trace, colors: dict[str, str], span_ms: float) -> set[str]:
    """Draw one trace; returns the names of the bars that are long enough to be seen."""
    axes.set_title(
        f"{trace.label}: {show_seconds(trace.step_s)} a step, of which the main thread waits "
        f"{show_seconds(trace.exposed_s)} for other ranks "
        f"({show_frac(trace.exposed_s / trace.step_s)})",
        pad=16,
    )
    drawn = set()
    for bars, lane in ((trace.stages, UPPER), (trace.communication, LOWER)):
        for bar in (bar for bar in bars if bar.start_ms < span_ms):
            width_ms = min(bar.end_ms, span_ms) - bar.start_ms
            is_wait = lane is UPPER and bar.name in EXPOSED_STAGES
            axes.broken_barh(
                [(bar.start_ms, width_ms)],
                lane,
                facecolor=(colors[bar.name], 0.22 if is_wait else 1.0),
                edgecolor=colors[bar.name] if is_wait else "none",
                hatch="/////" if is_wait else None,
                linewidth=0,
            )
            if width_ms > span_ms / 1500:
                drawn.add(bar.name)
    for step in (step for step in trace.steps if step.start_ms < span_ms):
        axes.axvline(step.start_ms, color=INK, linewidth=0.9, zorder=3)
        place = axes.get_xaxis_transform()
        axes.text(step.start_ms, 1.03, f" {step.name}", transform=place, color=SOFT_INK, fontsize=7)
    axes.set_xlim(0, span_ms)
    axes.set_yticks(
        [start + height / 2 for start, height in (UPPER, LOWER)], ["main thread", "communication"]
    )
    axes.tick_params(axis="x", labelbottom=True)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", metavar="LABEL=FILE")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the PNG to write")
    parser.add_argument("--steps", type=int, default=2, help="steps of the slowest trace to draw")
    parser.add_argument("--skip", type=int, default=1, help="first steps to omit")
    options = parser.parse_args()
    traces = []
    for text in options.traces:
        label, _, path = text.rpartition("=")
        traces.append(read_trace(label or path, Path(path), skip=options.skip))
    write_png(draw(traces, num_steps=options.steps), options.output)
    figures = {t.label: {"step_s": t.step_s, "exposed_s": t.exposed_s} for t in traces}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
