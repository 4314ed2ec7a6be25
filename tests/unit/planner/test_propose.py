"""The choice by cost: hot sets by exact prediction, the decision, and what the document says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.config.groups import CostPlacement
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import CostsError, Line, Link, World
from hotrec.cost_model.demand import TableDemand
from hotrec.cost_model.forms import LOOK_AHEAD, SPARSE_DIST, PipelineSpec, Workload
from hotrec.cost_model.quantities import TableSharding
from hotrec.planner.document import prediction_document
from hotrec.planner.machine import Machine
from hotrec.planner.predict import Predicted, own_name, predict_placement, predict_shardings
from hotrec.planner.propose import (
    HOT_SHARES,
    Decision,
    fastest_placement,
    hottest_share,
    predict_sensitivity,
)
from hotrec.planner.situation import Loader, Scenario
from hotrec.report.plan import plan_report_text
from hotrec.types import Exchange, PipelineKind
from tests.unit.cost_model.samples import make_demand

NUM_ROWS, BATCH, RANKS = (40_000, 5_000, 300), 2048, 2
COUNTS = {
    f"t{i}": np.random.default_rng(i).multinomial(
        400_000, (w := np.arange(1.0, n + 1) ** -1.05) / w.sum()
    )
    for i, n in enumerate(NUM_ROWS)
}


def make_scenario(pipeline: PipelineSpec, *, rate: float = 1.2e8, **changes: Any) -> Scenario:
    # Owners that are slow: with the built-in kernels no row pays as a replica here.
    slow = {
        name: replace(line, per_item_s=4 * line.per_item_s, per_byte_s=4 * line.per_byte_s)
        for name, line in BUILTIN["cpu_1gbit"].kernels.items()
        if name in ("read_device", "update_device")
    }
    kernels = {**BUILTIN["cpu_1gbit"].kernels, **slow}
    link = Link(3e-4, rate)
    costs = replace(BUILTIN["cpu_1gbit"], overlap=0.9, inter=link, kernels=kernels)
    shape: Any = {"dim": 64, "lookups": 4.0, "num_columns": 4, "batch_size": BATCH}
    demands = tuple(make_demand(counts, name, **shape) for name, counts in COUNTS.items())
    machine = Machine(RANKS, 1, "cpu", 0, 32 << 30, BATCH)
    workload = Workload(BATCH, 1e6, 0.2, 100_000)
    parts = {"costs": costs, "note": None, "world": World(RANKS, 1), "workload": workload}
    return Scenario(demands=demands, machine=machine, pipeline=pipeline, **{**parts, **changes})


def fastest(scenario: Scenario, **options: Any) -> Predicted:
    return fastest_placement(CostPlacement(**{"may_pool": False, **options}), scenario)


def test_fewer_rows_are_hot_than_in_line() -> None:
    in_line, ahead = (fastest(make_scenario(pipeline)) for pipeline in (SPARSE_DIST, LOOK_AHEAD))
    assert (in_line.pipeline, ahead.pipeline) == (SPARSE_DIST, LOOK_AHEAD)
    assert sum(ahead.num_hot.values()) < sum(in_line.num_hot.values())
    assert ahead.step.step_s < in_line.step.step_s


def test_no_share_of_what_is_found_is_better() -> None:
    scenario = make_scenario(LOOK_AHEAD, rate=3e7)
    best, in_line = fastest(scenario), fastest(replace(scenario, pipeline=SPARSE_DIST))
    for share in HOT_SHARES:
        num_hot = hottest_share(list(scenario.demands), in_line.num_hot, share)
        step = predict_placement(scenario, num_hot, in_line.tables).step
        assert best.step.step_s <= step.step_s * (1 + 1e-9)


@pytest.mark.parametrize("may_pool", [True, False])
def test_tables_that_the_user_decided_stay(may_pool: bool) -> None:
    overrides: dict[str, Any] = {"t2": "hot", "t1": 17}
    best = fastest(make_scenario(LOOK_AHEAD), overrides=overrides, may_pool=may_pool)
    assert (best.num_hot["t2"], best.num_hot["t1"]) == (300, 17)


def test_tables_are_pooled_under_look_ahead_where_that_is_faster() -> None:
    """Bags of many ids of a large table: vectors are fewer than rows."""
    demand = make_demand(np.full(400_000, 3), "bags", dim=16, lookups=40.0, batch_size=BATCH)
    scenario = replace(make_scenario(LOOK_AHEAD, rate=2e7), demands=(demand,))
    pooled, rows = (fastest(scenario, may_pool=may_pool) for may_pool in (True, False))
    assert pooled.tables["bags"].exchange is Exchange.POOLED
    assert pooled.step.step_s < rows.step.step_s


def test_sensitivity() -> None:
    scenario = make_scenario(SPARSE_DIST)
    best = fastest(scenario)

    def describe(machine: Machine) -> Scenario:
        if machine.world_size != RANKS:
            raise CostsError("no link")
        workload = replace(scenario.workload, batch_size=machine.batch_size)
        return replace(scenario, workload=workload, machine=machine)

    found = {
        entry.pop("what"): entry
        for entry in predict_sensitivity(CostPlacement(may_pool=False), scenario, best, describe)
    }
    assert set(found) == {
        *("hot budget x 0.5", "hot budget x 2", "batch x 0.5", "batch x 2"),
        *("ranks x 0.5", "ranks x 2"),
    }
    assert found["hot budget x 0.5"]["hot_rows"] < sum(best.num_hot.values())
    assert found["hot budget x 0.5"]["step_s"] >= best.step.step_s
    rates = [found[f"batch x {factor}"]["samples_per_s"] for factor in ("0.5", "2")]
    assert rates[0] < rates[1]
    assert found["ranks x 2"] == {"step_s": None, "hot_rows": None, "why": "no link"}


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


def make_document(pipeline: PipelineSpec) -> dict[str, Any]:
    scenario = make_scenario(pipeline)
    name = own_name(pipeline.kind)
    decision = Decision(name, "It is fastest.", {name: fastest(scenario)})
    document = prediction_document(
        scenario, decision, partition=None, counts=COUNTS, sensitivity=[]
    )
    whole: dict[str, Any] = json.loads(json.dumps(document))
    return whole


@pytest.mark.parametrize(
    "pipeline", [LOOK_AHEAD, PipelineSpec(PipelineKind.look_ahead, "fp16"), SPARSE_DIST]
)
def test_the_document(pipeline: PipelineSpec) -> None:
    document = make_document(pipeline)
    [plan] = document["plans"].values()
    assert document["pipeline"] == plan["pipeline"] == pipeline.kind.value
    assert plan["wire"] == pipeline.wire
    # Bytes by table add up to those of the plan.
    dense_bytes = 100_000 * (4 if pipeline.wire == "fp32" else 2)  # 2 (W-1)/W of each parameter
    sent = sum(table["sent_bytes_after"] for table in document["tables"])
    assert sent == pytest.approx(plan["total_sent_bytes"] - dense_bytes, rel=1e-6)
    assert 0 < document["expected"]["urgent_rows"] < document["expected"]["cold_rows"]
    text = " ".join(plan_report_text(document).split())
    assert ("communication that nothing hides. Row lookups" in text) == pipeline.is_look_ahead
    shown = "look_ahead" if pipeline.is_look_ahead else "sparse_dist"
    assert shown in text[text.index("(chosen)") :].split("Where a step")[0]


READ_S = 1e-3  # of a sample


@pytest.mark.parametrize("pipeline", [LOOK_AHEAD, SPARSE_DIST])
def test_the_loader_is_in_the_step(pipeline: PipelineSpec) -> None:
    """Where it is the bottleneck; workers that route take longer, but not TorchRec's."""
    scenario = make_scenario(pipeline)
    found = fastest(scenario)
    loader = {name: Line(per_item_s=READ_S) for name in ("read", "work")}
    loader |= {"receive": Line(), "route": Line(per_item_s=1e-6)}
    costs = replace(scenario.costs, loader=loader)
    workload = replace(scenario.workload, is_routed_by_loader=True)
    slow = replace(scenario, costs=costs, workload=workload, loader=Loader(2, 64))
    predicted = predict_placement(slow, found.num_hot, found.tables)
    num_ids = BATCH * sum(d.lookups_per_sample for d in scenario.demands)
    assert predicted.step.step_s == pytest.approx((READ_S * BATCH + 1e-6 * num_ids) / 2)
    plain = predict_shardings(
        slow, {d.name: TableSharding("table_wise", (0,)) for d in scenario.demands}
    )
    assert plain.step.step_s == pytest.approx(READ_S * BATCH / 2)
    assert sum(predicted.step.stage_s.values()) == pytest.approx(predicted.step.step_s)
