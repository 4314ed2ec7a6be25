"""A rank that is slow, killed, stopped or broken: what the other one says, and how it goes on."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from contextlib import chdir, suppress
from functools import partial
from pathlib import Path
from subprocess import Popen

import pytest

from benchmarks.faults import rank_processes
from hotrec.runtime.watchdog import EXIT_CODE
from tests.e2e.conftest import SMOKE, Outcome, Workspace, environment, hotrec
from tests.helpers.commands import run_on_ranks
from tests.helpers.faults import Fault, put_in, run_of_ranks, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
WORDS = [
    *("train", SMOKE, "placement=saved", "trainer.max_steps=40", "trainer.num_epochs=2"),
    "pipeline=look_ahead",
    *("trainer.save_every_steps=10", "trainer.log_every_steps=1", "trainer.eval_splits=[]"),
    "trainer.num_workers=0",
]


def final_loss(run_dir: Path) -> float:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["num_steps"] == 40
    return summary["loss"]


def variables(run_dir: Path) -> dict[str, str]:
    return environment(HOTREC_RUN_DIR=str(run_dir))


def line_with(text: str, words: str) -> str:
    found = [line for line in text.splitlines() if words in line]
    assert found, text
    return found[0]


def faulty(words: list[str], workspace: Workspace, run_dir: Path, fault: Fault) -> Outcome:
    """The command on two ranks of the tests' starter, which end by themselves."""
    with chdir(workspace.folder):
        return run_on_ranks(words, 2, variables(run_dir), before=partial(put_in, fault))


def slow_run(workspace: Workspace, run_dir: Path) -> None:
    """Rank 1 takes far more than ten times as long as the other, and more than the limit."""
    fault = Fault("slow", rank=1, step=20, seconds=0.5)
    done = faulty([*WORDS, "trainer.watchdog_s=3"], workspace, run_dir, fault)
    assert done.exit_code == 0, done.stderr
    assert "the others wait for rank 1" in done.stderr


def test_slow_rank_finishes_and_killed_rank_is_named(workspace: Workspace) -> None:
    slow, killed = (workspace.folder / "runs" / name for name in ("slow", "killed"))
    slow_run(workspace, slow)
    rank = random.SystemRandom().randrange(2)
    step = random.SystemRandom().randrange(11, 36)
    with run_of_ranks(
        WORDS, num_ranks=2, cwd=workspace.folder, environment=variables(killed)
    ) as running:
        wait_for_step(killed, step, running)
        os.kill(rank_processes(running.pid)[rank], signal.SIGKILL)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGKILL, err  # of the rank that ended first
    line = line_with(err, f": rank {rank} (process ")
    assert f"[rank {1 - rank}]" in line
    assert "expected 2 ranks, got 1" in line
    assert "has died, last seen" in line
    assert "resumes from checkpoint step-000000" in line
    # Started again, it ends like the run in which nobody died.
    again = hotrec(*WORDS, "launch.num_ranks=2", cwd=workspace.folder, HOTREC_RUN_DIR=str(killed))
    assert again.figures["num_steps"] == 40
    assert final_loss(killed) == final_loss(slow)


IN_BACKGROUND = [*WORDS, "trainer.save_in_background=true"]


def test_killed_while_a_checkpoint_is_written_in_the_background(workspace: Workspace) -> None:
    whole, killed = (workspace.folder / "runs" / name for name in ("background", "half_written"))
    hotrec(*IN_BACKGROUND, "launch.num_ranks=2", cwd=workspace.folder, HOTREC_RUN_DIR=str(whole))
    with run_of_ranks(
        IN_BACKGROUND,
        num_ranks=2,
        cwd=workspace.folder,
        environment=variables(killed),
        fault=Fault("disk", rank=1, step=20),
    ) as running:
        wait_for_step(killed, 30, running)  # training goes on, and saves again after the last one
        written = sorted(path.name for path in (killed / "checkpoints").glob("*step-*"))
        assert [name[:14] for name in written] == [
            ".step-00000020",
            ".step-00000020",
            "step-00000010",
        ]
        os.kill(rank_processes(running.pid)[0], signal.SIGKILL)
        _, err = running.communicate(timeout=60)
    assert "resumes from checkpoint step-00000010" in err
    again = hotrec(
        *IN_BACKGROUND, "launch.num_ranks=2", cwd=workspace.folder, HOTREC_RUN_DIR=str(killed)
    )
    assert again.figures["num_steps"] == 40
    assert final_loss(killed) == final_loss(whole)
    left = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert left == ["latest", "step-00000030", "step-00000040"]


