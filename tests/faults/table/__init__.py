"""The table of cases, by class."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tests.faults.case import Case
from tests.faults.table import artifacts, data, runs

# Of each class the ordinary tests run every so many-th case of one rank: those that take a second.
FAST_EVERY = {
    "artifact": 40, "manifest": 90, "rundir": 20, "data": 11, "names": 31, "export": 10,
    "predict": 10, "resume": 10, "kill": 12, "together": 4, "disk": 12, "worker": 2,
}  # fmt: skip


def all_cases(reference: Path) -> list[Case]:
    """Every case, in the order in which they run.

    Args:
        reference: The workspace, whose artifacts have the files and entries that are damaged.

    Raises:
        ValueError: if two have one name.
    """
    cases = [case for part in (runs, data, artifacts) for case in part.cases(reference)]
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"cases: expected every name once, got {twice} twice. Rename them.")
    return cases


def fast_cases(reference: Path) -> list[Case]:
    """A twentieth of them, of which none reads the run of two ranks."""
    by_kind: dict[str, list[Case]] = defaultdict(list)
    for case in all_cases(reference):
        on_ranks = "num_ranks=2" in case.words[-1] or "runs/two" in f"{case.words} {case.variables}"
        if not on_ranks and "two-ranks" not in case.name:
            by_kind[case.kind].append(case)
    return [
        case for kind, every in FAST_EVERY.items() for case in by_kind[kind][every // 2 :: every]
    ]
