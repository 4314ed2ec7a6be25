"""The table of cases, by class."""

from __future__ import annotations

from tests.faults.case import Case
from tests.faults.table import artifacts, data, growth, runs, serving


def all_cases() -> list[Case]:
    """Every case, in the order in which they run.

    Raises:
        ValueError: if two have one name.
    """
    parts = (runs, data, growth, artifacts, serving)
    cases = [case for part in parts for case in part.CASES]
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"cases: expected every name once, got {twice} twice. Rename them.")
    return cases
