"""The pictures of plans and runs: stages, traffic, learning, and coverage."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, PercentFormatter

from hotrec.artifact import read_artifact
from hotrec.report.compared import ComparedPlan
from hotrec.report.read import OTHER_STAGE, Run
from hotrec.report.style import (
    HELDOUT_COLOR,
    INK,
    PART_COLORS,
    PART_LABELS,
    PART_LOOKS,
    SOFT_INK,
    TRAIN_COLOR,
    legend_columns,
    light_grid,
    report_style,
    run_color,
    write_png,
)
from hotrec.report.units import NOT_RECORDED, show_bytes, show_count, show_frac, show_seconds

# The rest of the median step counts as "other" if it is more than rounding.
MIN_REST_FRAC = 0.02
BOUND_LABEL = "lower bound of exchanging rows"
# Rounding and seeds move an AUC by 1e-4 to 1e-3, which must not fill the axis.
MIN_AUC_RANGE = 0.01
# Letters of a bar's label in one line.
LABEL_WIDTH = 34

Content = Mapping[str, Any]
# The lengths of a bar's parts by name.
Parts = Mapping[str, float]


def draw_learning(runs: Sequence[Run]) -> Figure | None:
    """Training loss, held-out AUC and the share that a moving hot set serves, a line per run.

    Panels without a line of two points are omitted; None if no panel remains.
    """
    splits = {split for run in runs for split in run.splits[:1]}
    panels = {
        "Training loss (log loss)": ("", 0.0, [run.series("loss") for run in runs]),
        f"AUC on {' / '.join(sorted(splits))}": ("o", MIN_AUC_RANGE, [run.aucs() for run in runs]),
        "Share of lookups of hot rows": (
            "",
            0.0,
            [run.hot_shares() for run in runs],
        ),
    }
    panels = {t: p for t, p in panels.items() if any(len(steps) > 1 for steps, _ in p[2])}
    if not panels:
        return None
    with report_style():
        figure = Figure(figsize=(11, 3.9), layout="constrained")
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, (marker, min_range, lines)) in zip(row, panels.items(), strict=True):
            axes.set_title(title)
            _draw_lines(axes, runs, lines, marker)
            _widen(axes, min_range)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=legend_columns(labels))
    return figure


def _draw_lines(
    axes: Axes, runs: Sequence[Run], lines: Sequence[tuple[list[float], list[float]]], marker: str
) -> None:
    # Exact runs draw the same line; each is thinner than the one below it, so that all are visible.
    widths = np.linspace(1.6 + min(1.1 * len(runs), 5.0), 1.6, len(runs))
    for position, (run, (steps, values)) in enumerate(zip(runs, lines, strict=True)):
        width = widths[position]
        look: dict[str, Any] = {"color": run_color(position), "linewidth": width}
        look |= {"marker": marker, "markersize": width + 3}
        axes.plot(steps, values, label=run.name, **look)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.ticklabel_format(axis="y", useOffset=False)
    light_grid(axes, "both")


def _widen(axes: Axes, min_range: float) -> None:
    """Extend the y axis to at least that range, around its values."""
    low, high = axes.get_ylim()
    missing = max(min_range - (high - low), 0.0)
    axes.set_ylim(low - missing / 2, high + missing / 2)


def draw_steps(runs: Sequence[Run]) -> Figure | None:
    """The stages of a step, a stacked bar per run with p50 and p90; None if not recorded."""
    parts = {run.name: _with_rest(run.stage_s, run.number("step_p50_s")) for run in runs}
    if not any(parts.values()):
        return None
    texts = []
    for run in runs:
        quantiles = {name: run.number(f"step_{name}_s") for name in ("p50", "p90")}
        known = [f"{name} {show_seconds(s)}" for name, s in quantiles.items() if s is not None]
        texts.append(", ".join(known) or NOT_RECORDED)
    return bar_figure(len(runs), lambda axes: draw_bars(axes, parts, texts, show_seconds))


def _with_rest(stage_s: Parts, step_s: float | None) -> Parts:
    """The stages, with the rest of the median step in the stage "other"."""
    rest = (step_s or 0.0) - sum(stage_s.values())
    if not stage_s or not step_s or not rest > MIN_REST_FRAC * step_s:
        return stage_s
    return {**stage_s, OTHER_STAGE: stage_s.get(OTHER_STAGE, 0.0) + rest}


def draw_traffic(runs: Sequence[Run]) -> Figure | None:
    """Bytes sent per step and rank by collective, with the lower bound; None if there are none."""
    parts = {run.name: run.sent_bytes for run in runs}
    bounds = [run.number("bound_bytes") for run in runs]
    if not any(sum(sent.values()) for sent in parts.values()):
        return None
    texts = []
    for run, sent, bound in zip(runs, parts.values(), bounds, strict=True):
        total, between = sum(sent.values()), run.number("between_hosts_bytes")
        over = f", {total / bound:.2f}x the bound" if bound else ""
        over += f", {show_bytes(between)} between hosts" if between else ""
        texts.append(f"{show_bytes(total)}{over}" if sent else NOT_RECORDED)
    return bar_figure(len(runs), lambda axes: draw_bars(axes, parts, texts, show_bytes, bounds))


def draw_lookups(plans: Mapping[str, ComparedPlan]) -> Figure:
    """The lookups that each rank serves, a panel for each plan and a bar for each rank."""
    parts = ("replicated", "own", "all_to_all")
    labels = {"all_to_all": "rows of this rank, for samples of others"}
    with report_style():
        figure = Figure(figsize=(11, 2.9), layout="constrained")
        row = figure.subplots(1, len(plans), squeeze=False, sharey=True)[0]
        for axes, (name, plan) in zip(row, plans.items(), strict=True):
            owned = np.array(plan.owned_fracs)
            num_ranks = owned.size
            replicated = np.full(num_ranks, plan.replicated_frac / num_ranks)
            heights = (replicated, owned / num_ranks, owned * (1 - 1 / num_ranks))
            bottom = np.zeros(num_ranks)
            for part, height in zip(parts, heights, strict=True):
                label = labels.get(part, PART_LABELS[part])
                color, _ = PART_LOOKS[part]
                axes.bar(range(num_ranks), height, 0.8, bottom, color=color, label=label)
                bottom += height
            axes.set_title(fill(name, LABEL_WIDTH))
            axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda rank, _: f"rank {rank:.0f}"))
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.set_xlim(-0.6, num_ranks - 0.4)
            light_grid(axes, "y")
        row[0].set_ylabel("share of all lookups")
        handles, texts = row[0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside upper left", ncols=len(texts), handlelength=1.3)
    return figure


def bar_figure(num_bars: int, draw: Callable[[Axes], None]) -> Figure:
    """A figure with a legend, as high as its horizontal bars need, drawn by ``draw``."""
    with report_style():
        figure = Figure(figsize=(11, 1.5 + 0.46 * num_bars), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        columns = legend_columns(labels, num_letters=170)
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=1.3)
    return figure


def draw_bars(
    axes: Axes,
    bars: Mapping[str, Parts],
    texts: Sequence[str],
    show: Callable[[float], str],
    bounds: Sequence[float | None] = (),
) -> None:
    """Draw a horizontal stacked bar for each of ``bars``, with a text at its end.

    Args:
        axes: The axes to draw on; the first bar is at the top.
        bars: The parts of each bar by the bar's label.
        texts: The text at the end of each bar.
        show: Formats the numbers of the axis.
        bounds: The lower bound of each bar, marked by a line; None for no line.
    """
    names = sorted(
        dict.fromkeys(name for parts in bars.values() for name, length in parts.items() if length),
        # Parts without their own style come after the wait for data.
        key=lambda name: [*PART_LOOKS].index(name) if name in PART_LOOKS else 0.5,
    )
    others = [name for name in names if name not in PART_LOOKS]
    ends = [0.0] * len(bars)
    for name in names:
        color = PART_COLORS[others.index(name) % len(PART_COLORS)] if name in others else ""
        facecolor, hatch = PART_LOOKS.get(name, (color, ""))
        widths = [parts.get(name, 0.0) for parts in bars.values()]
        axes.barh(
            range(len(bars)),
            widths,
            left=ends,
            height=0.62,
            label=PART_LABELS.get(name, name.replace("_", " ")),
            facecolor=facecolor,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.8,
        )
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for position, bound in enumerate(bounds):
        if bound:
            # White edges separate the line from a dark bar behind it; one is in the legend.
            label = "_" if BOUND_LABEL in axes.get_legend_handles_labels()[1] else BOUND_LABEL
            ends[position] = max(ends[position], bound)
            (line,) = axes.plot(
                [bound] * 2, [position - 0.42, position + 0.42], color=INK, label=label
            )
            line.set_path_effects([withStroke(linewidth=4.5, foreground="white")])
    for position, text in enumerate(texts):
        axes.annotate(
            text, (ends[position], position), (7, 0), textcoords="offset points", va="center"
        )
    axes.set_xlim(0, max(ends) * 1.42 or 1.0)
    axes.set_yticks(range(len(bars)), [fill(name, LABEL_WIDTH) for name in bars])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    light_grid(axes, "x")
    axes.xaxis.set_major_formatter(lambda value, _: _trim_zeros(show(value)))


def _trim_zeros(text: str) -> str:
    """``2.50 MB`` becomes ``2.5 MB``, for the ticks of an axis."""
    return re.sub(r"\.?0+(?= )", "", text) if "." in text else text


def plot_coverage(profile: Path, png_path: Path) -> None:
    """Draw a profile's coverage curves.

    Raises:
        ArtifactError: If the profile is missing or altered.
    """
    write_png(draw_coverage(read_artifact(profile, kind="profile").content, None), png_path)


def draw_coverage(profile: Content, partition: Content | None) -> Figure:
    """Coverage over all tables, with the chosen partition marked if there is one.

    Args:
        profile: The content of a profile's manifest.
        partition: The content of a partition's manifest.
    """
    curve = profile["coverage"]
    fracs = curve["rows_frac"][1:]
    with report_style():
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.plot(fracs, curve["train"][1:], color=TRAIN_COLOR, label="train")
        axes.fill_between(fracs, curve["train"][1:], color=TRAIN_COLOR, alpha=0.07, linewidth=0)
        if curve["heldout"] is not None:
            heldout = curve["heldout"][1:]
            axes.plot(fracs, heldout, "--", color=HELDOUT_COLOR, label="held out, later")
        axes.set_xscale("log")
        axes.set_xlim(min(fracs[0], 0.5), 1)  # a single point would leave no range
        axes.set_ylim(0, 1.03)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda frac, _: f"{frac * 100:g}%"))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("most accessed rows, share of all rows (log scale)")
        axes.set_ylabel("share of lookups")
        num_rows = sum(table["num_rows"] for table in profile["tables"].values())
        axes.set_title(f"All {len(profile['tables'])} tables, {show_count(num_rows)} rows")
        light_grid(axes, "both")
        axes.minorticks_off()
        if partition is not None:
            _mark_partition(axes, partition["total"])
        axes.legend(loc="upper left")
    return figure


def _mark_partition(axes: Axes, total: Content) -> None:
    frac = total["hot_rows_frac"]
    if frac <= 0:
        axes.set_title("no hot rows", loc="right", fontsize=9, fontweight="normal", color=SOFT_INK)
        return
    axes.axvline(frac, color=INK, linewidth=1, linestyle=(0, (2, 2)))
    text = [f"{show_count(total['hot_rows'])} hot rows ({show_frac(frac)})"]
    for part, name, color in (
        ("coverage_train", "train", TRAIN_COLOR),
        ("coverage_heldout", "held-out", HELDOUT_COLOR),
    ):
        if total[part] is not None:
            axes.plot([frac], [total[part]], "o", color=color, markeredgecolor="white", zorder=5)
            text.append(f"{show_frac(total[part])} of the {name} lookups")
    # The box goes to the roomier side of the mark, below the curves.
    is_left = frac > math.prod(axes.get_xlim()) ** 0.5
    axes.annotate(
        "\n".join(text),
        xy=(frac, 0.06),
        xytext=(-8 if is_left else 8, 0),
        textcoords="offset points",
        ha="right" if is_left else "left",
        va="bottom",
        linespacing=1.5,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 3},
    )
