"""The placement with the fastest predicted step within memory, over all tables at once.

Decided per row: replicated or not, held in device memory or not; per table: exchange, sharding and
tier; for all: whether gradients of hot rows travel as touched rows or densely. The hot rows of a
table are its most looked-up ones, and so are, after them, those that its cache holds. What is
optimised is the very model that predicts (``hotrec.cost_model.step``), so the proof is about it.

TABLE_WISE sharding of rows moves as much as ROW_WISE on the mean rank, so it is used only for
tables with fewer rows than there are ranks, and for pooled tables, which lie whole on one rank.

The proof is of steps in TorchRec's pipeline. Steps with look-ahead are not linear; for them the
placement that is found here is one candidate of several (``optimise_shares``), and none is proven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hotrec.cost_model.costs import Costs, World
from hotrec.cost_model.demand import TableDemand
from hotrec.cost_model.forms import StepPrediction, Workload
from hotrec.cost_model.quantities import hot_cold_quantities
from hotrec.cost_model.step import make_step_model
from hotrec.planning.optimise_limits import InfeasibleError, Limits, explain, split_tiers
from hotrec.planning.optimise_plans import (
    MEMORIES,
    POOLED_DEVICE,
    ROWS_DEVICE,
    ROWS_HOST,
    Problem,
    TablePlan,
    build_problem,
)
from hotrec.planning.optimise_search import search
from hotrec.types import TablePlacement

__all__ = ["Choice", "InfeasibleError", "Limits", "compare", "optimise"]

# Sizes of simple policies that are tried beside the search.
NUM_THRESHOLDS = 10


@dataclass(frozen=True)
class Choice:
    """The fastest placement.

    Args:
        num_hot: hottest rows that are replicated, by table.
        tables: of the other rows.
        is_hot_dense: the hot exchange.
        prediction: of its step.
        quantities: what a rank does in it.
        bound_s: proven: no placement within the limits is predicted to be faster, in TorchRec's
            pipeline; 0 proves nothing.
    """

    num_hot: Mapping[str, int]
    tables: Mapping[str, TablePlacement]
    is_hot_dense: bool
    prediction: StepPrediction
    quantities: Mapping[str, float]
    bound_s: float

    @property
    def gap_frac(self) -> float:
        """How far the step can be from the best one, as a share of it."""
        step_s = self.prediction.step_s
        return (step_s - self.bound_s) / step_s if step_s > 0 else 0.0


def optimise(
    demands: Sequence[TableDemand],
    costs: Costs,
    world: World,
    workload: Workload,
    limits: Limits,
    *,
    hot_range: Mapping[str, tuple[int, int]] | None = None,
    at: Mapping[str, float] | None = None,
    narrow_frac: float = 1.0,
) -> Choice:
    """The fastest placement of these tables.

    Args:
        demands: of every table.
        costs: of the machine.
        world: ranks and hosts.
        workload: batch and dense layers.
        limits: memory, and which options there are.
        hot_range: fewest and most hot rows of a table, for tables fixed beforehand; any number
            where absent, rows never seen last.
        at: quantities of a step near the best one, at whose message sizes measured collectives
            become lines (``make_step_model``).
        narrow_frac: bytes of a value on the wire, over those of a float32.

    Raises:
        InfeasibleError: if nothing fits; says the smallest budget that would do.
        ValueError: if there is no table, two have one name, or a range is outside its table.
        CostsError: if the costs know nothing of several hosts.
    """
    hot_range = dict(hot_range or {})
    _check(demands, hot_range)
    can_M = limits.modes(costs)
    is_one_memory = costs.device == "cpu"
    hot_exchanges = sorted(set(limits.hot_exchanges))
    if world.num_ranks == 1:
        hot_exchanges = hot_exchanges[:1]  # one rank exchanges nothing, either way
    models = [
        make_step_model(costs, world, workload, is_hot_dense=h, at=at, narrow_frac=narrow_frac)
        for h in hot_exchanges
    ]
    problems = [
        build_problem(
            demands,
            model,
            world,
            workload.batch_size,
            can_TM=np.tile(can_M, (len(demands), 1)),
            limits_3=limits.sizes(is_one_memory),
            is_one_memory=is_one_memory,
            is_routed_on_device=not workload.is_routed_by_loader,
            hot_range=hot_range,
        )
        for model in models
    ]
    simple = _simple_choices(problems[0]) + _tight_choice(problems[0], is_one_memory)
    best = search(problems, [simple] * len(problems))
    if best is None:
        low = {name: span[0] for name, span in hot_range.items()}
        is_on_device = not workload.is_routed_by_loader
        raise explain(demands, world, limits, can_M, is_one_memory, is_on_device, low)
    is_hot_dense, model = hot_exchanges[best.problem], models[best.problem]
    num_hot = {demands[p.table].name: int(p.num_hot) for p in best.plans}
    tables = {demands[p.table].name: p.placement(demands[p.table], world) for p in best.plans}
    quantities = hot_cold_quantities(demands, num_hot, tables, world, workload.batch_size)
    prediction = model.predict(quantities)
    bound_s = min(best.bound_s, prediction.step_s)
    return Choice(num_hot, tables, is_hot_dense, prediction, quantities, bound_s)


def _check(demands: Sequence[TableDemand], hot_range: Mapping[str, tuple[int, int]]) -> None:
    if not demands:
        raise ValueError("demands: expected at least one table, got none.")
    sizes = {d.name: d.num_rows for d in demands}
    if len(sizes) < len(demands):
        names = sorted(d.name for d in demands)
        raise ValueError(f"demands: expected tables of different names, got {names}.")
    for name, (low, high) in hot_range.items():
        if name not in sizes:
            raise ValueError(f"hot_range: expected tables of {sorted(sizes)}, got {name!r}.")
        if not 0 <= low <= high <= sizes[name]:
            raise ValueError(
                f"hot_range table {name}: expected 0 <= low <= high <= {sizes[name]} rows, got "
                f"{(low, high)}."
            )


def _simple_choices(problem: Problem) -> list[list[TablePlan]]:
    """All cold, all hot, and the rows above a probability per byte, in each tier; all pooled."""
    demands = problem.demands
    density = [d.probs_G * d.lookups_per_sample / d.row_bytes for d in demands]
    every = np.concatenate([d[d > 0] for d in density] or [np.empty(0)])
    spread = np.quantile(every, np.linspace(0, 1, NUM_THRESHOLDS)) if every.size else []
    sizes = [[0] * len(demands), [d.num_rows for d in demands]]
    for threshold in spread:
        sizes.append(
            [
                int(d.rows_G[values >= threshold].sum())
                for d, values in zip(demands, density, strict=True)
            ]
        )
    low, high = problem.low_T, problem.high_T
    choices = []
    for mode in (ROWS_DEVICE, ROWS_HOST):
        for hot in sizes:
            whole = [float(n) for n in np.clip(hot, low, high)]
            choices.append([TablePlan(t, mode, n, n) for t, n in enumerate(whole)])
    for mode in (POOLED_DEVICE, POOLED_DEVICE + 1):
        choices.append([TablePlan(t, mode, 0.0, 0.0) for t in range(len(demands))])
    return choices


def _tight_choice(problem: Problem, is_one_memory: bool) -> list[list[TablePlan]]:
    """Tables spread over device and host so that host memory is short of least."""
    if is_one_memory or not problem.can_TM[:, [ROWS_DEVICE, ROWS_HOST]].all():
        return []
    hot = problem.low_T.astype(float)
    either = np.array(
        [
            [
                problem.take(TablePlan(t, m, n, n))[-len(MEMORIES) :]
                for m in (ROWS_DEVICE, ROWS_HOST)
            ]
            for t, n in enumerate(hot)
        ]
    )
    in_device, more = split_tiers(either, problem.limits_3, "host")
    if more > 0:
        return []
    modes = [ROWS_DEVICE if is_in else ROWS_HOST for is_in in in_device]
    return [[TablePlan(t, m, float(hot[t]), float(hot[t])) for t, m in enumerate(modes)]]


def compare(choice: Choice, baselines: Mapping[str, StepPrediction]) -> tuple[str, str]:
    """Which is predicted to be fastest, hot/cold or a baseline, and why.

    A baseline that is as fast wins: it is what people run already.

    Args:
        choice: of ``optimise``.
        baselines: predicted steps by name, such as "torchrec planner".

    Returns:
        "hot_cold" or the baseline's name; a sentence for people.
    """
    ours = choice.prediction
    if not baselines:
        return "hot_cold", f"hot_cold: {_ms(ours)} a step; nothing to compare with."
    name = min(baselines, key=lambda n: baselines[n].step_s)
    baseline = baselines[name]
    bytes_text = f"{ours.total_sent_bytes:,.0f} against {baseline.total_sent_bytes:,.0f} bytes sent"
    if ours.step_s < baseline.step_s:
        saved = 1 - ours.step_s / baseline.step_s
        parts = _largest_change(ours, baseline)
        return "hot_cold", (
            f"hot_cold is predicted to be fastest: {_ms(ours)} a step against {_ms(baseline)} for "
            f"{name}, {saved:.1%} less ({parts}; {bytes_text} by a rank)."
        )
    nothing = "without a hot row " if not any(choice.num_hot.values()) else ""
    return name, (
        f"splitting rows does not pay here: the best split {nothing}is predicted to take "
        f"{_ms(ours)} a step, {name} {_ms(baseline)} ({_largest_change(baseline, ours)}; "
        f"{bytes_text} by a rank). {name} is used."
    )


def _largest_change(fast: StepPrediction, slow: StepPrediction) -> str:
    """The stage in which the faster one gains most."""
    names = set(fast.stage_s) | set(slow.stage_s)
    gains = {n: slow.stage_s.get(n, 0.0) - fast.stage_s.get(n, 0.0) for n in sorted(names)}
    stage = max(gains, key=lambda n: gains[n])
    return f"most of it in {stage}: {1e3 * gains[stage]:.3g} ms"


def _ms(prediction: StepPrediction) -> str:
    return f"{1e3 * prediction.step_s:.4g} ms"
