"""What the doctor says: one verdict with the line that mends it, and how sizes are printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
MIB = 1 << 20

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One verdict.

    Args:
        name: what was looked at.
        status: "fail" stops every command, "warn" does not.
        found: what is there, for a table.
        expected: what should be there; empty if it is.
        mend: the command line that mends it; empty if nothing is to be done.
    """

    name: str
    status: Status
    found: str
    expected: str = ""
    mend: str = ""

    def message(self) -> str:
        """The verdict as one sentence and the line that mends it."""
        return f"{self.name}: expected {self.expected}, got {self.found}. Run: {self.mend}"


def size_text(num_bytes: int) -> str:
    """A size for people, in GiB or MiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"
