"""The choice by cost with look-ahead: hot sets by exact prediction, and what the document says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hotrec.config.groups import CostPlacement
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import Link, World
from hotrec.cost_model.demand import build_demand
from hotrec.cost_model.forms import LOOK_AHEAD, SPARSE_DIST, PipelineSpec, Workload
from hotrec.cost_model.histogram import build_histogram
from hotrec.planning.document import prediction_document
from hotrec.planning.machine import Machine
from hotrec.planning.optimum import fastest_placement
from hotrec.planning.predict import HOT_COLD, Decision, predict_placement
from hotrec.planning.scenario import Scenario
from hotrec.planning.search import HOT_SHARES, hottest_share
from hotrec.report.plan import plan_report_text, write_plan_page
from hotrec.types import PipelineKind

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
    demands = tuple(
        build_demand(
            name,
            build_histogram(counts),
            dim=64,
            row_bytes=260,
            lookups_per_sample=4.0,
            num_columns=4,
            batch_size=BATCH,
            world_size=RANKS,
        )
        for name, counts in COUNTS.items()
    )
    machine = Machine(RANKS, 1, "cpu", 0, 32 << 30, BATCH)
    workload = Workload(BATCH, 1e6, 0.2, 100_000)
    parts = {"costs": costs, "note": None, "world": World(RANKS, 1), "workload": workload}
    return Scenario(demands=demands, machine=machine, pipeline=pipeline, **{**parts, **changes})


def test_fewer_rows_are_hot_than_in_line() -> None:
    found = {}
    for pipeline in (SPARSE_DIST, LOOK_AHEAD):
        scenario = make_scenario(pipeline)
        best, choice = fastest_placement(CostPlacement(may_pool=False), scenario)
        assert best.pipeline == pipeline
        assert choice.num_hot == best.num_hot
        assert choice.prediction == best.step
        found[pipeline] = best
    in_line, ahead = found[SPARSE_DIST], found[LOOK_AHEAD]
    assert sum(ahead.num_hot.values()) < sum(in_line.num_hot.values())
    assert ahead.step.step_s < in_line.step.step_s


def test_no_share_of_what_is_found_is_better() -> None:
    scenario = make_scenario(LOOK_AHEAD, rate=3e7)
    best, _ = fastest_placement(CostPlacement(may_pool=False), scenario)
    in_line, _ = fastest_placement(
        CostPlacement(may_pool=False), replace(scenario, pipeline=SPARSE_DIST)
    )
    for share in (*HOT_SHARES, 1.0):
        num_hot = hottest_share(list(scenario.demands), in_line.num_hot, share)
        step = predict_placement(scenario, num_hot, in_line.tables).step
        assert best.step.step_s <= step.step_s * (1 + 1e-9)


def test_tables_that_the_user_decided_stay() -> None:
    overrides: dict[str, Any] = {"t2": "hot", "t1": 17}
    placement = CostPlacement(may_pool=False, overrides=overrides)
    best, _ = fastest_placement(placement, make_scenario(LOOK_AHEAD))
    assert (best.num_hot["t2"], best.num_hot["t1"]) == (300, 17)


def test_no_table_is_pooled() -> None:
    best, _ = fastest_placement(CostPlacement(may_pool=True), make_scenario(LOOK_AHEAD))
    assert {placed.exchange.value for placed in best.tables.values()} == {"rows"}


def make_document(pipeline: PipelineSpec) -> dict[str, Any]:
    scenario = make_scenario(pipeline)
    best, _ = fastest_placement(CostPlacement(may_pool=False), scenario)
    decision = Decision(HOT_COLD, "It is fastest.", {HOT_COLD: best})
    document = prediction_document(
        scenario, decision, partition=None, counts=COUNTS, sensitivity=[]
    )
    whole: dict[str, Any] = json.loads(json.dumps(document))
    return whole


def test_the_document_names_the_pipeline(tmp_path: Any) -> None:
    narrow = PipelineSpec(PipelineKind.look_ahead, "bf16")
    for pipeline, shown in (
        (LOOK_AHEAD, "look_ahead"),
        (narrow, "look_ahead, bf16"),
        (SPARSE_DIST, "sparse_dist"),
    ):
        document = make_document(pipeline)
        plan = document["plans"][HOT_COLD]
        assert document["pipeline"] == plan["pipeline"] == pipeline.kind.value
        assert plan["wire"] == pipeline.wire
        text = " ".join(plan_report_text(document).split())
        page = write_plan_page(document, tmp_path).read_text()
        row = text[text.index("hot_cold (chosen)") :].split("Where a step")[0]
        assert row.rstrip(" |#").endswith(shown)
        assert f"<td>{shown}</td>" in page
        is_ahead = pipeline.is_look_ahead
        assert ("communication that nothing hides. Row lookups" in text) == is_ahead


def test_bytes_by_table_add_up_to_those_of_the_plan() -> None:
    for pipeline in (LOOK_AHEAD, PipelineSpec(PipelineKind.look_ahead, "fp16"), SPARSE_DIST):
        document = make_document(pipeline)
        sent = document["plans"][HOT_COLD]["total_sent_bytes"]
        value_bytes = 4 if pipeline.wire == "fp32" else 2
        dense = 100_000 * value_bytes  # 2 (W-1)/W of each parameter
        tables = sum(table["sent_bytes_after"] for table in document["tables"])
        assert tables == pytest.approx(sent - dense, rel=1e-6)


def test_urgent_rows_are_in_the_document() -> None:
    document = make_document(LOOK_AHEAD)
    expected = document["expected"]
    assert 0 < expected["urgent_rows"] < expected["cold_rows"]
    assert "rows that some rank reads in the next step too: " in plan_report_text(document)
