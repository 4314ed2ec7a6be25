"""The pictures of plans and runs: stages, traffic, learning, and coverage.

Light, few lines, colors that color-blind readers can distinguish. Run colors are Okabe and Ito's;
stacked parts take Tol's muted scheme, so that the color of a run never denotes a part of a step.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, PercentFormatter

from hotrec.report.read import OTHER_STAGE, Run, series_of
from hotrec.report.units import NOT_RECORDED, show_bytes, show_count, show_frac, show_seconds

INK, SOFT_INK, GRID = "#1f2933", "#5b6672", "#e3e7eb"
RUN_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6B6B")
PART_COLORS = (
    *("#332288", "#88CCEE", "#CC6677", "#DDCC77", "#44AA99", "#AA4499"),
    *("#999933", "#882255", "#117733", "#661100", "#6699CC"),
)
REST_COLOR, CONNECTOR_COLOR = "#c9ced4", "#9aa5b1"
# The style of each part of a bar, on all pages. In a step computation is plain and communication
# hatched: eleven stage colors could not be distinguished. Bytes and lookups have the colors of
# their collective.
PART_LOOKS: Mapping[str, tuple[str, str]] = {
    "data_wait": (PART_COLORS[6], ""),
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
    "replicated": (PART_COLORS[7], ""),
    "own": (PART_COLORS[10], ""),
    "all_to_all": (PART_COLORS[8], ""),
    "all_reduce": (PART_COLORS[7], ""),
    "all_gather": (PART_COLORS[9], ""),
    "reduce_scatter": (PART_COLORS[10], ""),
    "broadcast": (PART_COLORS[1], ""),
    "other": (REST_COLOR, ""),
}
# Labels of parts whose names do not explain them.
PART_LABELS: Mapping[str, str] = {
    "hot_exchange": "gradients of dense layers and hot rows",
    "replicated": "rows on every rank",
    "own": "rows of this rank, for its own samples",
    "all_to_all": "all-to-all",
    "all_reduce": "all-reduce",
}
TRAIN_COLOR, HELDOUT_COLOR = "#0072B2", "#D55E00"

RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": CONNECTOR_COLOR,
    "axes.labelcolor": SOFT_INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT_INK,
    "ytick.color": SOFT_INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    # A "$" in the name of a run or a table does not start a formula.
    "text.parse_math": False,
    "figure.facecolor": "white",
    "svg.fonttype": "path",
    # A fixed salt makes the same report the same bytes.
    "svg.hashsalt": "hotrec",
}


@contextmanager
def report_style() -> Iterator[None]:
    """Matplotlib's settings for the figures; the caller's own are restored afterwards."""
    with mpl.rc_context(RC):
        yield


def run_color(position: int) -> str:
    """The color of a run, by its position in the report."""
    return RUN_COLORS[position % len(RUN_COLORS)]


def light_grid(axes: Axes, axis: str) -> None:
    """Draw thin lines along "x", "y" or "both", and no tick marks."""
    axes.grid(visible=True, axis=axis)  # type: ignore[arg-type]
    axes.tick_params(length=0)


def legend_columns(labels: Sequence[str], *, num_letters: int = 120) -> int:
    """The number of columns with which a legend stays inside a wide figure."""
    widest = max(map(len, labels), default=0) + 8
    return max(1, min(len(labels), num_letters // widest))


def to_svg(figure: Figure | None, label: str) -> str:
    """An inline ``<svg>`` element, empty without a figure; its text is drawn as outlines."""
    if figure is None:
        return ""
    buffer = io.StringIO()
    with report_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Without a fixed size the figure takes the page's width; the view box keeps its proportions.
    svg = re.sub(r' (?:width|height)="[^"]*"', "", svg, count=2)
    # A small figure is not blown up to the full width.
    style = f"max-width:{103 * figure.get_figwidth():.0f}px"
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}" style="{style}"', 1)


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
    splits = " / ".join(sorted({split for run in runs for split in run.splits[:1]}))
    panels = {
        "Training loss (log loss)": [run.series("loss") for run in runs],
        f"AUC on {splits}": [run.eval_series("auc", [*run.splits, ""][0]) for run in runs],
        "Share of lookups of hot rows": [series_of(run.decisions, "hot_share") for run in runs],
    }
    panels = {t: lines for t, lines in panels.items() if any(len(steps) > 1 for steps, _ in lines)}
    if not panels:
        return None
    # Exact runs draw the same line; each is thinner than the one below it, so that all are visible.
    widths = np.linspace(1.6 + min(1.1 * len(runs), 5.0), 1.6, len(runs))
    with report_style():
        figure = Figure(figsize=(11, 3.9), layout="constrained")
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, lines) in zip(row, panels.items(), strict=True):
            axes.set_title(title)
            is_auc = title.startswith("AUC")
            for position, (run, line, width) in enumerate(zip(runs, lines, widths, strict=True)):
                look: dict[str, Any] = {"color": run_color(position), "linewidth": width}
                look |= {"marker": "o" if is_auc else "", "markersize": width + 3}
                axes.plot(*line, label=run.name, **look)
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.ticklabel_format(axis="y", useOffset=False)
            light_grid(axes, "both")
            low, high = axes.get_ylim()
            missing = max(MIN_AUC_RANGE - (high - low), 0.0) if is_auc else 0.0
            axes.set_ylim(low - missing / 2, high + missing / 2)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=legend_columns(labels))
    return figure


def draw_steps(runs: Sequence[Run]) -> Figure | None:
    """The stages of a step, a stacked bar per run with p50 and p90; None if not recorded."""
    bars: dict[str, tuple[Parts, str]] = {}
    for run in runs:
        quantiles = {name: run.number(f"step_{name}_s") for name in ("p50", "p90")}
        known = [f"{name} {show_seconds(s)}" for name, s in quantiles.items() if s is not None]
        measured = _with_rest(run.by_name("stage_s"), run.number("step_p50_s"))
        bars[run.name] = measured, ", ".join(known) or NOT_RECORDED
        if predicted := run.by_name("predicted_stage_s"):
            step_s = run.number("predicted_step_s") or sum(predicted.values())
            bars[f"{run.name}, predicted"] = predicted, show_seconds(step_s)
    if not any(parts for parts, _ in bars.values()):
        return None
    parts_of = {name: parts for name, (parts, _) in bars.items()}
    return draw_bars(parts_of, [text for _, text in bars.values()], show_seconds)


def _with_rest(stage_s: Parts, step_s: float | None) -> Parts:
    """The stages, with the rest of the median step in the stage "other"."""
    rest = (step_s or 0.0) - sum(stage_s.values())
    if not stage_s or not step_s or not rest > MIN_REST_FRAC * step_s:
        return stage_s
    return {**stage_s, OTHER_STAGE: stage_s.get(OTHER_STAGE, 0.0) + rest}


def draw_traffic(runs: Sequence[Run]) -> Figure | None:
    """Bytes sent per step and rank by collective, with the lower bound; None if there are none."""
    parts = {run.name: run.by_name("sent_bytes") for run in runs}
    bounds = [run.number("bound_bytes") for run in runs]
    if not any(sum(sent.values()) for sent in parts.values()):
        return None
    texts = []
    for run, sent, bound in zip(runs, parts.values(), bounds, strict=True):
        total, between = sum(sent.values()), run.number("between_hosts_bytes")
        over = f", {total / bound:.2f}x the bound" if bound else ""
        over += f", {show_bytes(between)} between hosts" if between else ""
        texts.append(f"{show_bytes(total)}{over}" if sent else NOT_RECORDED)
    return draw_bars(parts, texts, show_bytes, bounds)


def draw_bars(
    bars: Mapping[str, Parts],
    texts: Sequence[str],
    show: Callable[[float], str],
    bounds: Sequence[float | None] = (),
) -> Figure:
    """A horizontal stacked bar for each of ``bars``, with a text at its end.

    Args:
        bars: The parts of each bar by the bar's label, from the top.
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
    ends = np.zeros(len(bars))
    with report_style():
        figure = Figure(figsize=(11, 1.5 + 0.46 * len(bars)), layout="constrained")
        axes = figure.subplots()
        for name in names:
            color = PART_COLORS[others.index(name) % len(PART_COLORS)] if name in others else ""
            facecolor, hatch = PART_LOOKS.get(name, (color, ""))
            widths = np.array([parts.get(name, 0.0) for parts in bars.values()])
            look: dict[str, Any] = {"facecolor": facecolor, "hatch": hatch, "linewidth": 0.8}
            look |= {"edgecolor": "white", "label": PART_LABELS.get(name, name.replace("_", " "))}
            axes.barh(range(len(bars)), widths, left=ends, height=0.62, **look)
            ends += widths
        label = BOUND_LABEL
        for position, bound in enumerate(bounds):
            if bound:
                # White edges separate the line from a dark bar behind it; one is in the legend.
                ends[position] = max(ends[position], bound)
                (line,) = axes.plot(
                    [bound] * 2, [position - 0.42, position + 0.42], color=INK, label=label
                )
                line.set_path_effects([withStroke(linewidth=4.5, foreground="white")])
                label = "_"
        for position, text in enumerate(texts):
            at = (ends[position], position)
            axes.annotate(text, at, (7, 0), textcoords="offset points", va="center")
        axes.set_xlim(0, max(ends) * 1.42 or 1.0)
        axes.set_yticks(range(len(bars)), [fill(name, LABEL_WIDTH) for name in bars])
        axes.tick_params(axis="y", labelcolor=INK)
        axes.invert_yaxis()
        axes.spines["left"].set_visible(False)
        light_grid(axes, "x")
        axes.xaxis.set_major_formatter(lambda value, _: _trim_zeros(show(value)))
        handles, labels = axes.get_legend_handles_labels()
        columns = legend_columns(labels, num_letters=170)
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=1.3)
    return figure


def _trim_zeros(text: str) -> str:
    """``2.50 MB`` becomes ``2.5 MB``, for the ticks of an axis."""
    return re.sub(r"\.?0+(?= )", "", text) if "." in text else text


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
        axes.set_title(f"{show_count(num_rows)} rows")
        light_grid(axes, "both")
        axes.minorticks_off()
        if partition is not None and (frac := partition["total"]["hot_rows_frac"]) > 0:
            axes.axvline(frac, color=INK, linewidth=1, linestyle=(0, (2, 2)))
            text = f"{show_count(partition['total']['hot_rows'])} hot rows ({show_frac(frac)})"
            look: dict[str, Any] = {"loc": "right", "fontsize": 9, "fontweight": "normal"}
            axes.set_title(text, color=SOFT_INK, **look)
        axes.legend(loc="upper left")
    return figure
