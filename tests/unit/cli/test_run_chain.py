"""``hotrec run``: which stages are made again, and how it ends; the stages are stand-ins."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hotrec.artifact import commit_artifact, scratch_directory
from hotrec.cli import run as run_module
from hotrec.cli.run import _Chain
from hotrec.cli.store import build_config, compose_config, quoted
from hotrec.cost_model.builtin import BUILTIN

DOUBT = "were measured with other load (1.3 of 2 cores busy)"
STAGES = ["prepare", "profile", "calibrate", "plan", "train", "evaluate", "report"]
TRAINED = {
    "command": "train",
    "finished": True,
    "num_steps": 10,
    "hot_rows": 3,
    "total_rows": 1000,
    "placement": "hot_cold",
    "pipeline": "look_ahead",
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
    started: dict[str, list[str]] = field(default_factory=dict)

    def run(
        self, *overrides: str, name: str = "", words: Sequence[str] = ()
    ) -> tuple[dict[str, Any], list[str]]:
        """Run the chain in a directory of its own; its figures, and the stages that were made.

        Args:
            overrides: Of the configuration.
            name: Of the directory.
            words: What the stages are started with.
        """
        self.number += 1
        folder = Path("runs/run", name or f"{self.number:02d}")
        folder.mkdir(parents=True, exist_ok=True)
        composed = compose_config("config", ["data=synthetic", *overrides])
        chain = _Chain(build_config(composed), folder, [*words], {})
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
        machine.started[name] = words
        if name == "prepare":
            return {"num_samples": {"valid": 9, "test": 9}}
        folder = self.folder / name
        if name in ("train", "torchrec", "counterpart"):
            kept = folder / "checkpoints/step-00000010"
            with scratch_directory(kept, kind="checkpoint") as scratch:
                (scratch / "tensors").write_text("weights")
                commit_artifact(scratch, kept, kind="checkpoint", content={})
            (folder / "checkpoints/latest").write_text(kept.name)
            summary = {**machine.summary, "finished": not machine.is_killed}
            (folder / "summary.json").write_text(json.dumps(summary))
            return summary
        folder.mkdir(exist_ok=True)
        (folder / "compare.json").write_text("{}")
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


@pytest.mark.parametrize(
    ("stage", "file"),
    [
        ("plan", "plan/compare.json"),
        ("train", "train/checkpoints"),
        ("train", "train/checkpoints/latest"),
        ("train", "train/checkpoints/step-00000010/tensors"),
        ("train", "train/summary.json"),
        ("torchrec", "torchrec/checkpoints"),
        ("compare", "compare/compare.json"),
        ("report", "report/compare.json"),
    ],
)
def test_a_stage_without_all_its_files_is_made_again(
    machine: Machine, stage: str, file: str
) -> None:
    first, _ = machine.run("run.compare=true")
    lost = Path(first["run_dir"], file)
    text = "" if lost.is_dir() else lost.read_text()
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    again, made = machine.run("run.compare=true")
    assert stage in made
    assert set(made) <= {stage, "evaluate", "report"}
    assert again["run_dir"] == first["run_dir"]
    assert lost.is_dir() or lost.read_text() == text
    assert machine.run("run.compare=true")[1] == []
    for other in (text[:-1], text[::-1]) if text else ():  # a part of it, or that of another run
        lost.write_text(other)
        assert stage in machine.run("run.compare=true")[1]
        assert lost.read_text() == text


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_run_that_ended_when_this_program_was_killed(machine: Machine, is_whole: bool) -> None:
    """Without a record of its files, and then without some of them."""
    first, _ = machine.run()
    trained = Path(first["run_dir"], "train")
    lost = trained / "checkpoints/step-00000010/tensors"
    (trained / "made.json").unlink()
    if is_whole:
        assert machine.run()[1] == []
    lost.unlink()
    assert "train" in machine.run()[1]
    assert lost.exists()
    assert machine.run()[1] == []


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


COMPARED = ["train", "torchrec", "counterpart", "evaluate", "compare", "report"]


@pytest.mark.parametrize(
    ("trained", "theirs", "counterpart"),
    [
        (
            {},
            "placement=torchrec",
            "placement=all_cold placement.cold_tier=fused pipeline=look_ahead plan.trial=false",
        ),
        (
            {"hot_rows": 0},
            "placement=torchrec",
            "placement=coverage placement.cold_tier=fused pipeline=look_ahead plan.trial=false",
        ),
        (
            {"hot_rows": 0, "placement": "torchrec hand_tuned"},
            "placement=torchrec",
            "placement=coverage placement.cold_tier=fused",
        ),
        # What was chosen is what it would be compared with.
        (
            {"hot_rows": 0, "placement": "torchrec planner"},
            None,
            "placement=coverage placement.cold_tier=fused",
        ),
    ],
)
def test_it_is_compared_with_torchrecs_planner_and_the_other_kind_of_plan(
    machine: Machine, trained: dict[str, Any], theirs: str | None, counterpart: str
) -> None:
    machine.summary |= trained
    words = ["seed=1", "placement=cost", "placement.cold_tier=fused", "pipeline=auto"]
    _, made = machine.run("run.compare=true", words=words)
    expected = [stage for stage in COMPARED if theirs or stage != "torchrec"]
    assert made[3:] == expected
    assert machine.started.get("torchrec") == (theirs and ["train", "seed=1", theirs])
    assert machine.started["counterpart"] == ["train", "seed=1", *counterpart.split()]
    runs = [name for name in ("train", "torchrec", "counterpart") if name in made]
    paths = [f"runs/run/01/{name}" for name in runs]
    assert machine.started["compare"][1] == f"runs=[{','.join(map(quoted, paths))}]"
    assert machine.started["report"][-1] == f"compared={quoted('runs/run/01/compare')}"
    assert machine.run("run.compare=true", words=words)[1] == []


def test_a_run_can_be_compared_later(machine: Machine) -> None:
    first, _ = machine.run()
    again, made = machine.run("run.compare=true")
    assert (again["run_dir"], made) == (
        first["run_dir"],
        ["torchrec", "counterpart", "compare", "report"],
    )


@pytest.mark.parametrize(
    ("stage", "made", "is_same_directory"),
    [
        ("report", ["report"], True),
        ("evaluate", ["evaluate", "report"], True),
        # The directory is new, so the plan is written into it, too.
        ("train", ["plan", "train", "evaluate", "report"], False),
        ("calibrate", ["calibrate", "plan", "train", "evaluate", "report"], False),
        ("prepare", STAGES, False),
    ],
)
def test_it_begins_again_at_a_stage(
    machine: Machine, stage: str, made: list[str], is_same_directory: bool
) -> None:
    machine.summary |= {"eval_split": "valid"}  # so that evaluate is a stage of its own
    first, _ = machine.run()
    again, found = machine.run(f"run.from_={stage}")
    assert found == made
    # What was trained before stays as it is.
    assert (again["run_dir"] == first["run_dir"]) is is_same_directory
    assert machine.run()[0]["run_dir"] == again["run_dir"]


def test_it_cannot_begin_again_at_a_stage_that_it_has_not(machine: Machine) -> None:
    with pytest.raises(ValueError, match=r"run.from: expected one of the stages .* got compare"):
        machine.run("run.from_=compare")


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
