"""Tables, and the renderer of the templates: HTML, or Markdown that is readable in a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from hotrec.artifact import naming
from hotrec.report.units import (
    DASH,
    describe_world,
    show_about,
    show_bytes,
    show_count,
    show_frac,
    show_known,
    show_rate,
    show_seconds,
)


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
    """A table with a row for each record, without the columns that no record has a value for.

    Unknown values are dashes, blank where not totalled.
    """
    records = list(records)
    columns = [column for column in columns if any(r.get(column[1]) is not None for r in records)]

    def cells(record: Mapping[str, Any], absent: str) -> list[str]:
        return [
            show_known(show, record[key]) if key in record else absent for _, key, show in columns
        ]

    header = [heading for heading, _, _ in columns]
    return Table(header, [cells(r, DASH) for r in records], [cells(t, "") for t in totals])


class Tile(NamedTuple):
    """A headline figure, its label, and its comparison with the baseline."""

    figure: str
    text: str
    note: str = ""


def render(template: str, **values: Any) -> str:
    """One of ``templates/``: a self-contained HTML file, or Markdown for a terminal."""
    return _templates().get_template(template).render(values)


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
        "breakable": lambda text: re.sub(r"([._])(?=[^\W\d])", r"\1<wbr>", escape(text)),
        "markdown": lambda table: markdown_table(table.header, table.rows, table.totals),
        "wrap": lambda text: fill(text, 100, break_long_words=False, break_on_hyphens=False),
        "about": show_about,
        "bytes": show_bytes,
        "count": show_count,
        "frac": show_frac,
        "rate": show_rate,
        "seconds": show_seconds,
        "world": describe_world,
    }
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
