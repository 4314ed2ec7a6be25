"""Predicts the step of placements with hot rows and of TorchRec's own plans."""

from __future__ import annotations

import dataclasses
import heapq
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from torchrec.distributed.types import CacheStatistics, ShardingPlan

from hotrec.config.groups import TorchrecPlacement
from hotrec.config.roots import Config
from hotrec.cost_model.caches import lru_miss_ratios
from hotrec.cost_model.demand import expected_distinct, take_rows
from hotrec.cost_model.forms import (
    BYTES_OF,
    BYTES_PER_FLOAT,
    SPARSE_DIST,
    TIERS,
    PipelineSpec,
    StepPrediction,
)
from hotrec.cost_model.histogram import CountHistogram, order_all_rows, top_rows
from hotrec.cost_model.look_ahead import FETCHES, MOVEMENTS
from hotrec.cost_model.memory import NUM_LASTING_GRADIENTS, memory_by_rank
from hotrec.cost_model.quantities import (
    TableSharding,
    cached_rows,
    hot_cold_caches,
    hot_cold_quantities,
    predict_torchrec,
    torchrec_quantities,
)
from hotrec.cost_model.step import make_model, make_step_model
from hotrec.planning.constraints import TIER_OF_KERNEL, offload_stats
from hotrec.planning.replay import Replayed
from hotrec.planning.scenario import Scenario, choose_pipeline
from hotrec.planning.torchrec_plan import plan_document
from hotrec.planning.unsharded import Unsharded, build_unsharded
from hotrec.types import (
    ColdTier,
    Exchange,
    Partition,
    PipelineKind,
    Placement,
    RowFetch,
    Rows,
    Schema,
    TablePlacement,
    Tier,
    TorchrecPlan,
    WireType,
)

logger = logging.getLogger(__name__)

HOT_COLD, ALL_COLD = "hot_cold", "all_cold"
NUM_CURVE_SIZES = 64
# Quantities that are larger on the rank that owns most pooled tables.
POOLED_LOADS = (
    *(f"pooled_ids_{tier}" for tier in TIERS),
    *(f"pooled_bytes_{tier}" for tier in TIERS),
    "pooled_sent_bytes",
)


@dataclass(frozen=True)
class Predicted:
    """The prediction of a hot/cold placement, or of a plan of TorchRec, which has shardings alone.

    ``memory`` is bytes of each rank by tier; ``quantities`` are those of the mean rank; ``slots``
    is what look-ahead moves in a step, over the slots of all ranks, None without slots.
    """

    step: StepPrediction
    memory: list[dict[str, float]]
    num_hot: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, TablePlacement] = field(default_factory=dict)
    shardings: Mapping[str, TableSharding] = field(default_factory=dict)
    quantities: Mapping[str, float] = field(default_factory=dict)
    is_hot_dense: bool = False
    pipeline: PipelineSpec = SPARSE_DIST
    slots: Replayed | None = None


def own_name(kind: PipelineKind) -> str:
    """The name of a placement with hot rows and its pipeline among the predictions."""
    return f"{HOT_COLD} {kind.value}"


def is_own(name: str) -> bool:
    """Whether a prediction is of a placement with hot rows, not of TorchRec's own plans."""
    return name.startswith(HOT_COLD)


def torchrec_name(config: Config) -> str:
    """The name of a configuration with placement=torchrec among the predictions."""
    placement = config.placement
    assert isinstance(placement, TorchrecPlacement), placement
    return baseline_name(placement.plan, config.pipeline.kind, placement.tier)


def baseline_name(plan: TorchrecPlan, kind: PipelineKind, tier: ColdTier = ColdTier.auto) -> str:
    """The name of one of TorchRec's own plans in a pipeline among the predictions."""
    in_tier = "" if tier is ColdTier.auto else f" {tier.name}"
    ahead = f" {kind.name}" if kind in (PipelineKind.prefetch, PipelineKind.base) else ""
    return f"torchrec {plan.name}{in_tier}{ahead}"


def torchrec_baselines(config: Config, device: str = "cuda") -> dict[str, Config]:
    """Returns the configurations that train TorchRec's own plans, by name.

    On CUDA there are also those of host tiers, for tables that do not fit the devices. With
    pipeline=auto there are those of the pipeline base too.
    """
    kind = config.pipeline.kind
    if kind is not PipelineKind.base:
        kind = PipelineKind.sparse_dist  # unsplit tables cannot be trained with look-ahead
    in_line = (TorchrecPlan.planner, TorchrecPlan.hand_tuned, TorchrecPlan.table_wise)
    plans = [(plan, ColdTier.auto, kind) for plan in in_line]
    if config.pipeline.kind is PipelineKind.auto:
        plans += [(plan, tier, PipelineKind.base) for plan, tier, _ in plans]
    if device == "cuda":
        plans += [
            (TorchrecPlan.planner, ColdTier.fused_uvm, kind),
            (TorchrecPlan.planner, ColdTier.fused_uvm_caching, PipelineKind.prefetch),
        ]
    configs = [
        with_pipeline(
            dataclasses.replace(config, placement=TorchrecPlacement(plan=plan, tier=tier)), kind
        )
        for plan, tier, kind in plans
    ]
    return {torchrec_name(baseline): baseline for baseline in configs}


