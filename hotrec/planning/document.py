"""The prediction document (prediction.json): the predictions, the choice and the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hotrec.cost_model.caches import lfu_hit_frac
from hotrec.cost_model.demand import (
    TableDemand,
    all_hot_share,
    coverage,
    expected_distinct,
    expected_urgent,
)
from hotrec.cost_model.quantities import TableSharding, cached_rows, served_by_shard
from hotrec.cost_model.step import break_even
from hotrec.planning.names import candidate_name, with_names
from hotrec.planning.optimum import Decision, fastest_of
from hotrec.planning.predict import (
    ALL_COLD,
    Predicted,
    predict_placement,
    predict_shardings,
)
from hotrec.planning.scenario import Scenario
from hotrec.planning.trial import Trial
from hotrec.types import Partition, Rows, Tier


def prediction_document(
    scenario: Scenario,
    decision: Decision,
    *,
    partition: Partition | None,
    counts: Mapping[str, Rows],
    sensitivity: Sequence[Mapping[str, Any]],
    trial: Trial | None = None,
) -> dict[str, Any]:
    """Returns the document, which the plan's page shows and a run is compared with.

    Args:
        partition: Partition of the chosen placement, or None for TorchRec's plans.
        counts: The profile's int64 (R,) counts by table.
        sensitivity: Predictions with other budgets, batches and ranks.
        trial: What was measured of the candidates, if a trial chose among them.
    """
    costs, chosen = scenario.costs, decision.predicted[decision.chosen]
    own = {n: p for n, p in decision.predicted.items() if p.tables and n != ALL_COLD}
    best = own[fastest_of(own)] if own and not chosen.tables else chosen
    baselines = [p for p in decision.predicted.values() if p.shardings]
    before = min(baselines, key=lambda p: p.step.step_s).shardings if baselines else {}
    return {
        "costs": {
            "name": costs.name,
            "origin": costs.origin,
            "is_trusted": costs.is_trusted,
            "note": scenario.note,
        },
        "world": dataclasses.asdict(scenario.world),
        "batch_size": scenario.workload.batch_size,
        "device": scenario.machine.device,
        "pipeline": chosen.pipeline.kind.value,
        "chosen": decision.chosen,
        "why": with_names(decision.why, candidate_names(decision)),
        "plans": {
            name: {
                "hot_rows": sum(predicted.num_hot.values()),
                "pipeline": predicted.pipeline.kind.value,
                "wire": predicted.pipeline.wire,
                **dataclasses.asdict(predicted.step),
                "interval_s": list(costs.interval_s(predicted.step.step_s)),
                "total_sent_bytes": predicted.step.total_sent_bytes,
                "samples_per_s": scenario.global_batch_size / predicted.step.step_s,
                "memory": predicted.memory,
            }
            for name, predicted in decision.predicted.items()
        },
        "tables": [_table_entry(scenario, d, best, before.get(d.name)) for d in scenario.demands],
        "break_even": {
            str(dim): break_even(
                costs, scenario.world, scenario.workload, dim=dim, quantities=best.quantities
            )
            for dim in sorted({demand.dim for demand in scenario.demands})
        },
        "balance": {"served_rows": _served_rows(scenario, partition, counts)},
        "expected": _expected(scenario, best) if best.tables else None,
        "sensitivity": sensitivity,
        "trial": None if trial is None else trial.document(),
    }


def candidate_names(decision: Decision) -> dict[str, str]:
    """The names of all predictions as a user knows them."""
    return {
        name: candidate_name(name, sum(predicted.num_hot.values()))
        for name, predicted in decision.predicted.items()
    }


def _table_entry(
    scenario: Scenario, demand: TableDemand, best: Predicted, sharding: TableSharding | None
) -> dict[str, Any]:
    num_hot = best.num_hot.get(demand.name, 0)
    placed = best.tables.get(demand.name)
    rest = demand.num_rows - num_hot
    # On CPU the kernels of a device read the host's memory.
    is_device = scenario.machine.device != "cpu"
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
        **_sent_bytes(scenario, demand, best, sharding),
        "torchrec_sharding": None if sharding is None else sharding.kind,
    }


def _sent_bytes(
    scenario: Scenario, demand: TableDemand, best: Predicted, sharding: TableSharding | None
) -> dict[str, float | None]:
    """Bytes of one table that the mean rank sends, those of the dense layers left out.

    The trainer chooses the hot exchange for all tables together; here it is this table's.
    """
    name, alone = demand.name, dataclasses.replace(scenario, demands=(demand,))
    nothing = predict_placement(dataclasses.replace(scenario, demands=()), {}, {})
    found: dict[str, Predicted] = {}
    if sharding is not None:
        found["before"] = predict_shardings(alone, {name: sharding})
    if best.tables:
        found["after"] = predict_placement(
            alone, {name: best.num_hot[name]}, best.tables, is_hot_dense=best.is_hot_dense
        )
    dense_bytes = nothing.step.total_sent_bytes
    return {
        f"sent_bytes_{when}": found[when].step.total_sent_bytes - dense_bytes
        if when in found
        else None
        for when in ("before", "after")
    }


def _served_rows(
    scenario: Scenario, partition: Partition | None, counts: Mapping[str, Rows]
) -> list[float] | None:
    """Expected cold rows that each rank serves in a step, over all row-wise tables."""
    if partition is None:
        return None
    total = np.zeros(scenario.world.num_ranks)
    for demand in scenario.demands:
        total += served_by_shard(
            counts[demand.name],
            partition.hot(demand.name),
            num_lookups_per_rank=demand.lookups_per_sample * scenario.workload.batch_size,
            world_size=scenario.world.num_ranks,
        )
    return [float(rows) for rows in total]


def _expected(scenario: Scenario, best: Predicted) -> dict[str, float | None]:
    demands = list(scenario.demands)
    hot = [best.num_hot.get(d.name, 0) for d in demands]
    # By table: distinct hot rows, cold rows, and hot rows of any rank.
    distinct = np.array([expected_distinct(d, n) for d, n in zip(demands, hot, strict=True)])
    lookups = np.array([d.lookups_per_sample for d in demands])
    hot_lookups = lookups @ [coverage(d, n) for d, n in zip(demands, hot, strict=True)]
    hits = [
        (lfu_hit_frac(d, round(cached_rows(d, best.tables[d.name])), n), cold)
        for d, n, cold in zip(demands, hot, distinct[:, 1], strict=True)
        if best.tables[d.name].tier is Tier.HOST_CACHED
    ]
    weight = float(sum(rows for _, rows in hits))
    hit_frac = float(sum(h * rows for h, rows in hits)) / weight if weight else None
    hot_rows, cold_rows, union_rows = distinct.sum(axis=0).tolist()
    return {
        "coverage_frac": float(hot_lookups / lookups.sum()) if lookups.any() else None,
        "cold_rows": cold_rows,
        "hot_rows": hot_rows,
        "union_rows": union_rows,
        "urgent_rows": sum(expected_urgent(d, n) for d, n in zip(demands, hot, strict=True)),
        "all_hot_frac": all_hot_share(demands, best.num_hot),
        "cache_hit_frac": hit_frac if best.slots is None else best.slots.row_hit_frac,
        "fetched_bytes": best.quantities["fetched_bytes"] + best.quantities["mapped_bytes"]
        if best.slots
        else None,
        "returned_bytes": best.quantities["returned_bytes"] if best.slots else None,
    }
