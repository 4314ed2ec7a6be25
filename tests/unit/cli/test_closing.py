"""The lines with which commands end, and figures that a terminal is spared."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotrec.cli.app import _print_figures
from hotrec.cli.closing import _LINES, best_line, print_closing, print_lines, quality_lines
from hotrec.cli.commands import COMMANDS
from hotrec.cli.launch import BRIEF

QUALITY = {"auc": 0.70021, "log_loss": 0.5, "num_samples": 1000}
TRAIN: dict[str, Any] = {
    "command": "train",
    "run_dir": Path("runs/a"),
    "finished": True,
    "num_steps": 1000,
    "model": "dlrm",
    "dataset_name": "events",
    "placement": "cost",
    "eval_split": "test",
    "eval_step": 1000,
    **QUALITY,
}
FIGURES: dict[str, dict[str, Any]] = {
    "train": TRAIN,
    "evaluate": {
        "command": "evaluate",
        "run_dir": Path("runs/a"),
        "checkpoint": "step-00001000",
        "split": "valid",
        **QUALITY,
    },
    "export": {
        "command": "export",
        "run_dir": Path("runs/a"),
        "output": Path("model"),
        "checkpoint": "step-00000800",
        "is_best": True,
        "rows": "fp16",
        "num_rows": 1234,
        "num_bytes": 5e6,
        "split": "test",
        **QUALITY,
    },
    "predict": {
        "command": "predict",
        "run_dir": Path("runs/a"),
        "output": Path("scores"),
        "checkpoint": "step-00001000",
        "num_files": 2,
        "num_skipped": 3,
        **QUALITY,
    },
    "report": {"command": "report", "verdict": ["a: 3 ms a step."], "page": Path("p.html")},
    "prepare": {
        "dataset": Path("data/a/dataset"),
        "num_samples": {"train": 2000, "test": 300},
        "num_rows": {"user": 1200, "item": 34},
        "num_skipped": 5,
    },
    "profile": {
        "profile": Path("data/a/profile"),
        "picture": Path("runs/p/coverage.png"),
        "num_lookups": 12345,
        "num_distinct": 1000,
        "num_rows": 1234,
        "landmarks": [
            {"rows_frac": 0.001, "train": 0.1, "heldout": 0.1},
            {"rows_frac": 0.01, "train": 0.501, "heldout": 0.4},
        ],
    },
    "calibrate": {
        "costs": Path("data/costs"),
        "origin": "measured",
        "name": "cpu",
        "elapsed_s": 61.2,
    },
    "plan": {
        "why": "hot_cold base is the best.",
        "hot_rows": 100,
        "total_rows": 1234,
        "hot_bytes": 6400,
        "page": Path("runs/p/plan.html"),
        "plan_text": Path("runs/p/plan.txt"),
        "world_size": 2,
    },
    "cache": {
        "num_rows": 1000,
        "picture": Path("runs/c/cache.png"),
        "least_slots": {"lru": {"0.9": 50, "0.99": None}, "frequency": {"0.9": None}},
    },
}
SAID = {
    "train": "done       runs/a: 1,000 steps, dlrm on events, cost\n"
    "AUC        0.7002 on test, log loss 0.5000\n"
    "evaluate   hotrec evaluate run_dir=runs/a\n"
    "export     hotrec export run_dir=runs/a output=exported\n",
    "evaluate": "checkpoint step-00001000 of runs/a\n"
    "AUC        0.7002 on valid (1,000 samples), log loss 0.5000\n",
    "export": "exported   model: 1,234 rows as fp16, 5.00 MB\n"
    "checkpoint step-00000800 of runs/a, the best one, which the run keeps\n"
    "AUC        0.7002 on test, log loss 0.5000\n",
    "predict": "scored     scores: 1,000 samples of 2 files, 3 skipped\n"
    "checkpoint step-00001000 of runs/a\n"
    "AUC        0.7002 on the scored files, log loss 0.5000\n",
    "report": "said       a: 3 ms a step.\npage       p.html\n",
    "prepare": "dataset    data/a/dataset: 2,300 samples (train 2,000, test 300), 1,234 rows in 2 "
    "tables\nleft out   5 unreadable lines\n",
    "profile": "profile    data/a/profile: 12,345 lookups of 1,000 of 1,234 rows\n"
    "hot rows   the most-read 1% of the rows serve 50.1% of the lookups, and 40.0% of "
    "the held-out ones\npicture    runs/p/coverage.png\n",
    "calibrate": "costs      data/costs: measured on cpu in 61.2 s\n",
    "plan": "chosen     hot_cold base is the best.\nhot rows   100 of 1,234, 6.40 kB on each rank\n"
    "page       runs/p/plan.html\n",
    "cache": "lru        50 slots (5.0% of the rows) serve 90% of the lookups\n"
    "frequency  no size reaches a hit rate of 90%\npicture    runs/c/cache.png\n",
    "doctor": "",
}
# Of stages without a word.
GO_ON = {
    "prepare": "next       hotrec profile\n",
    "profile": "next       hotrec calibrate\n",
    "plan": "next       hotrec train launch.num_ranks=2\n",
}
NEXT = {
    "prepare data=a append=[b.csv]": "hotrec profile data=a",
    "profile --config-dir conf data=a profile.mode=sample": "hotrec calibrate data=a",
    "calibrate data=a launch.num_ranks=2 calibrate.budget_s=1": "hotrec plan data=a "
    "launch.num_ranks=2 plan.world_size=2",
    "plan data=a launch.num_ranks=2 plan.world_size=2": "hotrec train data=a launch.num_ranks=2",
    "plan data=a launch.num_ranks=2": "hotrec train data=a launch.num_ranks=1",
    "calibrate data=a plan.world_size=4": "hotrec plan data=a plan.world_size=4",
    "prepare": "hotrec profile",
    "calibrate": None,
    "plan data=a plan.device=cuda": None,
    "plan data=a planner.costs=dgx_h100_infiniband": None,
    "train data=a": None,
}


@pytest.mark.parametrize("command", SAID)
def test_a_command_ends_with_lines(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_closing(command, FIGURES.get(command, {}))
    assert capsys.readouterr().err == SAID[command] + GO_ON.get(command, "")


def test_every_command_ends_with_lines() -> None:
    assert set(_LINES) == set(COMMANDS)


def given_size(words: list[str]) -> int:
    """The ranks that were planned for."""
    given = dict(word.split("=") for word in words if "=" in word)
    return int(given.get("plan.world_size", 1))


@pytest.mark.parametrize("line", NEXT)
def test_a_stage_names_the_next(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *words = line.split()
    print_closing(command, {**FIGURES[command], "world_size": given_size(words)}, words)
    said = capsys.readouterr().err.removeprefix(SAID[command])
    assert said == ("" if NEXT[line] is None else f"next       {NEXT[line]}\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", SAID)
def test_json_is_for_programs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"command": command, **FIGURES.get(command, {})}
    monkeypatch.setattr("hotrec.cli.app._own_words", lambda _: [])
    invocation: Any = SimpleNamespace(name=command)
    _print_figures(invocation, figures)
    out, err = capsys.readouterr()
    assert json.loads(out)["command"] == command
    assert err == SAID[command] + GO_ON.get(command, "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    _print_figures(invocation, figures)
    assert terminal.getvalue() == ""
    assert capsys.readouterr().err == err


def test_a_stage_of_run_ends_without_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(BRIEF, "1")
    print_closing("train", TRAIN)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "figures",
    [
        {"auc_by_label": {"clicked": 0.7002, "bought": 0.6096}},
        {"by_label": {"clicked": {"auc": 0.7002}, "bought": {"auc": 0.6096}}},
    ],
)
def test_each_label_has_its_auc(figures: dict[str, Any]) -> None:
    (line,) = quality_lines({"auc": 0.6549, "log_loss": 1.0, **figures}, "test")
    expected = "clicked 0.7002, bought 0.6096; 0.6549 is their mean on test, log loss 1.0000"
    assert line == ("AUC", expected)


def test_an_auc_that_is_not_defined_is_not_nan() -> None:
    (line,) = quality_lines({"auc": None, "log_loss": 0.1}, "test")
    assert line[1] == "undefined (all samples have the same label) on test, log loss 0.1000"
    assert quality_lines({"auc": None, "log_loss": None}, "test") == []


def test_an_auc_that_is_too_good_names_columns() -> None:
    found = {"clicked": {"auc": 0.9999, "alone": {"dwell_sec": 0.99991, "price": 0.51}}}
    lines = quality_lines({"auc": 0.9999, "log_loss": 0.1, "suspicious": found}, "test")
    assert lines[1][0] == "suspicious"
    assert "an AUC of 0.9999 for clicked is implausibly high" in lines[1][1]
    assert "dwell_sec 0.9999, price 0.5100" in lines[1][1]


def test_what_a_first_run_gets_wrong_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def said(**changes: Any) -> str:
        print_closing("train", {**TRAIN, "batch_size": 2048, "normalized_entropy": 0.9, **changes})
        return capsys.readouterr().err

    assert "too few" not in said(num_steps=100)
    assert re.search("12, too few .* trainer.batch_size .*2,048.* .*num_epochs", said(num_steps=12))
    assert "always predicting" not in said(normalized_entropy=1.0)
    assert "8.49 times" in said(normalized_entropy=8.49)


LAST = {"test": {"auc": 0.69}}


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"best_step": 800, "eval_step": 800, "last_quality": LAST}, "step 800, which is kept"),
        (
            {"best_step": 800, "eval_step": 800, "last_quality": LAST},
            "the AUC after the last step, 1000, is 0.6900",
        ),
        ({"best_step": 1000}, "step 1000, the last one"),
        ({"best_step": 800}, "step 800, which is not kept: the last step, 1000, is reported"),
        ({"best_step": -1}, None),
        ({}, None),
    ],
)
def test_which_step_is_meant_is_said(figures: dict[str, Any], said: str | None) -> None:
    lines = best_line({**TRAIN, **figures})
    assert (said is None and lines == []) or said in lines[0][1]


def test_a_terminal_gets_lines_of_its_width_and_commands_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    command = "hotrec evaluate run_dir=runs/a/long/path/of/a/run split=valid"
    print_lines([("measured", "one two three four five six seven eight"), ("next", command)])
    said = capsys.readouterr().err
    assert said == (
        f"measured   one two three four five six\n           seven eight\nnext       {command}\n"
    )
