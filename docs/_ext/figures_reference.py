"""Fills figures.md with a table of every figure of a run, made from ``hotrec.runtime.figures``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configuration_reference import table

from hotrec.runtime.figures import GROUPS, Figure

if TYPE_CHECKING:  # a test reads the tables where Sphinx is not installed
    from sphinx.application import Sphinx

PAGE, MARK = "figures", "<!-- figures -->"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", fill)
    return {"parallel_read_safe": True}


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the mark of the page by a heading and a table for each group of figures."""
    if page == PAGE:
        head = ("Key", "Meaning", "Unit", "Of all ranks", "Better")
        parts = [
            f"## {group}\n\n{table(head, [row(figure) for figure in figures])}"
            for group, figures in GROUPS.items()
        ]
        source[0] = source[0].replace(MARK, "\n\n".join(parts))


def row(figure: Figure) -> tuple[str, ...]:
    """The line of a figure."""
    unit = figure.unit.value + (f" by {figure.parts}" if figure.parts else "")
    label = figure.label.format(f"each {figure.parts}")
    how = figure.over_ranks.value if figure.unit.is_number else ""
    return (f"`{figure.key}`", label, unit, how, figure.better)
