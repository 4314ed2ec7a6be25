"""The choice by cost: hot sets by exact prediction, TorchRec's own plans, and what is claimed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.forms import LOOK_AHEAD, SPARSE_DIST, StepPrediction
from hotrec.cost_model.quantities import TableSharding
from hotrec.planner.plan import Plan, SplitTables, TorchrecTables
from hotrec.planner.predict import (
    Prediction,
    Shardings,
    predict_shardings,
)
from hotrec.planner.propose import (
    HOT_SHARES,
    MAX_TRIED,
    Decision,
    explain,
    fastest_split,
    hottest_share,
    in_doubt,
    propose,
)
from hotrec.planner.request import ByCost, PlanRequest
from hotrec.planner.search import InfeasibleError
from hotrec.planner.situation import Situation
from hotrec.types import (
    Exchange,
    Levels,
    PipelineKind,
    PipelineSpec,
    TableOutput,
    TorchrecPlan,
    TorchrecTier,
)
from tests.unit.cost_model.samples import make_demand
from tests.unit.planner.situations import (
    SKEWED_BATCH,
    by_table,
    machine,
    on_two_hosts_of_two,
    situation,
    skewed_situation,
    split_plan,
    torchrec_plan,
)

AUTO = PipelineSpec(PipelineKind.auto)
BASE = PipelineKind.base
PLANNER, HAND_TUNED = TorchrecPlan.planner, TorchrecPlan.hand_tuned

# --- the fastest split in a pipeline


def fastest(
    of: Situation, pipeline: PipelineSpec = SPARSE_DIST, **options: Any
) -> tuple[SplitTables, Prediction]:
    by_cost = ByCost(**{"may_pool": False, **options})
    plan, prediction = fastest_split(PlanRequest(by_cost), by_cost, pipeline, of)
    assert isinstance(plan.tables, SplitTables)
    assert plan.pipeline == pipeline
    return plan.tables, prediction


def test_tables_are_pooled_under_look_ahead_where_that_is_faster() -> None:
    """Bags of many ids of a large table: vectors are fewer than rows."""
    shape: Any = {"dim": 16, "lookups": 40.0, "batch_size": SKEWED_BATCH}
    demand = make_demand(np.full(400_000, 3), "bags", **shape)
    of = replace(skewed_situation(rate=2e7), demands=(demand,))
    pooled, rows = (fastest(of, LOOK_AHEAD, may_pool=may_pool) for may_pool in (True, False))
    assert pooled[0].tables["bags"].exchange is Exchange.POOLED
    assert pooled[1].step_s < rows[1].step_s
    sequences = replace(of, demands=(replace(demand, output=TableOutput.expanded),))
    assert fastest(sequences, LOOK_AHEAD, may_pool=True)[0] == rows[0]
    # Micro-batches compute before pooled vectors are there.
    in_parts, _ = fastest(of, replace(LOOK_AHEAD, micro_batches=True), may_pool=True)
    assert in_parts.tables["bags"].exchange is Exchange.ROWS


def test_host_memory_is_torchrecs_where_no_split_fits() -> None:
    """Rows take 26 MB of 10, and only TorchRec's plans keep them in host memory."""
    of = situation(machine(device_bytes=10_000_000))

    def on_host(tables: TorchrecTables, pipeline: PipelineSpec) -> Shardings | str:
        is_fused = tables.tier is TorchrecTier.fused
        return "they do not fit" if is_fused else by_table(tables, pipeline)

    decision = propose(PlanRequest(ByCost(), AUTO), of, on_host)
    assert isinstance(decision.chosen.tables, TorchrecTables)
    assert decision.chosen.tables.tier is not TorchrecTier.fused
    assert not any(plan.is_hotrec for plan in decision.predictions)
    with pytest.raises(InfeasibleError, match="^device_bytes: expected"):
        propose(PlanRequest(ByCost(may_decline=False), AUTO), of, on_host)


def sequences_of(of: Situation, output: TableOutput) -> Situation:
    return replace(of, demands=tuple(replace(d, output=output) for d in of.demands))


def needs_memory(of: Situation, pipeline: PipelineSpec) -> float:
    """Bytes that a host needs; with fewer, no split of cold rows is found."""
    _, host_bytes = fastest(of, pipeline, hot_budget_bytes=0)[1].max_bytes
    share = of.memory_bytes[1] / of.machine.host_bytes
    for more in (1e5, -1e5):
        on = replace(of.machine, host_bytes=int((host_bytes + more) / share))
        if more > 0:
            fastest(replace(of, machine=on), pipeline, hot_budget_bytes=0)
        else:
            with pytest.raises(InfeasibleError):
                fastest(replace(of, machine=on), pipeline, hot_budget_bytes=0)
    return host_bytes


