"""Runs of the choice grid that share a process: each is as if it were alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.conftest import SMOKE, Workspace, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_runs_of_one_process_do_not_know_of_each_other(workspace: Workspace) -> None:
    """An impossible one among them leaves its reason, and the next one begins."""
    place = workspace.folder / "runs/choice"
    words = [SMOKE, "trainer.max_steps=6", "trainer.eval_splits=[]", "placement=torchrec"]
    pipelines = {"first": "sparse_dist", "refused": "look_ahead", "base": "base"}
    pipelines["again"] = "sparse_dist"
    runs = [[str(place / name), [*words, f"pipeline={kind}"]] for name, kind in pipelines.items()]
    for name in pipelines:
        (place / name).mkdir(parents=True)
    (place / "runs.json").write_text(json.dumps(runs))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.choice_runs", str(place / "runs.json")],
        cwd=workspace.folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "expected sparse_dist or base" in (place / "refused/error.txt").read_text()
    losses = {
        name: json.loads((place / name / "summary.json").read_text())["loss"]
        for name in pipelines
        if name != "refused"
    }
    assert losses["first"] == losses["again"] == losses["base"]
