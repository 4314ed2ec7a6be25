"""The pictures of runs: learning, where a step's time goes, what a step sends."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from hotrec.report.read import Run
from hotrec.report.style import (
    INK,
    PART_COLORS,
    REST_COLOR,
    SOFT_INK,
    legend_columns,
    light_grid,
    report_style,
    run_color,
    run_line,
)
from hotrec.report.units import NOT_RECORDED, show_bytes, show_seconds

# The stage without a name of its own, with what the stages leave of the median step when that is
# more than rounding.
REST = "other"
BOUND_LABEL = "lower bound"
MIN_REST_FRAC = 0.02


def draw_learning(runs: Sequence[Run]) -> Figure | None:
    """Training loss and held-out AUC over steps, a line per run; None if neither was recorded."""
    losses = [run.series("loss") for run in runs]
    splits = _common_splits(runs)
    aucs = [run.eval_series("auc", splits[run.name]) for run in runs]
    if not any(x for x, _ in losses + aucs):
        return None
    with report_style():
        figure = Figure(figsize=(11, 3.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_lines(left, runs, losses, marker="")
        left.set_title("Training loss (log loss)")
        _draw_lines(right, runs, aucs, marker="o")
        names = sorted(set(splits[run.name] for run in runs if splits[run.name]))
        right.set_title(f"AUC on {' / '.join(names) or 'held-out data'}")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=legend_columns(labels))
    return figure


def _common_splits(runs: Sequence[Run]) -> dict[str, str]:
    """The split each run's AUC is drawn on: its first, which is the one evaluated along the way."""
    return {run.name: run.splits[0] if run.splits else "" for run in runs}


def _draw_lines(
    axes: Axes,
    runs: Sequence[Run],
    lines: Sequence[tuple[list[float], list[float]]],
    *,
    marker: str,
) -> None:
    # Exact runs draw one and the same line: each is thinner than the one under it, so all show.
    step_width = min(1.1, 5.0 / len(runs))
    for position, (run, (steps, values)) in enumerate(zip(runs, lines, strict=True)):
        width = 1.6 + step_width * (len(runs) - 1 - position)
        axes.plot(
            steps,
            values,
            color=run_color(position),
            linestyle=run_line(position),
            linewidth=width,
            marker=marker,
            markersize=width + 3,
            label=run.name,
        )
    if not any(steps for steps, _ in lines):
        axes.text(0.5, 0.5, NOT_RECORDED, transform=axes.transAxes, ha="center", color=SOFT_INK)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.ticklabel_format(axis="y", useOffset=False)
    light_grid(axes, "both")


def draw_steps(runs: Sequence[Run]) -> Figure | None:
    """The parts of a step, a stacked bar per run, p50 and p90 beside; None if not recorded."""
    parts = [with_rest(run.stage_s, run.number("step_p50_s")) for run in runs]
    if not any(parts):
        return None
    ends = [show_step(run, part) for run, part in zip(runs, parts, strict=True)]
    return _draw_bars(runs, parts, ends, [None] * len(runs), show_seconds, "time per step")


def with_rest(stage_s: Mapping[str, float], step_s: float | None) -> dict[str, float]:
    """The stages, with what they leave of the median step as one more."""
    parts = dict(stage_s)
    if parts and step_s is not None and not math.isnan(step_s):
        rest = step_s - sum(parts.values())
        if rest > MIN_REST_FRAC * step_s:
            parts[REST] = parts.get(REST, 0.0) + rest
    return parts


def show_step(run: Run, parts: Mapping[str, float]) -> str:
    """The label behind a bar: median and 90th percentile, or the sum of the parts."""
    p50, p90 = run.number("step_p50_s"), run.number("step_p90_s")
    if p50 is None:
        return f"sum {show_seconds(sum(parts.values()))}" if parts else NOT_RECORDED
    return f"p50 {show_seconds(p50)}" + ("" if p90 is None else f", p90 {show_seconds(p90)}")


def draw_traffic(runs: Sequence[Run]) -> Figure | None:
    """Bytes sent per step and rank by collective, with the lower bound; None if there are none."""
    parts = [dict(run.sent_bytes) for run in runs]
    bounds = [run.number("bound_bytes") for run in runs]
    if not any(sum(part.values()) for part in parts):
        return None
    ends = []
    for part, bound in zip(parts, bounds, strict=True):
        total = sum(part.values())
        text = show_bytes(total) if part else NOT_RECORDED
        ends.append(text + (f" = {total / bound:.2f}x bound" if part and bound else ""))
    return _draw_bars(runs, parts, ends, bounds, show_bytes, "bytes sent per step and rank")


def _trim_zeros(text: str) -> str:
    """``2.50 MB`` becomes ``2.5 MB``, for the ticks of an axis."""
    return re.sub(r"\.?0+(?= )", "", text) if "." in text else text


def _draw_bars(
    runs: Sequence[Run],
    parts: Sequence[Mapping[str, float]],
    ends: Sequence[str],
    bounds: Sequence[float | None],
    show: Callable[[float], str],
    label: str,
) -> Figure:
    names = list(dict.fromkeys(name for part in parts for name in part))
    named = [name for name in names if name != REST]
    color_of = {name: PART_COLORS[i % len(PART_COLORS)] for i, name in enumerate(named)}
    color_of[REST] = REST_COLOR
    with report_style():
        figure = Figure(figsize=(11, 1.5 + 0.46 * len(runs)), layout="constrained")
        axes = figure.subplots()
        lefts = [0.0] * len(runs)
        for name in [*named, *(n for n in names if n == REST)]:
            widths = [part.get(name, 0.0) for part in parts]
            text = name.replace("_", " ")
            axes.barh(
                range(len(runs)),
                widths,
                left=lefts,
                height=0.62,
                color=color_of[name],
                edgecolor="white",
                linewidth=0.8,
                label=text,
            )
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        for position, bound in enumerate(bounds):
            if bound:
                # White edges keep the line apart from a dark bar under it.
                edge = withStroke(linewidth=4.5, foreground="white")
                ends_y = [position - 0.42, position + 0.42]
                axes.plot([bound] * 2, ends_y, color=INK, linewidth=2, path_effects=[edge])
        if any(bounds):
            axes.plot([], [], color=INK, linewidth=2, label=BOUND_LABEL)
        reach = max([*lefts, *(bound or 0.0 for bound in bounds)])
        for position, text in enumerate(ends):
            end = max(lefts[position], bounds[position] or 0.0)
            axes.annotate(
                text, (end, position), xytext=(7, 0), textcoords="offset points", va="center"
            )
        axes.set_xlim(0, reach * 1.28 or 1.0)
        axes.set_yticks(range(len(runs)), [run.name for run in runs])
        axes.tick_params(axis="y", labelcolor=INK)
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _trim_zeros(show(value))))
        axes.set_xlabel(label)
        axes.spines["left"].set_visible(False)
        light_grid(axes, "x")
        handles, labels = axes.get_legend_handles_labels()
        # Lines come before bars in matplotlib's order; the parts are to be read first.
        order = sorted(range(len(labels)), key=lambda i: labels[i] == BOUND_LABEL)
        figure.legend(
            [handles[i] for i in order],
            [labels[i] for i in order],
            loc="outside upper left",
            ncols=legend_columns(labels, num_letters=190),
            columnspacing=1.4,
            handlelength=1.3,
        )
    return figure
