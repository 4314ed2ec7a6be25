"""prepare, profile, plan, train, evaluate, report in sequence, on two ranks."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotrec.planner.partition import read_placement
from hotrec.train.signals import STOPPED_EXIT_CODE
from tests.e2e.conftest import SMOKE, Workspace, environment, hotrec
from tests.e2e.faulty import Fault
from tests.helpers.commands import program
from tests.helpers.runs import losses

pytestmark = pytest.mark.timeout(400)
NUM_TRAIN, NUM_VALID, NUM_TEST = 16384, 2048, 2048


def test_prepare(workspace: Workspace) -> None:
    assert workspace.prepared["num_samples"] == {
        "train": NUM_TRAIN,
        "valid": NUM_VALID,
        "test": NUM_TEST,
    }
    assert workspace.prepared["num_rows"] == {"t0": 2000, "t1": 500, "t2": 100, "t3": 1000}


def test_profile_finds_what_is_popular(workspace: Workspace) -> None:
    dataset, profile = (
        workspace.folder / workspace.prepared["dataset"],
        workspace.folder / workspace.profiled["profile"],
    )
    assert workspace.profiled["num_samples"] == NUM_TRAIN
    assert workspace.profiled["num_heldout_samples"] == NUM_VALID
    for table in ("t0", "t1", "t2"):
        counts = np.load(profile / "counts" / f"{table}.npy")
        assert counts.sum() == NUM_TRAIN  # one id per sample
        popular = np.load(dataset / "popularity" / f"{table}.npy")[0]
        assert np.argmax(counts) == popular[0]
        assert set(np.argsort(-counts)[:5]) <= set(popular[:8])
    assert Path(workspace.profiled["picture"]).read_bytes().startswith(b"\x89PNG")


def test_plan(workspace: Workspace) -> None:
    planned = workspace.planned
    assert 0.8 <= planned["coverage_train"] < 0.81
    assert 0 < planned["hot_rows_frac"] < 0.2
    placement, artifact = read_placement(workspace.folder / planned["partition"])
    assert artifact.content_hash == planned["content_hash"]
    assert placement.partition.total_hot == planned["hot_rows"]
    ((_, tables),) = json.loads(Path(planned["plan_json"]).read_text()).items()
    for table in ("t0", "t1", "t2", "t3"):
        assert tables[f"{table}_hot"]["sharding_type"] == "data_parallel"
        assert tables[table]["sharding_type"] == "row_wise"
        assert len(tables[table]["shards"]) == 2
    assert "t0_hot" in Path(planned["plan_text"]).read_text()


def test_train_fills_its_directory(workspace: Workspace, trained: dict[str, Any]) -> None:
    run_dir = workspace.folder / "runs" / "hotcold"
    assert trained["run_dir"] == str(run_dir)
    names = {path.name for path in run_dir.iterdir()}
    assert names >= {"config.yaml", "plan.json", "plan.txt", "metrics.jsonl", "eval.jsonl"}
    assert names >= {"summary.json", "environment.json", "checkpoints", "tensorboard", "log.txt"}
    summary = json.loads((run_dir / "summary.json").read_text())
    assert {key: trained[key] for key in summary} == summary
    assert json.loads((run_dir / "environment.json").read_text())["world_size"] == 2


def test_train_figures(workspace: Workspace, trained: dict[str, Any]) -> None:
    assert trained["finished"] is True
    assert trained["world_size"] == 2
    assert trained["num_steps"] == 20
    assert trained["num_samples"] == 20 * 2 * 256
    assert trained["hot_rows"] == workspace.planned["hot_rows"]
    # The saved partition covers 80% of the lookups, so about that share is hot in a batch.
    assert trained["hot_lookup_frac"] == pytest.approx(0.8, abs=0.05)
    assert 0.5 < trained["auc"] < 1
    assert trained["sent_bytes"]["all_to_all"] > 0


def test_torchrec_learns_the_same(workspace: Workspace, trained: dict[str, Any]) -> None:
    words = [SMOKE, "placement=torchrec", "launch.num_ranks=2"]
    run_dir = workspace.folder / "runs" / "torchrec"
    figures = hotrec("train", *words, cwd=workspace.folder, HOTREC_RUN_DIR=str(run_dir)).figures
    assert figures["placement"] == "torchrec planner"
    assert figures["auc"] == pytest.approx(trained["auc"], abs=1e-4)
    ours, theirs = losses(workspace.folder / "runs" / "hotcold"), losses(run_dir)
    assert sorted(ours) == sorted(theirs)
    assert list(ours.values()) == pytest.approx(list(theirs.values()), abs=1e-5)

    report = hotrec("report", "runs=[runs/hotcold,runs/torchrec]", cwd=workspace.folder).figures
    assert [run["placement"] for run in report["runs"]] == ["saved", "torchrec planner"]
    page = Path(report["page"]).read_text()
    assert "torchrec planner" in page
    assert "<svg" in page
    compare_plans(workspace)


def compare_plans(workspace: Workspace) -> None:
    """The plans of the two runs take turns, and the page begins with them."""
    words = ["compare", "runs/hotcold", "runs/torchrec", "launch.num_ranks=2"]
    folder = workspace.folder
    outcome = hotrec(*words, "seconds=2", cwd=folder, HOTREC_RUN_DIR="runs/compared")
    ours, theirs = outcome.figures["plans"].values()
    assert len(ours["block_s"]) == len(theirs["block_s"]) >= 3
    assert ours["ratios"]["runs/torchrec"][0] == pytest.approx(ours["step_s"] / theirs["step_s"])
    assert ours["replicated_frac"] == pytest.approx(workspace.planned["coverage_train"])
    for plan in (ours, theirs):
        assert plan["replicated_frac"] + sum(plan["owned_fracs"]) == pytest.approx(1)
    said = outcome.stderr.splitlines()
    assert sum(line.startswith("measured") for line in said) == len(outcome.figures["verdict"])
    report = shlex.split(said[-1])
    assert report[:2] == ["report", "hotrec"]
    page = Path(hotrec(*report[2:], cwd=folder).figures["page"]).read_text()
    assert 'id="Plans"' in page
    for change, message in (
        ("launch.num_ranks=1", "launch.num_ranks: expected 2, as runs/hotcold had, got 1."),
        ("runs=[runs/hotcold,runs/hotcold]", "runs: expected at least two runs, got"),
    ):
        refused = hotrec(*words, change, cwd=folder)
        assert refused.exit_code == 1
        assert f"error: {message}" in refused.stderr


def test_evaluate_repeats_the_last_evaluation(
    workspace: Workspace, trained: dict[str, Any]
) -> None:
    words = ["run_dir=runs/hotcold", "split=test"]
    figures = hotrec("evaluate", *words, "launch.num_ranks=2", cwd=workspace.folder).figures
    assert figures["num_samples"] == NUM_TEST
    assert figures["step"] == trained["num_steps"]
    assert figures["auc"] == trained["auc"]
    assert figures["log_loss"] == trained["log_loss"]
    alone = hotrec("evaluate", *words, cwd=workspace.folder).figures
    assert alone["num_samples"] == NUM_TEST
    assert alone["log_loss"] == pytest.approx(trained["log_loss"], abs=1e-6)


def test_a_run_goes_on_with_other_ranks_and_another_placement(
    workspace: Workspace, trained: dict[str, Any]
) -> None:
    """Two ranks, then one with the same global batch, then three with what is left."""
    run_dir = workspace.folder / "runs" / "elastic"
    expected = losses(workspace.folder / "runs" / "hotcold")
    last = max(expected)
    size = 2 * trained["batch_size"]
    for words in (
        ["placement=saved", "launch.num_ranks=2", f"trainer.max_steps={last // 3}"],
        ["placement=all_cold", f"trainer.batch_size={size}", f"trainer.max_steps={2 * last // 3}"],
        ["placement=torchrec", "launch.num_ranks=2"],
    ):
        figures = hotrec(
            "train", SMOKE, *words, cwd=workspace.folder, HOTREC_RUN_DIR=str(run_dir)
        ).figures
    assert figures["num_steps"] == trained["num_steps"]
    found = losses(run_dir)
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-5)
    assert figures["log_loss"] == pytest.approx(trained["log_loss"], abs=1e-5)


def test_a_killed_rank_is_named_and_the_run_resumes_to_the_same_loss(
    workspace: Workspace, trained: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    run_dir, words = workspace.folder / "runs" / "killed", ["placement=saved"]
    words += ["trainer.save_every_steps=5", "trainer.log_every_steps=1"]
    died = workspace.faulty(run_dir, Fault("kill", rank=1, step=13), *words)
    assert died.exit_code != 0
    assert "rank 1: kill in step 13" in died.stderr
    (line,) = (line for line in died.stderr.splitlines() if ": rank 1 (process " in line)
    assert "[rank 0]" in line
    assert "expected 2 ranks, got 1" in line
    assert "has died" in line
    assert "step-00000010" in line
    figures = workspace.train("killed", *words, "launch.num_ranks=2")
    assert figures["num_steps"] == trained["num_steps"]
    assert figures["log_loss"] == trained["log_loss"]
    expected = losses(workspace.folder / "runs" / "hotcold")
    found = losses(run_dir)
    assert {step: found[step] for step in expected} == expected
    text = "faults: rank 1 of 2 killed in step 13, named by rank 0, resumed to the same losses"
    record_property("proved", text)


@pytest.mark.slow
def test_sweep_starts_ranks_for_each_job(workspace: Workspace) -> None:
    words = ["--multirun", SMOKE, "placement=all_hot,all_cold", "launch.num_ranks=2"]
    outcome = hotrec("train", *words, "trainer.max_steps=3", cwd=workspace.folder)
    assert outcome.exit_code == 0, outcome.stderr
    hot, cold = map(json.loads, outcome.stdout.splitlines())
    assert (hot["placement"], cold["placement"]) == ("all_hot", "all_cold")
    assert hot["world_size"] == cold["world_size"] == 2
    assert hot["hot_rows_frac"] == 1
    assert cold["hot_rows_frac"] == 0
    assert hot["auc"] == pytest.approx(cold["auc"], abs=1e-4)
    sweep = Path(hot["run_dir"]).parent
    assert sweep == Path(cold["run_dir"]).parent
    assert sweep.parent == workspace.folder / "runs" / "sweep" / "synthetic_smoke"
    for job in ("0", "1"):
        assert (sweep / job / "summary.json").exists()
    document = json.loads((sweep / "report.json").read_text())
    assert [job["placement"] for job in document["sweep"]] == ["all_hot", "all_cold"]
    assert [run["name"] for run in document["runs"]] == ["placement=all_hot", "placement=all_cold"]
    assert {"report.html", "sweep.csv"} <= {path.name for path in sweep.iterdir()}
    assert "| 1   |  all_cold |" in outcome.stderr


@pytest.mark.slow
def test_joblib_runs_jobs_of_a_sweep_with_loader_workers(workspace: Workspace) -> None:
    words = ["--multirun", SMOKE, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    words += ["placement=coverage", "trainer.num_workers=1", "trainer.max_steps=3,4,-1"]
    outcome = program("train", *words, cwd=workspace.folder)
    assert outcome.exit_code == 1, outcome.stderr  # of the job with an impossible setting
    figures = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert sorted(run["num_steps"] for run in figures) == [3, 4]
    table = (Path(figures[0]["run_dir"]).parent / "sweep.csv").read_text()
    assert [line.rpartition(",")[2] for line in table.splitlines()[1:]] == ["True", "True", "False"]


@pytest.mark.slow
def test_sigterm_saves_and_exits(workspace: Workspace) -> None:
    run_dir = workspace.folder / "runs" / "stopped"
    words = [SMOKE, "placement=saved", "launch.num_ranks=2", "trainer.num_workers=1"]
    words += ["trainer.max_steps=null", "trainer.num_epochs=200", "trainer.save_every_steps=5"]
    running = subprocess.Popen(
        [sys.executable, "-m", "hotrec", "train", *words],
        cwd=workspace.folder,
        env=environment(HOTREC_RUN_DIR=str(run_dir)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    try:
        for line in running.stderr:
            if "saved step 5 " in line:
                break
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == STOPPED_EXIT_CODE, err
    figures = json.loads(out)
    assert figures["finished"] is False
    saved = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    assert saved.name == f"step-{figures['num_steps']:08d}"
    assert (saved / "manifest.json").exists()