def with_pipeline(config: Config, kind: PipelineKind) -> Config:
    """Returns the configuration with another pipeline."""
    return dataclasses.replace(config, pipeline=dataclasses.replace(config.pipeline, kind=kind))


def predict_baselines(config: Config, schema: Schema, scenario: Scenario) -> dict[str, Predicted]:
    """Predicts TorchRec's own plans that differ and fit, and whose tier is in the costs.

    Those of host tiers only where the tables do not fit the devices: they are never faster there.
    """
    has_host = "pooled_host" in scenario.costs.kernels
    predicted = dict[str, Predicted]()
    device = scenario.machine.device if has_host else "cpu"
    for name, baseline in torchrec_baselines(config, device).items():
        assert isinstance(baseline.placement, TorchrecPlacement)
        kind = baseline.pipeline.kind
        if kind is PipelineKind.base and config.pipeline.kind is PipelineKind.auto:
            in_line = predicted.get(name.removesuffix(f" {kind.name}"))
            if in_line is not None:
                shardings = in_line.shardings
                predicted[name] = predict_shardings(scenario.with_pipeline(kind), shardings)
            continue
        if baseline.placement.tier is not ColdTier.auto and any(
            map(_is_in_device, predicted.values())
        ):
            continue
        # An optimizer that the device cannot train is an error, tables that do not fit are not.
        unsharded = build_unsharded(baseline, schema, None, scenario.machine)
        try:
            found = _predict_unsharded(baseline, unsharded, scenario)
        except ValueError as error:
            logger.info("%s does not fit: %s", name, error)
            continue
        if is_another(found, predicted.values()):
            predicted[name] = found
    return predicted


def _is_in_device(plan: Predicted) -> bool:
    return all(sharding.tier is Tier.DEVICE for sharding in plan.shardings.values())


def is_another(plan: Predicted, others: Iterable[Predicted]) -> bool:
    """Whether a plan of TorchRec shards tables otherwise than others of the same pipeline.

    Which rank holds a table does not count, since TorchRec's planner chooses that in all of them.
    """

    def of(plan: Predicted) -> tuple[PipelineKind, dict[str, tuple[str, Tier]]]:
        return plan.pipeline.kind, {name: (s.kind, s.tier) for name, s in plan.shardings.items()}

    return of(plan) not in [of(other) for other in others]


def predict_torchrec_config(config: Config, schema: Schema, scenario: Scenario) -> Predicted:
    """Predicts a configuration with placement=torchrec.

    Raises:
        ValueError: If the tables do not fit, or the device has no exact kernel for the optimizer or
            no such memory tier.
    """
    unsharded = build_unsharded(config, schema, None, scenario.machine)
    return _predict_unsharded(config, unsharded, scenario)


def _predict_unsharded(config: Config, unsharded: Unsharded, scenario: Scenario) -> Predicted:
    assert isinstance(config.placement, TorchrecPlacement)
    plan = unsharded.plan(scenario.machine)
    return predict_plan(
        scenario.with_pipeline(choose_pipeline(config, scenario.machine)),
        plan,
        config.placement.cache_load_frac,
    )


def predict_plan(
    scenario: Scenario,
    plan: ShardingPlan,
    cache_load_frac: float | None = None,
) -> Predicted:
    """Predicts a plan of TorchRec for unsplit tables.

    Args:
        scenario: The scenario; its pipeline, if that is prefetch, fills the device caches.
        cache_load_frac: Cached fraction of the rows of tables with a device cache.

    Raises:
        ValueError: If a table has a kernel without a cost model.
    """
    shardings = {}
    is_prefetched = scenario.pipeline.kind is PipelineKind.prefetch
    names = {demand.name for demand in scenario.demands}
    for tables in plan_document(plan).values():
        for name, facts in tables.items():
            if name not in names:  # of a module that is not an EmbeddingBagCollection
                continue
            kernel = facts["compute_kernel"]
            tier = Tier.DEVICE if kernel == "dense" else TIER_OF_KERNEL[ColdTier(kernel)]
            is_cached = tier is Tier.HOST_CACHED
            shardings[name] = TableSharding(
                kind=facts["sharding_type"],
                ranks=tuple(facts["ranks"] or ()),
                tier=tier,
                cache_load_frac=cache_load_frac if is_cached else None,
                is_prefetched=is_prefetched and is_cached,
            )
    return predict_shardings(scenario, shardings)


