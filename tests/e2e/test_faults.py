"""A rank that is slow, killed, stopped or broken: what the others say, and how a run goes on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hotrec.runtime.watchdog import EXIT_CODE
from tests.e2e.conftest import SMOKE, Workspace, environment
from tests.e2e.faulty import FAULT, Fault
from tests.helpers.runs import losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
WORDS = [
    *("placement=saved", "pipeline=look_ahead", "trainer.num_workers=0"),
    *("trainer.save_every_steps=10", "trainer.log_every_steps=1", "trainer.eval_splits=[]"),
]


def line_with(text: str, *parts: str) -> str:
    """The only line of an error that has all these."""
    (line,) = (line for line in text.splitlines() if all(part in line for part in parts))
    return line


def test_a_slow_rank_is_waited_for(workspace: Workspace, tmp_path: Path) -> None:
    """Rank 1 takes far more than ten times as long as the other, in all more than the limit."""
    fault = Fault("slow", rank=1, step=10, seconds=0.5)
    done = workspace.faulty(tmp_path, fault, *WORDS, "trainer.watchdog_s=3")
    assert done.exit_code == 0, done.stderr
    assert "the others wait for rank 1" in done.stderr


def test_torchrun_restarts_a_run_whose_rank_was_killed(
    workspace: Workspace, tmp_path: Path
) -> None:
    workspace.train("whole", *WORDS, "launch.num_ranks=2")
    launcher = ["-m", "hotrec.cli.ranks", "--standalone", "--local-addr", "localhost"]
    launcher += ["--nproc-per-node", "2", "--max-restarts", "1", "-m", "tests.e2e.faulty"]
    done = subprocess.run(
        [sys.executable, *launcher, "train", SMOKE, *WORDS],
        cwd=workspace.folder,
        env=environment(
            HOTREC_RUN_DIR=str(tmp_path),
            **{FAULT: json.dumps(vars(Fault("kill", rank=0, step=15)))},
        ),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    line_with(done.stderr, "[rank 1]", ": rank 0 (process ", "has died", "step-00000010")
    assert losses(tmp_path) == losses(workspace.folder / "runs" / "whole")


def test_a_stopped_rank_is_named(workspace: Workspace, tmp_path: Path) -> None:
    fault = Fault("stop", rank=1, step=15)
    done = workspace.faulty(tmp_path, fault, *WORDS, "trainer.watchdog_s=2")
    assert done.exit_code == EXIT_CODE, done.stderr
    line = line_with(done.stderr, "no heartbeat from rank 1", "[rank 0]", "within 2 s")
    # What rank 1 was in when its last heartbeat went: on a busy machine an earlier step.
    assert re.search(r"last seen in (check-?\w+ of )?step \d+\b", line), line


@pytest.mark.parametrize(
    ("kind", "words", "got"),
    [
        ("raise", [], "got an error on rank 1 in step 5 ("),
        # The first batch of an evaluation is the fifth that the pipeline computes.
        (
            "hang",
            ["trainer.eval_every_steps=4", "trainer.eval_splits=[valid]"],
            "got rank 1 alive but not moving for 3 s in evaluation of step 4 (",
        ),
    ],
    ids=["raise", "hang_in_evaluation"],
)
def test_a_broken_rank_is_named(
    workspace: Workspace, tmp_path: Path, kind: str, words: list[str], got: str
) -> None:
    fault = Fault(kind, rank=1, step=5)
    done = workspace.faulty(tmp_path, fault, *WORDS, "trainer.watchdog_s=3", *words)
    assert done.exit_code in ((1, EXIT_CODE) if kind == "raise" else (EXIT_CODE,)), done.stderr
    # One of the ranks says it for all.
    line = line_with(done.stderr, got, " error: ")
    record = tmp_path / "flight_recorder"
    assert str(record) in line
    assert (record / "rank_0").stat().st_size > 0
    assert ("ArithmeticError: the model has had enough" in line) == (kind == "raise")
    assert "; forward, at faulty.py:" in line
