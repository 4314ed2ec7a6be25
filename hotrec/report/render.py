"""Pages as plain data, and the one renderer: templates for HTML and for text, which is Markdown."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from hotrec.artifact import naming
from hotrec.report.units import DASH, show_known


class Cell(NamedTuple):
    """A table cell with small print after its text, and a colored dot before it."""

    text: str
    note: str = ""
    color: str = ""


Row = Sequence[str | Cell]
# A column of a table of records: its heading, the key of its values, and their format.
Column = tuple[str, str, Callable[[Any], str]]


@dataclass(frozen=True)
class Table:
    """A table whose first column is text and whose other columns are numbers.

    A row of one cell is a heading for the rows below it; ``totals`` are below a rule.
    """

    header: Row
    rows: Sequence[Row]
    totals: Sequence[Row] = ()

    def __post_init__(self) -> None:
        for row in (*self.rows, *self.totals):
            if len(row) not in (1, len(self.header)):
                raise ValueError(f"table row {row}: expected {len(self.header)} cells.")


def record_table(
    records: Iterable[Mapping[str, Any]],
    columns: Sequence[Column],
    totals: Iterable[Mapping[str, Any]] = (),
) -> Table:
    """A table with a row for each record; unknown values are dashes, blank where not totalled."""

    def cells(record: Mapping[str, Any], absent: str) -> list[str]:
        return [
            show_known(show, record[key]) if key in record else absent for _, key, show in columns
        ]

    header = [heading for heading, _, _ in columns]
    return Table(header, [cells(r, DASH) for r in records], [cells(t, "") for t in totals])


@dataclass(frozen=True)
class Heading:
    """A heading inside a section, with the color of the run that it is about."""

    text: str
    color: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure as an inline ``<svg>`` element, and its caption."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Items:
    """A bulleted list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Listing:
    """A file shown unchanged; ``language`` is that of a Markdown code block."""

    title: str
    text: str
    language: str = ""


# A string is a paragraph.
Block = str | Table | Heading | Picture | Items | Listing


class Tile(NamedTuple):
    """A headline figure, its label, and its comparison with the baseline."""

    figure: str
    text: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    """A whole page: blocks by the titles of their sections; empty sections are omitted.

    ``lead`` is the answer in sentences, ``data_file`` the JSON document next to the page.
    """

    title: str
    sections: Mapping[str, Sequence[Block]]
    subtitle: str = ""
    tiles: Sequence[Tile] = ()
    data_file: str = ""
    lead: Sequence[str] = ()


def render_html(page: Page) -> str:
    """One self-contained HTML file that fetches nothing."""
    return _templates().get_template("page.html.j2").render(page=page)


def render_text(page: Page) -> str:
    """Markdown that is also readable in a terminal: captions only for figures, aligned tables."""
    return _templates().get_template("page.md.j2").render(page=page)


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("hotrec.report"),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "as_cell": lambda cell: cell if isinstance(cell, Cell) else Cell(cell),
        "kind": lambda block: type(block).__name__,
        "breakable": lambda text: re.sub(r"([._])(?=[^\W\d])", r"\1<wbr>", escape(text)),
    }
    templates.globals["markdown_table"] = markdown_table
    return templates


def markdown_table(header: Row, rows: Iterable[Row], totals: Iterable[Row] = ()) -> str:
    """A table in Markdown, aligned for terminals: the first column left, the others right."""
    lines = [
        [
            (cell if isinstance(cell, str) else " ".join(filter(None, cell[:2])))
            .replace("|", "\\|")
            .replace("\n", " ")
            for cell in row
        ]
        for row in (header, *rows, *totals)
    ]
    widths = [
        max(3, *(len(line[i]) for line in lines if i < len(line))) for i in range(len(header))
    ]
    lines.insert(1, [f"{'-' * (width - 1)}{':' if i else '-'}" for i, width in enumerate(widths)])
    return "\n".join(
        f"| {' | '.join(f'{c:>{w}}' if i else f'{c:<{w}}' for i, (c, w) in enumerate(cells))} |"
        for cells in (zip(line, widths, strict=False) for line in lines)
    )


def write_files(directory: Path, contents: Mapping[str, str | bytes]) -> None:
    """Write files by name into a directory, all or none, and each in one move."""
    directory.mkdir(parents=True, exist_ok=True)
    scratches = {name: directory / f".{name}.tmp" for name in contents}
    try:
        for name, content in contents.items():
            with naming(directory / name):
                data = content.encode() if isinstance(content, str) else content
                scratches[name].write_bytes(data)
        for name, scratch in scratches.items():
            os.replace(scratch, directory / name)
    finally:
        for scratch in scratches.values():
            scratch.unlink(missing_ok=True)
