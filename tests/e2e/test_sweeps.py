"""Sweeps: of one stage or all, with ranks and loader workers, over values that Optuna chooses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import SMOKE, Workspace, hotrec
from tests.helpers.commands import Outcome, program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def jobs_of(outcome: Outcome) -> list[dict[str, Any]]:
    assert outcome.exit_code == 0, outcome.stderr
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def rows_of(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def test_ranks_start_for_each_job(workspace: Workspace) -> None:
    words = ["--multirun", SMOKE, "placement=all_hot,all_cold", "launch.num_ranks=2"]
    outcome = hotrec("train", *words, "trainer.max_steps=3", cwd=workspace.folder)
    hot, cold = jobs_of(outcome)
    assert (hot["hot_rows_frac"], cold["hot_rows_frac"]) == (1, 0)
    assert hot["world_size"] == cold["world_size"] == 2
    assert hot["auc"] == pytest.approx(cold["auc"], abs=1e-4)
    sweep = Path(hot["run_dir"]).parent
    assert sweep == Path(cold["run_dir"]).parent
    assert sweep.parent == workspace.folder / "runs" / "sweep" / "synthetic_smoke"
    document = json.loads((sweep / "report.json").read_text())
    assert [job["placement"] for job in document["sweep"]] == ["all_hot", "all_cold"]
    assert [run["name"] for run in document["runs"]] == ["placement=all_hot", "placement=all_cold"]
    assert {"report.html", "sweep.csv", "0", "1"} <= {path.name for path in sweep.iterdir()}
    assert "| 1   |  all_cold |" in outcome.stderr


def test_joblib_runs_jobs_with_loader_workers(workspace: Workspace) -> None:
    words = ["--multirun", SMOKE, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    words += ["placement=coverage", "trainer.num_workers=1", "trainer.max_steps=3,-1"]
    outcome = program("train", *words, cwd=workspace.folder)
    assert outcome.exit_code == 1, outcome.stderr  # of the job with an impossible setting
    figures = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert sorted(run["num_steps"] for run in figures) == [3]
    rows = rows_of(Path(figures[0]["run_dir"]).parent)
    assert [list(row.values())[-1] for row in rows] == ["True", "False"]


def test_a_sweep_of_run_ends_with_a_table(workspace: Workspace, tmp_path: Path) -> None:
    words = ["--multirun", SMOKE, "placement=coverage", "pipeline=base", "trainer.max_steps=4,6"]
    words += ["planner.costs=cpu_1gbit"]
    outcome = hotrec("run", *words, cwd=workspace.folder, HOTREC_RUN_DIR=str(tmp_path))
    jobs, rows = jobs_of(outcome), rows_of(tmp_path)
    found = [(row["job"], row["trainer.max_steps"], float(row["step_p50_s"])) for row in rows]
    assert found == [
        ("0/train", "4", jobs[0]["step_p50_s"]),
        ("1/train", "6", jobs[1]["step_p50_s"]),
    ]
    assert outcome.stderr.splitlines()[-1] == f"sweep: {tmp_path}/report.html"


def test_optuna_looks_for_the_highest_auc(workspace: Workspace, tmp_path: Path) -> None:
    words = ["--multirun", SMOKE, "hydra/sweeper=auc", "hydra.sweeper.n_trials=3"]
    words += [f"hydra.sweeper.storage=sqlite:///{tmp_path}/study.db", "hydra.sweeper.study_name=a"]
    words += ["hydra.sweeper.sampler.seed=1", "optimizer.learning_rate=interval(0.001,0.5)"]
    words += ["placement=coverage", "pipeline=base", "trainer.max_steps=8"]
    sweep = tmp_path / "sweep"
    jobs = jobs_of(hotrec("train", *words, cwd=workspace.folder, HOTREC_RUN_DIR=str(sweep)))
    # The validation split chooses, and the test split is reported.
    assert {job["eval_split"] for job in jobs} == {"test"}
    aucs = [job["quality"]["valid"]["auc"] for job in jobs]
    assert len(set(aucs)) > 1
    found = yaml.safe_load((sweep / "optimization_results.yaml").read_text())
    assert found["best_value"] == max(aucs)
    assert (tmp_path / "study.db").stat().st_size > 0
    point = json.loads((sweep / str(aucs.index(max(aucs))) / "point.json").read_text())
    rate = "optimizer.learning_rate"
    assert float(point["overrides"][rate]) == pytest.approx(found["best_params"][rate])
