"""Chooses between split tables and TorchRec's own plans by the predicted step.

A choice includes its claim, and the candidates that a trial should measure.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hotrec.cost_model.costs import Costs
from hotrec.cost_model.demand import TableDemand, take_rows
from hotrec.cost_model.quantities import hot_cold_quantities
from hotrec.planner.machine import Machine
from hotrec.planner.plan import Plan, SplitTables, TorchrecTables
from hotrec.planner.predict import (
    Prediction,
    Shardings,
    bytes_beside,
    predict_shardings,
    predict_split,
)
from hotrec.planner.request import ByCost, GivenTables, PlanRequest
from hotrec.planner.search import InfeasibleError, Limits, search_placement
from hotrec.planner.situation import Situation
from hotrec.planner.slots import check_slots, choose_slots
from hotrec.types import (
    Exchange,
    Levels,
    PipelineKind,
    PipelineSpec,
    Placement,
    TablePlacement,
    Tier,
    TorchrecPlan,
    TorchrecTier,
    spread_tables,
)

logger = logging.getLogger(__name__)

NUM_LINEARISATIONS = 3
# Shares of the hot rows tried as smaller hot sets if the step is not linear.
HOT_SHARES = (0.0, *(2.0**-k for k in range(10, 0, -1)), 0.75, 1.0)
# With more candidates, each would get too few steps of a trial.
MAX_TRIED = 6

# TorchRec's own plans that may be chosen; those of host tiers need CUDA.
ON_DEVICE = tuple(
    TorchrecTables(plan)
    for plan in (TorchrecPlan.planner, TorchrecPlan.hand_tuned, TorchrecPlan.table_wise)
)
ON_HOST = tuple(
    TorchrecTables(TorchrecPlan.planner, tier)
    for tier in (TorchrecTier.fused_uvm, TorchrecTier.fused_uvm_caching)
)

# TorchRec's shardings of unsplit tables by one of its plans in a pipeline; or why they do not fit.
ShardingsOf = Callable[[TorchrecTables, PipelineSpec], Shardings | str]


@dataclass(frozen=True)
class Decision:
    """The choice between predictions.

    Args:
        chosen: The chosen plan, one of the predicted plans.
        why: The reason for the user.
        predictions: The prediction of each plan.
        all_cold: Prediction without hot rows in the fastest split's pipeline, for comparison; None
            if the split is given.
        placement: The given placement, with its slots; None if the hot rows are the profile's most
            accessed rows, and for TorchRec's plans.
    """

    chosen: Plan
    why: str
    predictions: Mapping[Plan, Prediction]
    all_cold: Prediction | None = None
    placement: Placement | None = None

    @property
    def prediction(self) -> Prediction:
        """The prediction of the chosen plan."""
        return self.predictions[self.chosen]


def propose(
    request: PlanRequest,
    situation: Situation,
    shardings_of: ShardingsOf,
    *,
    with_baselines: bool = False,
) -> Decision:
    """Predicts the candidates of a request and chooses.

    Args:
        request: The request.
        situation: The situation to plan for.
        shardings_of: Runs TorchRec's planner on the unsplit tables.
        with_baselines: Whether to predict TorchRec's own plans even if none may be chosen.

    Raises:
        InfeasibleError: If no split fits the memory.
        ValueError: If the requested plan of TorchRec does not fit, a pipeline cannot train the
            tables, or there are too few slots.
        CostsError: If the costs lack what a prediction needs.
    """
    tables = request.tables
    if isinstance(tables, ByCost):
        return _decide(request, tables, situation, _baselines(request, situation, shardings_of))
    if isinstance(tables, TorchrecTables):
        decision = _decide_torchrec(request, tables, situation, shardings_of)
    else:
        decision = _decide_given(request, tables, situation)
    if not with_baselines:
        return decision
    others = _baselines(request, situation, shardings_of)
    return dataclasses.replace(decision, predictions={**others, **decision.predictions})


def unpredicted(request: PlanRequest, machine: Machine) -> Plan:
    """The plan of a request whose tables are given, without predictions.

    Raises:
        ValueError: If the pipeline cannot train the tables.
    """
    given = request.tables
    assert not isinstance(given, ByCost), request.name
    tables = split_of(request, given.placement) if isinstance(given, GivenTables) else given
    return Plan(tables, request.default_pipeline(machine), request.num_workers)


def split_of(request: PlanRequest, placement: Placement) -> SplitTables:
    """The plan of the tables of a placement."""
    partition = placement.partition
    return SplitTables(
        {table: partition.num_hot(table) for table in partition.num_rows},
        placement.tables,
        request.is_routed_by_loader,
        partition.digest,
    )


def _decide_torchrec(
    request: PlanRequest, tables: TorchrecTables, situation: Situation, shardings_of: ShardingsOf
) -> Decision:
    """Predicts the requested plan of TorchRec."""
    plan = unpredicted(request, situation.machine)
    shardings = shardings_of(tables, plan.pipeline)
    if isinstance(shardings, str):
        raise ValueError(shardings)
    prediction = predict_shardings(shardings, plan.pipeline, situation)
    return Decision(plan, f"placement={request.name} is configured.", {plan: prediction})


def _decide_given(request: PlanRequest, tables: GivenTables, situation: Situation) -> Decision:
    """Predicts the given split in each pipeline that may train it."""
    why, slots, placement = f"placement={request.name} is configured.", None, tables.placement
    pipelines = request.pipelines(situation.machine)
    if tables.slots is not None and not tables.is_all_in_slots:
        check_slots(situation, placement, tables.slots.samples_in_flight)
    elif tables.slots is not None:
        placement, slots, reason = choose_slots(
            tables.slots,
            placement,
            lambda placed: split_of(request, placed),
            pipelines[0],
            situation,
        )
        why = f"{why}{reason}"
        if situation.machine.device == "cuda":  # on CPU, slots are host memory too
            ways = {table.row_fetch.value for table in placement.tables.values()}
            why = f"{why} Rows come to the device by row_fetch={' and '.join(sorted(ways))}."
    split = split_of(request, placement)
    plans = [Plan(split, pipeline, request.num_workers) for pipeline in pipelines]
    predictions = {plan: predict_split(split, plan.pipeline, situation, slots) for plan in plans}
    chosen = fastest_of(predictions)
    if len(plans) > 1:
        levels = " in two levels" if chosen.pipeline.levels is Levels.two else ""
        kind = f"{chosen.pipeline.kind.value}{levels}"
        why = f"{why} Of its pipelines {kind} is predicted to be best."
    return Decision(chosen, why, predictions, placement=placement)


def _decide(
    request: PlanRequest,
    by_cost: ByCost,
    situation: Situation,
    baselines: Mapping[Plan, Prediction],
) -> Decision:
    """Chooses among splits in all pipelines and TorchRec's own plans.

    Ties go to TorchRec's plans, because users already run them. Only those can keep rows in host
    memory, so that there may be no split.
    """
    predictions = dict[Plan, Prediction]()
    in_line: dict[Levels, Plan] = {}
    for pipeline in request.pipelines(situation.machine):
        if pipeline.kind is PipelineKind.base and pipeline.levels in in_line:
            # The forms only differ in the cover of the ids, so the tables are the same.
            plan = dataclasses.replace(in_line[pipeline.levels], pipeline=pipeline)
            predictions[plan] = predict_split(_split(plan), pipeline, situation)
            continue
        try:
            plan, prediction = fastest_split(request, by_cost, pipeline, situation)
        except InfeasibleError as error:
            if not baselines or not by_cost.may_decline:
                raise
            logger.info("hot and cold rows do not fit: %s", error)
            continue
        predictions[plan] = prediction
        if pipeline.kind is PipelineKind.sparse_dist:
            in_line[pipeline.levels] = plan
    if not predictions:
        chosen = fastest_of(baselines)
        return Decision(chosen, explain(chosen, baselines, situation.costs), baselines)
    best = fastest_of(predictions)
    names = _split(best).tables
    cold = TablePlacement()
    all_cold = SplitTables(dict.fromkeys(names, 0), dict.fromkeys(names, cold))
    chosen = best
    if baselines and by_cost.may_decline:
        theirs = fastest_of(baselines)
        is_ours = predictions[best].step_s < baselines[theirs].step_s
        chosen = best if is_ours else theirs
    predictions |= baselines
    return Decision(
        chosen,
        explain(chosen, predictions, situation.costs),
        predictions,
        all_cold=predict_split(all_cold, best.pipeline, situation),
    )


def _split(plan: Plan) -> SplitTables:
    assert isinstance(plan.tables, SplitTables), plan.label
    return plan.tables


def fastest_split(
    request: PlanRequest, by_cost: ByCost, pipeline: PipelineSpec, situation: Situation
) -> tuple[Plan, Prediction]:
    """Searches for the split that is predicted to be fastest in a pipeline.

    The search needs linear costs, but measured collectives are not linear in the message size. It
    uses lines fitted at the message sizes of a likely split, then at those of the result; the best
    of all results is returned. With look-ahead, smaller hot sets are tried too (``hottest_share``).

    Raises:
        InfeasibleError: If no split fits the memory.
    """
    demands, workload = list(situation.demands), situation.workload
    device_bytes, host_bytes = situation.memory_bytes
    # Without hot rows most rows are relayed.
    all_cold = {d.name: TablePlacement() for d in demands}
    quantities = hot_cold_quantities(demands, {}, all_cold, situation.world, workload.batch_size)
    on_device, on_host = bytes_beside(quantities, situation, pipeline)
    # Micro-batches compute before pooled vectors have arrived.
    is_whole = not (pipeline.is_look_ahead and pipeline.micro_batches)
    limits = Limits(
        device_bytes=device_bytes - on_device,
        host_bytes=host_bytes - on_host,
        replica_bytes=by_cost.hot_budget_bytes,
        may_pool=by_cost.may_pool and is_whole,
    )
    at = _likely_quantities(situation)
    found: list[tuple[SplitTables, Prediction]] = []

    def add(split: SplitTables) -> Prediction:
        prediction = predict_split(split, pipeline, situation)
        found.append((split, prediction))
        return prediction

    for _ in range(NUM_LINEARISATIONS):
        choice = search_placement(
            demands,
            situation.costs,
            situation.world,
            workload,
            limits,
            at=at,
            hot_range={name: (number, number) for name, number in by_cost.fixed_hot.items()},
            pipeline=pipeline,
        )
        tables = spread_tables(choice.tables, by_cost.spread)
        add(SplitTables(choice.num_hot, tables, request.is_routed_by_loader))
        if any(t.exchange is Exchange.POOLED for t in choice.tables.values()):
            # The search assumes a balanced load, but a few pooled tables do not spread evenly.
            limits = dataclasses.replace(limits, may_pool=False)
        elif not situation.costs.curves:
            break  # the costs are linear already
        at = {name: max(value, at[name] / 8) for name, value in choice.quantities.items()}
    if pipeline.is_look_ahead:
        for best, _ in tuple(found):
            for share in HOT_SHARES:
                num_hot = hottest_share(demands, best.num_hot, share, by_cost.fixed_hot)
                if not add(dataclasses.replace(best, num_hot=num_hot)).fits(situation):
                    found.pop()
    split, prediction = min(found, key=lambda one: one[1].step_s)
    return Plan(split, pipeline, request.num_workers), prediction


def _likely_quantities(situation: Situation) -> dict[str, float]:
    """Quantities of the split whose hot rows, in whole groups, serve half of the lookups."""
    num_hot = {}
    for d in situation.demands:
        group = int(np.searchsorted(np.cumsum(d.probs_G * d.rows_G), 0.5))
        num_hot[d.name] = int(d.rows_G[: group + 1].sum())
    tables = dict.fromkeys(num_hot, TablePlacement())
    return hot_cold_quantities(
        list(situation.demands), num_hot, tables, situation.world, situation.workload.batch_size
    )


def hottest_share(
    demands: Sequence[TableDemand],
    num_hot: Mapping[str, int],
    share: float,
    fixed: Collection[str] = (),
) -> dict[str, int]:
    """Keeps the rows with the most lookups per byte among the hot rows of all tables.

    With look-ahead the step is not linear: fewer hot rows shorten the hot exchange, which couples
    two steps, while the exchange of cold rows is hidden. So smaller hot sets are candidates.

    Args:
        demands: The tables.
        num_hot: The number of hot rows of each table.
        share: The share of them to keep, 0..1, rounded down.
        fixed: Tables that keep all of their hot rows and are not counted.
    """
    kept = {d.name: num_hot.get(d.name, 0) for d in demands}
    free = [d for d in demands if d.name not in fixed]
    rows = [take_rows(d, kept[d.name]) for d in free]
    if not sum(part.size for part in rows):  # without lookups, no row is hotter than another
        return kept | dict.fromkeys((d.name for d in free), 0)
    density = np.concatenate([d.probs_G * d.lookups_per_sample / d.row_bytes for d in free])
    table = np.repeat(np.arange(len(free)), [part.size for part in rows])
    order = np.argsort(-density, kind="stable")
    most = int(share * sum(kept[d.name] for d in free))
    ends = np.cumsum(np.concatenate(rows)[order])
    taken = np.diff(np.minimum(ends, most), prepend=0.0)
    by_table = np.bincount(table[order], weights=taken, minlength=len(free))
    return kept | {d.name: int(n) for d, n in zip(free, by_table, strict=True)}


def _baselines(
    request: PlanRequest, situation: Situation, shardings_of: ShardingsOf
) -> dict[Plan, Prediction]:
    """Predicts TorchRec's own plans that are distinct and fit, and whose tier is in the costs.

    Plans of host tiers are only predicted if the tables do not fit the devices: otherwise they are
    never faster.
    """
    predictions = dict[Plan, Prediction]()

    def add(tables: TorchrecTables, pipeline: PipelineSpec) -> None:
        plan = Plan(tables, pipeline, request.num_workers)
        shardings = shardings_of(tables, pipeline)
        if isinstance(shardings, str):
            logger.info("%s is not predicted: %s", plan.label, shardings)
        elif not any(_is_alike(plan, shardings, *other) for other in predictions.items()):
            predictions[plan] = predict_shardings(shardings, pipeline, situation)

    first, *others = request.torchrec_pipelines()
    for tables in ON_DEVICE:
        add(tables, first)
    for pipeline in others:
        for plan, prediction in tuple(predictions.items()):
            if plan.pipeline == first:
                other = dataclasses.replace(plan, pipeline=pipeline)
                predictions[other] = predict_shardings(prediction.shardings, pipeline, situation)
    has_host = situation.machine.device == "cuda" and "pooled_host" in situation.costs.kernels
    for tables in ON_HOST if has_host else ():
        is_cached = tables.tier is TorchrecTier.fused_uvm_caching
        pipeline = first.with_kind(PipelineKind.prefetch) if is_cached else first
        if pipeline.kind in request.kinds and not any(map(_is_in_device, predictions.values())):
            add(tables, pipeline)
    return predictions


def _is_in_device(prediction: Prediction) -> bool:
    return all(sharding.tier is Tier.DEVICE for sharding in prediction.shardings.values())


def _is_alike(plan: Plan, shardings: Shardings, other: Plan, prediction: Prediction) -> bool:
    """Whether two plans of TorchRec shard the tables alike in the same pipeline.

    The rank of a table is ignored, since TorchRec's planner chooses it in all of them.
    """

    def kinds(shardings: Shardings) -> dict[str, tuple[str, Tier]]:
        return {name: (s.kind, s.tier) for name, s in shardings.items()}

    is_same = plan.pipeline.kind is other.pipeline.kind
    return is_same and kinds(shardings) == kinds(prediction.shardings)


def fastest_of(predictions: Mapping[Plan, Prediction]) -> Plan:
    """The fastest plan."""
    return min(predictions, key=lambda plan: predictions[plan].step_s)


def in_doubt(decision: Decision, costs: Costs, *, may_decline: bool = True) -> list[Plan]:
    """The candidates with overlapping predictions, most likely fastest first.

    The second is the most likely of the other kind (TorchRec's own plans or splits), if there is
    one. Their intervals reach below the upper end of the chosen plan's; of more than MAX_TRIED the
    slowest are omitted. Without ``may_decline``, TorchRec's own plans are excluded.
    """
    predictions = decision.predictions
    _, max_s = costs.interval_s(decision.prediction.step_s)
    plans = [
        plan
        for plan, prediction in predictions.items()
        if (may_decline or plan.is_hotrec) and costs.interval_s(prediction.step_s)[0] < max_s
    ]

    def order(plan: Plan) -> tuple[bool, float]:
        # base is predicted like sparse_dist, without its overlap.
        return plan.pipeline.kind is PipelineKind.base, predictions[plan].step_s

    ordered = sorted(plans, key=order)
    # Prediction errors are similar within a kind, and a short trial may only reach two candidates.
    rivals = [plan for plan in ordered if plan.is_hotrec is not ordered[0].is_hotrec][:1]
    others = [plan for plan in ordered if plan not in rivals]
    by_speed = sorted(others, key=lambda plan: predictions[plan].step_s)
    likely = by_speed[: MAX_TRIED - len(rivals)]
    others = [plan for plan in others if plan in likely]
    return [*others[:1], *rivals, *others[1:]]


def explain(chosen: Plan, predictions: Mapping[Plan, Prediction], costs: Costs) -> str:
    """Compares the choice with the best of the other kind; claims no gain within the noise."""
    others = {p: of for p, of in predictions.items() if p.is_hotrec is not chosen.is_hotrec}
    step_s = predictions[chosen].step_s
    ours = f"{chosen.title} is predicted to take {show_interval(step_s, costs)} a step"
    if not others:
        return f"{ours}."
    other = fastest_of(others)
    other_s = others[other].step_s
    theirs = f"{other.title}, {show_interval(other_s, costs)}"
    if costs.interval_s(step_s)[1] < costs.interval_s(other_s)[0]:
        return f"{ours}, {1 - step_s / other_s:.0%} less than {theirs}."
    if step_s > other_s:
        return f"{ours}, more than {theirs}; placement.may_decline=false keeps hot and cold rows."
    reason = "" if chosen.is_hotrec else " Splitting rows is not predicted to pay here."
    return f"{ours}, within the uncertainty of {theirs}.{reason}"


def show_interval(step_s: float, costs: Costs) -> str:
    """Such as ``12.9 ms (12.1 to 14.0)``."""
    low_s, high_s = costs.interval_s(step_s)
    return f"{1e3 * step_s:.3g} ms ({1e3 * low_s:.3g} to {1e3 * high_s:.3g})"
