"""The grid of choices: which cells there are, and what the page makes of results made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.choice_grid import (
    is_settled,
)
from benchmarks.choice_page import DEFAULT, judge


def run(candidate: str, repeat: int, step_ms: float) -> dict[str, Any]:
    facts = {"candidate": candidate, "repeat": repeat, "step_p50_s": step_ms / 1e3}
    return {**facts, "pipeline": "sparse_dist", "load_average": 1.0, "plan": candidate}


def runs(default: list[float], **candidates: list[float]) -> list[dict[str, Any]]:
    """Steps in ms by repeat; a candidate's pipeline follows two underscores."""
    steps = {DEFAULT: default, **{n.replace("__", "-"): found for n, found in candidates.items()}}
    return [run(n, repeat, ms) for n, found in steps.items() for repeat, ms in enumerate(found)]


def document(found: list[dict[str, Any]]) -> dict[str, Any]:
    settings = {"data": "kuairand", "batch_size": 512, "network": "loopback", "num_ranks": 2}
    settings |= {"warmup_steps": 5, "busy": False, "trial_s": 5.0}
    settings["candidates"] = sorted({run["candidate"] for run in found} - {DEFAULT})
    return {"settings": settings, "machine": {}, "runs": found}


def test_noisy_ratios_are_not_settled() -> None:
    quiet = runs([10, 20, 10], hot_cold__base=[10, 20.2, 10], planner__base=[30])
    assert is_settled(quiet)  # the machine was slow in one repeat, but for both alike
    assert not is_settled([*quiet[:3], *runs([], hot_cold__base=[10, 18, 11])])
    # Three repeats may agree by chance that the defaults lose.
    assert not is_settled(runs([10.4, 10.4, 10.4], hot_cold__base=[10, 10, 10]))


def test_ratios_are_paired_within_repeats() -> None:
    # The machine became twice as slow after the first repeat; the defaults are always 10% slower.
    found = runs([11, 22, 22], hot_cold__base=[10, 20, 20], planner__base=[30, 60, 60])
    cell = judge(document(found))
    assert cell is not None
    assert (cell.best, cell.ratio) == ("hot_cold-base", pytest.approx(1.1))
    assert cell.torchrec_ratio == pytest.approx(3.0)
