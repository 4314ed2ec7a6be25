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
from hotrec.cost_model.costs import CostsError
from hotrec.cost_model.demand import TableDemand
from hotrec.cost_model.forms import LOOK_AHEAD, SPARSE_DIST, StepPrediction
from hotrec.cost_model.quantities import TableSharding
from hotrec.planner.machine import Machine
from hotrec.planner.plan import Plan, SplitTables, TorchrecTables
from hotrec.planner.predict import (
    Prediction,
    Shardings,
    bytes_beside,
    predict_shardings,
    predict_split,
)
from hotrec.planner.propose import (
    HOT_SHARES,
    MAX_TRIED,
    Decision,
    explain,
    fastest_split,
    hottest_share,
    in_doubt,
    predict_sensitivity,
    propose,
)
from hotrec.planner.request import ByCost, GivenTables, PlanRequest
from hotrec.planner.search import InfeasibleError
from hotrec.planner.situation import Situation
from hotrec.types import (
    ColdTier,
    Exchange,
    HotExchange,
    Levels,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    TableOutput,
    Tier,
    TorchrecPlan,
)
from tests.unit.cost_model.samples import make_demand
from tests.unit.planner.situations import (
    NUM_ROWS,
    RANKS,
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
TABLE_WISE = TorchrecPlan.table_wise

# --- the fastest split in a pipeline


def test_relays_rows_in_flight_need_memory() -> None:
    whole = on_two_hosts_of_two(skewed_situation())
    two = replace(LOOK_AHEAD, levels=Levels.two, depth=3)
    split, found = fastest(whole, two)
    flat = predict_split(split, replace(two, levels=Levels.one), whole)
    added = np.subtract(found.max_bytes, flat.max_bytes)
    assert added[1] == pytest.approx(4 * found.quantities["relayed_bytes"])
    assert found.memory == flat.memory  # the tables', which a run compares with its own
    on_gpu = replace(whole, machine=replace(whole.machine, device="cuda"))
    assert bytes_beside(found.quantities, on_gpu, two) == pytest.approx((added[1], 0.0))
    # A host in which nothing but the relays' rows lacks room is too small.
    _, cold = fastest(whole, two, hot_budget_bytes=0)
    _, host_bytes = cold.max_bytes
    assert cold.quantities["relayed_bytes"] > 0

    def with_bytes(num_bytes: float) -> Situation:
        share = whole.memory_bytes[1] / whole.machine.host_bytes
        return replace(whole, machine=replace(whole.machine, host_bytes=int(num_bytes / share)))

    fastest(with_bytes(host_bytes + 1e5), two, hot_budget_bytes=0)
    with pytest.raises(InfeasibleError):
        fastest(with_bytes(host_bytes - 1e5), two, hot_budget_bytes=0)
    fastest(with_bytes(host_bytes - 1e5), replace(two, levels=Levels.one), hot_budget_bytes=0)


def fastest(
    of: Situation, pipeline: PipelineSpec = SPARSE_DIST, **options: Any
) -> tuple[SplitTables, Prediction]:
    by_cost = ByCost(**{"may_pool": False, **options})
    plan, prediction = fastest_split(PlanRequest(by_cost), by_cost, pipeline, of)
    assert isinstance(plan.tables, SplitTables)
    assert plan.pipeline == pipeline
    return plan.tables, prediction


def test_fewer_rows_are_hot_than_in_line() -> None:
    in_line, ahead = (fastest(skewed_situation(), kind) for kind in (SPARSE_DIST, LOOK_AHEAD))
    assert ahead[0].total_hot < in_line[0].total_hot
    assert ahead[1].step_s < in_line[1].step_s


def test_no_share_of_what_is_found_is_better() -> None:
    of = skewed_situation(rate=3e7)
    (_, best), (in_line, _) = fastest(of, LOOK_AHEAD), fastest(of)
    for share in HOT_SHARES:
        num_hot = hottest_share(list(of.demands), in_line.num_hot, share)
        fewer = replace(in_line, num_hot=num_hot, hot_exchange=HotExchange.auto)
        assert best.step_s <= predict_split(fewer, LOOK_AHEAD, of).step_s * (1 + 1e-9)


@pytest.mark.parametrize("may_pool", [True, False])
def test_tables_that_the_user_decided_stay(may_pool: bool) -> None:
    fixed = {"t2": 300, "t1": 17}
    best, _ = fastest(skewed_situation(), LOOK_AHEAD, fixed_hot=fixed, may_pool=may_pool)
    assert fixed.items() <= best.num_hot.items()


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


def sequences_of(of: Situation, output: TableOutput) -> Situation:
    return replace(of, demands=tuple(replace(d, output=output) for d in of.demands))


def test_expanded_rows_of_sequences_need_memory() -> None:
    bags = skewed_situation()
    expanded, packed = (
        sequences_of(bags, output) for output in (TableOutput.expanded, TableOutput.packed)
    )
    num_bytes = 2 * SKEWED_BATCH * sum(4.0 * 4 * d.dim for d in bags.demands)
    (_, whole), (_, of_packed) = fastest(expanded), fastest(packed)
    assert np.subtract(whole.max_bytes, of_packed.max_bytes)[1] == pytest.approx(num_bytes)
    assert whole.memory == of_packed.memory  # the tables'
    assert whole.step == of_packed.step == fastest(bags)[1].step
    shardings = {d.name: TableSharding("table_wise", (0,)) for d in bags.demands}
    theirs = [predict_shardings(shardings, SPARSE_DIST, of) for of in (bags, expanded, packed)]
    added = np.subtract([of.max_bytes[1] for of in theirs], theirs[0].max_bytes[1])
    assert added == pytest.approx([0, num_bytes, num_bytes])
    _, host_bytes = fastest(packed, hot_budget_bytes=0)[1].max_bytes
    share = bags.memory_bytes[1] / bags.machine.host_bytes
    small = replace(bags.machine, host_bytes=int((host_bytes + num_bytes / 2) / share))
    fastest(replace(packed, machine=small), hot_budget_bytes=0)
    with pytest.raises(InfeasibleError):
        fastest(replace(expanded, machine=small), hot_budget_bytes=0)


def test_torchrecs_plan_of_sequences_is_compared() -> None:
    """It sends the row of every id, hotrec each distinct row once."""
    of = sequences_of(skewed_situation(), TableOutput.expanded)
    shardings = {d.name: TableSharding("row_wise", (0, 1)) for d in of.demands}
    decision = propose(PlanRequest(ByCost(), AUTO), of, lambda tables, pipeline: shardings)
    theirs = [of for plan, of in decision.predictions.items() if not plan.is_hotrec]
    assert decision.chosen.is_hotrec
    num_ids = sum(d.lookups_per_sample * SKEWED_BATCH for d in of.demands)
    [rows_bytes] = {round(found.step.sent_bytes["rows_exchange"]) for found in theirs}
    assert rows_bytes == round(num_ids / 2 * 4 * 64)
    # With few ids, all of them different, there is nothing to win.
    distinct = replace(
        make_demand(np.full(400_000, 3), "t", dim=64, lookups=1.0, batch_size=SKEWED_BATCH),
        output=TableOutput.expanded,
    )
    few = replace(of, demands=(distinct,))
    alone = {"t": TableSharding("row_wise", (0, 1))}
    request = PlanRequest(ByCost(), SPARSE_DIST)
    found = propose(request, few, lambda tables, pipeline: alone).predictions
    ours, theirs_s = (
        min(of.step_s for plan, of in found.items() if plan.is_hotrec is is_ours)
        for is_ours in (True, False)
    )
    assert ours == pytest.approx(theirs_s, rel=0.5)


def test_look_ahead_gains_little_where_every_row_is_urgent() -> None:
    """As in a stream that is sorted by user: nothing can be fetched early, at any depth."""
    of = sequences_of(skewed_situation(), TableOutput.expanded)
    request = PlanRequest(ByCost(hot_budget_bytes=0), AUTO)
    urgent = tuple(replace(d, by_both_G=d.by_rank_G) for d in of.demands)
    steps = [
        {
            plan.pipeline.kind: found.step_s
            for plan, found in propose(request, situation, never_fits).predictions.items()
        }
        for situation in (of, replace(of, demands=urgent))
    ]
    ahead, in_line = PipelineKind.look_ahead, PipelineKind.sparse_dist
    assert steps[1][in_line] == steps[0][in_line]
    gains = [step_s[in_line] - step_s[ahead] for step_s in steps]
    assert gains[1] < 0.4 * gains[0]  # ids and the gradients of dense layers still travel early


def test_sensitivity() -> None:
    of, by_cost = skewed_situation(), ByCost(may_pool=False)
    request = PlanRequest(by_cost, SPARSE_DIST)
    decision = propose(request, of, never_fits)
    best = decision.prediction

    def describe(machine: Machine) -> Situation:
        if machine.world_size != RANKS:
            raise CostsError("no link")
        workload = replace(of.workload, batch_size=machine.batch_size)
        return replace(of, workload=workload, machine=machine)

    found = {
        entry.pop("what"): entry for entry in predict_sensitivity(request, decision, of, describe)
    }
    assert set(found) == {
        *("hot budget x 0.5", "hot budget x 2", "batch x 0.5", "batch x 2"),
        *("ranks x 0.5", "ranks x 2"),
    }
    assert found["hot budget x 0.5"]["hot_rows"] < decision.chosen.num_hot
    assert found["hot budget x 0.5"]["step_s"] >= best.step_s
    rates = [found[f"batch x {factor}"]["samples_per_s"] for factor in ("0.5", "2")]
    assert rates[0] < rates[1]
    assert found["ranks x 2"] == {"step_s": None, "hot_rows": None, "why": "no link"}


# --- smaller hot sets


def counted_demand(name: str, counts: Any) -> TableDemand:
    dim = 16 if name == "wide" else 4
    return make_demand(counts, name, dim=dim, row_bytes=4 * dim, batch_size=4)


# Lookups per byte, the same in all tables: 8, 4, 2, 1, 1 of 16 and 5, 5, 4, 2 of 16.
TWO = {"a": [1, 8, 4, 1, 2], "b": [5, 2, 5, 4]}


@pytest.mark.parametrize(
    ("counts", "num_hot", "share", "fixed", "kept"),
    [
        (TWO, {"a": 4, "b": 3}, 0.0, (), {"a": 0, "b": 0}),
        (TWO, {"a": 4, "b": 3}, 0.2, (), {"a": 1, "b": 0}),
        (TWO, {"a": 4, "b": 3}, 0.5, (), {"a": 1, "b": 2}),
        (TWO, {"a": 4, "b": 3}, 1.0, (), {"a": 4, "b": 3}),
        (TWO, {"a": 4, "b": 3}, 0.0, ("b",), {"a": 0, "b": 3}),
        (TWO, {"a": 4}, 0.5, ("a", "b"), {"a": 4, "b": 0}),
        ({"a": [3, 0, 0, 0]}, {"a": 4}, 0.5, (), {"a": 1}),  # rows never seen go first
        ({"wide": [8, 8], "b": [6, 6, 4]}, {"wide": 2, "b": 2}, 0.5, (), {"wide": 0, "b": 2}),
        ({"a": [0, 0], "b": [0]}, {"a": 2, "b": 1}, 0.75, ("b",), {"a": 0, "b": 1}),
    ],
)
def test_the_hottest_of_all_tables_are_kept(
    counts: Any, num_hot: Any, share: float, fixed: Any, kept: Any
) -> None:
    demands = [counted_demand(name, c) for name, c in counts.items()]
    assert hottest_share(demands, num_hot, share, fixed) == kept


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=12), min_size=1, max_size=4),
    st.sampled_from(HOT_SHARES),
    st.data(),
)
def test_shares_are_nested(tables: Any, share: float, data: st.DataObject) -> None:
    demands = [counted_demand(str(i), counts) for i, counts in enumerate(tables)]
    num_hot = {d.name: data.draw(st.integers(0, d.num_rows)) for d in demands}
    kept, more = hottest_share(demands, num_hot, share), hottest_share(demands, num_hot, 1.0)
    assert set(kept) == set(num_hot)
    assert all(0 <= kept[name] <= more[name] <= num_hot[name] for name in num_hot)
    assert sum(kept.values()) <= share * sum(num_hot.values())


