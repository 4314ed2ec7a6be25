"""The picture of a plan: seconds by stage, memory by rank, rows by tier, sensitivity."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from hotrec.report.plan_pipeline import pipeline_cells
from hotrec.report.plan_text import (
    MAX_TABLES_SHOWN,
    Document,
    baseline_name,
    check_prediction,
    compared_plans,
    describe_world,
    memory_of,
    placed_tables,
    rank_spread,
    sensitivity_base,
    shown_plans,
    shown_stages,
)
from hotrec.report.style import (
    INK,
    PART_COLORS,
    REST_COLOR,
    RUN_COLORS,
    SOFT_INK,
    light_grid,
    report_style,
    to_png,
)
from hotrec.report.units import show_bytes, show_count, show_rate, show_ratio, show_seconds
from hotrec.types import STAGES

MAX_PLANS_SHOWN = 6
# Computation in plain colours, communication hatched: ten stages are more than colours one tells
# apart.
STAGE_LOOKS: Mapping[str, tuple[str, str]] = {
    "route": (PART_COLORS[1], ""),
    "ids_exchange": (PART_COLORS[1], "////"),
    "row_lookup": (PART_COLORS[0], ""),
    "rows_exchange": (PART_COLORS[0], "////"),
    "pool": (PART_COLORS[4], ""),
    "dense": (PART_COLORS[3], ""),
    "grads_exchange": (PART_COLORS[2], "////"),
    "row_update": (PART_COLORS[2], ""),
    "hot_exchange": (PART_COLORS[5], "////"),
    "optimizer": (PART_COLORS[5], ""),
    "other": (REST_COLOR, ""),
}
TIER_COLORS = {"device": RUN_COLORS[0], "host": RUN_COLORS[4]}
# The same, half white: the plan before.
TIER_COLORS_BEFORE = {"device": "#7fb8d8", "host": "#f2cf7f"}
# How a table's rows are marked, by where they live.
ROW_MARKS = (
    ("hot_rows", "hot, on every rank", RUN_COLORS[1], "o"),
    ("device_rows", "device", RUN_COLORS[0], "s"),
    ("cached_rows", "cached by the device", RUN_COLORS[2], "^"),
    ("host_rows", "host", RUN_COLORS[4], "D"),
)


def stage_look(stage: str) -> dict[str, Any]:
    """Colour and hatching of a stage's bar, the same in every picture of a plan."""
    color, hatch = STAGE_LOOKS.get(stage, (REST_COLOR, ".."))
    return {"facecolor": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.8}


def draw_plan(document: Document, path: Path) -> None:
    """Write the picture as a PNG file.

    Raises:
        ValueError: if this is no prediction document.
    """
    write_png(build_plan_figure(document), path)


def write_png(figure: Figure, path: Path) -> None:
    """Write a picture in one move."""
    png = to_png(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_bytes(png)
    os.replace(scratch, path)


def build_plan_figure(document: Document) -> Figure:
    """Four panels; those without numbers are left out.

    Raises:
        ValueError: if this is no prediction document.
    """
    check_prediction(document)
    plans = shown_plans(document)[:MAX_PLANS_SHOWN]
    tables = placed_tables(document)[:MAX_TABLES_SHOWN]
    has_memory = any(memory_of(document["plans"][name]) for name in compared_plans(document))
    entries = document.get("sensitivity") or []
    lower = [name for name, is_there in (("memory", has_memory), ("what if", entries)) if is_there]
    heights = [1.35 + 0.36 * len(plans)]
    heights += [0.9 + 0.2 * len(tables)] if tables else []
    heights += [max(2.4, 0.9 + 0.3 * len(entries))] if lower else []
    with report_style():
        figure = Figure(
            figsize=(11, sum(heights) + 0.5), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.09)
        )
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        figure.suptitle(describe_world(document), fontsize=10, color=SOFT_INK)
        draw_stages(parts[0].subplots(), document, plans)
        if tables:
            _draw_rows(parts[1].subplots(), tables, len(document["tables"]))
        if lower:
            all_axes = parts[-1].subplots(1, len(lower), squeeze=False)[0]
            for name, axes in zip(lower, all_axes, strict=True):
                (_draw_memory if name == "memory" else _draw_sensitivity)(axes, document)
    return figure


def draw_stages(axes: Axes, document: Document, names: Sequence[str]) -> None:
    """A stacked bar of stages for each of the named plans, with its step and bytes behind it."""
    plans, before = document["plans"], baseline_name(document)
    stages = sorted(
        shown_stages(document, names),
        key=lambda stage: STAGES.index(stage) if stage in STAGES else len(STAGES),
    )
    lefts = [0.0] * len(names)
    for stage in stages:
        widths = [plans[name]["stage_s"].get(stage, 0.0) for name in names]
        if not any(widths):
            continue
        axes.barh(
            range(len(names)),
            widths,
            left=lefts,
            height=0.64,
            label=stage.replace("_", " "),
            **stage_look(stage),
        )
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for position, name in enumerate(names):
        plan = plans[name]
        text = f"{show_seconds(plan['step_s'])}, {show_bytes(plan['total_sent_bytes'])} sent"
        if before is not None and name != before:
            text += f", {show_ratio(plan['step_s'], plans[before]['step_s'])} of the time"
        axes.annotate(
            text,
            (lefts[position], position),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold" if name == document["chosen"] else "normal",
        )
    axes.set_xlim(0, max(lefts) * 1.42 or 1.0)
    labels = [name + (" (chosen)" if name == document["chosen"] else "") for name in names]
    cells = pipeline_cells(plans)
    labels = [
        "\n".join([label, *cells.get(name, ())]) for label, name in zip(labels, names, strict=True)
    ]
    axes.set_yticks(range(len(names)), labels)
    axes.set_title("Predicted time of a step (hatched: communication that nothing hides)")
    _finish_bars(axes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _show_tick_s(value)))
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.14), ncols=6, handlelength=1.6)


