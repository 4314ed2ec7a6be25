"""The training plan of every kind of placement, and reading what a run recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotrec.artifact import ArtifactError
from hotrec.assemble.job import Job
from hotrec.assemble.planning import Proposal, SettledPlan, make_proposal, read_settled_plan
from hotrec.cli.store import build_config, compose_config
from hotrec.config.roots import Config
from hotrec.data.chunks import Dataset
from hotrec.planner.machine import Machine
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.planner.trial import Trial, write_trial
from hotrec.runtime.run_dir import PARTITION, PREDICTION
from hotrec.types import PipelineKind, PipelineSpec, TorchrecPlan
from tests.unit.data.logs import write_dataset

SPARSE_DIST, BASE = PipelineKind.sparse_dist, PipelineKind.base
HAND_TUNED = TorchrecPlan.hand_tuned
ON = Machine(2, 2, "cpu", 0, 8 << 30, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan")
    write_dataset(path / "dataset", {"train": 90})
    return path


def config_of(folder: Path, *words: str) -> Config:
    names = ("dataset", "partition")
    paths = [f"paths.{name}={folder / name}" for name in names]
    given = ["trainer.batch_size=32", "planner.costs=cpu_1gbit", *paths, *words]
    config: Config = build_config(compose_config("config", given))
    return config


def job_of(folder: Path, *words: str) -> Job:
    return Job(config_of(folder, *words), Dataset.open(folder / "dataset"))


def propose_plan(folder: Path, *words: str, is_plan: bool = True, on: Machine = ON) -> Proposal:
    return make_proposal(job_of(folder, *words), on, is_plan=is_plan)


def make(folder: Path, *words: str, run: str = "run") -> SettledPlan:
    return propose_plan(folder, *words).settle(folder / run / PARTITION)


def record(run: Path, prediction: Any) -> None:
    run.mkdir(exist_ok=True)
    (run / PREDICTION).write_text(json.dumps(prediction))


@pytest.mark.parametrize(
    "words",
    [
        ("placement=cost", "placement.may_decline=false"),
        ("placement=cost",),
        ("placement=coverage",),
        ("placement=torchrec",),
    ],
)
def test_a_plan_is_made_and_read(folder: Path, words: tuple[str, ...], one_rank: Any) -> None:
    run = folder / f"{words[0][10:]}_{len(words)}"
    made = make(folder, *words, run=run.name)
    assert made.prediction is not None
    assert {"torchrec planner"} <= set(made.prediction["plans"])
    assert made.predicted is not None
    assert made.predicted["digest"] == made.plan.digest
    record(run, made.prediction)
    read = read_settled_plan(job_of(folder, *words), run, ON)
    assert read.prediction == json.loads(json.dumps(made.prediction))
    assert read.plan.pipeline == made.plan.pipeline
    assert read.plan.torchrec_plan is made.plan.torchrec_plan
    assert (read.partition is None) == (made.partition is None) == (not made.plan.is_hotrec)
    if made.partition is not None and read.partition is not None:
        assert read.placement is not None
        assert made.placement is not None
        assert read.placement.tables == made.placement.tables
        assert read.partition.digest == made.partition.digest
        assert read.partition.num_rows == made.partition.num_rows
        saved = ("placement=saved", f"paths.partition={run / PARTITION}")
        assert make(folder, *saved).artifact == read.artifact


def test_a_trial_decides_and_is_read_back(folder: Path, one_rank: Any) -> None:
    proposal = propose_plan(folder, "placement=cost")
    digests = list(proposal.candidates)
    assert len(digests) > 1
    for number, (digest, candidate) in enumerate(proposal.candidates.items()):
        run, plan = folder / f"trial_{number}", candidate.plan
        trial = Trial({other: [0.01 + 0.01 * (other != digest)] * 3 for other in digests}, 5.0)
        made = proposal.settle(run / PARTITION, trial)
        assert made.plan == plan
        assert made.prediction is not None
        assert made.prediction["chosen"] == plan.label
        assert made.prediction["plan"] == plan.to_json()
        assert made.prediction["trial"]["plans"][plan.label]["step_s"] == pytest.approx(0.01)
        record(run, made.prediction)
        read = read_settled_plan(job_of(folder, "placement=cost"), run, ON)
        assert read.plan.pipeline == plan.pipeline
        assert read.plan.torchrec_plan is plan.torchrec_plan


def test_a_plan_of_torchrec_is_read_where_look_ahead_was_asked_for(folder: Path) -> None:
    """Look-ahead was for a split, over which TorchRec's plan was chosen."""
    plan = Plan(TorchrecTables(), PipelineSpec(SPARSE_DIST, depth=0))
    plans = {plan.label: {"digest": plan.digest}}
    record(folder / "declined", {"chosen": plan.label, "plan": plan.to_json(), "plans": plans})
    job = job_of(folder, "placement=cost", "pipeline=look_ahead", "pipeline.depth=0")
    assert read_settled_plan(job, folder / "declined", ON).plan == plan


@pytest.mark.parametrize(
    "prediction", [None, "", {"chosen": "gone", "plans": {}}, {"plan": {"is_hotrec": True}}]
)
def test_a_run_by_cost_without_its_recorded_plan_is_refused(folder: Path, prediction: Any) -> None:
    run = folder / "damaged"
    if prediction is not None:
        record(run, prediction)
    with pytest.raises(ArtifactError, match=r"prediction\.json"):
        read_settled_plan(job_of(folder, "placement=cost"), run, ON)
    words = ("placement=torchrec", "placement.plan=hand_tuned", "pipeline=base")
    read = read_settled_plan(job_of(folder, *words), folder / "nothing", ON)
    assert read.plan == Plan(TorchrecTables(HAND_TUNED), PipelineSpec(BASE))


def test_a_recorded_trial_is_of_these_candidates(
    folder: Path, one_rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("placement=cost", f"paths.trials={folder / 'trials'}", "pipeline.depth=0")
    proposal = propose_plan(folder, *words)
    assert proposal.recorded_trial is None
    first, second, *_ = proposal.candidates
    trial = Trial({first: [1.0, 1.0], second: [2.0, 2.0]}, 5.0)
    write_trial(trial, proposal.trial_file)
    assert propose_plan(folder, *words).recorded_trial == replace(trial, is_recorded=True)
    write_trial(Trial({"gone": [1.0, 1.0]}, 5.0), proposal.trial_file)
    assert proposal.recorded_trial is None
    assert str(proposal.trial_file) in caplog.text


@pytest.mark.slow
def test_a_trial_is_recorded_for_its_situation(folder: Path, one_rank: Any) -> None:
    file = propose_plan(folder, "placement=cost").trial_file
    rates = ("optimizer.learning_rate=0.5", "optimizer.schedule.decay=cosine")
    for same in ((), rates):
        assert propose_plan(folder, "placement=cost", *same).trial_file == file
    for change in ("trainer.num_workers=2", "trainer.batch_size=16", "optimizer=adagrad"):
        assert propose_plan(folder, "placement=cost", change).trial_file != file
