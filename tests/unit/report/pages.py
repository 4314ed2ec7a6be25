"""What a reader sees of a page."""

from __future__ import annotations

import html
import re


def visible_text(page: str) -> str:
    """With single spaces."""
    text = re.sub(r"<(style|svg)\b.*?</\1>", " ", page, flags=re.S).replace("<wbr>", "")
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def check_html(page: str, text: str) -> None:
    """The page fetches nothing, its links lead to its sections, and it shows all of the text."""
    assert re.findall(r"<(?:script|link|img|iframe|object)\b", page) == []
    assert re.findall(r"(?:src|srcset)\s*=|@import|url\((?!#)", page) == []
    links = re.findall(r'<a href="([^"]*)"', page)
    assert links == [f"#{anchor}" for anchor in re.findall(r'<section id="([^"]*)"', page)] != []
    seen, lines = visible_text(page), text.splitlines()[1:]  # a title may differ
    cells = {cell.strip("|#* ") for line in lines for cell in line.split(" | ")}
    assert [c for c in cells if c.strip("-:`yaml") and " ".join(c.split()) not in seen] == []
