"""One run, one directory: for one process, for a sweep, for ranks that real torchrun started."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from hotrec.cli.app import run_command
from hotrec.cli.launch import decide_run_dir
from tests.helpers.commands import run_on_ranks

SIZES = ("num_rows=[50]", "mean_lengths=[1]", "num_train=200", "num_valid=0", "num_test=0")
SMALL = ["data=synthetic", *(f"data.synthetic.{size}" for size in SIZES)]


@pytest.fixture(autouse=True)
def no_run_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HOTREC_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("given", "words", "is_multirun", "start"),
    [
        ("", ["experiment=quickstart"], False, "runs/quickstart/"),
        ("", ["experiment=a,b"], False, "runs/train/"),
        ("", [], True, "runs/sweep/train/"),
        ("somewhere/else", [], False, "somewhere/else"),
    ],
)
def test_name_of_the_environment_command_or_experiment(
    given: str, words: list[str], is_multirun: bool, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given:
        monkeypatch.setenv("HOTREC_RUN_DIR", given)
    assert decide_run_dir("train", words, is_multirun=is_multirun).startswith(start)


def test_two_runs_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrec.cli.launch.time", Mock(strftime=lambda _: "20231114-221320"))
    for is_multirun in (False, True):
        chosen = []
        for _ in range(3):
            chosen.append(decide_run_dir("train", [], is_multirun=is_multirun))
            assert Path(chosen[-1]).is_dir(), "made, so that no other run takes it"
            monkeypatch.delenv("HOTREC_RUN_DIR")
        assert chosen[1:] == [f"{chosen[0]}-1", f"{chosen[0]}-2"]


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

    monkeypatch.setattr("hotrec.cli.app.run_stage", convert)
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


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "first"}, "first"),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": "/t/none_x7/a/1/e"}, "none_x7"),
        ({"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2"}, None),
        ({}, None),  # of another launcher
    ],
)
def test_ranks_take_the_id_of_torchrun(
    variables: dict[str, str], name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is that of all hosts, and of a restart."""
    for key, value in {**variables, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    if name is not None:
        assert decide_run_dir("train", [], is_multirun=False) == f"runs/train/{name}"
        return
    with pytest.raises(ValueError, match="HOTREC_RUN_DIR: expected .* got none"):
        decide_run_dir("train", [], is_multirun=False)


def test_command_on_ranks(tmp_path: Path) -> None:
    done = run_on_ranks(["prepare", *SMALL], 2)
    assert done.figures["world_size"] == 2
    (run_dir,) = (tmp_path / "runs/prepare").iterdir()
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.yaml", "log.txt"]
