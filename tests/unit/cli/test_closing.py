"""The lines with which commands end, and figures that a terminal is spared."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotrec.cli.app import _print_figures
from hotrec.cli.closing import print_closing, quality_lines
from hotrec.cli.launch import BRIEF

QUALITY = {"auc": 0.70021, "log_loss": 0.5, "num_samples": 1000}
TRAIN: dict[str, Any] = {
    **{"command": "train", "run_dir": Path("runs/a"), "finished": True, "num_steps": 1000},
    **{"model": "dlrm", "dataset_name": "events", "placement": "cost", "eval_split": "test"},
    **{"eval_step": 1000, **QUALITY},
}
# Figures of commands, and what of them stands in their last lines.
SAID: dict[str, tuple[dict[str, Any], list[str]]] = {
    "train": (
        TRAIN,
        ["steps      1,000\n", "0.7002 on test", "0.5000", "hotrec evaluate run_dir=runs/a\n",
         "hotrec export run_dir=runs/a output="],
    ),
    "prepare": (
        {"dataset": Path("data/a"), "num_samples": {"train": 2000, "test": 300},
         "num_rows": {"user": 1200, "item": 34}, "num_skipped": 5, "num_lookups": 4600,
         "landmarks": [{"rows_frac": 0.01, "train": 0.8, "heldout": 0.7}]},
        ["samples    2,300 (train 2,000, test 300)", "rows       1,234 (", "5 unreadable",
         "80.0% of", "hotrec calibrate\n"],
    ),
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", SAID)
def test_lines_are_for_readers_and_json_for_programs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, shown = SAID[command]
    monkeypatch.setattr("hotrec.cli.app._own_words", lambda _: [])
    invocation: Any = SimpleNamespace(name=command)
    _print_figures(invocation, {"command": command, **figures})
    out, err = capsys.readouterr()
    assert json.loads(out)["command"] == command
    assert [text for text in shown if text not in err] == []
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    _print_figures(invocation, {"command": command, **figures})
    assert terminal.getvalue() == ""
    assert capsys.readouterr().err == err
    monkeypatch.setenv(BRIEF, "1")  # a stage of `hotrec run`
    print_closing(command, figures)
    assert capsys.readouterr().err == ""


def test_quality_is_that_of_each_label_or_undefined() -> None:
    by_label = {"clicked": 0.7002, "bought": 0.6096}
    (line,) = quality_lines({"auc": 0.6549, "log_loss": 1.0, "auc_by_label": by_label}, "test")
    assert all(f"{figure:.4f}" in line[1] for figure in (*by_label.values(), 0.6549, 1.0))
    (line,) = quality_lines({"auc": None, "log_loss": 0.1}, "test")
    assert line[1].startswith("undefined")
    found = {"clicked": {"auc": 0.9999, "alone": {"dwell_sec": 0.99991, "price": 0.51}}}
    _, line = quality_lines({"auc": 0.9999, "log_loss": 0.1, "suspicious": found}, "test")
    assert "dwell_sec 0.9999, price 0.5100" in line[1]
