"""The best plan of every table, with a proof of how far from the best it can be.

Small problems: every plan of every table goes into one mixed-integer program, and its optimum is
the optimum. Large ones: the Lagrangian bound (``optimise_dual``) brings along the few plans of each
table that matter; a mixed-integer program over these gives the choice. Where a table lies between
two modes, both are tried, best bound first. Rows are whole in the end; that, and the number of
branches, is what the gap between a choice and its bound consists of.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotrec.cost_model.demand import Floats
from hotrec.planning.optimise_dual import SETS, Dual, Part
from hotrec.planning.optimise_master import Master, all_plans
from hotrec.planning.optimise_plans import MODES, Mask, Problem, TablePlan
from hotrec.types import Tier

# Up to this many plans are enumerated.
MOST_PLANS = 1500
# Relative distance to the bound at which a large search stops, and that of each of its bounds.
GAP = 1e-4
DUAL_GAP = 2e-5
# Parts that a large search looks at, times tables, but no fewer parts than LEAST_NODES.
MOST_TABLE_NODES = 20_000
LEAST_NODES = 12


@dataclass(frozen=True)
class Found:
    """A choice of one plan for every table.

    Args:
        problem: position of the problem that it solves.
        plans: in the order of the tables, whole rows.
        step_s: of these.
        bound_s: proven seconds below which no choice can be, in any of the problems.
    """

    problem: int
    plans: tuple[TablePlan, ...]
    step_s: float
    bound_s: float


def search(
    problems: Sequence[Problem], extra: Sequence[Iterable[Sequence[TablePlan]]]
) -> Found | None:
    """The best plan of every table in the best problem; None where no choice fits the limits.

    Args:
        problems: the same tables under different models; equal steps go to the first one.
        extra: for each, choices that the result must not be worse than; those that do not fit are
            left out.
    """
    best: Found | None = None
    for number, problem in enumerate(problems):
        for plans in extra[number]:
            best = _better(problem, number, plans, best)
    every = all_plans(problems[0], MOST_PLANS)
    found = _Search(problems, best).run() if every is None else _try_all(problems, every, best)
    return None if found is None else tidy(problems[found.problem], found)


def _better(
    problem: Problem, number: int, plans: Sequence[TablePlan], best: Found | None
) -> Found | None:
    """The better one of ``best`` and ``plans``, if these are allowed and fit."""
    if not all(problem.can_TM[plan.table, plan.mode] for plan in plans):
        return best
    taken = problem.total(plans)
    if not problem.fits(taken):
        return best
    step_s = problem.step_s(taken)
    if best is not None and best.step_s <= step_s:
        return best
    return Found(number, tuple(plans), step_s, 0.0)


def tidy(problem: Problem, found: Found) -> Found:
    """The same step with as many tables as possible wholly in device memory.

    A table whose rows are all hot, or hidden anyway, takes the same in any tier; smallest first.
    """
    taken = problem.total(found.plans)
    step_s = problem.step_s(taken)
    plans = list(found.plans)
    sizes = [d.num_rows * d.row_bytes for d in problem.demands]
    for t in sorted(range(len(plans)), key=lambda t: sizes[t]):
        old = plans[t]
        exchange, tier = MODES[old.mode]
        mode = MODES.index((exchange, Tier.DEVICE))
        if tier is Tier.DEVICE or not problem.can_TM[t, mode]:
            continue
        new = TablePlan(t, mode, old.num_hot, old.num_hot)
        changed = taken + problem.take(new) - problem.take(old)
        if problem.fits(changed) and problem.step_s(changed) <= step_s:
            plans[t], taken = new, changed
    return replace(found, plans=tuple(plans))


def _unit(problem: Problem, best: Found | None) -> float:
    """Seconds of about one step."""
    if best is not None:
        return max(best.step_s, 1e-12)
    plans = [
        TablePlan(t, int(modes.argmax()), float(problem.low_T[t]), float(problem.low_T[t]))
        for t, modes in enumerate(problem.can_TM)
    ]
    return max(problem.step_s(problem.total(plans)), 1e-12)


def _try_all(
    problems: Sequence[Problem], plans: Sequence[TablePlan], best: Found | None
) -> Found | None:
    proven = np.inf
    for number, problem in enumerate(problems):
        master = Master(problem, plans, _unit(problem, best))
        shares, bound = master.solve(is_plan_whole=True, rel_gap=0.0)
        proven = min(proven, bound)
        chosen = [plans[int(i)] for i in np.flatnonzero(shares > 0.5)]
        if chosen:
            best = _better(problem, number, sorted(chosen, key=lambda plan: plan.table), best)
    return None if best is None else replace(best, bound_s=min(proven, best.step_s))


class _Search:
    """Branch and bound over modes of tables and message groups of dimensions."""

    def __init__(self, problems: Sequence[Problem], best: Found | None) -> None:
        self.problems = problems
        self.best = best
        self.unit_s = _unit(problems[0], best)
        self.duals = [Dual(problem, self.unit_s) for problem in problems]

    def run(self) -> Found | None:
        order = itertools.count()
        heap = []
        for number, problem in enumerate(self.problems):
            whole = Part(problem.can_TM, np.ones((len(problem.dims), len(SETS)), bool))
            heap.append((0.0, next(order), number, whole))
        proven = np.inf  # least bound of the parts that were given up
        for _ in range(max(MOST_TABLE_NODES // self.problems[0].num_tables, LEAST_NODES)):
            if not heap:
                break
            bound, _, number, part = heapq.heappop(heap)
            if bound >= self._stop_s():
                proven = min(proven, bound)
                continue
            is_root = bound == 0.0
            found, shares, sets_DS = self.duals[number].solve(part, self._stop_s(), DUAL_GAP)
            bound = max(bound, found)
            if not shares:
                # Given up at once, or some table can do nothing.
                proven = min(proven, bound)
                continue
            if is_root:
                self._round(number, self._whole_modes(number, shares))
            self._round(number, shares)
            parts = [] if bound >= self._stop_s() else self._branch(number, part, shares, sets_DS)
            if not parts:
                proven = min(proven, bound)
            for child in parts:
                heapq.heappush(heap, (bound, next(order), number, child))
        proven = min([proven, *(node[0] for node in heap)])
        return (
            None if self.best is None else replace(self.best, bound_s=min(proven, self.best.step_s))
        )

    def _stop_s(self) -> float:
        """Seconds at which a bound is close enough to the best choice."""
        return np.inf if self.best is None else self.best.step_s * (1 - GAP)

    def _whole_modes(
        self, number: int, shares: Mapping[TablePlan, float]
    ) -> dict[TablePlan, float]:
        """The shares of the best whole modes over the plans at hand."""
        plans = list(shares) + [
            p for p in (self.best.plans if self.best else ()) if p not in shares
        ]
        master = Master(self.problems[number], plans, self.unit_s)
        whole, _ = master.solve(is_plan_whole=False, rel_gap=GAP / 10)
        return {plan: float(w) for plan, w in zip(plans, whole, strict=False) if w > 1e-9}

    def _by_mode(self, shares: Mapping[TablePlan, float]) -> tuple[Floats, Floats]:
        """float64 (T, M) shares; float64 (T, M, 2) hot and held rows, weighted by them."""
        shares_TM = np.zeros(self.problems[0].can_TM.shape)
        rows = np.zeros((*shares_TM.shape, 2))
        for plan, share in shares.items():
            shares_TM[plan.table, plan.mode] += share
            rows[plan.table, plan.mode] += share * np.array([plan.num_hot, plan.num_held])
        return shares_TM, rows

    def _round(self, number: int, shares: Mapping[TablePlan, float]) -> None:
        """Every table in its main mode, whole rows; kept if it fits and is better."""
        if not shares:
            return
        shares_TM, rows = self._by_mode(shares)
        plans = []
        for t, mode in enumerate(shares_TM.argmax(axis=1)):
            hot, held = rows[t, mode] / shares_TM[t, mode]
            plan = TablePlan(t, int(mode), float(hot), float(max(hot, held)))
            plans.append(self.problems[number].round_plan(plan))
        self.best = _better(self.problems[number], number, plans, self.best)

    def _branch(
        self, number: int, part: Part, shares: Mapping[TablePlan, float], sets_DS: Floats
    ) -> list[Part]:
        """Two parts that together hold every choice; none where nothing is mixed."""
        main_D = sets_DS.max(axis=1)
        d = int(main_D.argmin())
        if main_D[d] < 1 - 1e-6:
            sets = _split(part.can_DS, d, int(sets_DS[d].argmax()))
            return [replace(part, can_DS=can_DS) for can_DS in sets]
        shares_TM, _ = self._by_mode(shares)
        main_T = shares_TM.max(axis=1)
        sizes = [demand.num_rows * demand.row_bytes for demand in self.problems[number].demands]
        t = int(((1 - main_T) * sizes).argmax())
        if main_T[t] > 1 - 1e-6:
            return []
        modes = _split(part.can_TM, t, int(shares_TM[t].argmax()))
        return [replace(part, can_TM=can_TM) for can_TM in modes]


def _split(can: Mask, row: int, column: int) -> tuple[Mask, Mask]:
    """Only that column of the row; all but it."""
    only, without = can.copy(), can.copy()
    only[row] = False
    only[row, column] = True
    without[row, column] = False
    return only, without
