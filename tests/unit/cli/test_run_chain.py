"""``hotrec run``: which stages are made again, and how it ends; the stages are stand-ins."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
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
STAGES = ["prepare", "calibrate", "plan", "train", "evaluate", "report"]
TRAINED = {
    **{"command": "train", "finished": True, "num_steps": 10, "hot_rows": 3, "total_rows": 1000},
    **{"placement": "hot_cold", "pipeline": "look_ahead", "auc": 0.7, "log_loss": 0.5},
    **{"eval_split": "test", "eval_step": 10},
}


@functools.cache
def config_of(*overrides: str) -> Any:
    return build_config(compose_config("config", ["data=synthetic", *overrides]))


@dataclass
class Machine:
    """What the stand-ins make: the costs on disk, and what a run of this program would say."""

    costs: str = "first"
    doubts: tuple[str, ...] = ()
    summary: dict[str, Any] = field(default_factory=lambda: dict(TRAINED))
    is_killed: bool = False
    number: int = 0
    started: dict[str, list[str]] = field(default_factory=dict)

    def run(self, *overrides: str, words: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
        """Run the chain in a directory of its own; its figures, and the stages that were made."""
        self.number += 1
        folder = Path("runs/run", f"{self.number:02d} a=b")
        folder.mkdir(parents=True, exist_ok=True)
        chain = _Chain(config_of(*overrides), folder, [*words], {})
        chain.run()
        return chain.sum_up(), chain.made


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.chdir(tmp_path)
    machine, made = Machine(), set[str]()

    def find_dataset(_: _Chain) -> dict[str, Any] | None:
        return {"num_samples": {"valid": 9, "test": 9}} if "prepare" in made else None

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
        ("read_costs", read_costs),
        ("check_host", lambda *_: None),
        ("content_hash", content_hash),
    ):
        monkeypatch.setattr(run_module, name, stand_in)
    monkeypatch.setattr(_Chain, "start", start)
    monkeypatch.setattr(_Chain, "find_dataset", find_dataset)
    monkeypatch.setattr("hotrec.data.chunks.Dataset.open", lambda _: None)
    monkeypatch.setattr("hotrec.runs.check.check_with_data", lambda *_, **__: 10)
    return machine


Change = Callable[[Machine, Path], object]


def lose(file: str) -> Change:
    def change(machine: Machine, folder: Path) -> None:
        lost = folder / file
        shutil.rmtree(lost) if lost.is_dir() else lost.unlink()

    return change


def write(file: str, text: str) -> Change:
    return lambda machine, folder: (folder / file).write_text(text)


def become(**facts: Any) -> Change:
    return lambda machine, folder: vars(machine).update(facts)


WEIGHTS = "train/checkpoints/step-00000010/tensors"
AGAIN = ["plan", "train", "evaluate", "torchrec", "counterpart", "compare", "report"]
# What changes after a first run, how the second is called, and what it makes in which directory.
DECISIONS: dict[str, tuple[Change, list[str], set[str], bool]] = {
    "nothing": (become(), [], set(), True),
    "no plan": (lose("plan"), [], {"plan"}, True),
    "no weights": (lose(WEIGHTS), [], {"train"}, True),
    "other weights": (write(WEIGHTS, "other"), [], {"train"}, True),
    "no report": (lose("report"), [], {"report"}, True),
    "new costs": (become(costs="second"), [], {*AGAIN}, False),
    # New costs, a new plan; they are no better, so the model stays.
    "in doubt": (become(costs="second", doubts=(DOUBT,)), [], {"calibrate", "plan"}, True),
    "from report": (become(), ["run.from_=report"], {"report"}, True),
    "from evaluate": (become(), ["run.from_=evaluate"], {"evaluate", "compare", "report"}, True),
    # The directory is new, so the plan is written into it, too.
    "from train": (become(), ["run.from_=train"], {*AGAIN}, False),
    "from calibrate": (become(), ["run.from_=calibrate"], {"calibrate", *AGAIN}, False),
    "from prepare": (become(), ["run.from_=prepare"], {*STAGES, *AGAIN}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", DECISIONS)
def test_what_is_current_is_not_made_again(machine: Machine, name: str) -> None:
    change, words, expected, is_same = DECISIONS[name]
    machine.summary |= {"eval_split": "valid"}  # so that evaluate is a stage of its own
    first, made = machine.run("run.compare=true")
    assert {*made} == {*STAGES, *AGAIN} - {"calibrate"}  # the costs on disk are this machine's
    change(machine, Path(first["run_dir"]))
    again, made = machine.run("run.compare=true", *words)
    assert {*made} == expected
    assert (again["run_dir"] == first["run_dir"]) is is_same
    assert Path(again["run_dir"], WEIGHTS).read_text() == "weights"
    if not machine.doubts:
        assert machine.run("run.compare=true")[1] == []


def test_costs_that_are_not_to_be_trusted_are_measured_again_and_said(machine: Machine) -> None:
    machine.doubts = (DOUBT,)
    first, made = machine.run()
    assert made == STAGES
    assert DOUBT in first["caveat"]
    # Costs that are given are not measured.
    figures, made = machine.run("planner.costs=cpu_1gbit")
    assert "calibrate" not in made
    assert figures["caveat"] is None
    # On a quiet machine all that rested on them is made anew, beside what there is.
    machine.costs, machine.doubts = "second", ()
    quiet, made = machine.run()
    assert made == ["plan", "train", "evaluate", "report"]
    assert quiet["run_dir"] != first["run_dir"]
    assert machine.run()[1] == []


def test_the_test_split_is_a_stage_of_its_own_unless_trained_with_it(machine: Machine) -> None:
    figures, made = machine.run()
    assert (figures["auc"], made[-2:]) == (0.7, ["evaluate", "report"])
    machine.summary |= {"eval_split": "valid"}
    assert machine.run("run.from_=train")[0]["auc"] == 0.6
    with pytest.raises(ValueError, match=r"run.from: expected one of .*, got compare"):
        machine.run("run.from_=compare")


PLAIN = "placement.cold_tier=fused"
SAME = f"{PLAIN} pipeline=look_ahead plan.trial=false"


@pytest.mark.parametrize(
    ("trained", "theirs", "counterpart"),
    [
        ({}, ["placement=torchrec"], f"placement=all_cold {SAME}"),
        ({"hot_rows": 0}, ["placement=torchrec"], f"placement=coverage {SAME}"),
        (
            {"hot_rows": 0, "placement": "torchrec hand_tuned"},
            *(["placement=torchrec"], f"placement=coverage {PLAIN}"),
        ),
        # What was chosen is what it would be compared with.
        ({"hot_rows": 0, "placement": "torchrec planner"}, *([], f"placement=coverage {PLAIN}")),
    ],
)
def test_it_is_compared_with_torchrecs_planner_and_the_other_kind_of_plan(
    machine: Machine, trained: dict[str, Any], theirs: list[str], counterpart: str
) -> None:
    machine.summary |= trained
    words = ["seed=1", "placement=cost", PLAIN, "pipeline=auto"]
    assert machine.run(words=words)[1][-1] == "report"
    _, made = machine.run("run.compare=true", words=words)
    assert made == [*["torchrec"][: len(theirs)], "counterpart", "compare", "report"]
    assert machine.started.get("torchrec", ["train", "seed=1"]) == ["train", "seed=1", *theirs]
    assert machine.started["counterpart"] == ["train", "seed=1", *counterpart.split()]
    runs = [name for name in ("train", "torchrec", "counterpart") if name in ("train", *made)]
    paths = [quoted(f"runs/run/01 a=b/{name}") for name in runs]
    assert machine.started["compare"][1] == f"runs=[{','.join(paths)}]"
    assert machine.run("run.compare=true", words=words)[1] == []
