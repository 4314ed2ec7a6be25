"""Tables behind device slots as a user trains them: the same losses, and the misses of a replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import SMOKE, Workspace, hotrec, refusal
from tests.helpers.runs import losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SLOTS = ("placement=all_cold", "placement.cold_tier=cached", "pipeline=look_ahead")
BATCH = ("trainer.batch_size=64", "trainer.eval_batch_size=64", "placement.cache_load_frac=0.5")


def test_a_plan_predicts_what_a_run_moves_which_trains_as_without_slots(
    workspace: Workspace,
) -> None:
    """With evaluations and checkpoints on the way, and a checkpoint evaluated afterwards."""
    words = [*SLOTS, *BATCH, "plan.world_size=2", "planner.costs=cpu_1gbit"]
    places = ["paths.partition=slots", "hydra.run.dir=runs/slots"]
    planned = hotrec("plan", SMOKE, *words, *places, cwd=workspace.folder).figures
    document = json.loads(Path(planned["plan_json"]).with_name("prediction.json").read_text())
    assert document["plans"][document["chosen"]]["hidden_s"]["rows_exchange"] > 0
    words = [*SLOTS, *BATCH, "launch.num_ranks=2", "trainer.max_steps=50"]
    words += ["trainer.eval_every_steps=10", "trainer.save_every_steps=20"]
    runs = {
        tier: workspace.train(tier, *words, f"placement.cold_tier={tier}")
        for tier in ("cached", "fused")
    }
    folders = [workspace.folder / "runs" / tier for tier in runs]
    assert losses(folders[0]) == losses(folders[1])
    # After the first quarter of the batches; all slots are in use from the start.
    cache = json.loads((folders[0] / "summary.json").read_text())["cache"]
    hit_frac = 1 - cache["num_misses"] / cache["num_rows"]
    assert hit_frac == pytest.approx(document["expected"]["cache_hit_frac"], abs=0.05)
    given = ["run_dir=runs/cached", "launch.num_ranks=2"]
    evaluated = hotrec("evaluate", *given, cwd=workspace.folder).figures
    assert evaluated["auc"] == runs["cached"]["auc"] == runs["fused"]["auc"]


def test_too_few_slots_are_refused_by_the_plan(workspace: Workspace) -> None:
    said = refusal("train", SMOKE, *SLOTS, "placement.cache_load_frac=0.02", cwd=workspace.folder)
    assert "placement.cache_load_frac: expected" in said
