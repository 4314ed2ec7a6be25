"""Choosing one plan for every table: a mixed-integer program over plans (HiGHS).

Minimise the step over shares of plans (a share per plan, adding up to 1 per table), the excess of
what travels over what hides it (a stage each), and the message groups in use (a dimension and kind
each), within the memories. Seconds are scaled so that a step is about SCALE, bytes to shares of
their limit, so that the solver's tolerances are far below what matters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from hotrec.cost_model.demand import Floats
from hotrec.planning.optimise_plans import FLAGS, MODES, Integers, Problem, TablePlan

SCALE = 1e4
NUM_FLAGS = len(FLAGS)
# Branches of the solver after which it gives what it has, with its bound.
MOST_BRANCHES = 100_000
MOST_BRANCHES_BY_MODE = 200


class Rows:
    """Rows of a sparse matrix under construction, with their upper ends."""

    def __init__(self) -> None:
        self.i: list[Integers] = []
        self.j: list[Integers] = []
        self.v: list[Floats] = []
        self.ends: list[float] = []

    def add(self, end: float, *parts: tuple[npt.ArrayLike, npt.ArrayLike]) -> None:
        """One row: (columns, values) and its upper end."""
        for columns, values in parts:
            j = np.atleast_1d(np.asarray(columns, np.int64))
            self.j.append(j)
            self.v.append(np.broadcast_to(np.asarray(values, np.float64), j.shape))
            self.i.append(np.full(j.size, len(self.ends), np.int64))
        self.ends.append(end)

    def add_each(self, ends: Floats, i: Integers, j: Integers, v: Floats) -> None:
        """Several rows at once: their upper ends, and where each value goes."""
        self.i.append(len(self.ends) + i)
        self.j.append(j)
        self.v.append(v)
        self.ends += ends.tolist()

    def matrix(self, num_columns: int) -> coo_array:
        parts = (np.concatenate(p) if p else np.empty(0) for p in (self.v, self.i, self.j))
        v, i, j = parts
        return coo_array((v, (i, j)), shape=(len(self.ends), num_columns)).tocsr()


@dataclass
class Master:
    """The program over some plans, one of each table to be chosen.

    Args:
        problem: whose tables they are of.
        plans: to choose from.
        unit_s: seconds of about one step, for scaling.
    """

    problem: Problem
    plans: Sequence[TablePlan]
    unit_s: float

    def __post_init__(self) -> None:
        self.num_excess = self.problem.num_excess
        self.num_groups = len(self.problem.dims) * NUM_FLAGS
        self.table_P = np.array([plan.table for plan in self.plans], np.int64)
        self.mode_P = np.array([plan.mode for plan in self.plans], np.int64)

    def solve(self, *, is_plan_whole: bool, rel_gap: float) -> tuple[Floats, float]:
        """The mixed-integer program.

        Args:
            is_plan_whole: one plan a table; else one mode a table, between whose plans the shares
                may lie.
            rel_gap: relative distance from its optimum at which to stop.

        Returns:
            float64 (P,) shares, empty if nothing fits; the proven bound over these plans, seconds.
        """
        costs, upper, equal = self._program()
        num_plans, num_old = len(self.plans), costs.size
        num_modes = 0 if is_plan_whole else self._tie_modes(equal, num_old)
        size = num_old + num_modes
        high, whole = np.full(size, np.inf), np.zeros(size)
        high[num_plans + self.num_excess :] = 1.0
        whole[num_plans + self.num_excess :] = 1
        high[:num_plans] = 1.0
        whole[:num_plans] = 1 if is_plan_whole else 0
        answer = milp(
            np.concatenate([costs, np.zeros(num_modes)]),
            integrality=whole,
            bounds=Bounds(0.0, high),
            constraints=[
                LinearConstraint(upper.matrix(size), ub=upper.ends),
                LinearConstraint(equal.matrix(size), lb=equal.ends, ub=equal.ends),
            ],
            options={
                "mip_rel_gap": rel_gap,
                "node_limit": MOST_BRANCHES if is_plan_whole else MOST_BRANCHES_BY_MODE,
            },
        )
        if answer.x is None:
            return np.empty(0), np.inf
        bound = float(answer.mip_dual_bound) / SCALE * self.unit_s
        return np.asarray(answer.x[:num_plans]), bound + float(self.problem.constant_K[0])

    def _program(self) -> tuple[Floats, Rows, Rows]:
        """Costs, upper-bounded rows (excess, memories, groups) and one equation a table."""
        problem, num_plans, num_excess = self.problem, len(self.plans), self.num_excess
        scale = SCALE / self.unit_s
        taken = np.array([problem.take(plan) for plan in self.plans])
        flags = np.array([problem.flags(plan) for plan in self.plans], bool)
        every = np.arange(num_plans)
        z = num_plans + num_excess + np.arange(self.num_groups)
        flag_takes = np.tile(problem.flags_FK, (len(problem.dims), 1))
        costs = np.concatenate(
            [taken[:, 0] * scale, np.full(num_excess, 1.0), flag_takes[:, 0] * scale]
        )
        upper, equal = Rows(), Rows()
        for s in range(num_excess):
            k = 1 + s
            upper.add(
                -problem.constant_K[k] * scale,
                (every, taken[:, k] * scale),
                (z, flag_takes[:, k] * scale),
                (num_plans + s, -1.0),
            )
        for m in np.flatnonzero(np.isfinite(problem.limits_3)):
            limit = max(problem.limits_3[m], 1.0)
            upper.add(problem.limits_3[m] / limit, (every, taken[:, 1 + num_excess + m] / limit))
        order = np.argsort(self.table_P, kind="stable")
        starts = np.searchsorted(self.table_P[order], np.arange(problem.num_tables + 1))
        for t, f in itertools.product(range(problem.num_tables), range(NUM_FLAGS)):
            mine = order[starts[t] : starts[t + 1]]
            needing = mine[flags[mine, f]]
            if needing.size:
                upper.add(0.0, (needing, 1.0), (z[problem.dim_T[t] * NUM_FLAGS + f], -1.0))
        equal.add_each(np.ones(problem.num_tables), self.table_P, every, np.ones(num_plans))
        return costs, upper, equal

    def _tie_modes(self, equal: Rows, num_old: int) -> int:
        """A binary for each table and mode: equal to the shares of its plans."""
        pairs = self.table_P * len(MODES) + self.mode_P
        distinct, which = np.unique(pairs, return_inverse=True)
        count, num_plans = distinct.size, len(self.plans)
        columns = np.concatenate([np.arange(num_plans), num_old + np.arange(count)])
        rows = np.concatenate([which, np.arange(count)])
        values = np.concatenate([np.ones(num_plans), -np.ones(count)])
        equal.add_each(np.zeros(count), rows, columns, values)
        return count


def all_plans(problem: Problem, most: int) -> list[TablePlan] | None:
    """Every plan of every table in whole rows, or None where there are more than ``most``."""
    num_rows = [d.num_rows for d in problem.demands]
    if sum(n * n for n in num_rows) > 10 * most:
        return None
    plans: list[TablePlan] = []
    for t, size in enumerate(num_rows):
        hots: Sequence[int] = range(int(problem.low_T[t]), int(problem.high_T[t]) + 1)
        for mode in range(len(MODES)):
            if not problem.can_TM[t, mode]:
                continue
            is_pooled, is_cached = mode >= 3, mode % 3 == 2
            for hot in [0] if is_pooled else hots:
                ends = range(hot + 1, size + 1) if is_cached else [hot]
                plans += [TablePlan(t, mode, float(hot), float(held)) for held in ends]
    return plans if len(plans) <= most else None
