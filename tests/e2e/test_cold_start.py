"""Programs that nobody has imported anything for; other tests use ``tests.helpers.commands``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import SMOKE, Workspace, environment
from tests.helpers.commands import program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
INSTALLED = Path(sys.executable).parent / "hotrec"


@pytest.mark.skipif(not INSTALLED.exists(), reason=f"hotrec is not installed: no {INSTALLED}")
def test_the_installed_program_prepares_the_same(workspace: Workspace, tmp_path: Path) -> None:
    words = [str(INSTALLED), "prepare", SMOKE]
    line = subprocess.check_output(words, cwd=tmp_path, env=environment(), timeout=150)
    figures = json.loads(line)
    assert figures["content_hash"] == workspace.prepared["content_hash"]
    assert figures.keys() == workspace.prepared.keys()


def test_two_ranks_train_as_those_of_other_tests(
    workspace: Workspace, trained: dict[str, Any]
) -> None:
    words = ["train", SMOKE, "placement=saved", "launch.num_ranks=2"]
    folder = workspace.folder
    figures = program(*words, cwd=folder, HOTREC_RUN_DIR="runs/cold").figures
    assert figures.keys() == trained.keys()
    assert figures["auc"] == trained["auc"]
    assert figures["log_loss"] == trained["log_loss"]
    ours, theirs = (folder / "runs" / name for name in ("cold", "hotcold"))
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    losses = [
        [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        for run_dir in (ours, theirs)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) > 1
