"""Three tables on two ranks, and how TorchRec may shard them, for the tests of the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import Link
from hotrec.cost_model.quantities import TableSharding
from hotrec.cost_model.step import Workload
from hotrec.planner.machine import Machine
from hotrec.planner.plan import Plan, SplitTables, TorchrecTables
from hotrec.planner.predict import Shardings
from hotrec.planner.situation import Situation
from hotrec.types import (
    TIER_OF_KERNEL,
    PipelineKind,
    PipelineSpec,
    TablePlacement,
    Tier,
    TorchrecPlan,
    TorchrecTier,
)
from tests.unit.cost_model.samples import make_demand

RANKS = 2

# Those of skewed lookups over the Ethernet, where some rows pay as replicas.
SKEWED_ROWS, SKEWED_BATCH = (40_000, 5_000, 300), 2048
COUNTS = {
    f"t{i}": np.random.default_rng(i).multinomial(
        400_000, (w := np.arange(1.0, n + 1) ** -1.05) / w.sum()
    )
    for i, n in enumerate(SKEWED_ROWS)
}


def skewed_situation(rate: float = 1.2e8) -> Situation:
    """Two hosts of one rank."""
    # Owners that are slow: with the built-in kernels no row pays as a replica here.
    slow = {
        name: replace(line, per_item_s=4 * line.per_item_s, per_byte_s=4 * line.per_byte_s)
        for name, line in BUILTIN["cpu_1gbit"].kernels.items()
        if name in ("read_device", "update_device")
    }
    kernels = {**BUILTIN["cpu_1gbit"].kernels, **slow}
    link = Link(3e-4, rate)
    costs = replace(BUILTIN["cpu_1gbit"], overlap=0.9, inter=link, kernels=kernels)
    shape: Any = {"dim": 64, "lookups": 4.0, "num_columns": 4, "batch_size": SKEWED_BATCH}
    demands = tuple(make_demand(counts, name, **shape) for name, counts in COUNTS.items())
    machine = Machine(RANKS, 1, "cpu", 0, 32 << 30, SKEWED_BATCH)
    return Situation(machine, demands, Workload(SKEWED_BATCH, 1e6, 0.2, 100_000), costs)


NUM_ROWS, BATCH = {"C1": 400_000, "C2": 5_000, "C3": 300}, 512


def machine(device: str = "cuda", *, device_bytes: int = 1 << 30) -> Machine:
    return Machine(RANKS, RANKS, device, device_bytes, 64 << 30, BATCH)


def situation(on: Machine) -> Situation:
    """One host of two ranks, of the largest table's rows most are read now and then."""
    demands = [
        make_demand(
            np.maximum(4e6 / np.arange(1, num_rows + 1), 1).astype(int),
            name,
            dim=16,
            batch_size=BATCH,
        )
        for name, num_rows in NUM_ROWS.items()
    ]
    costs = BUILTIN["dgx_h100_infiniband" if on.device == "cuda" else "cpu_1gbit"]
    return Situation(on, tuple(demands), Workload(BATCH, 1e6, 0.2, 10_000), costs)


def split_plan(
    kind: PipelineKind = PipelineKind.sparse_dist, num_hot: int = 5, **pipeline: Any
) -> Plan:
    tables = SplitTables({"t": num_hot}, {"t": TablePlacement()})
    return Plan(tables, PipelineSpec(kind, **pipeline))


def torchrec_plan(
    plan: TorchrecPlan = TorchrecPlan.planner,
    kind: PipelineKind = PipelineKind.sparse_dist,
    tier: TorchrecTier = TorchrecTier.fused,
) -> Plan:
    return Plan(TorchrecTables(plan, tier), PipelineSpec(kind))


def by_table(tables: TorchrecTables, pipeline: PipelineSpec) -> Shardings:
    """Stands in for TorchRec's planner: table-wise, and with a hand the last table replicated."""
    tier = TIER_OF_KERNEL[tables.tier]
    is_cached = tier is Tier.HOST_CACHED
    shardings = {
        name: TableSharding(
            "table_wise",
            (number % RANKS,),
            tier,
            tables.cache_load_frac if is_cached else None,
            is_prefetched=is_cached and pipeline.kind is PipelineKind.prefetch,
        )
        for number, name in enumerate(NUM_ROWS)
    }
    if tables.plan is TorchrecPlan.hand_tuned:
        shardings["C3"] = TableSharding("data_parallel", tuple(range(RANKS)))
    return shardings
