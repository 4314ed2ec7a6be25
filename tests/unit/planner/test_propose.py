"""The choice by cost: hot sets by exact prediction, TorchRec's own plans, and what is claimed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.step import StepPrediction
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.planner.predict import Prediction
from hotrec.planner.propose import MAX_TRIED, Decision, explain, in_doubt, propose
from hotrec.planner.request import ByCost, PlanRequest
from hotrec.types import PipelineKind, PipelineSpec, TorchrecPlan
from tests.unit.cost_model.samples import SPARSE_DIST
from tests.unit.planner.situations import by_table, machine, situation, split_plan, torchrec_plan

AUTO = PipelineSpec(PipelineKind.auto)
BASE = PipelineKind.base
PLANNER, HAND_TUNED = TorchrecPlan.planner, TorchrecPlan.hand_tuned

# --- TorchRec's own plans, and the choice


def never_fits(tables: TorchrecTables, pipeline: PipelineSpec) -> str:
    return "too large"


def test_a_request_for_a_plan_of_torchrec_predicts_that_one() -> None:
    of, asked = situation(machine("cpu")), TorchrecTables(HAND_TUNED)
    request = PlanRequest(asked, SPARSE_DIST, num_workers=3, name="torchrec")
    decision = propose(request, of, by_table)
    assert list(decision.predictions) == [decision.chosen] == [Plan(asked, SPARSE_DIST, 3)]
    assert decision.prediction.shardings["C3"].kind == "data_parallel"
    others = propose(request, of, by_table, with_baselines=True).predictions
    assert {plan.label for plan in others} == {"torchrec planner", "torchrec hand_tuned"}
    # What does not fit is left out, unless it was asked for.
    by_cost = PlanRequest(ByCost(), name="cost")
    assert all(plan.is_hotrec for plan in propose(by_cost, of, never_fits).predictions)
    with pytest.raises(ValueError, match="too large"):
        propose(request, of, never_fits)


@pytest.mark.parametrize("may_decline", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_fastest_is_chosen(device: str, may_decline: bool) -> None:
    """TorchRec's plan where it is predicted to be as fast, unless the user keeps hot rows."""
    request = PlanRequest(ByCost(may_decline=may_decline), AUTO, name="cost")
    decision = propose(request, situation(machine(device)), by_table)
    steps = {plan: of.step_s for plan, of in decision.predictions.items()}
    ours = [plan for plan in steps if plan.is_hotrec]
    ahead = {PipelineKind.look_ahead} if device == "cpu" else set()
    assert {plan.pipeline.kind for plan in ours} == {BASE, *ahead}
    assert decision.chosen == min(steps if may_decline else ours, key=steps.__getitem__)
    assert decision.all_cold is not None
    assert decision.placement is None


# --- what a choice claims, and which candidates a trial gets

COSTS = replace(BUILTIN["cpu_1gbit"], ratio_interval=(0.9, 1.2))
AHEAD, OURS, OUR_BASE = (
    split_plan(kind) for kind in (PipelineKind.look_ahead, PipelineKind.sparse_dist, BASE)
)
THEIRS, THEIR_HAND = torchrec_plan(PLANNER), torchrec_plan(HAND_TUNED)


def decided(steps_ms: Mapping[Plan, float]) -> Decision:
    """The first one is chosen."""
    predictions = {
        plan: Prediction(StepPrediction(step_ms / 1e3, {}, {}, {}), [])
        for plan, step_ms in steps_ms.items()
    }
    return Decision(next(iter(predictions)), "", predictions)


@pytest.mark.parametrize(
    ("ours_ms", "theirs_ms", "claim"),
    [(10.0, 20.0, "50% less"), (10.0, 11.0, "uncertainty"), (12.0, 11.0, "placement.may_decline=")],
)
def test_no_gain_is_claimed_within_the_interval(
    ours_ms: float, theirs_ms: float, claim: str
) -> None:
    decision = decided({OURS: ours_ms, THEIRS: theirs_ms, THEIR_HAND: 25.0, AHEAD: 30.0})
    why = explain(OURS, decision.predictions, COSTS)
    assert claim in why
    assert ("% less" in why) == (claim == "50% less")


def test_candidates_in_doubt() -> None:
    decision = decided(
        # The last one takes from 12.6 ms on, where the chosen one ends at 12.
        {OURS: 10.0, AHEAD: 11.0, OUR_BASE: 10.5, THEIRS: 13.0, THEIR_HAND: 14.0}
    )
    assert in_doubt(decision, COSTS) == [OURS, THEIRS, OUR_BASE, AHEAD]
    assert in_doubt(decision, COSTS, may_decline=False) == [OURS, OUR_BASE, AHEAD]
    many = decided({split_plan(num_hot=n): 10.0 for n in range(9)})
    assert len(in_doubt(many, COSTS)) == MAX_TRIED
