"""The prediction document (prediction.json): the predictions, the choice and the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from hotrec.cost_model.demand import (
    TableDemand,
    all_hot_share,
    coverage,
    expected_distinct,
    expected_urgent,
)
from hotrec.cost_model.quantities import (
    TableSharding,
    between_hosts_bound_bytes,
    cached_rows,
)
from hotrec.planner.plan import Plan, SplitTables
from hotrec.planner.predict import Prediction, predict_shardings, predict_split
from hotrec.planner.propose import Decision, fastest_of
from hotrec.planner.situation import Situation
from hotrec.planner.trial import Trial
from hotrec.types import Tier

ALL_COLD = "all_cold"


def prediction_document(
    situation: Situation,
    decision: Decision,
    *,
    trial: Trial | None = None,
) -> dict[str, Any]:
    """Returns the document, which is shown on the plan's page and compared with a run.

    Args:
        situation: The situation of the predictions.
        decision: The predictions and the choice.
        trial: The measurements of the candidates, by digest, if a trial chose among them.
    """
    costs, predictions = situation.costs, decision.predictions
    chosen = decision.chosen
    splits = {plan: of for plan, of in predictions.items() if plan.is_hotrec}
    best = fastest_of(splits) if splits and not chosen.is_hotrec else chosen
    baselines = [of for plan, of in predictions.items() if not plan.is_hotrec]
    before = min(baselines, key=lambda of: of.step_s).shardings if baselines else {}
    labels = {plan.digest: plan.label for plan in predictions}
    entries = {plan.label: _plan_entry(situation, plan, of) for plan, of in predictions.items()}
    if decision.all_cold is not None:
        title = dataclasses.replace(best, tables=SplitTables({}, {})).title
        cold = {"title": title, "hot_rows": 0, **_entry(situation, best, decision.all_cold)}
        entries = _inserted(entries, {ALL_COLD: cold}, len(splits))
    split = best.tables if isinstance(best.tables, SplitTables) else None
    return {
        "costs": {
            "name": costs.name,
            "origin": costs.origin,
            "is_trusted": costs.is_trusted,
            "note": situation.note,
        },
        "world": dataclasses.asdict(situation.world),
        "batch_size": situation.workload.batch_size,
        "between_hosts_bound_bytes": between_hosts_bound_bytes(
            situation.demands, situation.world, situation.workload.num_dense_values
        ),
        "device": situation.machine.device,
        "pipeline": chosen.pipeline.kind.value,
        "chosen": chosen.label,
        "plan": chosen.to_json(),
        "why": decision.why,
        "plans": entries,
        "tables": [
            _table_entry(situation, demand, split, best, before.get(demand.name))
            for demand in situation.demands
        ],
        "expected": None if split is None else _expected(situation, split, predictions[best]),
        "trial": None if trial is None else trial.document(labels),
    }


def _plan_entry(situation: Situation, plan: Plan, prediction: Prediction) -> dict[str, Any]:
    return {
        "digest": plan.digest,
        "title": plan.title,
        "is_hotrec": plan.is_hotrec,
        "torchrec_plan": plan.torchrec_plan and plan.torchrec_plan.value,
        "hot_rows": plan.num_hot,
        **_entry(situation, plan, prediction),
    }


def _entry(situation: Situation, plan: Plan, prediction: Prediction) -> dict[str, Any]:
    pipeline = plan.pipeline if plan.is_hotrec else plan.pipeline.of_torchrec
    return {
        "pipeline": pipeline.kind.value,
        "wire": pipeline.wire.value,
        **dataclasses.asdict(prediction.step),
        "interval_s": list(situation.costs.interval_s(prediction.step_s)),
        "total_sent_bytes": prediction.step.total_sent_bytes,
        "samples_per_s": situation.global_batch_size / prediction.step_s,
        "memory": prediction.memory,
    }


def _inserted(
    entries: Mapping[str, Any], added: Mapping[str, Any], position: int
) -> dict[str, Any]:
    items = list(entries.items())
    return dict([*items[:position], *added.items(), *items[position:]])


def _table_entry(
    situation: Situation,
    demand: TableDemand,
    split: SplitTables | None,
    plan: Plan,
    sharding: TableSharding | None,
) -> dict[str, Any]:
    num_hot = 0 if split is None else split.num_hot.get(demand.name, 0)
    placed = None if split is None else split.tables.get(demand.name)
    rest = demand.num_rows - num_hot
    # On CPU the device kernels read host memory.
    is_device = situation.machine.device != "cpu"
    in_device = rest if is_device and placed is not None and placed.tier is Tier.DEVICE else 0
    return {
        "name": demand.name,
        "num_rows": demand.num_rows,
        "dim": demand.dim,
        "hot_rows": num_hot,
        "device_rows": in_device,
        "cached_rows": 0 if placed is None else round(cached_rows(demand, placed)),
        "host_rows": rest - in_device,
        "exchange": None if placed is None else placed.exchange.value,
        "sharding": None if placed is None else placed.sharding.value,
        "tier": None if placed is None else placed.tier.value,
        "coverage_frac": coverage(demand, num_hot),
        **_sent_bytes(situation, demand, split, plan, sharding),
        "torchrec_sharding": None if sharding is None else sharding.kind,
    }


def _sent_bytes(
    situation: Situation,
    demand: TableDemand,
    split: SplitTables | None,
    plan: Plan,
    sharding: TableSharding | None,
) -> dict[str, float | None]:
    """Bytes of one table that the mean rank sends, without those of the dense layers.

    The trainer chooses the hot exchange for all tables together; here it is chosen for this table.
    """
    name, alone = demand.name, dataclasses.replace(situation, demands=(demand,))
    empty = dataclasses.replace(situation, demands=())
    dense = predict_split(SplitTables({}, {}), plan.pipeline, empty)
    found: dict[str, Prediction] = {}
    if sharding is not None:
        found["before"] = predict_shardings({name: sharding}, plan.pipeline, alone)
    if split is not None:
        of_table = dataclasses.replace(split, num_hot={name: split.num_hot[name]})
        found["after"] = predict_split(of_table, plan.pipeline, alone)
    return {
        f"sent_bytes_{when}": found[when].step.total_sent_bytes - dense.step.total_sent_bytes
        if when in found
        else None
        for when in ("before", "after")
    }


def _expected(
    situation: Situation, split: SplitTables, prediction: Prediction
) -> dict[str, float | None]:
    demands = list(situation.demands)
    hot = [split.num_hot.get(d.name, 0) for d in demands]
    # By table: distinct hot rows, cold rows, and hot rows of any rank.
    distinct = np.array([expected_distinct(d, n) for d, n in zip(demands, hot, strict=True)])
    lookups = np.array([d.lookups_per_sample for d in demands])
    hot_lookups = lookups @ [coverage(d, n) for d, n in zip(demands, hot, strict=True)]
    moved, slots = prediction.quantities, prediction.slots
    hot_rows, cold_rows, union_rows = distinct.sum(axis=0).tolist()
    return {
        "coverage_frac": float(hot_lookups / lookups.sum()) if lookups.any() else None,
        "cold_rows": cold_rows,
        "hot_rows": hot_rows,
        "union_rows": union_rows,
        "urgent_rows": sum(expected_urgent(d, n) for d, n in zip(demands, hot, strict=True)),
        "all_hot_frac": all_hot_share(demands, split.num_hot),
        "cache_hit_frac": None if slots is None else slots.row_hit_frac,
        "fetched_bytes": prediction.quantities["fetched_bytes"]
        + prediction.quantities["mapped_bytes"]
        if prediction.slots
        else None,
        "returned_bytes": moved["returned_bytes"] if slots else None,
    }
