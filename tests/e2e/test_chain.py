"""prepare, plan, train, evaluate, report in sequence, on two ranks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotrec.planner.partition import read_placement
from tests.e2e.conftest import Workspace, hotrec, refusal
from tests.e2e.faulty import Fault
from tests.helpers.runs import losses

pytestmark = pytest.mark.timeout(400)
NUM_TRAIN, NUM_VALID, NUM_TEST = 16384, 2048, 2048


def test_prepare(workspace: Workspace) -> None:
    prepared = workspace.prepared
    assert prepared["num_samples"] == {"train": NUM_TRAIN, "valid": NUM_VALID, "test": NUM_TEST}
    assert prepared["num_rows"] == {"t0": 2000, "t1": 500, "t2": 100, "t3": 1000}
    for table in ("t0", "t1", "t2"):
        counts = np.load(workspace.folder / prepared["profile"] / "counts" / f"{table}.npy")
        assert counts.sum() == NUM_TRAIN  # one id per sample
        popular = workspace.folder / prepared["dataset"] / "popularity" / f"{table}.npy"
        assert set(np.argsort(-counts)[:5]) <= set(np.load(popular)[0][:8])


def test_plan(workspace: Workspace) -> None:
    planned = workspace.planned
    assert 0.8 <= planned["coverage_train"] < 0.81
    placement, artifact = read_placement(workspace.folder / planned["partition"])
    assert artifact.content_hash == planned["content_hash"]
    assert placement.partition.total_hot == planned["hot_rows"]
    ((_, tables),) = json.loads(Path(planned["plan_json"]).read_text()).items()
    for table in ("t0", "t1", "t2", "t3"):
        assert tables[f"{table}_hot"]["sharding_type"] == "data_parallel"
        assert tables[table]["sharding_type"] == "row_wise"
    assert "t0_hot" in Path(planned["plan_text"]).read_text()


def test_train(workspace: Workspace, trained: dict[str, Any]) -> None:
    run_dir = workspace.folder / "runs" / "hotcold"
    assert trained["run_dir"] == str(run_dir)
    names = {path.name for path in run_dir.iterdir()}
    assert names >= {"config.yaml", "plan.json", "plan.txt", "metrics.jsonl", "eval.jsonl"}
    assert names >= {"summary.json", "environment.json", "checkpoints", "tensorboard", "log.txt"}
    summary = json.loads((run_dir / "summary.json").read_text())
    assert {key: trained[key] for key in summary} == summary
    expected = {"finished": True, "world_size": 2, "num_steps": 20, "num_samples": 20 * 2 * 256}
    expected["hot_rows"] = workspace.planned["hot_rows"]
    assert {key: trained[key] for key in expected} == expected
    # The saved partition covers 80% of the lookups, so about that share is hot in a batch.
    assert trained["hot_lookup_frac"] == pytest.approx(0.8, abs=0.05)
    assert 0.5 < trained["auc"] < 1


def test_torchrec_learns_the_same(workspace: Workspace, trained: dict[str, Any]) -> None:
    figures = workspace.train("torchrec", "placement=torchrec", "launch.num_ranks=2")
    assert figures["placement"] == "torchrec planner"
    assert figures["auc"] == pytest.approx(trained["auc"], abs=1e-4)
    runs = workspace.folder / "runs"
    ours, theirs = losses(runs / "hotcold"), losses(runs / "torchrec")
    assert sorted(ours) == sorted(theirs)
    assert list(ours.values()) == pytest.approx(list(theirs.values()), abs=1e-5)

    report = hotrec("report", "runs=[runs/hotcold,runs/torchrec]", cwd=workspace.folder).figures
    assert [run["placement"] for run in report["runs"]] == ["saved", "torchrec planner"]
    assert "torchrec planner" in Path(report["page"]).read_text()
    compare_plans(workspace)


def compare_plans(workspace: Workspace) -> None:
    """The plans of the two runs take turns, and the page begins with them."""
    words, folder = (
        ["runs/hotcold", "runs/torchrec", "launch.num_ranks=2", "seconds=2"],
        workspace.folder,
    )
    outcome = hotrec("compare", *words, "seconds=2", cwd=folder, HOTREC_RUN_DIR="runs/compared")
    ours, theirs = outcome.figures["plans"].values()
    assert len(ours["block_s"]) == len(theirs["block_s"]) >= 3
    assert ours["ratios"]["runs/torchrec"][0] == pytest.approx(ours["step_s"] / theirs["step_s"])
    for plan in (ours, theirs):
        assert plan["replicated_frac"] + sum(plan["owned_fracs"]) == pytest.approx(1)
    report = shlex.split(outcome.stderr.splitlines()[-1])
    assert report[:2] == ["report", "hotrec"]
    said_of_plans = outcome.figures["verdict"]
    assert hotrec(*report[2:], cwd=folder).figures["verdict"][: len(said_of_plans)] == said_of_plans
    said = refusal("compare", *words, "launch.num_ranks=1", cwd=folder)
    assert "launch.num_ranks: expected 2, as runs/hotcold had, got 1." in said


def test_evaluate_repeats_the_last_evaluation(
    workspace: Workspace, trained: dict[str, Any]
) -> None:
    words = ["run_dir=runs/hotcold", "split=test"]
    figures = hotrec("evaluate", *words, "launch.num_ranks=2", cwd=workspace.folder).figures
    assert (figures["num_samples"], figures["step"]) == (NUM_TEST, trained["num_steps"])
    assert (figures["auc"], figures["log_loss"]) == (trained["auc"], trained["log_loss"])
    alone = hotrec("evaluate", *words, cwd=workspace.folder).figures
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
        figures = workspace.train("elastic", *words)
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
    (line,) = (line for line in died.stderr.splitlines() if ": rank 1 (process " in line)
    for part in ("[rank 0]", "expected 2 ranks, got 1", "has died", "step-00000010"):
        assert part in line
    figures = workspace.train("killed", *words, "launch.num_ranks=2")
    assert figures["num_steps"] == trained["num_steps"]
    assert figures["log_loss"] == trained["log_loss"]
    expected = losses(workspace.folder / "runs" / "hotcold")
    found = losses(run_dir)
    assert {step: found[step] for step in expected} == expected
    text = "faults: rank 1 of 2 killed in step 13, named by rank 0, resumed to the same losses"
    record_property("proved", text)
