"""Passages: sentences and a table, written once and shown twice, as plain text and as HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

TEXT_WIDTH = 100
NOTHING = "-"


@dataclass(frozen=True)
class Grid:
    """A table: the first column is text, all others are set to the right.

    Args:
        heads: of the columns.
        rows: cells, as many as heads each.
        totals: rows below a line, such as a sum.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    totals: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        for row in (*self.rows, *self.totals):
            if len(row) != len(self.heads):
                raise ValueError(
                    f"grid row {row}: expected {len(self.heads)} cells, got {len(row)}."
                )


@dataclass(frozen=True)
class Passage:
    """A part of a page.

    Args:
        anchor: for links.
        title: plain text.
        sentences: plain text, a paragraph each.
        grid: the table, if there is one.
    """

    anchor: str
    title: str
    sentences: tuple[str, ...] = ()
    grid: Grid | None = None


def passages_text(title: str, passages: Iterable[Passage]) -> str:
    """For a terminal or a text file."""
    parts = [title]
    for passage in passages:
        lines = [passage.title]
        for sentence in passage.sentences:
            lines += textwrap.wrap(
                sentence, TEXT_WIDTH, initial_indent="  ", subsequent_indent="  "
            )
        if passage.grid is not None:
            lines += _grid_lines(passage.grid)
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _grid_lines(grid: Grid) -> list[str]:
    everything = [grid.heads, *grid.rows, *grid.totals]
    widths = [max(len(row[i]) for row in everything) for i in range(len(grid.heads))]
    lines = [_grid_line(row, widths) for row in everything]
    rule = "  " + "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines.insert(1, rule)
    if grid.totals:
        lines.insert(len(lines) - len(grid.totals), rule)
    return lines


def _grid_line(row: Sequence[str], widths: Sequence[int]) -> str:
    first = row[0].ljust(widths[0])
    rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return ("  " + "  ".join([first, *rest])).rstrip()


def passage_html(passage: Passage) -> str:
    """The body of a section: paragraphs, then the table."""
    body = "".join(f"<p>{escape(sentence)}</p>" for sentence in passage.sentences)
    return body if passage.grid is None else body + _grid_html(passage.grid)


def _grid_html(grid: Grid) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in grid.heads)
    rows, totals = ("".join(map(_row_html, part)) for part in (grid.rows, grid.totals))
    foot = f"<tfoot>{totals}</tfoot>" if totals else ""
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>{foot}'
        "</table></div>"
    )


def _row_html(row: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"


def tiles_html(tiles: Sequence[tuple[str, str]]) -> str:
    """The headline of a page: big figures, each with what it is; plain text."""
    cells = "".join(
        f'<div class="tile"><b>{escape(figure)}</b><span>{escape(text)}</span></div>'
        for figure, text in tiles
    )
    return f'<div class="tiles">{cells}</div>'