def test_a_checkpoint_that_cannot_be_written_in_the_background(workspace: Workspace) -> None:
    run_dir = workspace.folder / "runs" / "full_disk"
    done = faulty(IN_BACKGROUND, workspace, run_dir, Fault("full disk", rank=1, step=20))
    assert done.exit_code == 1, done.stderr
    assert done.stderr.count("No space left on device") == 1, done.stderr
    left = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert left == ["latest", "step-00000010"]


def test_run_goes_on_when_torchrun_restarts_it(workspace: Workspace) -> None:
    run_dir = workspace.folder / "runs" / "restarted"
    with run_of_ranks(
        WORDS, num_ranks=2, cwd=workspace.folder, environment=variables(run_dir), max_restarts=1
    ) as running:
        wait_for_step(run_dir, 15, running)
        os.kill(rank_processes(running.pid)[1], signal.SIGKILL)
        _, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    assert "has died, last seen" in err
    assert final_loss(run_dir) > 0


def listening(pid: int) -> list[str]:
    """The addresses, as /proc shows them, at which a process accepts connections."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(os.readlink(link).removeprefix("socket:[").rstrip("]"))
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets]


def wait_for_end_of(rank: int, running: Popen[str]) -> None:
    until_s = time.monotonic() + 60
    while rank in rank_processes(running.pid):
        assert time.monotonic() < until_s, f"rank {rank} hangs"
        time.sleep(0.05)


def test_stopped_rank_is_named(workspace: Workspace) -> None:
    run_dir = workspace.folder / "runs" / "stopped_rank"
    with run_of_ranks(
        [*WORDS, "trainer.watchdog_s=2"],
        num_ranks=2,
        cwd=workspace.folder,
        environment=variables(run_dir),
    ) as running:
        wait_for_step(run_dir, 15, running)
        stopped = rank_processes(running.pid)[1]
        agent_and_ranks = [running.pid, *rank_processes(running.pid).values()]
        addresses = {address for pid in agent_and_ranks for address in listening(pid)}
        assert addresses == {"0100007F"}  # 127.0.0.1: nobody else can reach a local run
        os.kill(stopped, signal.SIGSTOP)
        wait_for_end_of(0, running)
        os.kill(stopped, signal.SIGCONT)  # torchrun would kill it after half a minute
        _, err = running.communicate(timeout=60)
    assert running.returncode == EXIT_CODE, err
    line = line_with(err, "no heartbeat from rank 1")
    assert "[rank 0]" in line
    assert "within 2 s" in line
    # "step 16", or "check-up of step 16", or still "checkpoint of step 10": steps are short here.
    assert re.search(r"last seen in (check-?\w+ of )?step \d+", line), line


@pytest.mark.parametrize(
    ("kind", "words", "got"),
    [
        ("raise", [], "got an error on rank 1 in step 5 ("),
        ("hang", [], "got rank 1 alive but not moving for 3 s in step 5 ("),
        # The first batch of an evaluation is the fifth that the pipeline computes.
        (
            "hang",
            ["trainer.eval_every_steps=4", "trainer.eval_splits=[valid]"],
            "got rank 1 alive but not moving for 3 s in evaluation of step 4 (",
        ),
    ],
    ids=["raise", "hang", "hang_in_evaluation"],
)
def test_broken_rank_is_named(
    workspace: Workspace, tmp_path: Path, kind: str, words: list[str], got: str
) -> None:
    given = [*WORDS, "trainer.watchdog_s=3", *words]
    done = faulty(given, workspace, tmp_path / "run", Fault(kind, rank=1, step=5))
    assert done.exit_code in ((1, EXIT_CODE) if kind == "raise" else (EXIT_CODE,)), done.stderr
    # One of the ranks says it for all.
    (line,) = (line for line in done.stderr.splitlines() if got in line and " error: " in line)
    record = tmp_path / "run" / "flight_recorder"
    assert f"The last collectives are in {record}." in line
    assert (record / "rank_0").stat().st_size > 0
    assert ("ArithmeticError: the model has had enough" in line) == (kind == "raise")
    assert "; forward, at faults.py:" in line
    assert "there is no checkpoint yet" in line
