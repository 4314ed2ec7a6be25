"""Predicts the step of placements with hot rows and of TorchRec's own plans."""

from __future__ import annotations

import dataclasses
import heapq
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torchrec.distributed.types import ShardingPlan

from hotrec.config.groups import TorchrecPlacement
from hotrec.config.roots import Config
from hotrec.cost_model.caches import lru_miss_ratios
from hotrec.cost_model.costs import World
from hotrec.cost_model.demand import TableDemand, expected_distinct
from hotrec.cost_model.forms import SPARSE_DIST, TIERS, PipelineSpec, StepPrediction
from hotrec.cost_model.histogram import CountHistogram, order_all_rows, top_rows
from hotrec.cost_model.memory import NUM_LASTING_GRADIENTS, memory_by_rank
from hotrec.cost_model.quantities import (
    TableSharding,
    hot_cold_caches,
    hot_cold_quantities,
    predict_torchrec,
    torchrec_quantities,
)
from hotrec.planning.constraints import MissCurve
from hotrec.planning.machine import Machine
from hotrec.planning.scenario import Scenario
from hotrec.planning.torchrec_plan import plan_document
from hotrec.planning.unsharded import Unsharded, build_unsharded
from hotrec.types import (
    ColdTier,
    Exchange,
    Partition,
    PipelineKind,
    Placement,
    Rows,
    Schema,
    TablePlacement,
    Tier,
    TorchrecPlan,
)

logger = logging.getLogger(__name__)

HOT_COLD = "hot_cold"
NUM_CURVE_SIZES = 64
# Quantities that are larger on the rank that owns most pooled tables.
POOLED_LOADS = (
    *(f"pooled_ids_{tier}" for tier in TIERS),
    *(f"pooled_bytes_{tier}" for tier in TIERS),
    "pooled_sent_bytes",
)
TIER_OF_KERNEL = {
    "dense": Tier.DEVICE,
    "fused": Tier.DEVICE,
    "fused_uvm": Tier.HOST,
    "fused_uvm_caching": Tier.HOST_CACHED,
}


@dataclass(frozen=True)
class Predicted:
    """The prediction of a hot/cold placement or of a plan of TorchRec.

    Args:
        step: Seconds and bytes of the step.
        memory: Bytes of each rank by tier.
        num_hot: Hot rows of each table; empty for TorchRec's plans.
        tables: Placement of each table; empty for TorchRec's plans.
        shardings: Sharding of each table; empty for hot/cold placements.
        quantities: Quantities of the mean rank; empty for TorchRec's plans.
        is_hot_dense: Whether hot gradients are exchanged by a dense all-reduce.
        pipeline: The pipeline that was assumed.
    """

    step: StepPrediction
    memory: list[dict[str, float]]
    num_hot: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, TablePlacement] = field(default_factory=dict)
    shardings: Mapping[str, TableSharding] = field(default_factory=dict)
    quantities: Mapping[str, float] = field(default_factory=dict)
    is_hot_dense: bool = False
    pipeline: PipelineSpec = SPARSE_DIST


@dataclass(frozen=True)
class Decision:
    """The choice between predictions.

    Args:
        chosen: Name of the chosen one: HOT_COLD, or "torchrec <plan>".
        why: Explanation for the user.
        predicted: All predictions by name.
    """

    chosen: str
    why: str
    predicted: Mapping[str, Predicted]


@dataclass(frozen=True)
class Baseline:
    """A plan of TorchRec for unsplit tables.

    Args:
        plan: How the tables are sharded.
        tier: Memory tier of their rows.
        is_prefetched: Whether TorchRec's prefetch pipeline fills the device caches.
    """

    plan: TorchrecPlan
    tier: ColdTier = ColdTier.auto
    is_prefetched: bool = False

    @staticmethod
    def of(config: Config) -> Baseline:
        """Returns the baseline of a configuration with placement=torchrec."""
        placement = config.placement
        assert isinstance(placement, TorchrecPlacement), placement
        is_prefetched = config.pipeline.kind is PipelineKind.prefetch
        return Baseline(placement.plan, placement.tier, is_prefetched)

    @property
    def name(self) -> str:
        tier = "" if self.tier is ColdTier.auto else f" {self.tier.name}"
        return f"torchrec {self.plan.name}{tier}{' prefetch' if self.is_prefetched else ''}"

    def configure(self, config: Config) -> Config:
        """Returns the configuration that trains this baseline."""
        placement = TorchrecPlacement(plan=self.plan, tier=self.tier)
        pipeline = config.pipeline
        if self.is_prefetched:
            pipeline = dataclasses.replace(pipeline, kind=PipelineKind.prefetch)
        elif pipeline.kind is PipelineKind.look_ahead:
            # Unsplit tables cannot be trained with look-ahead.
            pipeline = dataclasses.replace(pipeline, kind=PipelineKind.sparse_dist)
        return dataclasses.replace(config, placement=placement, pipeline=pipeline)


