"""A proven bound on the fastest step of many tables, and the plans that come close to it.

Stages with messages and memories are all that joins the tables. Given a price y_s in 0..1 for the
excess of each stage's messages and mu_m >= 0 for each memory, the tables decide one by one, those
of one dimension together over the message groups that they share, and

    L(y, mu) = constant + y excess - mu limits + sum over dimensions of the cheapest plans

is below the step of every choice that fits (Lagrangian relaxation; Everett 1963). The best prices
are found by cutting planes (Kelley 1960), each evaluated halfway between the best prices so far and
those that the planes suggest, which steadies them. The weights of the planes at the end say in what
shares the plans mix where L is largest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog

from hotrec.cost_model.demand import Floats
from hotrec.planning.optimise_plans import (
    FLAGS,
    MEMORIES,
    MODES,
    POOLED_DEVICE,
    Mask,
    Problem,
    TablePlan,
)
from hotrec.planning.optimise_prices import NEEDS, NEVER, price_plans
from hotrec.types import Tier

# Which message groups a dimension has: any but none.
SETS = tuple(
    tuple(f for f in range(len(FLAGS)) if bits >> f & 1) for bits in range(1, 1 << len(FLAGS))
)
# Price of all of a memory, in steps, beyond which a part is taken not to fit.
DEAREST = 1e3
MOST_ROUNDS = 150


@dataclass(frozen=True)
class Plane:
    """One dimension's answer to some prices.

    Args:
        taken_K: what its plans take, message groups included.
        plans: of its tables.
        groups: position in SETS.
    """

    taken_K: Floats
    plans: tuple[TablePlan, ...]
    groups: int


@dataclass(frozen=True)
class Part:
    """A part of all choices: modes of tables, bool (T, M), and SETS of dimensions, bool (D, S)."""

    can_TM: Mask
    can_DS: Mask


@dataclass
class Dual:
    """The relaxation of a problem; planes hold for all its parts in which their plans are allowed.

    Args:
        problem: the tables.
        unit_s: seconds of about one step, for scaling.
    """

    problem: Problem
    unit_s: float
    planes: list[list[Plane]] = field(default_factory=list)
    _taken: dict[TablePlan, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.problem
        self.planes = [[] for _ in problem.dims]
        self.bounded = [m for m in range(len(MEMORIES)) if np.isfinite(problem.limits_3[m])]
        self.scale = np.ones(problem.constant_K.size) / self.unit_s
        for m in self.bounded:
            self.scale[1 + problem.num_excess + m] = 1 / max(problem.limits_3[m], 1.0)
        # Places of the prices among the resources.
        first = 1 + problem.num_excess
        self.priced = [*range(1, first), *(first + m for m in self.bounded)]
        limits = np.array([problem.limits_3[m] for m in self.bounded])
        self.ends = np.concatenate([problem.constant_K[1:first], -limits]) * self.scale[self.priced]
        self.most = np.array([1.0] * problem.num_excess + [DEAREST] * len(self.bounded))

    def solve(
        self, part: Part, stop_s: float, gap: float
    ) -> tuple[float, dict[TablePlan, float], Floats]:
        """The best bound over a part of all choices.

        Args:
            part: to stay in.
            stop_s: seconds at which the bound is high enough to give the part up.
            gap: relative distance from the best bound at which to stop.

        Returns:
            Seconds, infinite if some table can do nothing; plans with their shares, which add up to
            1 for each table; shares of SETS, float64 (D, S).
        """
        sets_DS = np.zeros(part.can_DS.shape)
        active = [
            [
                plane
                for plane in planes
                if part.can_DS[d, plane.groups]
                and all(part.can_TM[plan.table, plan.mode] for plan in plane.plans)
            ]
            for d, planes in enumerate(self.planes)
        ]
        centre = np.where(self.most == 1.0, 0.5, 0.0)
        bound = self._cut(part, centre, active)
        if not np.isfinite(bound):
            return bound, {}, sets_DS
        weights: list[Floats] = []
        for _ in range(MOST_ROUNDS):
            above, tip, weights = self._model(active)
            if above - bound <= gap * abs(bound) or bound * self.unit_s >= stop_s:
                break
            point = (centre + tip) / 2
            found = self._cut(part, point, active)
            if found > bound:
                bound, centre = found, point
        shares: dict[TablePlan, float] = {}
        for d, (planes, weight) in enumerate(zip(active, weights, strict=True)):
            for plane, w in zip(planes, weight, strict=False):
                sets_DS[d, plane.groups] += w
                for plan in plane.plans if w > 1e-9 else ():
                    shares[plan] = shares.get(plan, 0.0) + float(w)
        return bound * self.unit_s, shares, sets_DS

    def _cut(self, part: Part, point: Floats, active: list[list[Plane]]) -> float:
        """L at some prices, in steps; the planes there are added."""
        problem = self.problem
        prices_K = np.zeros(problem.constant_K.size)
        prices_K[0] = 1 / self.unit_s
        prices_K[self.priced] = point * self.scale[self.priced]
        prices = price_plans(problem, part.can_TM, prices_K)
        flags_F = problem.flags_FK @ prices_K
        total = float(problem.constant_K[0] / self.unit_s + self.ends @ point)
        for d in range(len(problem.dims)):
            tables = np.flatnonzero(problem.dim_T == d)
            value_TN = prices.value_TN[tables]
            best, needs, groups = NEVER, [0], 0
            for number in np.flatnonzero(part.can_DS[d]):
                some = SETS[number]
                can = [n for n, need in enumerate(NEEDS) if set(need) <= set(some)]
                value = float(value_TN[:, can].min(axis=1).sum() + flags_F[list(some)].sum())
                if value < best:
                    best, needs, groups = value, can, int(number)
            if best >= NEVER / 2:
                return np.inf
            total += best
            picks = np.array(needs)[value_TN[:, needs].argmin(axis=1)]
            plans = []
            for t, n in zip(tables, picks, strict=True):
                rows = problem.cuts_TJ4[t, :, 0]
                mode = int(prices.mode_TN[t, n])
                hot = 0.0 if mode >= POOLED_DEVICE else float(rows[prices.hot_TN[t, n]])
                is_cached = MODES[mode][1] is Tier.HOST_CACHED
                held = float(rows[prices.held_TN[t, n]]) if is_cached else hot
                plans.append(TablePlan(int(t), mode, hot, held))
            taken = np.sum([self.take(plan) for plan in plans], axis=0)
            taken = taken + problem.flags_FK[list(SETS[groups])].sum(axis=0)
            plane = Plane(taken, tuple(plans), groups)
            self.planes[d].append(plane)
            active[d].append(plane)
        return total

    def take(self, plan: TablePlan) -> Floats:
        if plan not in self._taken:
            self._taken[plan] = self.problem.take(plan)
        return self._taken[plan]

    def _model(self, active: list[list[Plane]]) -> tuple[float, Floats, list[Floats]]:
        """The prices at which the planes are highest: that height, the prices, the weights."""
        num_prices, num_dims = len(self.priced), len(active)
        planes = [(d, plane) for d, some in enumerate(active) for plane in some]
        taken = np.array([plane.taken_K for _, plane in planes])
        below = np.zeros((len(planes), num_prices + num_dims))
        below[:, :num_prices] = -taken[:, self.priced] * self.scale[self.priced]
        below[np.arange(len(planes)), [num_prices + d for d, _ in planes]] = 1.0
        answer = linprog(
            np.concatenate([-self.ends, -np.ones(num_dims)]),
            A_ub=below,
            b_ub=taken[:, 0] / self.unit_s,
            bounds=[(0.0, most) for most in self.most] + [(None, None)] * num_dims,
            method="highs",
        )
        assert answer.status == 0, answer.message
        weight = -np.asarray(answer.ineqlin.marginals)
        ends = np.cumsum([len(some) for some in active])
        height = float(self.problem.constant_K[0]) / self.unit_s - float(answer.fun)
        return height, np.asarray(answer.x[:num_prices]), np.split(weight, ends[:-1])
