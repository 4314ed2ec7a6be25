"""Golden pages: each fixture's page as text; HOTREC_UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

from hotrec.report.render import Page, render_html, render_text

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("HOTREC_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{name} changed; see tests/unit/report/golden.py"


def check_page(name: str, page: Page) -> None:
    """The text is the golden one, and the HTML shows all of it."""
    text = render_text(page)
    check_golden(name, text)
    check_html(render_html(page), text)


def check_html(page: str, text: str) -> None:
    """The page fetches nothing, its links lead to its sections, and it shows all of the text."""
    assert re.findall(r"<(?:script|link|img|iframe|object)\b", page) == []
    assert re.findall(r"(?:src|srcset)\s*=|@import|url\((?!#)", page) == []
    links = re.findall(r'<a href="([^"]*)"', page)
    assert links == [f"#{anchor}" for anchor in re.findall(r'<section id="([^"]*)"', page)] != []
    seen, lines = visible_text(page), text.splitlines()[1:]  # a title may differ
    cells = {cell.strip("|#* ") for line in lines for cell in line.split(" | ")}
    assert [c for c in cells if c.strip("-:`yaml") and " ".join(c.split()) not in seen] == []


def visible_text(page: str) -> str:
    """What a reader of an HTML page sees, with single spaces."""
    text = re.sub(r"<(style|svg)\b.*?</\1>", " ", page, flags=re.S).replace("<wbr>", "")
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())
