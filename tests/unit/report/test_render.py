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
    render_text,
    write_files,
)
from tests.unit.report.pages import check_html, visible_text


def test_a_page_of_every_block() -> None:
    rows = [("x < y", Cell("1.00", "0.50x")), ("trainer.batch_size", "not recorded")]
    table = Table(("name", Cell("run", "baseline", "#0072B2")), [("group",), *rows], [("sum", "2")])
    blocks = [table, Picture("<svg></svg>", "A caption."), Items(["one", "two & three"]),
              Listing("config.yaml", "a: <b>\n", "yaml")]  # fmt: skip
    first = ["A sentence with `code`.", Heading("Sub", "#123456")]
    sections = {"First & only": first, "Empty": [], "Blocks": blocks}
    page = Page("A <title>", sections, "subtitle", [Tile("45 ms", "step", "0.70x")], "data.json")
    html, text = render_html(page), render_text(page)
    check_html(html, text)
    assert "Empty" not in text
    assert "trainer.<wbr>batch_<wbr>size" in html  # long names may break
    assert "1.00 0.50x" in visible_text(html)
    assert html.count("<svg") == 1


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
        (units.show_quality, {0.78125: "0.7812", math.nan: "nan"}),
        (lambda pair: units.show_ratio(*pair), {(1, 3): "0.33x", (1, 0): "", (math.nan, 1): ""}),
    ],
)
def test_numbers_carry_their_unit(show: Callable[[Any], str], shown: dict[Any, str]) -> None:
    assert {value: units.show_known(show, value) for value in shown} == shown
