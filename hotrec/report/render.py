"""The pages as plain data, and the one renderer that shows them as HTML, Markdown or plain text."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from hotrec.report.units import DASH, show_known

TEXT_WIDTH = 100


@dataclass(frozen=True)
class Cell:
    """A table cell with more than text.

    Args:
        text: What the cell says.
        note: Small print after the text, such as a ratio to the baseline.
        color: The color of a dot before the text; none if empty.
    """

    text: str
    note: str = ""
    color: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.note}".rstrip()


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """A table whose first column is text and whose other columns are numbers.

    Args:
        header: The column headings.
        rows: The cells, one for each column. A row of one cell is a heading for the rows below it.
        totals: Rows below a rule, such as a sum.
    """

    header: Row
    rows: Sequence[Row]
    totals: Sequence[Row] = ()

    def __post_init__(self) -> None:
        for row in (*self.rows, *self.totals):
            if len(row) not in (1, len(self.header)):
                raise ValueError(f"table row {row}: expected {len(self.header)} cells.")


# A column of a table of records: its heading, the key of its values, and how they are written.
Column = tuple[str, str, Callable[[Any], str]]


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
    """A heading inside a passage, with the color of the run that it is about."""

    text: str
    color: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure as an inline ``<svg>`` element, and its caption."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Missing:
    """A line that stands where something was not recorded."""

    text: str


@dataclass(frozen=True)
class Items:
    """A bulleted list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Listing:
    """A file shown as it is; ``language`` is that of a Markdown code block."""

    title: str
    text: str
    language: str = ""


# A string is a paragraph.
Block = str | Table | Heading | Picture | Missing | Items | Listing


@dataclass(frozen=True)
class Passage:
    """A section of a page: its title, the anchor that links to it, and what it shows."""

    anchor: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Tile:
    """A headline figure, what it is, and how it compares with the baseline."""

    figure: str
    text: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    """A whole page; ``data_file`` names the JSON document beside it."""

    title: str
    passages: Sequence[Passage]
    subtitle: str = ""
    tiles: Sequence[Tile] = ()
    data_file: str = ""


def render_html(page: Page) -> str:
    """One self-contained HTML file that fetches nothing."""
    return _templates().get_template("page.html.j2").render(page=page)


def render_markdown(page: Page) -> str:
    """A Markdown file, without the figures."""
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
    templates.filters |= {"as_cell": _as_cell, "kind": lambda block: type(block).__name__}
    templates.globals["markdown_table"] = markdown_table
    return templates


def _as_cell(cell: str | Cell) -> Cell:
    return cell if isinstance(cell, Cell) else Cell(cell)


def render_text(page: Page) -> str:
    """For a terminal or a text file; of a figure the caption, of a listing the title."""
    parts = ["\n".join(filter(None, [page.title, page.subtitle]))]
    parts += [
        "\n".join(filter(None, [f"{tile.figure}  {tile.text}", tile.note])) for tile in page.tiles
    ]
    for passage in page.passages:
        lines = [passage.title, *(_block_text(block) for block in passage.blocks)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _block_text(block: Block) -> str:
    match block:
        case Table():
            return plain_table(block.header, block.rows, block.totals, indent="  ")
        case Items():
            return "\n".join(_wrap(item, "  * ") for item in block.items)
        case Picture():
            return _wrap(f"[Figure] {block.caption}")
        case Heading():
            return "\n" + _wrap(block.text)
        case Listing():
            return _wrap(f"[File] {block.title}")
        case Missing():
            return _wrap(block.text)
    return _wrap(block)


def _wrap(text: str, indent: str = "  ") -> str:
    return textwrap.fill(
        text, TEXT_WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent)
    )


def plain_table(
    header: Row, rows: Iterable[Row], totals: Iterable[Row] = (), *, indent: str = ""
) -> str:
    """A table for a terminal: the first column aligned left, the others right."""
    body, below = list(rows), list(totals)
    texts = [[str(cell) for cell in row] for row in (header, *body, *below)]
    widths = [
        max(len(row[i]) for row in texts if len(row) == len(header)) for i in range(len(header))
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in texts
    ]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines.insert(1, rule)
    if below:
        lines.insert(len(lines) - len(below), rule)
    return "\n".join(indent + line for line in lines)


def markdown_table(header: Row, rows: Iterable[Row], totals: Iterable[Row] = ()) -> str:
    """A table in Markdown: the first column aligned left, the others right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows, *totals]
    texts = [[str(c).replace("|", "\\|").replace("\n", " ") for c in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in texts)


def write_file(path: Path, content: str | bytes) -> Path:
    """Write a file in one move, so that nobody reads half of it; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.replace(scratch, path)
    return path
