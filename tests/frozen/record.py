"""Records of what a refactoring must not change; HOTREC_UPDATE_GOLDEN=1 writes them anew.

A commit that changes a record says why the change is meant, as for a golden page.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FROZEN = Path(__file__).parent


def is_updated() -> bool:
    return bool(os.environ.get("HOTREC_UPDATE_GOLDEN"))


def check_text(name: str, text: str) -> None:
    """The text is the recorded one; else the message has the lines that differ."""
    path = FROZEN / name
    if is_updated():
        path.write_text(text)
    lines = difflib.unified_diff(
        path.read_text().splitlines(), text.splitlines(), "recorded", "now", lineterm="", n=0
    )
    difference = "\n".join(lines)
    assert not difference, f"{name} changed; see tests/frozen/record.py\n{difference}"


def write_json(path: Path, document: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes two levels on lines of their own, so that a change is a changed line."""
    sections = (
        f'"{name}": {{\n'
        + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
        + "\n}"
        for name, entries in document.items()
    )
    path.write_text("{\n" + ",\n".join(sections) + "\n}\n")