# --- TorchRec's own plans, and the choice


def never_fits(tables: TorchrecTables, pipeline: PipelineSpec) -> str:
    return "too large"


ALL_COLD = GivenTables(Placement.alike(Partition(NUM_ROWS), Tier.DEVICE, None))


def baselines(
    on: Machine, kind: PipelineKind = PipelineKind.sparse_dist, shardings: Any = by_table
) -> dict[str, Prediction]:
    request = PlanRequest(ALL_COLD, PipelineSpec(kind), name="all_cold")
    decision = propose(request, situation(on), shardings, with_baselines=True)
    return {p.label: of for p, of in decision.predictions.items() if not p.is_hotrec}


def test_host_tiers_are_predicted_on_cuda_where_the_tables_do_not_fit() -> None:
    def on_hosts(tables: TorchrecTables, pipeline: PipelineSpec) -> Shardings | str:
        return "no" if tables.tier is ColdTier.auto else by_table(tables, pipeline)

    found = baselines(machine(), shardings=on_hosts)
    uvm, prefetched = (f"torchrec planner {t}" for t in ("fused_uvm", "fused_uvm_caching prefetch"))
    assert list(found) == [uvm, prefetched]
    assert found[prefetched].step.hidden_s["row_lookup"] > 0
    assert found[uvm].max_bytes[0] < found[prefetched].max_bytes[0]
    # Where all fits the devices they are never faster, and on a CPU there are none.
    for device in ("cuda", "cpu"):
        assert list(baselines(machine(device))) == ["torchrec planner", "torchrec hand_tuned"]
    assert baselines(machine("cpu"), shardings=on_hosts) == {}