def predict_shardings(scenario: Scenario, shardings: Mapping[str, TableSharding]) -> Predicted:
    """Predicts unsplit tables, see ``predict_plan``."""
    pipeline = scenario.pipeline.of_torchrec
    per_rank = torchrec_quantities(
        list(scenario.demands), shardings, scenario.world, scenario.workload.batch_size
    )
    names = {name for quantities in per_rank for name in quantities}
    mean = {name: sum(q.get(name, 0.0) for q in per_rank) / len(per_rank) for name in names}
    model = make_step_model(
        scenario.costs, scenario.world, scenario.workload, pipeline=pipeline, at=mean
    )
    return Predicted(
        step=scenario.beside_loader(predict_torchrec(model, per_rank), is_routed=False),
        memory=_memory(scenario, {}, shardings, NUM_LASTING_GRADIENTS),
        shardings=shardings,
        pipeline=pipeline,
    )


def _memory(
    scenario: Scenario,
    num_hot: Mapping[str, int],
    tables: Mapping[str, TablePlacement] | Mapping[str, TableSharding],
    num_gradients: int,
) -> list[dict[str, float]]:
    return memory_by_rank(
        list(scenario.demands),
        num_hot,
        tables,
        scenario.world,
        device=scenario.machine.device,
        is_routed_on_device=not scenario.workload.is_routed_by_loader,
        num_gradients=num_gradients,
    )


def predict_placement(
    scenario: Scenario,
    num_hot: Mapping[str, int],
    tables: Mapping[str, TablePlacement],
    *,
    is_hot_dense: bool = False,
    slots: Replayed | None = None,
) -> Predicted:
    """Predicts a placement with hot and cold rows, and with what moves if some are in slots."""
    world, demands, pipeline = scenario.world, list(scenario.demands), scenario.pipeline
    quantities = hot_cold_quantities(
        demands,
        num_hot,
        tables,
        world,
        batch_size=scenario.workload.batch_size,
        caches=hot_cold_caches(demands, num_hot, tables, world),
    )
    factor = _pooled_imbalance(scenario, tables)
    quantities = {n: v * factor if n in POOLED_LOADS else v for n, v in quantities.items()}
    if slots is not None:
        quantities |= _moved(scenario, tables, slots)
    model = make_model(
        scenario.costs,
        world,
        scenario.workload,
        pipeline=pipeline,
        is_hot_dense=is_hot_dense,
        at=quantities,
    )
    num_gradients = 0 if pipeline.is_look_ahead else NUM_LASTING_GRADIENTS
    return Predicted(
        step=scenario.beside_loader(model.predict(quantities), is_routed=True),
        memory=_memory(scenario, num_hot, tables, num_gradients),
        num_hot=num_hot,
        tables=tables,
        quantities=quantities,
        is_hot_dense=is_hot_dense,
        pipeline=pipeline,
        slots=slots,
    )


def with_faster_fetch(scenario: Scenario, placement: Placement, slots: Replayed) -> Placement:
    """Returns the placement with the way of fetching rows that takes least by the costs.

    Costs of a CPU have only one, since slots are host memory there.
    """

    def seconds(way: RowFetch) -> float:
        moved = _moved(scenario, placement.with_fetch(way).tables, slots)
        items = MOVEMENTS[FETCHES[way]]
        return scenario.costs.kernel(FETCHES[way]).seconds(moved[items], moved[BYTES_OF[items]])

    known = [way for way, kernel in FETCHES.items() if kernel in scenario.costs.kernels]
    return placement.with_fetch(min(known, key=seconds, default=RowFetch.staged))


def _moved(
    scenario: Scenario, tables: Mapping[str, TablePlacement], slots: Replayed
) -> dict[str, float]:
    """Returns the rows, and their bytes, that the mean rank moves into slots and back in a step."""
    # Slots are of tables of one dimension and one type (see ``SlotReplay``).
    demand = scenario.demands[0]
    host_bytes = demand.row_bytes
    if tables[demand.name].row_type is not WireType.fp32:
        host_bytes -= BYTES_PER_FLOAT // 2 * demand.dim
    fetched = MOVEMENTS[FETCHES[tables[demand.name].row_fetch]]
    moved = {fetched: slots.num_in, "returned_rows": slots.num_out}
    moved |= {BYTES_OF[items]: host_bytes * number for items, number in moved.items()}
    return {name: number / scenario.world.num_ranks for name, number in moved.items()}


