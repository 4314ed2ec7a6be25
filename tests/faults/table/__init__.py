"""The table of cases, by class."""

from __future__ import annotations

from pathlib import Path

from tests.faults.case import Case
from tests.faults.table import artifacts, data, runs

# What the ordinary tests run: these, and of each class of generated ones a few.
FAST = frozenset(
    [
        "resume/goes-on",
        "resume/older-to-14-keep-0",
        "resume/finished",
        "resume/ended-optimizer=sgd",
        "callback/exit",
        "together/prepare-during-run-0",
        "worker/train-00000-garbled-1",
        "disk/prepare-16k",
        "disk/train-48k",
        "kill/prepare-writing",
        "kill/train-second",
        "data/empty",
        "data/short-line",
        "data/one-line-16mb",
        "data/log.csv-label-2",
        "data/log.csv-price-nan",
        "data/log.parquet-user-0.5",
        "data/log.csv.gz-cut",
        "data/log.parquet-emptied",
        "data/log.csv-pipe",
        "data/good-as-log.csv",
        "data/good-crlf",
        "names/feature-items",
        "names/bad-feature-slash",
        "names/bad-table-dots",
        "names/bad-feature-newline",
        "append/copy-random",
        "append/gz-last",
        "append/growing-log",
        "append/other-split",
        "generations/rebuilt-without",
        "generations/evaluated",
        "predict/column-missing",
        "state/resume-piece-3.0",
        "state/t0.weight/momentum1--1.0",
        "rundir/config-tag",
        "rundir/latest-dangling",
        "rundir/resume-metrics.jsonl-list",
    ]
)
FAST_EVERY = {"artifact": 40, "manifest": 90}


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
    """A twentieth of them."""
    cases = all_cases(reference)
    absent = FAST - {case.name for case in cases}
    if absent:
        raise ValueError(f"cases: expected those of FAST, got none named {sorted(absent)}.")
    chosen = [case for case in cases if case.name in FAST]
    for kind, every in FAST_EVERY.items():
        chosen += [case for case in cases if case.kind == kind and "two-ranks" not in case.name][
            ::every
        ]
    return chosen