def test_each_plan_of_torchrec_is_predicted_in_each_pipeline() -> None:
    in_line = ["torchrec planner", "torchrec hand_tuned"]
    of_base = [f"{name} base" for name in in_line]
    for kind, expected in (
        (PipelineKind.sparse_dist, in_line),
        (PipelineKind.look_ahead, in_line),  # which trains no unsplit table
        (PipelineKind.base, of_base),
        (PipelineKind.auto, [*in_line, *of_base]),
    ):
        found = baselines(machine("cpu"), kind)
        assert list(found) == expected, kind
    for name in in_line:
        assert found[f"{name} base"].shardings == found[name].shardings


@pytest.mark.parametrize(
    ("change", "is_another"),
    [
        ({"ranks": (0,)}, False),  # TorchRec's planner chooses the ranks in all of its plans
        ({"kind": "data_parallel"}, True),
        ({"tier": Tier.HOST}, True),
    ],
)
def test_plans_that_are_alike_are_one(change: Mapping[str, Any], is_another: bool) -> None:
    def shardings(tables: TorchrecTables, pipeline: PipelineSpec) -> Shardings | str:
        found = dict(by_table(TorchrecTables(), pipeline))
        if tables.plan is HAND_TUNED:
            found["C1"] = replace(found["C1"], **change)
        return found

    found = baselines(machine("cuda"), shardings=shardings)
    assert list(found)[:1] == ["torchrec planner"]
    assert ("torchrec hand_tuned" in found) == is_another
    assert "torchrec table_wise" not in found