def _pooled_imbalance(scenario: Scenario, tables: Mapping[str, TablePlacement]) -> float:
    """Returns the pooled work of the busiest rank over the mean, with greedy assignment."""
    loads = [
        d.dim * (d.lookups_per_sample + d.num_columns)
        for d in scenario.demands
        if tables[d.name].exchange is Exchange.POOLED
    ]
    ranks = [0.0] * scenario.world.num_ranks
    for load in sorted(loads, reverse=True):
        heapq.heapreplace(ranks, ranks[0] + load)
    return max(ranks) * len(ranks) / sum(loads) if loads else 1.0


# Standard deviations by which the most that a run's batches read is taken to exceed their mean.
NUM_DEVIATIONS = 4


class SlotsError(ValueError):
    """The slots on the device do not fit, or, if ``are_too_few``, do not suffice."""

    def __init__(self, message: str, *, are_too_few: bool) -> None:
        super().__init__(message)
        self.are_too_few = are_too_few


def check_slots(scenario: Scenario, placement: Placement, samples_in_flight: int) -> None:
    """Checks that the slots of CACHED tables fit, and suffice for the batches of look-ahead.

    They hold the distinct rows of a rank's share of those that the batches in flight read. A row is
    read in one of n global batches with probability
    1 - (1 - Q)^n, as if they were independent, and at most as many as NUM_DEVIATIONS standard
    deviations of a Poisson number above the mean are read.

    Args:
        samples_in_flight: Most samples of all ranks whose rows look-ahead holds at once, in
            training or evaluation.

    Raises:
        SlotsError: If a mean rank is expected to need more, or its device cannot hold them.
    """
    num_ranks = scenario.world.num_ranks
    num_batches = samples_in_flight / (scenario.machine.batch_size * num_ranks)
    needed, num_slots = 0.0, 0.0
    num_bytes, free_bytes = 0.0, scenario.memory_bytes[0]
    for demand in scenario.demands:
        placed, num_hot = placement.tables[demand.name], placement.partition.num_hot(demand.name)
        if placed.tier is not Tier.CACHED or num_hot == demand.num_rows:
            continue
        cold_G = demand.rows_G - take_rows(demand, num_hot)
        needed += float(cold_G @ (1 - (1 - demand.by_any_G) ** num_batches))
        num_slots += cached_rows(demand, placed)
        num_bytes += cached_rows(demand, placed) * demand.row_bytes / num_ranks
    needed += NUM_DEVIATIONS * math.sqrt(num_ranks * needed)
    if num_bytes > free_bytes and scenario.machine.device == "cuda":
        raise SlotsError(
            f"placement.cache_load_frac: expected slots, with optimizer state, of at most "
            f"{int(free_bytes)} bytes, the device's memory, got {math.ceil(num_bytes)}. Set it "
            f"{free_bytes / num_bytes:.2f} times as large or less.",
            are_too_few=False,
        )
    if needed > num_slots:
        raise SlotsError(
            f"placement.cache_load_frac: expected {math.ceil(needed)} slots or more over all ranks "
            f"for the rows that {samples_in_flight} samples in flight read, got "
            f"{math.ceil(num_slots)}. Set it {needed / num_slots:.2f} times as large or more, or "
            "lower pipeline.depth or the larger of trainer.batch_size and trainer.eval_batch_size.",
            are_too_few=True,
        )


def cache_statistics(scenario: Scenario, placement: Placement) -> dict[str, CacheStatistics]:
    """Returns statistics of a placement's device caches, by table, for TorchRec's planner."""
    found: dict[str, CacheStatistics] = {}
    for demand in scenario.demands:
        if placement.tables[demand.name].tier is not Tier.HOST_CACHED:
            continue
        num_hot = placement.partition.num_hot(demand.name)
        sizes = np.unique(np.geomspace(1, demand.num_rows, NUM_CURVE_SIZES).astype(np.int64))
        misses = lru_miss_ratios(demand, sizes, num_hot)
        _, cold, _ = expected_distinct(demand, num_hot)
        found[demand.name] = offload_stats(
            sizes.astype(np.float64), misses, cold * scenario.world.num_ranks, demand.num_rows
        )
    return found


def make_placement(
    predicted: Predicted,
    counts: Mapping[str, Rows],
    histograms: Mapping[str, CountHistogram],
    policy: str,
) -> Placement:
    """Returns the placement whose hot rows are the most accessed rows of each table.

    Where there are not enough, they are rows that were never seen too.
    """
    hot_rows = {
        table: top_rows(rows, num_hot, histograms[table])
        if (num_hot := predicted.num_hot[table]) <= histograms[table].num_distinct
        else order_all_rows(rows)[:num_hot]
        for table, rows in counts.items()
    }
    partition = Partition({table: int(c.size) for table, c in counts.items()}, hot_rows, policy)
    return Placement(partition, dict(predicted.tables), predicted.is_hot_dense)
