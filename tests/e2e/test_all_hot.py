"""order=all_hot through the program on two ranks: what it says, stop, resume and evaluation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Workspace, hotrec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WORDS = (
    *("placement=coverage", "placement.coverage_frac=0.95", "order=all_hot", "order.patience=1"),
    *("launch.num_ranks=2", "trainer.batch_size=256", "pipeline=look_ahead"),
    *("trainer.eval_every_steps=4", "trainer.log_every_steps=1"),
)


def lines_of(path: Path, value: str) -> dict[tuple[int, str], Any]:
    lines = map(json.loads, path.read_text().splitlines())
    return {(line["step"], line.get("split", "")): line[value] for line in lines}


def test_a_run_says_that_it_reorders_and_resumes_bit_for_bit(workspace: Workspace) -> None:
    """Stopped where an evaluation is due, which the uninterrupted run made on its way."""
    whole = workspace.train("all_hot", *WORDS, "trainer.max_steps=24")
    expected, resumed = (workspace.folder / "runs" / name for name in ("all_hot", "all_hot_2"))
    summary = json.loads((expected / "summary.json").read_text())
    assert summary["order"] == whole["order"] == "all_hot"
    assert 0.1 < whole["all_hot_samples_frac"] < 0.9
    log = (expected / "log.txt").read_text()
    [said] = re.findall(r"training samples are reordered: (\d+) of 16384 \(", log)
    assert int(said) / 16384 == whole["all_hot_samples_frac"]
    # With patience 1 every evaluation after the first changes the length of the blocks, unless it
    # is at an end of its range.
    assert "blocks of 1 of an epoch, before 0.5" in log
    for steps in (8, 24):
        figures = workspace.train("all_hot_2", *WORDS, f"trainer.max_steps={steps}")
        assert figures["num_steps"] == steps
    for file, value in (("metrics.jsonl", "loss"), ("eval.jsonl", "log_loss")):
        found = lines_of(resumed / file, value)
        for key, uninterrupted in lines_of(expected / file, value).items():
            assert found[key] == uninterrupted, (file, key)
    words = ("run_dir=runs/all_hot", "launch.num_ranks=2", "split=test")
    evaluated = hotrec("evaluate", *words, cwd=workspace.folder).figures
    assert figures["auc"] == evaluated["auc"] == whole["auc"]
