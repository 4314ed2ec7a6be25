"""Programs that nobody has imported anything for; other tests use ``tests.helpers.commands``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotrec.train.signals import STOPPED_EXIT_CODE
from tests.e2e.conftest import REPOSITORY, SMOKE, Workspace, environment
from tests.helpers.commands import program
from tests.helpers.runs import losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
INSTALLED = Path(sys.executable).parent / "hotrec"


@pytest.mark.skipif(not INSTALLED.exists(), reason=f"hotrec is not installed: no {INSTALLED}")
def test_the_installed_program_prepares_the_same(workspace: Workspace, tmp_path: Path) -> None:
    words = [str(INSTALLED), "prepare", SMOKE]
    line = subprocess.check_output(words, cwd=tmp_path, env=environment(), timeout=150)
    figures = json.loads(line)
    assert figures["content_hash"] == workspace.prepared["content_hash"]
    assert figures.keys() == workspace.prepared.keys()


# At the first checkpoint rank 0 has the launcher stopped, and goes on when it has heard of it.
CALLBACK = """
import os, signal
from pathlib import Path
from hotrec.train.callbacks import Callback

class Stop(Callback):
    def on_checkpoint(self, step, path):
        heard, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told)
        agent = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(agent.rpartition(")")[2].split()[1]), signal.SIGTERM)
        os.read(heard, 1)
        signal.set_wakeup_fd(-1)
"""


def test_two_ranks_that_sigterm_stops_go_on_as_those_of_other_tests(
    workspace: Workspace, trained: dict[str, Any]
) -> None:
    folder = workspace.folder
    (folder / "stop_at_once.py").write_text(CALLBACK)
    words = ["train", SMOKE, "placement=saved", "launch.num_ranks=2", "trainer.save_every_steps=5"]
    variables = {"HOTREC_RUN_DIR": "runs/cold", "PYTHONPATH": f"{folder}:{REPOSITORY}"}
    stop = "trainer.callbacks=[stop_at_once.Stop]"
    stopped = program(*words, stop, "trainer.check_every_steps=1", cwd=folder, **variables)
    assert stopped.exit_code == STOPPED_EXIT_CODE, stopped.stderr
    at = json.loads(stopped.stdout)
    assert (at["finished"], 5 <= at["num_steps"] < 20) == (False, True)
    latest = (folder / "runs/cold/checkpoints/latest").read_text().strip()
    assert latest == f"step-{at['num_steps']:08d}"
    figures = program(*words, cwd=folder, **variables).figures
    assert figures.keys() == trained.keys()
    assert [figures[name] for name in ("auc", "log_loss")] == [trained["auc"], trained["log_loss"]]
    found, expected = (losses(folder / "runs" / name) for name in ("cold", "hotcold"))
    assert {step: found[step] for step in expected} == expected
