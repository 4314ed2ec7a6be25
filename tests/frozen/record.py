"""Records of what a refactoring must not change; HOTREC_UPDATE_GOLDEN=1 writes them anew.

A commit that changes a record says why the change is meant, as for a golden page.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

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
