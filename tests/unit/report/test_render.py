"""The renderers, and numbers with their units."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    write_files,
)
from tests.unit.report.golden import check_golden, check_page

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
    check_page("blocks.md", PAGE)
    check_golden("blocks.html", render_html(PAGE).partition("</style>")[2])


def test_files_are_written_all_or_none(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": "old", "b": b"old"})
    with pytest.raises(TypeError):
        write_files(tmp_path, {"a": "new", "b": None})  # type: ignore[dict-item]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old", "b": "old"}


def test_tables_keep_to_their_columns() -> None:
    # Markdown cells cannot end a cell or a line.
    assert markdown_table(["a"], [["x|y\nz"]]).splitlines()[-1] == "| x\\|y z |"
    with pytest.raises(ValueError, match="table row .*: expected 3 cells"):
        Table(("a", "b", "c"), [("x", "y")])


@pytest.mark.parametrize(
    ("show", "shown"),
    [
        (units.show_bytes, {0: "0 B", 999: "999 B", 4_900_000: "4.90 MB", 3.2e12: "3.20 TB"}),
        (units.show_seconds, {0.124: "124 ms", 0.0012: "1.20 ms", 12.34: "12.3 s"}),
        (units.show_frac, {0.0: "0.0%", 0.9123: "91.2%", 0.00012: "0.012%", 1.0: "100.0%"}),
        (units.show_error, {0.05: "+5.0%", -0.05: "-5.0%", 0.0: "+0.0%"}),
        (units.show_count, {4950000: "4,950,000", None: "-"}),
        (units.show_rate, {33032.4: "33,032 /s"}),
        (units.show_quality, {0.78125: "0.7812", math.nan: "nan"}),
        (lambda pair: units.show_ratio(*pair), {(1, 3): "0.33x", (1, 0): "", (math.nan, 1): ""}),
    ],
)
def test_numbers_carry_their_unit(show: Callable[[Any], str], shown: dict[Any, str]) -> None:
    assert {value: units.show_known(show, value) for value in shown} == shown


def test_long_names_may_break_and_numbers_not() -> None:
    texts = ["trainer.batch_size.of", "4.24 ms to 12.5 ms, all", "<b>data.source.columns"]
    html = render_html(Page("T", {"S": [Table(["a", "b"], [[text, ""] for text in texts])]}))
    assert "trainer.<wbr>batch_<wbr>size.<wbr>of" in html
    assert "4.24 ms to 12.5 ms, all" in html
    assert "&lt;b&gt;data.<wbr>source.<wbr>columns" in html
