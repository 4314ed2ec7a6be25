"""The renderers, and numbers with their units."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from hotrec.report import units
from hotrec.report.render import (
    Cell,
    Heading,
    Items,
    Listing,
    Page,
    Picture,
    Table,
    Tile,
    markdown_table,
    render_html,
)
from tests.unit.report.golden import check_page

PAGE = Page(
    "A <title>",
    {
        "First & only": ["A sentence with `code`.", Heading("Sub", "#123456")],
        "Empty": [],
        "Blocks": [
            Table(
                ("name", Cell("run", "baseline", "#0072B2")),
                [("group",), ("x < y", Cell("1.00", "0.50x")), ("z", "not recorded")],
                [("sum", "2")],
            ),
            Picture("<svg></svg>", "A caption."),
            Items(["one", "two & three"]),
            Listing("config.yaml", "a: <b>\n", "yaml"),
        ],
    },
    "subtitle",
    [Tile("45 ms", "step", "0.70x of it")],
    "data.json",
)


def test_a_page_of_every_block() -> None:
    check_page("blocks.txt", PAGE)
    html = render_html(PAGE)
    for part in (
        "<h1>A &lt;title&gt;</h1>",
        '<tr class="group"><th colspan="2">group</th></tr>',
        '<td>1.00<span class="note">0.50x</span></td>',
        '<td class="none">not recorded</td>',
        '<span class="dot" style="background:#0072B2"></span>run<span class="note">baseline</span>',
        "<figure><svg></svg><figcaption>A caption.</figcaption></figure>",
        "<li>two &amp; three</li>",
        "<pre>a: &lt;b&gt;\n</pre>",
        "data.json beside this page",
    ):
        assert part in html


def test_markdown_cells_cannot_end_a_cell_or_a_line() -> None:
    assert markdown_table(["a"], [["x|y\nz"]]).splitlines()[-1] == "| x\\|y z |"


def test_rows_have_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match="table row .*: expected 3 cells"):
        Table(("a", "b", "c"), [("x", "y")])


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (units.show_bytes, 0, "0 B"),
        (units.show_bytes, 999, "999 B"),
        (units.show_bytes, 4_900_000, "4.90 MB"),
        (units.show_bytes, 14_800_000, "14.8 MB"),
        (units.show_bytes, 2.5e9, "2.50 GB"),
        (units.show_bytes, 3.2e12, "3.20 TB"),
        (units.show_seconds, 0.124, "124 ms"),
        (units.show_seconds, 0.0012, "1.20 ms"),
        (units.show_seconds, 12.34, "12.3 s"),
        (units.show_frac, 0.0, "0.0%"),
        (units.show_frac, 0.9123, "91.2%"),
        (units.show_frac, 0.00012, "0.012%"),
        (units.show_frac, 1.0, "100.0%"),
        (units.show_error, 0.05, "+5.0%"),
        (units.show_error, -0.05, "-5.0%"),
        (units.show_error, 0.0, "+0.0%"),
        (units.show_count, 4950000, "4,950,000"),
        (units.show_rate, 33032.4, "33,032 /s"),
        (units.show_quality, 0.78125, "0.7812"),
        (units.show_quality, math.nan, "nan"),
    ],
)
def test_numbers_carry_their_unit(show: Callable[[float], str], value: float, text: str) -> None:
    assert show(value) == text
    assert units.show_known(show, value) == text


def test_comparisons() -> None:
    pairs = ((1, 3), (1, 0), (math.nan, 1))
    assert [units.show_ratio(*pair) for pair in pairs] == ["0.33x", "", ""]
    assert units.show_known(units.show_count, None) == "-"