BASELINE_PLANS = (Baseline(TorchrecPlan.planner), Baseline(TorchrecPlan.hand_tuned))
# On CUDA also TorchRec's host tiers, for tables that do not fit the devices.
HOST_BASELINE_PLANS = (
    Baseline(TorchrecPlan.planner, ColdTier.fused_uvm),
    Baseline(TorchrecPlan.planner, ColdTier.fused_uvm_caching, is_prefetched=True),
)


def read_shardings(plan: ShardingPlan) -> dict[str, TableSharding]:
    """Converts a plan of TorchRec to shardings of the cost model."""
    shardings = {}
    for tables in plan_document(plan).values():
        for name, facts in tables.items():
            tier = TIER_OF_KERNEL.get(facts["compute_kernel"])
            if tier is None:
                raise ValueError(
                    f"plan table {name} kernel: expected one of {sorted(TIER_OF_KERNEL)}, got "
                    f"{facts['compute_kernel']!r}, which has no cost model."
                )
            shardings[name] = TableSharding(
                kind=facts["sharding_type"],
                ranks=tuple(facts["ranks"] or ()),
                tier=tier,
                cache_load_frac=None,
            )
    return shardings


def predict_plan(
    scenario: Scenario,
    plan: ShardingPlan,
    cache_load_frac: float | None = None,
    *,
    is_prefetched: bool = False,
) -> Predicted:
    """Predicts a plan of TorchRec for unsplit tables.

    Args:
        scenario: The scenario.
        plan: The plan.
        cache_load_frac: Cached fraction of the rows of tables with a device cache.
        is_prefetched: Whether TorchRec's prefetch pipeline fills these caches.
    """
    pipeline = scenario.pipeline.of_torchrec
    if is_prefetched:
        pipeline = dataclasses.replace(pipeline, kind=PipelineKind.prefetch)
    scenario = dataclasses.replace(scenario, pipeline=pipeline)
    shardings = {
        name: dataclasses.replace(
            sharding,
            cache_load_frac=cache_load_frac if sharding.tier is Tier.HOST_CACHED else None,
            is_prefetched=is_prefetched and sharding.tier is Tier.HOST_CACHED,
        )
        for name, sharding in read_shardings(plan).items()
    }
    world, demands = scenario.world, list(scenario.demands)
    per_rank = torchrec_quantities(
        demands, shardings, world, batch_size=scenario.workload.batch_size
    )
    return Predicted(
        step=predict_torchrec(scenario.torchrec_model(_mean(per_rank)), per_rank),
        memory=memory_by_rank(
            demands,
            {},
            shardings,
            world,
            device=scenario.machine.device,
            is_routed_on_device=not scenario.workload.is_routed_by_loader,
            num_gradients=NUM_LASTING_GRADIENTS,
        ),
        shardings=shardings,
        pipeline=pipeline,
    )


def _mean(per_rank: list[dict[str, float]]) -> dict[str, float]:
    names = {name for quantities in per_rank for name in quantities}
    return {name: sum(q.get(name, 0.0) for q in per_rank) / len(per_rank) for name in names}


def predict_placement(
    scenario: Scenario,
    num_hot: Mapping[str, int],
    tables: Mapping[str, TablePlacement],
    *,
    is_hot_dense: bool = False,
) -> Predicted:
    """Predicts a placement with hot and cold rows."""
    world, demands = scenario.world, list(scenario.demands)
    quantities = hot_cold_quantities(
        demands,
        num_hot,
        tables,
        world,
        batch_size=scenario.workload.batch_size,
        caches=hot_cold_caches(demands, num_hot, tables, world),
    )
    factor = _pooled_imbalance(demands, tables, world)
    quantities = {n: v * factor if n in POOLED_LOADS else v for n, v in quantities.items()}
    return Predicted(
        step=scenario.model(quantities, is_hot_dense=is_hot_dense).predict(quantities),
        memory=memory_by_rank(
            demands,
            num_hot,
            tables,
            world,
            device=scenario.machine.device,
            is_routed_on_device=not scenario.workload.is_routed_by_loader,
            num_gradients=0 if scenario.pipeline.is_look_ahead else NUM_LASTING_GRADIENTS,
        ),
        num_hot=num_hot,
        tables=tables,
        quantities=quantities,
        is_hot_dense=is_hot_dense,
        pipeline=scenario.pipeline,
    )


