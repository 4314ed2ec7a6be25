"""The prediction document: what it says of each plan, each table and the step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hotrec.planner.document import prediction_document
from hotrec.planner.plan import Plan
from hotrec.planner.predict import Prediction
from hotrec.planner.propose import Decision, fastest_split
from hotrec.planner.request import ByCost, PlanRequest
from hotrec.planner.situation import Situation
from hotrec.types import PipelineKind, PipelineSpec, WireType
from tests.unit.planner.situations import skewed_situation

# Some of the rows are hot.
BY_COST = ByCost(may_pool=False, hot_budget_bytes=10_000)


def fastest(of: Situation, pipeline: PipelineSpec) -> tuple[Plan, Prediction]:
    return fastest_split(PlanRequest(BY_COST), BY_COST, pipeline, of)


def as_read(*args: Any, **kwargs: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(prediction_document(*args, **kwargs)))
    return document


@pytest.mark.parametrize("wire", WireType)
@pytest.mark.parametrize("kind", [PipelineKind.look_ahead, PipelineKind.sparse_dist])
def test_bytes_by_table_add_up_to_those_of_the_plan(kind: PipelineKind, wire: WireType) -> None:
    of = skewed_situation()
    chosen, prediction = fastest(of, PipelineSpec(kind, wire))
    decision = Decision(chosen, "It is fastest.", {chosen: prediction})
    document = as_read(of, decision)
    [plan] = document["plans"].values()
    assert (document["pipeline"], plan["wire"]) == (kind.value, wire.value)
    dense_bytes = 100_000 * (4 if wire is WireType.fp32 else 2)  # 2 (W-1)/W of each
    sent = sum(table["sent_bytes_after"] for table in document["tables"])
    assert sent == pytest.approx(plan["total_sent_bytes"] - dense_bytes, rel=1e-6)
    assert 0 < document["expected"]["urgent_rows"] < document["expected"]["cold_rows"]
