"""The prediction document (prediction.json): the predictions, the choice and the reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hotrec.cost_model.break_even import break_even
from hotrec.cost_model.caches import lfu_hit_frac
from hotrec.cost_model.demand import (
    TableDemand,
    all_hot_share,
    coverage,
    expected_distinct,
    expected_urgent,
)
from hotrec.cost_model.forms import BYTES_PER_FLOAT, BYTES_PER_ID
from hotrec.cost_model.look_ahead import FLAGS_BYTES, POSITION_BYTES, SLOT_BYTES
from hotrec.cost_model.quantities import TableSharding, served_by_shard
from hotrec.planning.predict import HOT_COLD, Decision, Predicted, plan_entry
from hotrec.planning.scenario import Scenario
from hotrec.runtime.run_dir import PREDICTION
from hotrec.types import Exchange, Partition, Rows, TablePlacement, Tier


def prediction_document(
    scenario: Scenario,
    decision: Decision,
    *,
    partition: Partition | None,
    counts: Mapping[str, Rows],
    sensitivity: list[dict[str, Any]],
) -> dict[str, Any]:
    """Returns the document, which the plan's page shows and a run is compared with.

    Args:
        scenario: The scenario of the predictions.
        decision: The predictions and the choice.
        partition: Partition of the chosen placement, or None for TorchRec's plans.
        counts: The profile's int64 (R,) counts by table.
        sensitivity: Predictions with other budgets, batches and ranks.
    """
    global_batch = scenario.workload.batch_size * scenario.world.num_ranks
    chosen = decision.predicted[decision.chosen]
    best = decision.predicted.get(HOT_COLD, chosen)
    baselines = [p for p in decision.predicted.values() if p.shardings]
    before = min(baselines, key=lambda p: p.step.step_s) if baselines else None
    return {
        "costs": {
            "name": scenario.costs.name,
            "origin": scenario.costs.origin,
            "note": scenario.note,
        },
        "world": dataclasses.asdict(scenario.world),
        "batch_size": scenario.workload.batch_size,
        "device": scenario.machine.device,
        "pipeline": chosen.pipeline.kind.value,
        "chosen": decision.chosen,
        "why": decision.why,
        "plans": {
            name: plan_entry(predicted, global_batch)
            for name, predicted in decision.predicted.items()
        },
        "tables": [
            _table_entry(scenario, demand, best, None if before is None else before.shardings)
            for demand in scenario.demands
        ],
        "break_even": _break_even(scenario, best),
        "balance": {"served_rows": _served_rows(scenario, partition, counts)},
        "expected": _expected(scenario, best) if best.tables else None,
        "sensitivity": sensitivity,
    }


def _table_entry(
    scenario: Scenario,
    demand: TableDemand,
    best: Predicted,
    before: Mapping[str, TableSharding] | None,
) -> dict[str, Any]:
    num_hot = best.num_hot.get(demand.name, 0)
    placed = best.tables.get(demand.name)
    rest = demand.num_rows - num_hot
    cached = 0
    if placed is not None and placed.tier is Tier.HOST_CACHED:
        cached = round((placed.cache_load_frac or 0.0) * demand.num_rows)
    in_device = rest if placed is not None and placed.tier is Tier.DEVICE else 0
    sharding = None if before is None else before.get(demand.name)
    return {
        "name": demand.name,
        "num_rows": demand.num_rows,
        "dim": demand.dim,
        "hot_rows": num_hot,
        "device_rows": in_device,
        "cached_rows": cached,
        "host_rows": rest - in_device,
        "exchange": None if placed is None else placed.exchange.value,
        "sharding": None if placed is None else placed.sharding.value,
        "tier": None if placed is None else placed.tier.value,
        "coverage_frac": coverage(demand, num_hot),
        "sent_bytes_before": _bytes_before(scenario, demand, sharding),
        "sent_bytes_after": _bytes_after(scenario, demand, num_hot, placed),
        "torchrec_sharding": None if sharding is None else sharding.kind,
    }


def _pooled_bytes(scenario: Scenario, demand: TableDemand) -> float:
    """Bytes that the mean rank sends: ids, pooled vectors and their gradients."""
    world, batch = scenario.world, scenario.workload.batch_size
    others = (world.num_ranks - 1) / world.num_ranks
    ids = BYTES_PER_ID * demand.lookups_per_sample * batch
    vector = BYTES_PER_FLOAT * scenario.pipeline.narrow_frac * demand.dim
    return others * (ids + 2 * batch * demand.num_columns * vector)


def _bytes_before(
    scenario: Scenario, demand: TableDemand, sharding: TableSharding | None
) -> float | None:
    if sharding is None:
        return None
    ranks = scenario.world.num_ranks
    if sharding.kind == "data_parallel":
        row = BYTES_PER_FLOAT * scenario.pipeline.narrow_frac * demand.dim
        return 2 * (ranks - 1) / ranks * demand.num_rows * row
    pooled = _pooled_bytes(scenario, demand)
    # Row-wise shards each send a partial sum of every bag.
    return pooled * ranks if sharding.kind == "row_wise" else pooled


def _bytes_after(
    scenario: Scenario, demand: TableDemand, num_hot: int, placed: TablePlacement | None
) -> float | None:
    if placed is None:
        return None
    if placed.exchange is Exchange.POOLED:
        return _pooled_bytes(scenario, demand)
    ranks = scenario.world.num_ranks
    hot, cold, union = expected_distinct(demand, num_hot)
    row = BYTES_PER_FLOAT * scenario.pipeline.narrow_frac * demand.dim
    others = (ranks - 1) / ranks
    if not scenario.pipeline.is_look_ahead:
        return cold * (BYTES_PER_ID + 2 * row) * others + hot * (row + SLOT_BYTES) * (ranks - 1)
    # The trainer chooses the hot exchange for all tables together; per table it is approximate.
    moved_hot = min(hot * (ranks - 1), (hot + union) * others)
    requested = POSITION_BYTES + FLAGS_BYTES
    return cold * (requested + 2 * row) * others + moved_hot * (row + SLOT_BYTES)


def _break_even(scenario: Scenario, best: Predicted) -> dict[str, float | None]:
    return {
        str(dim): break_even(
            scenario.costs,
            scenario.world,
            scenario.workload,
            dim=dim,
            quantities=best.quantities,
        )
        for dim in sorted({demand.dim for demand in scenario.demands})
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
    hot_rows = cold_rows = union_rows = urgent_rows = hot_lookups = lookups = 0.0
    hits: list[tuple[float, float]] = []
    for demand in scenario.demands:
        num_hot = best.num_hot.get(demand.name, 0)
        hot, cold, union = expected_distinct(demand, num_hot)
        hot_rows, cold_rows, union_rows = hot_rows + hot, cold_rows + cold, union_rows + union
        urgent_rows += expected_urgent(demand, num_hot)
        lookups += demand.lookups_per_sample
        hot_lookups += demand.lookups_per_sample * coverage(demand, num_hot)
        placed = best.tables[demand.name]
        if placed.tier is Tier.HOST_CACHED:
            cached = round((placed.cache_load_frac or 0.0) * demand.num_rows)
            hits.append((lfu_hit_frac(demand, cached, num_hot), cold))
    weight = sum(rows for _, rows in hits)
    return {
        "coverage_frac": hot_lookups / lookups if lookups else None,
        "cold_rows": cold_rows,
        "hot_rows": hot_rows,
        "union_rows": union_rows,
        "urgent_rows": urgent_rows,
        "all_hot_frac": all_hot_share(list(scenario.demands), best.num_hot),
        "cache_hit_frac": sum(h * rows for h, rows in hits) / weight if weight else None,
    }


def read_prediction(run_dir: Path) -> dict[str, Any] | None:
    """Reads the document of a run, or returns None if it has none."""
    path = run_dir / PREDICTION
    if not path.exists():
        return None
    document: dict[str, Any] = json.loads(path.read_text())
    return document