def test_what_does_not_fit_is_left_out_unless_it_was_asked_for() -> None:
    of = situation(machine("cpu"))
    request = PlanRequest(ByCost(), name="cost")
    assert all(plan.is_hotrec for plan in propose(request, of, never_fits).predictions)
    with pytest.raises(ValueError, match="too large"):
        propose(PlanRequest(TorchrecTables(), name="torchrec"), of, never_fits)


def test_a_request_for_a_plan_of_torchrec_predicts_that_one() -> None:
    of, asked = situation(machine("cpu")), TorchrecTables(HAND_TUNED)
    request = PlanRequest(asked, SPARSE_DIST, num_workers=3, name="torchrec")
    decision = propose(request, of, by_table)
    assert decision.chosen == Plan(asked, SPARSE_DIST, 3)
    assert list(decision.predictions) == [decision.chosen]
    assert decision.prediction.shardings["C3"].kind == "data_parallel"
    assert decision.why == "placement=torchrec is configured."
    others = propose(request, of, by_table, with_baselines=True).predictions
    assert {plan.label for plan in others} == {"torchrec planner", "torchrec hand_tuned"}


def test_a_given_split_is_predicted_in_each_pipeline() -> None:
    partition = Partition(NUM_ROWS, {"C2": np.array([4, 1])})
    given_tables = GivenTables(Placement.alike(partition, Tier.DEVICE, None))
    request = PlanRequest(given_tables, AUTO, num_workers=1, name="coverage")
    decision = propose(request, situation(machine("cpu")), never_fits)
    kinds = [plan.pipeline.kind.value for plan in decision.predictions]
    assert kinds == ["look_ahead", "sparse_dist", "base"]
    assert {plan.num_hot for plan in decision.predictions} == {2}
    assert {plan.num_workers for plan in decision.predictions} == {1}
    steps = [of.step_s for of in decision.predictions.values()]
    assert decision.prediction.step_s == min(steps)
    assert decision.placement is given_tables.placement
    kind = decision.chosen.pipeline.kind.value
    assert decision.why.endswith(f"configured. Of its pipelines {kind} is predicted to be best.")


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
    assert decision.why.startswith(f"{decision.chosen.title} is predicted to take ")
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
THEIRS, THEIR_HAND, THEIR_TABLES = (torchrec_plan(p) for p in (PLANNER, HAND_TUNED, TABLE_WISE))
THEIR_BASE = torchrec_plan(HAND_TUNED, BASE)


