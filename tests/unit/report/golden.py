"""Golden pages: each fixture's page as plain text; HOTREC_UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

from hotrec.report.render import Page, Table, render_html, render_text

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("HOTREC_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{name} changed; see tests/unit/report/golden.py"


def check_page(name: str, page: Page, html: str | None = None) -> None:
    """The text is the golden one, and the HTML fetches nothing and shows all that the text does."""
    check_golden(name, render_text(page))
    html = html or render_html(page)
    assert_self_contained(html)
    visible = visible_text(html)
    for block in (block for blocks in page.sections.values() for block in blocks):
        parts = [block] if isinstance(block, str) else []
        if isinstance(block, Table):
            rows = (block.header, *block.rows, *block.totals)
            parts = [getattr(cell, "text", cell) for row in rows for cell in row]
        assert [part for part in parts if " ".join(part.split()) not in visible] == []


def visible_text(page: str) -> str:
    """What a reader of an HTML page sees, with single spaces."""
    text = re.sub(r"<(style|svg)\b.*?</\1>", " ", page, flags=re.S).replace("<wbr>", "")
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def assert_self_contained(page: str) -> None:
    """Nothing is fetched, and every link leads to a section of the page."""
    assert re.findall(r"<(?:script|link|img|iframe|object)\b", page) == []
    assert re.findall(r"(?:src|srcset)\s*=|@import|url\((?!#)", page) == []
    links = re.findall(r'<a href="([^"]*)"', page)
    assert links == [f"#{anchor}" for anchor in re.findall(r'<section id="([^"]*)"', page)]
    assert links
