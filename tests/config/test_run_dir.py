"""One run, one directory: for one process, for a sweep, for ranks that real torchrun started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from hotrec.cli.app import run_command
from hotrec.cli.launch import decide_run_dir
from tests.helpers.commands import environment, run_on_ranks

SMALL = [
    "data=synthetic",
    "data.synthetic.num_rows=[50]",
    "data.synthetic.mean_lengths=[1]",
    "data.synthetic.num_train=200",
    "data.synthetic.num_valid=0",
    "data.synthetic.num_test=0",
]
# Each rank thinks it starts at another time, as ranks on several hosts do.
DECIDE = """
import os, sys, time
from hotrec.cli import launch
rank = int(os.environ["RANK"])
launch.time = type("Clock", (), {"strftime": lambda _: f"2023-{rank}-{os.getpid()}"})
chosen = launch.decide_run_dir("train", [], is_multirun=False)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"attempt-{attempt}-rank-{rank}", "w").write(chosen)
if attempt == "0":
    time.sleep(1.5)
    sys.exit(1)
"""


@pytest.fixture(autouse=True)
def no_run_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HOTREC_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


def test_name_of_the_command_or_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    for command, words, start in (
        ("prepare", ["experiment=quickstart"], "runs/prepare/"),
        ("train", [], "runs/train/"),
        ("train", ["experiment=quickstart"], "runs/quickstart/"),
        ("train", ["experiment=a,b"], "runs/train/"),
    ):
        monkeypatch.delenv("HOTREC_RUN_DIR", raising=False)
        assert decide_run_dir(command, words, is_multirun=False).startswith(start)
    monkeypatch.delenv("HOTREC_RUN_DIR")
    assert decide_run_dir("train", [], is_multirun=True).startswith("runs/sweep/train/")


def test_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTREC_RUN_DIR", "somewhere/else")
    assert decide_run_dir("train", [], is_multirun=False) == "somewhere/else"


def test_two_runs_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrec.cli.launch.time", Mock(strftime=lambda _: "20231114-221320"))
    for is_multirun in (False, True):
        chosen = []
        for _ in range(3):
            chosen.append(decide_run_dir("train", [], is_multirun=is_multirun))
            assert Path(chosen[-1]).is_dir(), "made, so that no other run takes it"
            monkeypatch.delenv("HOTREC_RUN_DIR")
        assert chosen[1:] == [f"{chosen[0]}-1", f"{chosen[0]}-2"]


def test_jobs_that_start_at_once_have_directories_of_their_own(tmp_path: Path) -> None:
    program = (
        "import sys, time; from hotrec.cli.launch import decide_run_dir; time.sleep(0.3)\n"
        "print(decide_run_dir('train', [], is_multirun=False))"
    )
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    chosen = {job.communicate(timeout=60)[0].strip() for job in jobs}
    assert len(chosen) == len(list((tmp_path / "runs/train").iterdir())) == 8


@pytest.mark.parametrize("words", [["trainer.cake=1"], ["--cfg", "job"], ["data=nope"]])
def test_nothing_stays_of_a_command_that_does_nothing(words: list[str], tmp_path: Path) -> None:
    run_command("train", words)
    assert not any(tmp_path.iterdir())


def test_a_directory_of_the_user_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("HOTREC_RUN_DIR", "mine")
    assert run_command("train", ["trainer.cake=1"]) == 1
    assert (tmp_path / "mine").is_dir()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_command_whatever_it_interrupts(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(*_: object) -> None:
        try:
            signal.raise_signal(number)
        except BaseException:
            raise TypeError("expected an int, got an object of another type") from None

    monkeypatch.setattr("hotrec.cli.app._run_composed", convert)
    # A shell starts a background job with SIGINT ignored, and a command leaves it so.
    of_job = signal.signal(number, signal.default_int_handler)
    try:
        found = run_command("prepare", SMALL)
    except SystemExit as ended:
        found = ended.code
    after = signal.signal(number, of_job)
    assert found == code
    assert after is signal.default_int_handler


def test_sweep(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "paths.dataset=made-${data.synthetic.seed}", "data.synthetic.seed=3,4"]
    assert run_command("prepare", ["--multirun", *words]) == 0
    figures = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [figure["dataset"] for figure in figures] == ["made-3", "made-4"]
    (sweep,) = (tmp_path / "runs/sweep/prepare").iterdir()
    for job, seed in (("0", 3), ("1", 4)):
        recorded = yaml.safe_load((sweep / job / "config.yaml").read_text())
        assert recorded["data"]["synthetic"]["seed"] == seed
        assert recorded["paths"]["dataset"] == f"made-{seed}"
        assert f"made-{seed}: 200 samples" in (sweep / job / "log.txt").read_text()
    assert "HOTREC_RUN_DIR" not in os.environ


@pytest.mark.timeout(200)
def test_ranks_agree(tmp_path: Path) -> None:
    """Those that a real torchrun has started again, too."""
    script = tmp_path / "decide.py"
    script.write_text(DECIDE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*launcher, "--nproc-per-node", "2", "--max-restarts", "1", str(script)]
    subprocess.run(words, cwd=tmp_path, env=environment(), timeout=150, check=True)
    files = sorted(tmp_path.glob("attempt-*"))
    assert [path.name for path in files] == [
        f"attempt-{attempt}-rank-{rank}" for attempt in (0, 1) for rank in (0, 1)
    ]
    assert len({path.read_text() for path in files}) == 1


def test_command_on_ranks(tmp_path: Path) -> None:
    done = run_on_ranks(["prepare", *SMALL], 2)
    assert done.figures["world_size"] == 2
    (run_dir,) = (tmp_path / "runs/prepare").iterdir()
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.yaml", "log.txt"]
