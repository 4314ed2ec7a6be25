"""Sweeps: of all stages, and over values that Optuna chooses."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import SMOKE, Workspace, hotrec


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_of_run_ends_with_a_table(workspace: Workspace, tmp_path: Path) -> None:
    words = ["--multirun", SMOKE, "placement=coverage", "pipeline=base", "trainer.max_steps=4,6"]
    words += ["planner.costs=cpu_1gbit"]
    sweep = tmp_path / "sweep"
    outcome = hotrec("run", *words, cwd=workspace.folder, HOTREC_RUN_DIR=str(sweep))
    assert outcome.exit_code == 0, outcome.stderr
    jobs = [json.loads(line) for line in outcome.stdout.splitlines()]
    with (sweep / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["job"] for row in rows] == ["0/train", "1/train"]
    assert [row["trainer.max_steps"] for row in rows] == ["4", "6"]
    assert [float(row["step_p50_s"]) for row in rows] == [job["step_p50_s"] for job in jobs]
    assert outcome.stderr.splitlines()[-1] == f"sweep: {sweep}/report.html"
    assert "max_steps=6" in (sweep / "report.html").read_text()


def test_optuna_looks_for_the_highest_auc(workspace: Workspace, tmp_path: Path) -> None:
    words = ["--multirun", SMOKE, "hydra/sweeper=auc", "hydra.sweeper.n_trials=3"]
    words += [f"hydra.sweeper.storage=sqlite:///{tmp_path}/study.db", "hydra.sweeper.study_name=a"]
    words += ["hydra.sweeper.sampler.seed=1", "optimizer.learning_rate=interval(0.001,0.5)"]
    words += ["placement=coverage", "pipeline=base", "trainer.max_steps=8"]
    sweep = tmp_path / "sweep"
    outcome = hotrec("train", *words, cwd=workspace.folder, HOTREC_RUN_DIR=str(sweep))
    assert outcome.exit_code == 0, outcome.stderr
    jobs = [json.loads(line) for line in outcome.stdout.splitlines()]
    # The validation split chooses, and the test split is reported.
    assert {job["eval_split"] for job in jobs} == {"test"}
    aucs = [job["quality"]["valid"]["auc"] for job in jobs]
    assert len(set(aucs)) > 1
    found = yaml.safe_load((sweep / "optimization_results.yaml").read_text())
    assert found["best_value"] == max(aucs)
    assert (tmp_path / "study.db").stat().st_size > 0
    point = json.loads((sweep / str(aucs.index(max(aucs))) / "point.json").read_text())
    assert float(point["overrides"]["optimizer.learning_rate"]) == pytest.approx(
        found["best_params"]["optimizer.learning_rate"]
    )
