"""Chooses by predicted step between hot/cold placements and TorchRec's own plans.

A choice says what it can claim, and which candidates a trial should measure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hotrec.config.groups import CostPlacement
from hotrec.config.roots import Config
from hotrec.cost_model.costs import Costs
from hotrec.cost_model.demand import TableDemand, take_rows
from hotrec.cost_model.quantities import hot_cold_quantities
from hotrec.planning.machine import Machine
from hotrec.planning.predict import (
    ALL_COLD,
    Predicted,
    is_own,
    own_name,
    predict_baselines,
    predict_placement,
)
from hotrec.planning.scenario import Scenario, candidate_pipelines, resized
from hotrec.planning.search import Limits, search_placement
from hotrec.planning.tables import num_overridden
from hotrec.types import Exchange, PipelineKind, Schema, TablePlacement

MIB = 1 << 20
NUM_LINEARISATIONS = 3
# Shares of the hot rows that are tried as smaller hot sets where the step is not linear.
HOT_SHARES = (0.0, *(2.0**-k for k in range(10, 0, -1)), 0.75, 1.0)


# Of more candidates each would get too few steps of a trial.
MOST_TRIED = 6


def fastest_placement(placement: CostPlacement, scenario: Scenario) -> Predicted:
    """Searches for the placement with hot and cold rows that is predicted to be fastest.

    The search needs linear costs, but measured collectives are not linear in the message size. It
    is run with lines fitted at the message sizes of a likely placement, then again at those of the
    result; the best of all results is returned. With look-ahead, smaller hot sets are tried too
    (``hottest_share``).

    Raises:
        InfeasibleError: If no placement fits the memory.
        ValueError: If an override names an unknown table, or more rows than it has.
    """
    demands = list(scenario.demands)
    device_bytes, host_bytes = scenario.memory_bytes
    budget = placement.hot_budget_mib
    limits = Limits(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        replica_bytes=None if budget is None else budget * MIB,
        may_pool=placement.may_pool,
    )
    num_fixed = num_overridden(placement.overrides, {d.name: d.num_rows for d in demands})
    at = _likely_quantities(scenario)
    found: list[Predicted] = []
    for _ in range(NUM_LINEARISATIONS):
        choice = search_placement(
            demands,
            scenario.costs,
            scenario.world,
            scenario.workload,
            limits,
            at=at,
            hot_range={name: (number, number) for name, number in num_fixed.items()},
            wire=scenario.pipeline.wire,
        )
        found.append(
            predict_placement(
                scenario, choice.num_hot, choice.tables, is_hot_dense=choice.is_hot_dense
            )
        )
        if any(t.exchange is Exchange.POOLED for t in choice.tables.values()):
            # The search assumes a balanced load, but a few pooled tables do not spread evenly.
            limits = dataclasses.replace(limits, may_pool=False)
        elif not scenario.costs.curves:
            break  # the costs are linear already
        at = {name: max(value, at[name] / 8) for name, value in choice.quantities.items()}
    if scenario.pipeline.is_look_ahead:
        for best in tuple(found):
            for share in HOT_SHARES:
                num_hot = hottest_share(demands, best.num_hot, share, num_fixed)
                # With sparse hot exchange the trainer still chooses a dense reduction in steps
                # where that sends fewer bytes.
                smaller = predict_placement(scenario, num_hot, best.tables)
                if all(
                    rank["device_bytes"] <= device_bytes and rank["host_bytes"] <= host_bytes
                    for rank in smaller.memory
                ):
                    found.append(smaller)
    return min(found, key=lambda predicted: predicted.step.step_s)


def _likely_quantities(scenario: Scenario) -> dict[str, float]:
    """Quantities of the placement whose hot rows, in whole groups, take half of the lookups."""
    num_hot = {}
    for d in scenario.demands:
        group = int(np.searchsorted(np.cumsum(d.probs_G * d.rows_G), 0.5))
        num_hot[d.name] = int(d.rows_G[: group + 1].sum())
    tables = dict.fromkeys(num_hot, TablePlacement(tier=scenario.cold_tier))
    return hot_cold_quantities(
        list(scenario.demands), num_hot, tables, scenario.world, scenario.workload.batch_size
    )


def hottest_share(
    demands: Sequence[TableDemand],
    num_hot: Mapping[str, int],
    share: float,
    fixed: Collection[str] = (),
) -> dict[str, int]:
    """Keeps the rows with most lookups per byte among the hot rows of all tables.

    With look-ahead the step is not linear: fewer hot rows shorten the hot exchange, which joins two
    steps, while cold rows travel under computation. So smaller hot sets are candidates there.

    Args:
        num_hot: The number of hot rows of each table.
        share: The share of them to keep, 0..1, rounded down.
        fixed: Tables that keep all of their hot rows and do not count.
    """
    kept = {d.name: num_hot.get(d.name, 0) for d in demands}
    free = [d for d in demands if d.name not in fixed]
    rows = [take_rows(d, kept[d.name]) for d in free]
    if not sum(part.size for part in rows):  # no lookup was seen: none of them is hottest
        return kept | dict.fromkeys((d.name for d in free), 0)
    density = np.concatenate([d.probs_G * d.lookups_per_sample / d.row_bytes for d in free])
    table = np.repeat(np.arange(len(free)), [part.size for part in rows])
    order = np.argsort(-density, kind="stable")
    most = int(share * sum(kept[d.name] for d in free))
    ends = np.cumsum(np.concatenate(rows)[order])
    taken = np.diff(np.minimum(ends, most), prepend=0.0)
    by_table = np.bincount(table[order], weights=taken, minlength=len(free))
    return kept | {d.name: int(n) for d, n in zip(free, by_table, strict=True)}


def decide(config: Config, schema: Schema, scenario: Scenario) -> Decision:
    """Chooses among placements with hot rows and TorchRec's own plans, in all pipelines.

    A plan of TorchRec that is as fast wins, because users run it already.

    Raises:
        InfeasibleError: If no placement fits the memory.
    """
    placement = config.placement
    assert isinstance(placement, CostPlacement)
    return decide_between(
        placement,
        scenario,
        candidate_pipelines(config, scenario.machine),
        predict_baselines(config, schema, scenario),
        micro_batches=config.pipeline.micro_batches,
    )


def decide_between(
    placement: CostPlacement,
    scenario: Scenario,
    kinds: Sequence[PipelineKind],
    baselines: Mapping[str, Predicted],
    *,
    micro_batches: bool = False,
) -> Decision:
    """Chooses among placements with hot rows in these pipelines and TorchRec's own plans.

    Args:
        placement: Limits of the search, and whether TorchRec's plans may win.
        scenario: What is predicted for.
        kinds: Pipelines of the placements with hot rows.
        baselines: TorchRec's own plans by name.
        micro_batches: Whether look_ahead computes micro-batches, which no pooled table can.

    Raises:
        InfeasibleError: If no placement fits the memory.
    """
    predicted = dict[str, Predicted]()
    for kind in kinds:
        of_kind, in_line = scenario.with_pipeline(kind), own_name(PipelineKind.sparse_dist)
        if kind is PipelineKind.base and in_line in predicted:
            # The same forms but for the cover of the ids, so the same placement.
            found = predicted[in_line]
            found = predict_placement(
                of_kind, found.num_hot, found.tables, is_hot_dense=found.is_hot_dense
            )
        else:
            limited = placement
            if micro_batches and kind is PipelineKind.look_ahead:
                limited = dataclasses.replace(placement, may_pool=False)
            found = fastest_placement(limited, of_kind)
        predicted[own_name(kind)] = found
    best = fastest_of(predicted)
    fastest = predicted[best]
    cold = TablePlacement(tier=scenario.cold_tier)
    all_cold = predict_placement(
        scenario.with_pipeline(fastest.pipeline.kind),
        dict.fromkeys(fastest.tables, 0),
        dict.fromkeys(fastest.tables, cold),
    )
    chosen = best
    if baselines and placement.may_decline:
        theirs = fastest_of(baselines)
        is_ours = fastest.step.step_s < baselines[theirs].step.step_s
        chosen = best if is_ours else theirs
    predicted |= {ALL_COLD: all_cold, **baselines}
    return Decision(chosen, explain(chosen, predicted, scenario.costs), predicted)


def predict_sensitivity(
    placement: CostPlacement,
    scenario: Scenario,
    best: Predicted,
    describe: Callable[[Machine], Scenario],
) -> list[dict[str, Any]]:
    """Predicts the step with half and twice the hot budget of ``best``, the batch and the ranks.

    ``describe`` returns the scenario on another machine.
    """
    scenario = scenario.with_pipeline(best.pipeline.kind)
    hot_mib = sum(best.num_hot[d.name] * d.row_bytes for d in scenario.demands) / MIB
    entries = []
    for factor in (0.5, 2.0):
        limited = dataclasses.replace(placement, hot_budget_mib=hot_mib * factor)
        entries.append(_vary(f"hot budget x {factor:g}", limited, lambda: scenario))
    for what, world_factor, batch_factor in (
        ("batch x 0.5", 1, 0.5),
        ("batch x 2", 1, 2),
        ("ranks x 0.5", 0.5, 1),
        ("ranks x 2", 2, 1),
    ):
        machine = resized(scenario.machine, scenario.costs, world_factor, batch_factor)
        if machine != scenario.machine:
            kind = best.pipeline.kind
            entries.append(_vary(what, placement, partial(_describe, describe, machine, kind)))
    return entries


def _describe(
    describe: Callable[[Machine], Scenario], machine: Machine, kind: PipelineKind
) -> Scenario:
    return describe(machine).with_pipeline(kind)


def _vary(what: str, placement: CostPlacement, describe: Callable[[], Scenario]) -> dict[str, Any]:
    try:
        scenario = describe()
        predicted = fastest_placement(placement, scenario)
    except ValueError as error:  # too little memory, or costs without the link between hosts
        return {"what": what, "step_s": None, "hot_rows": None, "why": str(error)}
    step_s = predicted.step.step_s
    return {
        "what": what,
        "step_s": step_s,
        "samples_per_s": scenario.workload.batch_size * scenario.world.num_ranks / step_s,
        "hot_rows": sum(predicted.num_hot.values()),
        "sent_bytes": predicted.step.total_sent_bytes,
    }


@dataclass(frozen=True)
class Decision:
    """The choice between predictions, which are by name."""

    chosen: str  # ``own_name``, or "torchrec <plan>"
    why: str  # for the user
    predicted: Mapping[str, Predicted]


def fastest_of(predicted: Mapping[str, Predicted]) -> str:
    """The name of the fastest prediction."""
    return min(predicted, key=lambda name: predicted[name].step.step_s)


def in_doubt(decision: Decision, costs: Costs, *, may_decline: bool = True) -> list[str]:
    """The candidates that may be fastest, as far as predictions can tell, the likeliest first.

    The second one is the likeliest of the other kind, TorchRec's own plans or those with hot rows,
    if there is one. Their intervals reach below the upper end of the chosen one's; of more than
    MOST_TRIED the slowest are left out. Without ``may_decline`` TorchRec's own plans are not among
    them.
    """
    predicted = decision.predicted
    _, most_s = costs.interval_s(predicted[decision.chosen].step.step_s)
    names = [
        name
        for name, plan in predicted.items()
        if name != ALL_COLD
        and (may_decline or is_own(name))
        and costs.interval_s(plan.step.step_s)[0] < most_s
    ]

    def order(name: str) -> tuple[bool, float]:
        # base is predicted as sparse_dist is, but for what that overlaps.
        is_base = predicted[name].pipeline.kind is PipelineKind.base
        return is_base, predicted[name].step.step_s

    ordered = sorted(names, key=order)
    # Errors of predictions are alike within a kind, and a short trial may reach two candidates.
    rivals = [name for name in ordered if is_own(name) is not is_own(ordered[0])][:1]
    others = [name for name in ordered if name not in rivals]
    by_speed = sorted(others, key=lambda name: predicted[name].step.step_s)
    likely = by_speed[: MOST_TRIED - len(rivals)]
    others = [name for name in others if name in likely]
    return [*others[:1], *rivals, *others[1:]]


def explain(chosen: str, predicted: Mapping[str, Predicted], costs: Costs) -> str:
    """Says what was chosen against the best of the other kind; claims no gain within the noise."""
    others = {n: p for n, p in predicted.items() if is_own(n) is not is_own(chosen)}
    others.pop(ALL_COLD, None)
    step_s = predicted[chosen].step.step_s
    ours = f"{chosen} is predicted to take {show_interval(step_s, costs)} a step"
    if not others:
        return f"{ours}."
    other = fastest_of(others)
    other_s = others[other].step.step_s
    theirs = f"{other}, {show_interval(other_s, costs)}"
    if costs.interval_s(step_s)[1] < costs.interval_s(other_s)[0]:
        return f"{ours}, {1 - step_s / other_s:.0%} less than {theirs}."
    if step_s > other_s:
        return f"{ours}, more than {theirs}; placement.may_decline=false keeps hot and cold rows."
    reason = "" if is_own(chosen) else " Splitting rows is not predicted to pay here."
    return f"{ours}, within the uncertainty of {theirs}.{reason}"


def show_interval(step_s: float, costs: Costs) -> str:
    """Such as ``12.9 ms (12.1 to 14.0)``."""
    low_s, high_s = costs.interval_s(step_s)
    return f"{1e3 * step_s:.3g} ms ({1e3 * low_s:.3g} to {1e3 * high_s:.3g})"
