"""The picture of a what-if sweep: samples per second against ranks."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator

from hotrec.report.style import (
    INK,
    SOFT_INK,
    legend_columns,
    light_grid,
    report_style,
    run_color,
    run_line,
)
from hotrec.report.sweep_points import Point, varied_keys
from hotrec.report.units import show_count, show_rate


def build_what_if_figure(
    points: Sequence[Point], cheapest: Point | None, min_samples_per_s: float | None
) -> Figure:
    """A line for each batch size and setting that was varied; points of unknown ranks left out."""
    shown = [point for point in points if point.num_ranks is not None]
    lines: dict[str, list[Point]] = {}
    for point in shown:
        lines.setdefault(line_label(point, points), []).append(point)
    with report_style():
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        axes = figure.subplots()
        for position, (label, members) in enumerate(lines.items()):
            _draw_line(axes, label, members, position)
        if cheapest is not None and cheapest.num_ranks is not None:
            axes.plot(
                [cheapest.num_ranks],
                [cheapest.samples_per_s or 0.0],
                "o",
                markersize=15,
                fillstyle="none",
                color=INK,
                label="cheapest",
            )
        if min_samples_per_s is not None:
            axes.axhline(min_samples_per_s, color=INK, linewidth=1, linestyle=(0, (2, 2)))
            note = axes.annotate(
                f"wanted: {show_rate(min_samples_per_s)}",
                (0.005, min_samples_per_s),
                xycoords=("axes fraction", "data"),
                xytext=(0, 4),
                textcoords="offset points",
                color=SOFT_INK,
            )
            note.set_in_layout(False)
        _set_axes(axes, sorted({point.num_ranks or 0 for point in shown}))
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            figure.legend(handles, labels, loc="outside lower center", ncols=legend_columns(labels))
    return figure


def line_label(point: Point, points: Sequence[Point]) -> str:
    """What a line stands for: the batch, and what else was varied but ranks and hosts."""
    batch = "batch unknown" if point.batch_size is None else f"batch {show_count(point.batch_size)}"
    parts = [batch]
    if len({p.overrides.get("plan.ranks_per_host") for p in points}) > 1:
        parts.append(f"{point.ranks_per_host} ranks per host")
    # The last part of a dotted key says enough in a picture.
    parts += [
        f"{key.rpartition('.')[2]}={point.overrides[key]}"
        for key in varied_keys(points)
        if key in point.overrides
    ]
    return ", ".join(parts)


def _draw_line(axes: Axes, label: str, members: Sequence[Point], position: int) -> None:
    color = run_color(position)
    fitting = sorted(
        ((p.num_ranks or 0, p.samples_per_s or 0.0) for p in members if p.fits), key=lambda p: p[0]
    )
    ranks, rates = [x for x, _ in fitting], [y for _, y in fitting]
    axes.plot(
        ranks,
        rates,
        color=color,
        linestyle=run_line(position),
        marker="o",
        markersize=5,
        label=label,
    )
    # Below the curves; those of several lines at one rank stand side by side.
    missing = [(p.num_ranks or 0) * 1.035**position for p in members if not p.fits]
    crosses = axes.plot(
        missing,
        [0.05] * len(missing),
        "x",
        color=color,
        markersize=7,
        markeredgewidth=2,
        transform=axes.get_xaxis_transform(),
    )
    for cross in crosses:
        cross.set_in_layout(False)


def _set_axes(axes: Axes, ranks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    if ranks:
        axes.set_xlim(ranks[0] / 1.25, ranks[-1] * 1.25)
        axes.xaxis.set_major_locator(FixedLocator(list(ranks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    top = axes.get_ylim()[1]
    axes.set_ylim(-0.1 * top, top)
    axes.yaxis.set_major_locator(FixedLocator([t for t in axes.get_yticks() if 0 <= t <= top]))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("ranks (log scale); a cross: does not fit")
    axes.set_title("Predicted samples per second, all ranks")
    light_grid(axes, "both")
