"""The sentences on the measured runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hotrec.report.read import read_runs
from hotrec.report.verdict import verdicts
from tests.unit.report.runs import COMPARED, SUMMARY, TORCHREC, metrics_line, write_run

STEPS = range(20, 200, 20)
NOISE = (1.0, 1.02, 0.99, 1.01, 1.0, 0.98, 1.03, 1.0, 0.99)


def lines(step_s: float) -> list[dict[str, object]]:
    """The first line is of a cold start, and of no account."""
    noisy = zip(STEPS, (5.0, *NOISE[1:]), strict=True)
    return [metrics_line(step, step_p50_s=step_s * factor) for step, factor in noisy]


@pytest.mark.parametrize(
    ("step_s", "said"),
    [
        (0.150, r"is 2\d% to 2\d% slower than planner \(TorchRec's plan\): 150 ms a step"),
        (0.120, r"is as fast as planner \(TorchRec's plan\), within the noise: 120 ms a step"),
        (0.090, r"is 2\d% to 2\d% faster than planner \(TorchRec's plan\): 90.0 ms a step"),
    ],
)
def test_a_difference_is_named_where_it_is_one(tmp_path: Path, step_s: float, said: str) -> None:
    ours = {**SUMMARY, **COMPARED, "pipeline": "look_ahead", "step_p50_s": step_s}
    theirs = {**TORCHREC, "pipeline": "sparse_dist", "step_p50_s": 0.1205}
    other = [
        line | {"step_p50_s": 0.1205 * n} for line, n in zip(lines(1), NOISE[::-1], strict=True)
    ]
    runs = read_runs(
        [
            write_run(tmp_path / "a", ours, lines(step_s)),
            write_run(tmp_path / "b", theirs, other),
        ]
    )
    first, second = verdicts(runs, runs[1])
    assert re.match(re.escape(f"{runs[0].name} (look_ahead) ") + said, first)
    assert "predicted 100 ms (-20.0%); planner takes 120 ms." in first
    assert ("A longer trial (plan.trial_s)" in first) == ("slower" in first)
    assert second == "planner (sparse_dist): 120 ms a step."


@pytest.mark.parametrize(
    ("memory", "is_said"),
    [({"measured_host_bytes": 4e6}, True), ({"measured_host_bytes": 4e9}, False), ({}, False)],
)
def test_small_tables_are_named(tmp_path: Path, memory: dict[str, Any], is_said: bool) -> None:
    paths = [
        write_run(tmp_path / "a", SUMMARY, lines(0.3)),
        write_run(tmp_path / "b", {**TORCHREC, **memory}, lines(0.2)),
    ]
    runs = read_runs(paths)
    assert ("The tables are small (4.00 MB on the fullest rank)" in verdicts(runs, runs[1])[0]) == (
        is_said
    )


def test_what_was_not_measured_is_not_judged(tmp_path: Path) -> None:
    runs = read_runs(
        [
            write_run(tmp_path / "a", SUMMARY, lines(0.1)[:3]),
            write_run(tmp_path / "b", TORCHREC, lines(0.1)),
            write_run(tmp_path / "c", {"name": "bare"}),
        ]
    )
    short, _ = verdicts(runs, runs[1])
    assert "too few lines of metrics with equal batches to compare it with planner" in short
