"""Chooses between split tables and TorchRec's own plans by the predicted step.

A choice includes its claim, and the candidates that a trial should measure.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hotrec.cost_model.costs import Costs
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
    Levels,
    PipelineKind,
    PipelineSpec,
    Placement,
    TablePlacement,
    Tier,
    TorchrecPlan,
    TorchrecTier,
)

logger = logging.getLogger(__name__)

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
    for pipeline in request.pipelines(situation.machine):
        try:
            plan, prediction = fastest_split(request, by_cost, pipeline, situation)
        except InfeasibleError as error:
            if not baselines or not by_cost.may_decline:
                raise
            logger.info("hot and cold rows do not fit: %s", error)
            continue
        predictions[plan] = prediction
    if not predictions:
        chosen = fastest_of(baselines)
        return Decision(chosen, explain(chosen, baselines, situation.costs), baselines)
    best = fastest_of(predictions)
    assert isinstance(best.tables, SplitTables), best.label
    names = best.tables.tables
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


def fastest_split(
    request: PlanRequest, by_cost: ByCost, pipeline: PipelineSpec, situation: Situation
) -> tuple[Plan, Prediction]:
    """Searches for the split that is predicted to be fastest in a pipeline.

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
    num_hot, tables = search_placement(
        demands,
        situation.costs,
        situation.world,
        workload,
        limits,
        pipeline=pipeline,
        hot_range={name: (number, number) for name, number in by_cost.fixed_hot.items()},
    )
    split = SplitTables(num_hot, tables, request.is_routed_by_loader)
    prediction = predict_split(split, pipeline, situation)
    return Plan(split, pipeline, request.num_workers), prediction


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
        elif not any(_is_alike(shardings, other.shardings) for other in predictions.values()):
            predictions[plan] = predict_shardings(shardings, pipeline, situation)

    in_line = request.torchrec_pipeline
    for tables in ON_DEVICE:
        add(tables, in_line)
    has_host = situation.machine.device == "cuda" and "pooled_host" in situation.costs.kernels
    for tables in ON_HOST if has_host else ():
        is_cached = tables.tier is TorchrecTier.fused_uvm_caching
        pipeline = in_line.with_kind(PipelineKind.prefetch) if is_cached else in_line
        if pipeline.kind in request.kinds and not any(map(_is_in_device, predictions.values())):
            add(tables, pipeline)
    return predictions


def _is_in_device(prediction: Prediction) -> bool:
    return all(sharding.tier is Tier.DEVICE for sharding in prediction.shardings.values())


def _is_alike(shardings: Shardings, others: Shardings) -> bool:
    """Whether two plans of TorchRec shard the tables alike.

    The rank of a table is ignored, since TorchRec's planner chooses it in all of them.
    """

    def kinds(shardings: Shardings) -> dict[str, tuple[str, Tier]]:
        return {name: (s.kind, s.tier) for name, s in shardings.items()}

    return kinds(shardings) == kinds(others)


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

    ordered = sorted(plans, key=lambda plan: predictions[plan].step_s)
    # Prediction errors are similar within a kind, and a short trial may only reach two candidates.
    rivals = [plan for plan in ordered if plan.is_hotrec is not ordered[0].is_hotrec][:1]
    others = [plan for plan in ordered if plan not in rivals]
    return [*others[:1], *rivals, *others[1:]][:MAX_TRIED]


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
