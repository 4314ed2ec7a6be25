"""Renders notebooks as pages, with the outputs that are stored in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

SUFFIX = ".ipynb"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_source_suffix(SUFFIX, "markdown")
    app.connect("source-read", render)
    return {"parallel_read_safe": True}


def render(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace a notebook by its Markdown."""
    if str(app.env.doc2path(page)).endswith(SUFFIX):
        cells = json.loads(source[0])["cells"]
        source[0] = "\n\n".join(block for cell in cells for block in blocks_of(cell))


def blocks_of(cell: Mapping[str, Any]) -> Iterator[str]:
    """The text of a cell, and its outputs."""
    text = "".join(cell["source"])
    yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "image/png" in data:
            yield f"![What the code draws](data:image/png;base64,{data['image/png'].strip()})"
        else:
            text = "".join(output.get("text") or data["text/plain"])
            yield f"```text\n{text.rstrip()}\n```"
