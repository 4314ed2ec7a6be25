"""Tables behind device slots as a user trains them: the same losses, and the misses of a replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import SMOKE, Workspace, hotrec
from tests.helpers.runs import losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SLOTS = ("placement=all_cold", "placement.cold_tier=cached", "placement.cache_load_frac=0.5")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_plan_predicts_what_a_run_moves(workspace: Workspace, num_ranks: int) -> None:
    """After the first quarter of the batches; all slots are in use from the start."""
    ranks = [f"plan.world_size={num_ranks}", "trainer.batch_size=64", "planner.costs=cpu_1gbit"]
    words = [SMOKE, *SLOTS, *ranks, "pipeline=look_ahead", "trainer.eval_splits=[]"]
    places = [f"paths.partition=slots{num_ranks}", "hydra.run.dir=runs/slots"]
    planned = hotrec("plan", *words, *places, cwd=workspace.folder).figures
    document = json.loads(Path(planned["plan_json"]).with_name("prediction.json").read_text())
    expected = document["expected"]
    steps = "trainer.max_steps=50"
    launch = [f"launch.num_ranks={num_ranks}"] if num_ranks > 1 else []
    trained = hotrec("train", *words, *launch, steps, cwd=workspace.folder).figures
    cache = json.loads((Path(trained["run_dir"]) / "summary.json").read_text())["cache"]
    hit_frac = 1 - cache["num_misses"] / cache["num_rows"]
    assert hit_frac == pytest.approx(expected["cache_hit_frac"], abs=0.05)
    step = document["plans"][document["chosen"]]
    assert step["hidden_s"]["rows_exchange"] > 0


def test_two_ranks_train_as_without_slots(workspace: Workspace) -> None:
    """With evaluations and checkpoints on the way, and a checkpoint evaluated afterwards."""
    words = [
        SMOKE, *SLOTS, "launch.num_ranks=2", "pipeline=look_ahead", "trainer.batch_size=64",
        "trainer.eval_batch_size=64", "trainer.max_steps=30", "trainer.eval_every_steps=10",
        "trainer.save_every_steps=20", "trainer.log_every_steps=5",
    ]  # fmt: skip
    runs: dict[str, dict[str, Any]] = {}
    for tier in ("cached", "fused"):
        given = [*words, f"placement.cold_tier={tier}"]
        directory = {"HOTREC_RUN_DIR": f"runs/{tier}"}
        runs[tier] = hotrec("train", *given, cwd=workspace.folder, **directory).figures
    found = [losses(workspace.folder / "runs" / tier) for tier in runs]
    assert found[0] == found[1]
    assert len(found[0]) == 6
    assert runs["cached"]["auc"] == runs["fused"]["auc"]
    words = ["run_dir=runs/cached", "launch.num_ranks=2"]
    evaluated = hotrec("evaluate", *words, cwd=workspace.folder).figures
    assert evaluated["auc"] == runs["fused"]["auc"]


def test_too_few_slots_are_refused_by_the_plan(workspace: Workspace) -> None:
    words = [SMOKE, *SLOTS, "placement.cache_load_frac=0.02", "pipeline=look_ahead"]
    outcome = hotrec("train", *words, cwd=workspace.folder)
    assert outcome.exit_code == 1
    assert "placement.cache_load_frac: expected" in outcome.stderr
