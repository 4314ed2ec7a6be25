"""The look of all figures: light, few lines, colors that color-blind readers can distinguish.

Run colors are Okabe and Ito's; stacked parts take Tol's muted scheme, so that the color of a run
never denotes a part of a step.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
