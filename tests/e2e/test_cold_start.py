"""Programs that nobody has imported anything for: the other tests fork theirs, see ``forked``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import SMOKE, Workspace, environment
from tests.helpers.forked import COLD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
INSTALLED = Path(sys.executable).parent / "hotrec"


def cold(*words: str, cwd: Path, **variables: str) -> dict[str, Any]:
    """Figures of a command whose interpreter, and those of its ranks, start from nothing."""
    done = subprocess.run(
        words,
        cwd=cwd,
        env=environment(**{COLD: "1"}, **variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    figures: dict[str, Any] = json.loads(line)
    return figures


@pytest.mark.skipif(not INSTALLED.exists(), reason=f"hotrec is not installed: no {INSTALLED}")
def test_the_installed_program_and_the_module_prepare_alike(
    workspace: Workspace, tmp_path: Path
) -> None:
    found = [
        cold(*program, "prepare", SMOKE, f"paths.dataset={name}", cwd=tmp_path)
        for name, program in (
            ("module", [sys.executable, "-m", "hotrec"]),
            ("installed", [str(INSTALLED)]),
        )
    ]
    for figures in found:
        assert figures["content_hash"] == workspace.prepared["content_hash"]
        assert figures.keys() == workspace.prepared.keys()


def test_two_ranks_train_as_forked_ones_do(workspace: Workspace, trained: dict[str, Any]) -> None:
    words = ["train", SMOKE, "placement=saved", "launch.num_ranks=2"]
    folder = workspace.folder
    figures = cold(
        *(sys.executable, "-m", "hotrec"), *words, cwd=folder, HOTREC_RUN_DIR="runs/cold"
    )
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