def build_unsplit(config: Config, schema: Schema, machine: Machine) -> Unsharded:
    """Builds the model of a configuration with placement=torchrec, to be planned only.

    Raises:
        ValueError: If the device has no exact kernel for the optimizer, or no such memory tier.
    """
    return build_unsharded(
        config,
        schema,
        None,
        world_size=machine.world_size,
        compute_device=machine.device,
        dense_device=torch.device("meta"),
    )


def predict_baselines(config: Config, schema: Schema, scenario: Scenario) -> dict[str, Predicted]:
    """Predicts TorchRec's own plans, except where they do not fit or the costs lack their tier."""
    predicted = {}
    baselines: tuple[Baseline, ...] = BASELINE_PLANS
    if scenario.machine.device == "cuda" and "pooled_host" in scenario.costs.kernels:
        baselines += HOST_BASELINE_PLANS
    for baseline in baselines:
        configured = baseline.configure(config)
        assert isinstance(configured.placement, TorchrecPlacement)
        unsharded = build_unsplit(configured, schema, scenario.machine)
        try:
            sharding_plan = unsharded.plan(scenario.machine)
        except ValueError as error:
            logger.info("%s does not fit: %s", baseline.name, error)
            continue
        predicted[baseline.name] = predict_plan(
            scenario,
            sharding_plan,
            configured.placement.cache_load_frac,
            is_prefetched=baseline.is_prefetched,
        )
    return predicted


def _pooled_imbalance(
    demands: Sequence[TableDemand], tables: Mapping[str, TablePlacement], world: World
) -> float:
    """Returns the pooled work of the busiest rank over the mean, with greedy assignment."""
    loads = sorted(
        (
            d.dim * (d.lookups_per_sample + d.num_columns)
            for d in demands
            if tables[d.name].exchange is Exchange.POOLED
        ),
        reverse=True,
    )
    if not loads:
        return 1.0
    ranks = [0.0] * world.num_ranks
    for load in loads:
        heapq.heapreplace(ranks, ranks[0] + load)
    return max(ranks) * world.num_ranks / sum(loads)


def miss_curves(scenario: Scenario, placement: Placement | None) -> dict[str, MissCurve]:
    """Returns the miss curves of a placement's device caches, by table, for TorchRec's planner."""
    if placement is None:
        return {}
    curves = {}
    for demand in scenario.demands:
        if placement.tables[demand.name].tier is not Tier.HOST_CACHED:
            continue
        num_hot = placement.partition.num_hot(demand.name)
        sizes = np.unique(np.geomspace(1, demand.num_rows, NUM_CURVE_SIZES).astype(np.int64))
        misses = lru_miss_ratios(demand, sizes, num_hot)
        hot, cold, _ = expected_distinct(demand, num_hot)
        curves[demand.name] = MissCurve(
            sizes.astype(np.float64), misses, cold * scenario.world.num_ranks
        )
    return curves


def cold_tier(scenario: Scenario) -> Tier:
    """Returns the default memory tier of cold rows."""
    return Tier.DEVICE if scenario.machine.device == "cpu" else Tier.HOST


def make_placement(
    predicted: Predicted,
    counts: Mapping[str, Rows],
    histograms: Mapping[str, CountHistogram],
    policy: str,
) -> Placement:
    """Returns the placement whose hot rows are the most accessed rows of each table."""
    partition = Partition(
        num_rows={table: int(c.size) for table, c in counts.items()},
        hot_rows={
            table: _hottest(counts[table], predicted.num_hot[table], histograms[table])
            for table in counts
        },
        policy=policy,
    )
    return Placement(partition, dict(predicted.tables), predicted.is_hot_dense)


def _hottest(counts: Rows, num_hot: int, histogram: CountHistogram) -> Rows:
    """Returns the most accessed rows, and unseen rows where there are not enough others."""
    if num_hot <= histogram.num_distinct:
        return top_rows(counts, num_hot, histogram)
    return order_all_rows(counts)[:num_hot]


def plan_entry(predicted: Predicted, global_batch_size: int) -> dict[str, Any]:
    """Returns a prediction as an entry of the prediction document."""
    step = predicted.step
    return {
        "pipeline": predicted.pipeline.kind.value,
        "wire": predicted.pipeline.wire,
        "step_s": step.step_s,
        "stage_s": dict(step.stage_s),
        "hidden_s": dict(step.hidden_s),
        "sent_bytes": dict(step.sent_bytes),
        "total_sent_bytes": step.total_sent_bytes,
        "samples_per_s": global_batch_size / step.step_s,
        "memory": predicted.memory,
    }
