"""``hotrec run``: which stages are made again, and how it ends; the stages are stand-ins."""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hotrec.cli import run as run_module
from hotrec.cli.run import _Chain
from hotrec.cli.store import build_config, compose_config, quoted
from hotrec.cost_model.builtin import BUILTIN

DOUBT = "were measured beside other work (1.3 of 2 cores busy)"
STAGES = ["prepare", "profile", "calibrate", "plan", "train", "evaluate", "report"]
TRAINED = {
    "command": "train",
    "finished": True,
    "num_steps": 10,
    "hot_rows": 3,
    "total_rows": 1000,
    "placement": "hot_cold",
    "samples_per_s": 1000.0,
    "sent_bytes_total": 2e6,
    "auc": 0.7,
    "log_loss": 0.5,
    "eval_split": "test",
    "eval_step": 10,
}


@dataclass
class Machine:
    """What the stand-ins make: the costs on disk, and what a run of this program would say."""

    costs: str = "first"
    doubts: tuple[str, ...] = ()
    summary: dict[str, Any] = field(default_factory=lambda: dict(TRAINED))
    is_killed: bool = False
    number: int = 0

    def run(self, *words: str, name: str = "") -> tuple[dict[str, Any], list[str]]:
        """Run the chain in a directory of its own; its figures, and the stages that were made."""
        self.number += 1
        folder = Path("runs/run", name or f"{self.number:02d}")
        folder.mkdir(parents=True, exist_ok=True)
        composed = compose_config("config", ["data=synthetic", *words])
        chain = _Chain(build_config(composed), folder, [], {})
        return chain.run(), chain.made


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.chdir(tmp_path)
    machine, made = Machine(), set[str]()

    def find_artifact(name: str, config: object) -> dict[str, Any] | None:
        return {"num_samples": {"valid": 9, "test": 9}} if name in made else None

    def read_costs(path: Path) -> Any:
        facts = {"num_ranks": 1, "batch_size": 2048}
        given = {"origin": "measured", "facts": facts, "doubts": machine.doubts}
        return replace(BUILTIN["cpu_1gbit"], **given)

    def start(self: _Chain, name: str, words: list[str]) -> dict[str, Any]:
        made.add(name)
        if name == "prepare":
            return {"num_samples": {"valid": 9, "test": 9}}
        folder = self.folder / name
        if name in ("train", "torchrec"):
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            summary = {**machine.summary, "finished": not machine.is_killed}
            (folder / "summary.json").write_text(json.dumps(summary))
            return summary
        folder.mkdir(exist_ok=True)
        return {"verdict": ["a sentence."]} if name == "report" else {"log_loss": 0.6, "auc": 0.6}

    def content_hash(path: str, kind: str) -> str:
        return machine.costs if kind == "costs" else kind

    for name, stand_in in (
        ("find_artifact", find_artifact),
        ("read_costs", read_costs),
        ("check_host", lambda *_: None),
        ("content_hash", content_hash),
    ):
        monkeypatch.setattr(run_module, name, stand_in)
    monkeypatch.setattr(_Chain, "start", start)
    monkeypatch.setattr("hotrec.data.chunks.Dataset.open", lambda _: None)
    monkeypatch.setattr("hotrec.runs.check.check_with_data", lambda *_, **__: 10)
    return machine


def test_what_is_current_is_not_made_again(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hotrec")
    first, made = machine.run()
    # The costs on disk are those of this machine; training has evaluated the split.
    assert made == [stage for stage in STAGES if stage != "calibrate"]
    assert "6/7 evaluate: done by train" in caplog.text
    assert "evaluate: current" not in caplog.text
    again, made = machine.run()
    assert made == []
    assert again["run_dir"] == first["run_dir"]
    assert "6/7 evaluate: current, nothing to do" in caplog.text


def test_costs_that_are_not_to_be_trusted_are_measured_again_and_said(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.doubts = (DOUBT,)
    first, made = machine.run()
    assert made == STAGES
    said = f"costs      the costs {DOUBT}: calibrate again on a quiet machine\n"
    assert said in capsys.readouterr().err
    assert DOUBT in first["caveat"]
    # Still busy: new costs, a new plan; they are no better, so the model stays.
    machine.costs = "second"
    again, made = machine.run()
    assert made == ["calibrate", "plan"]
    assert again["run_dir"] == first["run_dir"]
    # On a quiet machine all that rested on them is made anew, beside what there is.
    machine.costs, machine.doubts = "third", ()
    quiet, made = machine.run()
    assert made == ["plan", "train", "evaluate", "report"]
    assert quiet["run_dir"] != first["run_dir"]
    capsys.readouterr()
    assert machine.run()[1] == []
    assert "costs " not in capsys.readouterr().err


def test_what_was_trained_by_half_goes_on_with_new_costs(machine: Machine) -> None:
    machine.is_killed = True
    first, _ = machine.run()
    machine.is_killed, machine.costs = False, "second"
    again, made = machine.run()
    assert made == ["plan", "train", "evaluate", "report"]
    assert again["run_dir"] == first["run_dir"]


def test_costs_that_are_given_are_not_measured(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.doubts = (DOUBT,)
    caplog.set_level(logging.INFO, "hotrec")
    figures, made = machine.run("planner.costs=cpu_1gbit")
    assert made == [stage for stage in STAGES if stage != "calibrate"]
    assert figures["caveat"] is None
    assert "3/6 plan: " in caplog.text


def test_it_ends_with_the_commands_that_take_its_model(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.run("run.compare=true", name="a b=c")
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().err.splitlines())
    words = shlex.split(lines["evaluate"])
    assert words == ["hotrec", "evaluate", f"run_dir={quoted('runs/run/a b=c/train')}"]
    assert lines["export"].endswith(" output=exported")
    assert lines["measured"] == "a sentence."
    assert lines["sent"] == "2.00 MB a step (TorchRec's plan: 2.00 MB)"


def test_hot_rows_that_the_trial_threw_away_are_explained(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.summary |= {"hot_rows": 0, "placement": "torchrec table_wise"}
    machine.run()
    said = "hot rows   0 of 1,000: TorchRec's table-wise plan was trained\n"
    assert said in capsys.readouterr().err


def test_the_test_split_is_evaluated_where_training_did_not(machine: Machine) -> None:
    machine.summary |= {"eval_split": "valid"}
    figures, made = machine.run()
    assert (figures["auc"], made[-2:]) == (0.6, ["evaluate", "report"])