def _show_tick_s(seconds: float) -> str:
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"


def _finish_bars(axes: Axes) -> None:
    axes.tick_params(axis="y", labelcolor=INK)
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    light_grid(axes, "x")


def _draw_rows(axes: Axes, tables: Sequence[Mapping[str, Any]], num_tables: int) -> None:
    # Marks of equal size would hide one another.
    shifts = {name: (i - 1.5) * 0.12 for i, (name, *_) in enumerate(ROW_MARKS)}
    for name, label, color, marker in ROW_MARKS:
        points = [
            (table[name], position + shifts[name])
            for position, table in enumerate(tables)
            if table.get(name)
        ]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, marker, color=color, markersize=4.5, label=label, alpha=0.9)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.7), high * 1.6)
    axes.xaxis.set_major_locator(LogLocator(10, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_count(value)))
    axes.set_yticks(
        range(len(tables)), [f"{t['name']}  ({show_count(t['num_rows'])})" for t in tables]
    )
    axes.tick_params(axis="y", labelcolor=INK, labelsize=8)
    axes.set_ylim(len(tables) - 0.4, -0.6)
    shown = f" of the {len(tables)} largest tables" if num_tables > len(tables) else " by table"
    axes.set_title(f"Rows{shown}, by where they live (log scale)")
    light_grid(axes, "both")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_memory(axes: Axes, document: Document) -> None:
    names, before = compared_plans(document), baseline_name(document)
    width = 0.8 / len(names)
    labels: list[str] = []
    for position, name in enumerate(names):
        tiers = memory_of(document["plans"][name])
        bottoms: list[float] = []
        for tier, sizes in tiers.items():
            spread = rank_spread(sizes)
            labels = labels or [label for label, _ in spread]
            heights = [size for _, size in spread]
            bottoms = bottoms or [0.0] * len(heights)
            places = [i + (position - (len(names) - 1) / 2) * width for i in range(len(heights))]
            axes.bar(
                places,
                heights,
                width * 0.92,
                bottom=bottoms,
                color=(TIER_COLORS_BEFORE if name == before else TIER_COLORS)[tier],
                edgecolor="white",
            )
            bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    tiers_shown = dict.fromkeys(t for name in names for t in memory_of(document["plans"][name]))
    handles = [
        Patch(
            color=(TIER_COLORS_BEFORE if name == before else TIER_COLORS)[tier],
            label=f"{tier}, {name}",
        )
        for name in names
        for tier in tiers_shown
    ]
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel("rank" if labels and labels[0] == "0" else "ranks, by their memory")
    axes.set_ylim(0, axes.get_ylim()[1] * (1.16 + 0.09 * len(handles)))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_bytes(value)))
    axes.set_title("Memory of tables per rank")
    axes.legend(handles=handles, loc="upper left", ncols=1, fontsize=8)
    light_grid(axes, "y")


def _draw_sensitivity(axes: Axes, document: Document) -> None:
    """Samples per second, or the step where an entry lacks them, against the plan as it is."""
    base = document["plans"][sensitivity_base(document)]
    entries = document["sensitivity"]
    predicted = [entry for entry in entries if entry.get("step_s") is not None]
    name = "samples_per_s" if all(e.get("samples_per_s") for e in predicted) else "step_s"
    show = show_rate if name == "samples_per_s" else show_seconds
    ratios = [e[name] / base[name] if e in predicted else None for e in entries]
    for position, (entry, ratio) in enumerate(zip(entries, ratios, strict=True)):
        if ratio is None:
            _annotate(axes, 1.0, position, "does not fit or was not predicted", SOFT_INK)
            continue
        axes.plot([1.0, ratio], [position] * 2, color="#9aa5b1", linewidth=1.2, zorder=1)
        axes.plot([ratio], [position], "o", color=RUN_COLORS[0], markersize=6)
        _annotate(axes, max(ratio, 1.0), position, f"{show(entry[name])}, {ratio:.2f}x", INK)
    axes.axvline(1.0, color=INK, linewidth=1, linestyle=(0, (2, 2)))
    known = [1.0, *(ratio for ratio in ratios if ratio is not None)]
    span = max(max(known) - min(known), 0.1)
    axes.set_xlim(min(known) - 0.08 * span, max(known) + 0.75 * span)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.set_yticks(range(len(entries)), [entry["what"] for entry in entries])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    what = "Samples per second" if name == "samples_per_s" else "Time of a step"
    axes.set_title(f"{what} if one thing changes")
    axes.set_xlabel(f"1x: {sensitivity_base(document)}, {show(base[name])}")
    light_grid(axes, "x")


def _annotate(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    axes.annotate(text, (x, y), xytext=(8, 0), textcoords="offset points", va="center", color=color)
