"""order=all_hot through the program on two ranks: what it says, stop and resume."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import SMOKE, Workspace, hotrec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORDS = [SMOKE, "placement=coverage", "placement.coverage_frac=0.95", "order=all_hot"]
WORDS += ["launch.num_ranks=2", "trainer.batch_size=256", "trainer.max_steps=24"]
WORDS += [
    "pipeline=look_ahead",
    "trainer.eval_every_steps=4",
    "trainer.log_every_steps=1",
    "order.patience=1",
]


def lines_of(path: Path, value: str) -> dict[tuple[int, str], Any]:
    lines = map(json.loads, path.read_text().splitlines())
    return {(line["step"], line.get("split", "")): line[value] for line in lines}


@pytest.fixture(scope="module")
def whole(workspace: Workspace) -> dict[str, Any]:
    return hotrec("train", *WORDS, cwd=workspace.folder, HOTREC_RUN_DIR="runs/all_hot").figures


def test_a_run_says_that_it_reorders(workspace: Workspace, whole: dict[str, Any]) -> None:
    assert whole["order"] == "all_hot"
    assert 0.1 < whole["all_hot_samples_frac"] < 0.9
    assert whole["num_steps"] == 24
    assert 0.5 < whole["auc"] < 1
    run_dir = workspace.folder / "runs" / "all_hot"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["order"] == "all_hot"
    log = (run_dir / "log.txt").read_text()
    [said] = re.findall(r"training samples are reordered: (\d+) of 16384 \(", log)
    assert int(said) / 16384 == whole["all_hot_samples_frac"]
    evaluated = lines_of(run_dir / "eval.jsonl", "log_loss")
    assert [step for step, split in evaluated if split == "valid"] == [4, 8, 12, 16, 20, 24]
    # With patience 1 every evaluation after the first changes the length of the blocks, unless it
    # is at an end of its range.
    assert "blocks of 1 of an epoch, before 0.5" in log


def test_resume_is_bitwise(workspace: Workspace, whole: dict[str, Any]) -> None:
    """Stopped where an evaluation is due, which the uninterrupted run made on its way."""
    folder, run_dir = workspace.folder, workspace.folder / "runs" / "all_hot_resumed"
    for steps in (8, 24):
        words = [*WORDS, f"trainer.max_steps={steps}"]
        figures = hotrec("train", *words, cwd=folder, HOTREC_RUN_DIR=str(run_dir)).figures
        assert figures["num_steps"] == steps
    expected = folder / "runs" / "all_hot"
    for file, value in (("metrics.jsonl", "loss"), ("eval.jsonl", "log_loss")):
        found = lines_of(run_dir / file, value)
        for key, uninterrupted in lines_of(expected / file, value).items():
            assert found[key] == uninterrupted, (file, key)
    assert figures["auc"] == whole["auc"]


def test_a_checkpoint_is_evaluated(workspace: Workspace, whole: dict[str, Any]) -> None:
    words = ["run_dir=runs/all_hot", "launch.num_ranks=2", "split=test"]
    assert hotrec("evaluate", *words, cwd=workspace.folder).figures["auc"] == whole["auc"]