@pytest.mark.slow
def test_rows_in_flight_need_memory_beside_the_tables() -> None:
    """Those of relays, and those of sequences, expanded to every id."""
    whole = on_two_hosts_of_two(skewed_situation())
    two = replace(LOOK_AHEAD, levels=Levels.two)
    relayed_bytes = fastest(whole, two, hot_budget_bytes=0)[1].quantities["relayed_bytes"]
    flat_bytes = needs_memory(whole, replace(two, levels=Levels.one))
    assert needs_memory(whole, two) - flat_bytes == pytest.approx(2 * relayed_bytes)
    expanded, packed = (
        sequences_of(skewed_situation(), output)
        for output in (TableOutput.expanded, TableOutput.packed)
    )
    num_bytes = 2 * SKEWED_BATCH * sum(4.0 * 4 * d.dim for d in expanded.demands)
    more = needs_memory(expanded, SPARSE_DIST) - needs_memory(packed, SPARSE_DIST)
    assert more == pytest.approx(num_bytes)
    shardings = {d.name: TableSharding("table_wise", (0,)) for d in expanded.demands}
    theirs = [
        predict_shardings(shardings, SPARSE_DIST, of).max_bytes[1]
        for of in (skewed_situation(), expanded, packed)
    ]
    assert np.subtract(theirs, theirs[0]) == pytest.approx([0, num_bytes, num_bytes])


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=12), min_size=1, max_size=4),
    st.sampled_from(HOT_SHARES),
    st.data(),
)
def test_the_hottest_of_all_tables_are_kept(tables: Any, share: float, data: st.DataObject) -> None:
    """By lookups per byte; those of a table that the user decided stay and do not count."""
    dims = [data.draw(st.sampled_from([4, 16])) for _ in tables]
    demands = [
        make_demand(sorted(counts)[::-1], str(i), dim=dim, row_bytes=4 * dim, batch_size=4)
        for i, (counts, dim) in enumerate(zip(tables, dims, strict=True))
    ]
    num_hot = {d.name: data.draw(st.integers(0, d.num_rows)) for d in demands}
    fixed = data.draw(st.sets(st.sampled_from([*num_hot])))
    kept = hottest_share(demands, num_hot, share, fixed)
    assert all(0 <= kept[name] <= num for name, num in num_hot.items())
    assert all(kept[name] == num_hot[name] for name in fixed)
    free = [d for d in demands if d.name not in fixed]
    densities = {
        d.name: np.sort(np.array(tables[int(d.name)]) / max(1, sum(tables[int(d.name)])))[::-1]
        * (d.lookups_per_sample / d.row_bytes)
        for d in free
    }
    stay = [density for d in free for density in densities[d.name][: kept[d.name]]]
    go = [density for d in free for density in densities[d.name][kept[d.name] : num_hot[d.name]]]
    assert max(go, default=0) <= min(stay, default=np.inf) + 1e-12
    num_read = sum(density > 0 for density in stay + go)
    assert len(stay) == min(int(share * len(stay + go)), num_read)


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
    assert {plan.pipeline.kind for plan in ours} == {PipelineKind.sparse_dist, BASE, *ahead}
    assert decision.chosen == min(steps if may_decline else ours, key=steps.__getitem__)
    assert decision.all_cold is not None
    assert decision.placement is None
    # The same forms but for the cover of the ids, so the same tables.
    in_line, of_base = (
        next(p for p in ours if p.pipeline.kind is k) for k in (PipelineKind.sparse_dist, BASE)
    )
    assert in_line.tables == of_base.tables


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
        {OURS: 10.0, AHEAD: 11.0, OUR_BASE: 10.0, THEIRS: 13.0, THEIR_HAND: 14.0}
    )
    assert in_doubt(decision, COSTS) == [OURS, THEIRS, AHEAD, OUR_BASE]
    assert in_doubt(decision, COSTS, may_decline=False) == [OURS, AHEAD, OUR_BASE]
    many = decided({split_plan(num_hot=n): 10.0 for n in range(9)})
    assert len(in_doubt(many, COSTS)) == MAX_TRIED
