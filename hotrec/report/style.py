"""One look for all pictures: light, few lines, colours that a colour-blind reader tells apart.

Run colours are Okabe and Ito's; stacked parts take Tol's muted scheme, so that a colour of a run
never stands for a part of a step.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, SOFT_INK, GRID = "#1f2933", "#5b6672", "#e3e7eb"
RUN_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6B6B")
PART_COLORS = (
    "#332288",
    "#88CCEE",
    "#CC6677",
    "#DDCC77",
    "#44AA99",
    "#AA4499",
    "#999933",
    "#882255",
    "#117733",
    "#661100",
    "#6699CC",
)
REST_COLOR = "#c9ced4"
TRAIN_COLOR, HELDOUT_COLOR = "#0072B2", "#D55E00"

RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#9aa5b1",
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
    # A "$" in the name of a run or a table is just that.
    "text.parse_math": False,
    "figure.facecolor": "white",
    "svg.fonttype": "path",
    # Fixed, so that one report is one sequence of bytes.
    "svg.hashsalt": "hotrec",
}


@contextmanager
def report_style() -> Iterator[None]:
    """Matplotlib's settings for the pictures of the report; the caller's own come back after."""
    with mpl.rc_context(RC):
        yield


def run_color(position: int) -> str:
    """The colour of a run, by its place in the report."""
    return RUN_COLORS[position % len(RUN_COLORS)]


def run_line(position: int) -> str:
    """Solid, and dashed once the colours begin again."""
    return ("-", "--", ":")[position // len(RUN_COLORS) % 3]


def light_grid(axes: Axes, axis: str) -> None:
    """Thin lines along "x", "y" or "both", no tick marks."""
    axes.grid(visible=True, axis=axis)  # type: ignore[arg-type]
    axes.tick_params(length=0)


def legend_columns(labels: Sequence[str], *, num_letters: int = 120) -> int:
    """How many columns a legend may have so that it stays inside a wide figure."""
    if sum(len(label) + 8 for label in labels) <= num_letters:
        return max(1, len(labels))
    widest = max(len(label) for label in labels) + 8
    return max(1, min(len(labels), num_letters // widest))


def to_svg(figure: Figure, label: str) -> str:
    """An inline ``<svg>`` element: text as outlines, so that it looks the same everywhere."""
    buffer = io.StringIO()
    with report_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Fixed sizes give way to the page's width; the view box keeps the proportions.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def to_png(figure: Figure, *, dots_per_inch: int = 150) -> bytes:
    """The picture as the bytes of a PNG file."""
    buffer = io.BytesIO()
    with report_style():
        figure.savefig(buffer, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return buffer.getvalue()
