"""The look of all figures: light, few lines, colors that color-blind readers can tell apart.

Run colors are Okabe and Ito's; stacked parts take Tol's muted scheme, so that the color of a run
never stands for a part of a step.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hotrec.report.render import write_file

INK, SOFT_INK, GRID = "#1f2933", "#5b6672", "#e3e7eb"
RUN_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6B6B")
PART_COLORS = (
    *("#332288", "#88CCEE", "#CC6677", "#DDCC77", "#44AA99", "#AA4499"),
    *("#999933", "#882255", "#117733", "#661100", "#6699CC"),
)
REST_COLOR, CONNECTOR_COLOR = "#c9ced4", "#9aa5b1"
# Computation is plain and communication hatched: eleven stage colors could not be told apart.
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


def stage_look(stage: str) -> dict[str, str]:
    """The color and hatching of a stage, the same in every figure."""
    color, hatch = STAGE_LOOKS.get(stage, (REST_COLOR, ".."))
    return {"facecolor": color, "hatch": hatch}


def run_color(position: int) -> str:
    """The color of a run, by its position in the report."""
    return RUN_COLORS[position % len(RUN_COLORS)]


def run_line(position: int) -> str:
    """The line style of a run: solid, then dashed and dotted once the colors repeat."""
    return ("-", "--", ":")[position // len(RUN_COLORS) % 3]


def light_grid(axes: Axes, axis: str) -> None:
    """Draw thin lines along "x", "y" or "both", and no tick marks."""
    axes.grid(visible=True, axis=axis)  # type: ignore[arg-type]
    axes.tick_params(length=0)


def legend_columns(labels: Sequence[str], *, num_letters: int = 120) -> int:
    """The number of columns with which a legend stays inside a wide figure."""
    if sum(len(label) + 8 for label in labels) <= num_letters:
        return max(1, len(labels))
    widest = max(len(label) for label in labels) + 8
    return max(1, min(len(labels), num_letters // widest))


def stack_bars(
    axes: Axes, parts: Sequence[Mapping[str, float]], looks: Mapping[str, Mapping[str, Any]]
) -> list[float]:
    """Draw a horizontal bar for each mapping of ``parts`` and return where the bars end.

    Args:
        axes: The axes to draw on; the first bar is at the top.
        parts: The lengths of a bar's parts by name.
        looks: The style of each part, in the order in which the parts are stacked.
    """
    ends = [0.0] * len(parts)
    for name, look in looks.items():
        widths = [part.get(name, 0.0) for part in parts]
        axes.barh(
            range(len(parts)),
            widths,
            left=ends,
            height=0.62,
            label=name.replace("_", " "),
            **{"edgecolor": "white", "linewidth": 0.8, **look},
        )
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.tick_params(axis="y", labelcolor=INK)
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    light_grid(axes, "x")
    return ends


def annotate(axes: Axes, x: float, y: float, text: str, **look: Any) -> None:
    """Write a text a little to the right of a point."""
    axes.annotate(text, (x, y), xytext=(7, 0), textcoords="offset points", va="center", **look)


def to_svg(figure: Figure, label: str) -> str:
    """An inline ``<svg>`` element; its text is drawn as outlines and looks the same everywhere."""
    buffer = io.StringIO()
    with report_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Without a fixed size the figure takes the page's width; the view box keeps its proportions.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # A small figure is not blown up to the full width.
    style = f"max-width:{103 * figure.get_figwidth():.0f}px"
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}" style="{style}"', 1)


def to_png(figure: Figure, *, dots_per_inch: int = 150) -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    with report_style():
        figure.savefig(buffer, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return buffer.getvalue()


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file."""
    write_file(path, to_png(figure))