def decided(steps_ms: Mapping[Plan, float]) -> Decision:
    """The first one is chosen."""
    predictions = {
        plan: Prediction(StepPrediction(step_ms / 1e3, {}, {}, {}), [])
        for plan, step_ms in steps_ms.items()
    }
    return Decision(next(iter(predictions)), "", predictions)


@pytest.mark.parametrize(
    ("ours_ms", "theirs_ms", "claim"),
    [
        (10.0, 20.0, "10 ms (9 to 12) a step, 50% less than TorchRec's planner, 20 ms (18 to 24)."),
        (10.0, 11.0, "within the uncertainty of TorchRec's planner, 11 ms (9.9 to 13.2)."),
        (12.0, 11.0, "more than TorchRec's planner, 11 ms (9.9 to 13.2); placement.may_decline="),
    ],
)
def test_no_gain_is_claimed_within_the_interval(
    ours_ms: float, theirs_ms: float, claim: str
) -> None:
    decision = decided({OURS: ours_ms, THEIRS: theirs_ms, THEIR_HAND: 25.0, AHEAD: 30.0})
    why = explain(OURS, decision.predictions, COSTS)
    assert why.startswith("hotrec, 5 hot rows, sparse_dist is predicted to take ")
    assert claim in why


def test_candidates_in_doubt() -> None:
    decision = decided(
        # The last one takes from 12.6 ms on, where the chosen one ends at 12.
        {OURS: 10.0, AHEAD: 11.0, OUR_BASE: 10.0, THEIRS: 13.0, THEIR_HAND: 14.0}
    )
    assert in_doubt(decision, COSTS) == [OURS, THEIRS, AHEAD, OUR_BASE]
    assert in_doubt(decision, COSTS, may_decline=False) == [OURS, AHEAD, OUR_BASE]
    many = decided({split_plan(num_hot=n): 10.0 for n in range(9)})
    assert len(in_doubt(many, COSTS)) == MAX_TRIED


def test_the_slowest_in_doubt_are_not_tried() -> None:
    """Though a plan in base comes after all others, as its prediction hardly differs."""
    in_base = {OUR_BASE: 10.5, THEIR_BASE: 10.5}
    theirs = {THEIRS: 11.0, THEIR_HAND: 10.0, THEIR_TABLES: 11.5}
    *in_line, base, their_base = in_doubt(
        decided({OURS: 10.0, AHEAD: 11.0} | in_base | theirs), COSTS
    )
    assert in_line[:2] == [OURS, THEIR_HAND]
    assert set(in_line[2:]) == {AHEAD, THEIRS}
    assert {base, their_base} == set(in_base)
