"""A plan as a value: its identity, its plain data, and what people read."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from hotrec.planner.plan import Plan, SplitTables, TorchrecTables
from hotrec.types import (
    Exchange,
    PipelineKind,
    PipelineSpec,
    RowFetch,
    TablePlacement,
    Tier,
    TorchrecPlan,
    TorchrecTier,
    WireType,
)
from tests.unit.planner.situations import split_plan, torchrec_plan

SPLIT = SplitTables(
    {"a": 3, "b": 0},
    {
        "a": TablePlacement(),
        "b": TablePlacement(
            Exchange.ROWS,
            Tier.CACHED,
            0.25,
            row_type=WireType.bf16,
            row_fetch=RowFetch.mapped,
        ),
    },
    is_routed_by_loader=True,
    rows="0123",
)
AHEAD = PipelineSpec(PipelineKind.look_ahead, WireType.bf16, 2, 8, micro_batches=True)
PLANS = {
    "split": Plan(SPLIT, AHEAD, 4),
    **{f"split {kind.value}": split_plan(kind) for kind in PipelineKind},
    **{f"torchrec {plan.value}": torchrec_plan(plan) for plan in TorchrecPlan},
    "torchrec": Plan(
        TorchrecTables(TorchrecPlan.hand_tuned, TorchrecTier.fused_uvm_caching, 0.4),
        PipelineSpec(PipelineKind.prefetch),
        0,
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_read_back_from_its_plain_data(name: str) -> None:
    plan = PLANS[name]
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert (again.digest, hash(again), again.label) == (plan.digest, hash(plan), plan.label)


def changed(value: Any) -> dict[str, Any]:
    """Another value of each field of a part of a plan, by the field."""
    found = {}
    for field in fields(value):
        old = getattr(value, field.name)
        new: Any
        if isinstance(old, bool):
            new = not old
        elif isinstance(old, int | float):
            new = old / 2
        elif isinstance(old, str):
            new = old + "4"
        elif isinstance(old, PipelineSpec | SplitTables | TorchrecTables):
            continue
        elif isinstance(old, dict):
            new = dict(list(old.items())[:1])
        else:
            new = next(other for other in type(old) if other is not old)
        found[field.name] = replace(value, **{field.name: new})
    return found


def test_each_field_is_in_the_digest() -> None:
    split, torchrec = PLANS["split"], PLANS["torchrec"]
    plans = [split, torchrec, *changed(split).values()]
    plans += [replace(split, pipeline=pipeline) for pipeline in changed(AHEAD).values()]
    plans += [replace(split, tables=tables) for tables in changed(SPLIT).values()]
    placed = SPLIT.tables["b"]
    # Slots are of tables whose rows are exchanged row-wise.
    for name, table in changed(placed).items():
        if name in ("exchange", "tier"):
            table = replace(table, tier=Tier.CACHED, row_fetch=RowFetch.staged)
        tables = {**SPLIT.tables, "b": table}
        plans.append(replace(split, tables=replace(SPLIT, tables=tables)))
    assert len(changed(placed)) == 5
    plans += [replace(torchrec, tables=tables) for tables in changed(torchrec.tables).values()]
    plans.append(replace(torchrec, num_workers=None))
    assert len({plan.digest for plan in plans}) == len(plans)
    assert len(set(plans)) == len(plans)


def test_equal_plans_are_one_key() -> None:
    """The order in which tables are named is none of a plan."""
    tables = dict(reversed(SPLIT.tables.items()))
    other = Plan(replace(SPLIT, tables=tables, num_hot={"b": 0, "a": 3}), AHEAD, 4)
    assert other.digest == PLANS["split"].digest
    assert {PLANS["split"]: 1, other: 2} == {other: 2}
