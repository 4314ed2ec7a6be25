"""The figures of runs: learning, stages and traffic of a step, predictions, and coverage."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, PercentFormatter

from hotrec.report.read import Run, read_coverage
from hotrec.report.style import (
    CONNECTOR_COLOR,
    HELDOUT_COLOR,
    INK,
    PART_COLORS,
    SOFT_INK,
    STAGE_LOOKS,
    TRAIN_COLOR,
    annotate,
    legend_columns,
    light_grid,
    report_style,
    run_color,
    run_line,
    stack_bars,
    stage_look,
    write_png,
)
from hotrec.report.units import (
    NOT_RECORDED,
    show_bytes,
    show_count,
    show_error,
    show_frac,
    show_seconds,
)

# The stage without a name, and what the stages leave of the median step if that is not rounding.
REST, MIN_REST_FRAC = "other", 0.02
BOUND_LABEL = "lower bound"
PREDICTED_COLOR, MEASURED_COLOR = "#88CCEE", "#332288"
MAX_TABLES_SHOWN = 30

Content = Mapping[str, Any]
# Keyword arguments of a matplotlib call.
Style = dict[str, Any]


def draw_learning(runs: Sequence[Run]) -> Figure | None:
    """Training loss and held-out AUC over steps, a line per run; None if neither was recorded."""
    losses = [run.series("loss") for run in runs]
    # The first split is the one that is evaluated during training.
    splits = [run.splits[0] if run.splits else "" for run in runs]
    aucs = [run.eval_series("auc", split) for run, split in zip(runs, splits, strict=True)]
    if not any(steps for steps, _ in losses + aucs):
        return None
    with report_style():
        figure = Figure(figsize=(11, 3.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_lines(left, runs, losses, marker="")
        left.set_title("Training loss (log loss)")
        _draw_lines(right, runs, aucs, marker="o")
        right.set_title(
            f"AUC on {' / '.join(sorted(set(filter(None, splits)))) or 'held-out data'}"
        )
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=legend_columns(labels))
    return figure


def _draw_lines(
    axes: Axes,
    runs: Sequence[Run],
    lines: Sequence[tuple[list[float], list[float]]],
    *,
    marker: str,
) -> None:
    # Exact runs draw the same line; each is thinner than the one below it, so that all show.
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
    """The stages of a step, a stacked bar per run with p50 and p90; None if not recorded."""
    parts = [_with_rest(run.stage_s, run.number("step_p50_s")) for run in runs]
    if not any(parts):
        return None
    texts = []
    for run, part in zip(runs, parts, strict=True):
        p50, p90 = run.number("step_p50_s"), run.number("step_p90_s")
        if p50 is None:
            texts.append(f"sum {show_seconds(sum(part.values()))}" if part else NOT_RECORDED)
        else:
            tail = "" if p90 is None else f", p90 {show_seconds(p90)}"
            texts.append(f"p50 {show_seconds(p50)}{tail}")
    return _draw_bars(runs, parts, texts, [None] * len(runs), show_seconds, "time per step")


def _with_rest(stage_s: Mapping[str, float], step_s: float | None) -> dict[str, float]:
    """The stages, and what they leave of the median step as one more."""
    parts = dict(stage_s)
    if parts and step_s is not None and not math.isnan(step_s):
        rest = step_s - sum(parts.values())
        if rest > MIN_REST_FRAC * step_s:
            parts[REST] = parts.get(REST, 0.0) + rest
    return parts


def draw_traffic(runs: Sequence[Run]) -> Figure | None:
    """Bytes sent per step and rank by collective, with the lower bound; None if there are none."""
    bounds = [run.number("bound_bytes") for run in runs]
    if not any(sum(run.sent_bytes.values()) for run in runs):
        return None
    texts = []
    for run, bound in zip(runs, bounds, strict=True):
        total = sum(run.sent_bytes.values())
        text = show_bytes(total) if run.sent_bytes else NOT_RECORDED
        over = f", {total / bound:.2f}x the lower bound" if run.sent_bytes and bound else ""
        texts.append(text + over)
    parts = [run.sent_bytes for run in runs]
    return _draw_bars(runs, parts, texts, bounds, show_bytes, "bytes sent per step and rank")


def _draw_bars(
    runs: Sequence[Run],
    parts: Sequence[Mapping[str, float]],
    texts: Sequence[str],
    bounds: Sequence[float | None],
    show: Callable[[float], str],
    label: str,
) -> Figure:
    names = list(dict.fromkeys(name for part in parts for name in part if name != REST))
    others = [name for name in names if name not in STAGE_LOOKS]
    # Stages use the first colors, so that other parts beside them take the remaining ones.
    colors = PART_COLORS[6:] if len(others) < len(names) else PART_COLORS
    looks = {name: stage_look(name) for name in names}
    for i, name in enumerate(others):
        looks[name] = {"facecolor": colors[i % len(colors)]}
    if any(REST in part for part in parts):
        looks[REST] = stage_look(REST)
    with report_style():
        figure = Figure(figsize=(11, 1.5 + 0.46 * len(runs)), layout="constrained")
        axes = figure.subplots()
        ends = stack_bars(axes, parts, looks)
        handles, labels = axes.get_legend_handles_labels()
        for position, (text, bound) in enumerate(zip(texts, bounds, strict=True)):
            if bound:
                # White edges separate the line from a dark bar behind it.
                (line,) = axes.plot([bound] * 2, [position - 0.42, position + 0.42], color=INK)
                line.set_path_effects([withStroke(linewidth=4.5, foreground="white")])
                ends[position] = max(ends[position], bound)
                if BOUND_LABEL not in labels:
                    handles, labels = [*handles, line], [*labels, BOUND_LABEL]
            annotate(axes, ends[position], position, text)
        axes.set_xlim(0, max(ends) * 1.28 or 1.0)
        axes.set_yticks(range(len(runs)), [run.name for run in runs])
        axes.xaxis.set_major_formatter(lambda value, _: _trim_zeros(show(value)))
        axes.set_xlabel(label)
        figure.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=legend_columns(labels, num_letters=190),
            columnspacing=1.4,
            handlelength=1.3,
        )
    return figure


def _trim_zeros(text: str) -> str:
    """``2.50 MB`` becomes ``2.5 MB``, for the ticks of an axis."""
    return re.sub(r"\.?0+(?= )", "", text) if "." in text else text


def predicted_stages(runs: Sequence[Run]) -> list[str]:
    """All stages that were predicted or measured, in the order of a step."""
    by_stage = [
        stages
        for run in runs
        for stages in (run.by_part["predicted_stage_s"], run.by_part["measured_stage_s"])
    ]
    return list(dict.fromkeys(stage for stages in by_stage for stage in stages))


def draw_predicted(runs: Sequence[Run]) -> Figure:
    """Predicted and measured seconds of each stage side by side, the runs on one scale.

    Args:
        runs: Runs with predicted and measured stages.
    """
    stages = predicted_stages(runs)
    with report_style():
        figure = Figure(figsize=(11, 0.6 + 2.7 * len(runs)), layout="constrained")
        rows = figure.subplots(len(runs), 1, squeeze=False, sharey=True)[:, 0]
        for axes, run in zip(rows, runs, strict=True):
            _draw_prediction(axes, run, stages)
        slowest, *handles = rows[0].get_legend_handles_labels()[0]  # lines come before bars
        figure.legend(handles=[*handles, slowest], loc="outside upper right", ncols=3)
    return figure


def _draw_prediction(axes: Axes, run: Run, stages: Sequence[str]) -> None:
    places = range(len(stages))
    for shift, times, look in (
        (-0.19, run.by_part["predicted_stage_s"], Style(color=PREDICTED_COLOR, hatch="//")),
        (0.19, run.by_part["measured_stage_s"], Style(color=MEASURED_COLOR)),
    ):
        axes.bar(
            [place + shift for place in places],
            [times.get(stage, 0.0) for stage in stages],
            width=0.36,
            edgecolor=INK,
            linewidth=0.8,
            label="predicted" if shift < 0 else "measured, mean over the ranks",
            **look,
        )
    slowest = [
        (i + 0.19, run.by_part["slowest_rank_stage_s"].get(stage)) for i, stage in enumerate(stages)
    ]
    marks = [(x, seconds) for x, seconds in slowest if seconds is not None]
    dash = Style(linestyle="", marker="_", markersize=12, markeredgewidth=1.6, color=INK)
    axes.plot([x for x, _ in marks], [s for _, s in marks], label="slowest rank", **dash)
    predicted, measured = run.number("predicted_step_s"), run.number("measured_step_s")
    error, title = run.number("step_error_frac"), run.name
    if predicted is not None and measured is not None and error is not None:
        title += f": step predicted {show_seconds(predicted)}, measured {show_seconds(measured)}"
        title += f", error {show_error(error)}"
    axes.set_title(title)
    axes.set_xticks(places, [stage.replace("_", "\n") for stage in stages])
    axes.tick_params(axis="x", labelcolor=INK)
    axes.yaxis.set_major_formatter(lambda value, _: show_seconds(value))
    light_grid(axes, "y")


def plot_coverage(profile: Path, png_path: Path, *, partition: Path | None = None) -> None:
    """Draw a profile's coverage curves, with the chosen partition marked where one is given.

    Raises:
        ArtifactError: If the profile or partition is missing or altered, or they do not belong
            together.
    """
    artifacts = read_coverage(profile, partition)
    figure = draw_coverage(artifacts[0].content, artifacts[1].content if artifacts[1] else None)
    write_png(figure, png_path)


def draw_coverage(profile: Content, partition: Content | None) -> Figure:
    """Coverage over all tables; with a partition, also what it covers of each table.

    Args:
        profile: The content of a profile's manifest.
        partition: The content of a partition's manifest.
    """
    with report_style():
        if partition is None:
            figure = Figure(figsize=(7.2, 4.2), layout="constrained")
            _draw_curves(figure.subplots(), profile, None)
            return figure
        tables = profile["tables"]
        # Tables with equal lookups (all of them, with one id per sample) are ordered by size.
        shown = sorted(
            tables, key=lambda t: (-tables[t]["num_lookups"], -tables[t]["num_rows"], t)
        )[:MAX_TABLES_SHOWN]
        figure = Figure(figsize=(11, max(4.2, 1.4 + 0.21 * len(shown))), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        _draw_curves(left, profile, partition)
        _draw_tables(right, partition, shown, num_tables=len(tables))
        return figure


def _draw_curves(axes: Axes, profile: Content, partition: Content | None) -> None:
    curve = profile["coverage"]
    fracs = curve["rows_frac"][1:]
    axes.plot(fracs, curve["train"][1:], color=TRAIN_COLOR, label="train")
    axes.fill_between(fracs, curve["train"][1:], color=TRAIN_COLOR, alpha=0.07, linewidth=0)
    if curve["heldout"] is not None:
        dashed = Style(color=HELDOUT_COLOR, linestyle="--", label="held out, later")
        axes.plot(fracs, curve["heldout"][1:], **dashed)
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


def _mark_partition(axes: Axes, total: Content) -> None:
    frac = total["hot_rows_frac"]
    if frac <= 0:
        axes.set_title("no hot rows", loc="right", fontsize=9, fontweight="normal", color=SOFT_INK)
        return
    axes.axvline(frac, color=INK, linewidth=1, linestyle=(0, (2, 2)))
    text = [f"chosen: {show_count(total['hot_rows'])} hot rows ({show_frac(frac)})"]
    for part, name, color in (
        ("coverage_train", "train", TRAIN_COLOR),
        ("coverage_heldout", "held-out", HELDOUT_COLOR),
    ):
        if total[part] is not None:
            axes.plot([frac], [total[part]], "o", color=color, markeredgecolor="white", zorder=5)
            text.append(f"{show_frac(total[part])} of the {name} lookups")
    # The box goes to the roomier side of the mark, below the curves.
    low, high = axes.get_xlim()
    is_left = frac > (low * high) ** 0.5
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


def _draw_tables(axes: Axes, partition: Content, shown: Sequence[str], *, num_tables: int) -> None:
    summaries = [partition["tables"][table] for table in shown]
    for position, summary in enumerate(summaries):
        covered = [summary["coverage_train"], summary["coverage_heldout"]]
        if None not in covered:
            axes.plot(covered, [position] * 2, color=CONNECTOR_COLOR, linewidth=1.2, zorder=1)
    for part, label, look in (
        ("coverage_train", "train", Style(marker="o", color=TRAIN_COLOR, markersize=5)),
        (
            "coverage_heldout",
            "held out, later",
            Style(marker="D", color=HELDOUT_COLOR, markersize=4, fillstyle="none"),
        ),
    ):
        points = [(s[part], y) for y, s in enumerate(summaries) if s[part] is not None]
        if points or label == "train":
            x, y = [x for x, _ in points], [y for _, y in points]
            axes.plot(x, y, linestyle="", label=label, **look)
    names = [table if len(table) <= 24 else table[:23] + "~" for table in shown]
    fracs = [show_frac(summary["hot_rows_frac"]) for summary in summaries]
    axes.set_yticks(
        range(len(shown)), [f"{name}  ({frac})" for name, frac in zip(names, fracs, strict=True)]
    )
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(-0.02, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("share of the table's lookups that its hot rows take")
    left_out = f", {len(shown)} of {num_tables}" if len(shown) < num_tables else ""
    axes.set_title(f"Each table{left_out}")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.2)
    light_grid(axes, "both")
