"""The coverage picture: what share of the lookups the most accessed rows take."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from hotrec.artifact import Artifact, check_made_from, read_artifact
from hotrec.report.style import (
    HELDOUT_COLOR,
    INK,
    SOFT_INK,
    TRAIN_COLOR,
    light_grid,
    report_style,
    to_png,
)
from hotrec.report.units import show_count, show_frac

MAX_TABLES_SHOWN = 30


def read_coverage(profile: Path, partition: Path | None) -> tuple[Artifact, Artifact | None]:
    """Open a profile and, where given, a partition made from it.

    Raises:
        ArtifactError: if one of them is missing or altered, or the partition is of another profile.
    """
    profile_artifact = read_artifact(profile, kind="profile")
    if partition is None:
        return profile_artifact, None
    partition_artifact = read_artifact(partition, kind="partition")
    check_made_from(partition_artifact, profile_artifact)
    return profile_artifact, partition_artifact


def plot_coverage(profile: Path, png_path: Path, *, partition: Path | None = None) -> None:
    """Draw a profile's coverage curves, with the chosen partition marked where one is given.

    Raises:
        ArtifactError: as ``read_coverage``.
    """
    profile_artifact, partition_artifact = read_coverage(profile, partition)
    content = None if partition_artifact is None else partition_artifact.content
    png = to_png(draw_coverage(profile_artifact.content, content))
    png_path.parent.mkdir(parents=True, exist_ok=True)
    scratch = png_path.with_name(f".{png_path.name}.tmp")
    scratch.write_bytes(png)
    os.replace(scratch, png_path)


def draw_coverage(profile: Mapping[str, Any], partition: Mapping[str, Any] | None) -> Figure:
    """Coverage over all tables; with a partition, also what it covers of each table.

    Args:
        profile: content of a profile's manifest.
        partition: content of a partition's manifest.
    """
    with report_style():
        if partition is None:
            figure = Figure(figsize=(7.2, 4.2), layout="constrained")
            _draw_curves(figure.subplots(), profile, None)
            return figure
        shown = _tables_by_lookups(profile)[:MAX_TABLES_SHOWN]
        height = max(4.2, 1.4 + 0.21 * len(shown))
        figure = Figure(figsize=(11, height), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        _draw_curves(left, profile, partition)
        _draw_tables(right, partition, shown, num_tables=len(profile["tables"]))
        return figure


def _tables_by_lookups(profile: Mapping[str, Any]) -> list[str]:
    tables = profile["tables"]
    # Tables with equal lookups (all of them, for one id per sample) go by size.
    return sorted(tables, key=lambda t: (-tables[t]["num_lookups"], -tables[t]["num_rows"], t))


def _draw_curves(
    axes: Axes, profile: Mapping[str, Any], partition: Mapping[str, Any] | None
) -> None:
    curve = profile["coverage"]
    fracs = curve["rows_frac"][1:]
    axes.plot(fracs, curve["train"][1:], color=TRAIN_COLOR, label="train")
    axes.fill_between(fracs, curve["train"][1:], color=TRAIN_COLOR, alpha=0.07, linewidth=0)
    if curve["heldout"] is not None:
        axes.plot(
            fracs,
            curve["heldout"][1:],
            color=HELDOUT_COLOR,
            linestyle="--",
            label="held out, later",
        )
    axes.set_xscale("log")
    axes.set_xlim(min(fracs[0], 0.5), 1)  # one row alone would leave no range
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


def _mark_partition(axes: Axes, total: Mapping[str, Any]) -> None:
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
    # The box goes to the roomier side of the mark, low down, where no curve runs beside it.
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


def _draw_tables(
    axes: Axes, partition: Mapping[str, Any], shown: Sequence[str], *, num_tables: int
) -> None:
    for position, table in enumerate(shown):
        summary = partition["tables"][table]
        train, heldout = summary["coverage_train"], summary["coverage_heldout"]
        if train is not None and heldout is not None:
            axes.plot([train, heldout], [position] * 2, color="#9aa5b1", linewidth=1.2, zorder=1)
        if train is not None:
            axes.plot([train], [position], "o", color=TRAIN_COLOR, markersize=5)
        if heldout is not None:
            axes.plot(
                [heldout], [position], "D", color=HELDOUT_COLOR, markersize=4, fillstyle="none"
            )
    axes.plot([], [], "o", color=TRAIN_COLOR, markersize=5, label="train")
    if any(partition["tables"][t]["coverage_heldout"] is not None for t in shown):
        axes.plot(
            [],
            [],
            "D",
            color=HELDOUT_COLOR,
            markersize=4,
            fillstyle="none",
            label="held out, later",
        )
    axes.set_yticks(range(len(shown)), [_table_label(t, partition["tables"][t]) for t in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(-0.02, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("share of the table's lookups that its hot rows take")
    # Short: the legend stands to its right. What is left out are the least read tables.
    left_out = f", {len(shown)} of {num_tables}" if len(shown) < num_tables else ""
    axes.set_title(f"Each table{left_out}")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.2)
    light_grid(axes, "both")


def _table_label(table: str, summary: Mapping[str, Any]) -> str:
    name = table if len(table) <= 24 else table[:23] + "~"
    return f"{name}  ({show_frac(summary['hot_rows_frac'])})"
