"""Chooses by predicted step between hot/cold placements and TorchRec's own plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from hotrec.config.groups import CostPlacement
from hotrec.config.roots import Config
from hotrec.cost_model.demand import TableDemand
from hotrec.cost_model.quantities import hot_cold_quantities
from hotrec.planning.machine import Machine
from hotrec.planning.predict import (
    HOT_COLD,
    Decision,
    Predicted,
    cold_tier,
    predict_baselines,
    predict_placement,
)
from hotrec.planning.scenario import Scenario, resized
from hotrec.planning.search import (
    HOT_SHARES,
    Choice,
    InfeasibleError,
    Limits,
    compare,
    hottest_share,
    search_placement,
)
from hotrec.types import Exchange, Schema, TablePlacement

MIB = 1 << 20
NUM_LINEARISATIONS = 3


def make_limits(placement: CostPlacement, scenario: Scenario) -> Limits:
    """Returns the memory and the options that the search may use."""
    device_bytes, host_bytes = scenario.memory_bytes
    budget = placement.hot_budget_mib
    return Limits(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        replica_bytes=None if budget is None else budget * MIB,
        # Look-ahead cannot hide the exchange of pooled tables.
        exchanges=tuple(Exchange)
        if placement.may_pool and not scenario.pipeline.is_look_ahead
        else (Exchange.ROWS,),
    )


def fastest_placement(placement: CostPlacement, scenario: Scenario) -> tuple[Predicted, Choice]:
    """Searches for the placement with hot and cold rows that is predicted to be fastest.

    The search needs linear costs, but measured collectives are not linear in the message size. It
    is run with lines fitted at the message sizes of a likely placement, then again at those of the
    result; the best of all results is returned. With look-ahead, smaller hot sets are tried too
    (``hottest_share``).

    Raises:
        InfeasibleError: If no placement fits the memory.
    """
    limits = make_limits(placement, scenario)
    at = _likely_quantities(scenario)
    hot_range = _hot_range(placement, scenario)
    found: list[tuple[Predicted, Choice]] = []
    for _ in range(NUM_LINEARISATIONS):
        choice = search_placement(
            list(scenario.demands),
            scenario.costs,
            scenario.world,
            scenario.workload,
            limits,
            at=at,
            hot_range=hot_range,
            narrow_frac=scenario.pipeline.narrow_frac,
        )
        predicted = predict_placement(
            scenario, choice.num_hot, choice.tables, is_hot_dense=choice.is_hot_dense
        )
        found.append((predicted, choice))
        if any(t.exchange is Exchange.POOLED for t in choice.tables.values()):
            # The search assumes a balanced load, but a few pooled tables do not spread evenly.
            limits = dataclasses.replace(limits, exchanges=(Exchange.ROWS,))
        elif not scenario.costs.curves:
            break  # the costs are linear already
        at = {name: max(value, at[name] / 8) for name, value in choice.quantities.items()}
    if scenario.pipeline.is_look_ahead:
        found += _with_fewer_hot(scenario, found, fixed=hot_range)
    best, choice = min(found, key=lambda pair: pair[0].step.step_s)
    return best, dataclasses.replace(
        choice,
        num_hot=best.num_hot,
        is_hot_dense=best.is_hot_dense,
        prediction=best.step,
        quantities=best.quantities,
    )


def _with_fewer_hot(
    scenario: Scenario, found: Sequence[tuple[Predicted, Choice]], fixed: Collection[str]
) -> list[tuple[Predicted, Choice]]:
    """Predicts the placements that were found with smaller hot sets, where these fit the memory."""
    candidates = []
    for _, choice in found:
        for share in (*HOT_SHARES, 1.0):
            num_hot = hottest_share(list(scenario.demands), choice.num_hot, share, fixed)
            # With sparse hot exchange the trainer still chooses a dense reduction in steps where
            # that sends fewer bytes.
            predicted = predict_placement(scenario, num_hot, choice.tables, is_hot_dense=False)
            if _fits(scenario, predicted):
                candidates.append((predicted, choice))
    return candidates


def _fits(scenario: Scenario, predicted: Predicted) -> bool:
    device_bytes, host_bytes = scenario.memory_bytes
    return all(
        rank["device_bytes"] <= device_bytes and rank["host_bytes"] <= host_bytes
        for rank in predicted.memory
    )


def _hot_range(placement: CostPlacement, scenario: Scenario) -> dict[str, tuple[int, int]]:
    """Returns the range of hot rows of each overridden table.

    Raises:
        ValueError: If an override names an unknown table, or more rows than it has.
    """
    tables = {demand.name: demand for demand in scenario.demands}
    unknown = sorted(set(placement.overrides) - set(tables))
    if unknown:
        raise ValueError(f"overrides: expected tables of {sorted(tables)}, got {unknown}.")
    found = {}
    for name, wanted in placement.overrides.items():
        num_rows = tables[name].num_rows
        if isinstance(wanted, str):
            num_hot = num_rows if wanted == "hot" else 0
        elif isinstance(wanted, float):
            num_hot = int(wanted * num_rows) if 0 <= wanted <= 1 else -1
        else:
            num_hot = wanted
        if not 0 <= num_hot <= num_rows:
            raise ValueError(
                f"overrides.{name}: expected at most the table's {num_rows} rows, or a fraction in "
                f"0..1, got {wanted}."
            )
        found[name] = (num_hot, num_hot)
    return found


def _likely_quantities(scenario: Scenario) -> dict[str, float]:
    """Quantities of the placement whose hot rows take half of the lookups."""
    demands = list(scenario.demands)
    num_hot = {d.name: _rows_covering(d, 0.5) for d in demands}
    tables = {d.name: TablePlacement(tier=cold_tier(scenario)) for d in demands}
    return hot_cold_quantities(
        demands, num_hot, tables, scenario.world, batch_size=scenario.workload.batch_size
    )


def _rows_covering(demand: TableDemand, share: float) -> int:
    """Number of the most accessed rows that take a share of the lookups, in whole groups."""
    reached = np.cumsum(demand.probs_G * demand.rows_G)
    group = int(np.searchsorted(reached, share))
    return int(demand.rows_G[: group + 1].sum())


def decide(config: Config, schema: Schema, scenario: Scenario) -> Decision:
    """Chooses between the best placement with hot rows and TorchRec's own plans.

    Raises:
        InfeasibleError: If no placement fits the memory.
    """
    assert isinstance(config.placement, CostPlacement)
    best, choice = fastest_placement(config.placement, scenario)
    all_cold = predict_placement(
        scenario,
        dict.fromkeys(best.tables, 0),
        {t.name: TablePlacement(tier=cold_tier(scenario)) for t in scenario.demands},
    )
    predicted = {HOT_COLD: best, "all_cold": all_cold}
    baselines = predict_baselines(config, schema, scenario)
    chosen, why = compare(choice, {name: baseline.step for name, baseline in baselines.items()})
    if chosen != HOT_COLD and not config.placement.may_decline:
        why = f"{why} placement.may_decline=false keeps hot and cold rows."
        chosen = HOT_COLD
    return Decision(chosen, why, {**predicted, **baselines})


def predict_sensitivity(
    placement: CostPlacement,
    scenario: Scenario,
    decision: Decision,
    describe: Callable[[Machine], Scenario],
) -> list[dict[str, Any]]:
    """Predicts the step with half and twice the hot budget, the batch and the ranks.

    Args:
        placement: The configured placement.
        scenario: The scenario of the decision.
        decision: The choice in this scenario.
        describe: Returns the scenario on another machine.
    """
    best = decision.predicted[HOT_COLD]
    bytes_of_row = {demand.name: demand.row_bytes for demand in scenario.demands}
    hot_bytes = sum(best.num_hot[name] * size for name, size in bytes_of_row.items())
    entries = []
    for factor in (0.5, 2.0):
        limited = dataclasses.replace(placement, hot_budget_mib=hot_bytes * factor / MIB)
        entries.append(_sensitivity(f"hot budget x {factor:g}", limited, scenario))
    for what, world_factor, batch_factor in (
        ("batch x 0.5", 1, 0.5),
        ("batch x 2", 1, 2),
        ("ranks x 0.5", 0.5, 1),
        ("ranks x 2", 2, 1),
    ):
        machine = resized(
            scenario.machine,
            scenario.costs,
            world_factor=world_factor,
            batch_factor=batch_factor,
        )
        if machine == scenario.machine:
            continue
        try:
            entries.append(_sensitivity(what, placement, describe(machine)))
        except ValueError as error:  # the costs lack the link between hosts
            entries.append({"what": what, "step_s": None, "hot_rows": None, "why": str(error)})
    return entries


def _sensitivity(what: str, placement: CostPlacement, scenario: Scenario) -> dict[str, Any]:
    try:
        predicted, _ = fastest_placement(placement, scenario)
    except InfeasibleError as error:
        return {"what": what, "step_s": None, "hot_rows": None, "why": str(error)}
    global_batch = scenario.workload.batch_size * scenario.world.num_ranks
    return {
        "what": what,
        "step_s": predicted.step.step_s,
        "samples_per_s": global_batch / predicted.step.step_s,
        "hot_rows": sum(predicted.num_hot.values()),
        "sent_bytes": predicted.step.total_sent_bytes,
    }
