"""Searches for the placement with the least predicted step time that fits in memory.

Simple placements (one frequency threshold for all tables) start the search, column generation
proposes plans of tables, a mixed-integer program selects one for each, and a descent changes one
at a time. This is a heuristic: no bound on the distance from the optimum is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from hotrec.cost_model.costs import Costs, World
from hotrec.cost_model.demand import Floats, TableDemand
from hotrec.cost_model.forms import BYTES_PER_FLOAT, BYTES_PER_ID, StepPrediction, Workload
from hotrec.cost_model.memory import (
    ROUTER_BYTES,
    cached_row_bytes,
    replica_row_bytes,
    shard_row_bytes,
)
from hotrec.cost_model.quantities import BYTES_PER_LENGTH, host_state_bytes, hot_cold_quantities
from hotrec.cost_model.step import StepModel, make_step_model
from hotrec.types import Exchange, Sharding, TablePlacement, Tier

Mask = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

# Letters of array shapes: T tables, J cuts between groups of equally frequent rows, M modes, K
# resources (seconds of computation, then of exposed communication by stage, then bytes by
# MEMORIES), P plans, F flags, D dimensions.
# Those that it chooses from; the user chooses Tier.CACHED.
TIERS = (Tier.DEVICE, Tier.HOST, Tier.HOST_CACHED)
MODES = tuple((exchange, tier) for exchange in Exchange for tier in TIERS)
# Pooled first, which needs no router; cached last.
SMALLEST_MODES = (3, 0, 4, 1, 5, 2)
MEMORIES = ("device_bytes", "host_bytes", "replica_bytes")
# Fixed costs of messages, which the tables of one dimension share.
FLAGS = ("cold_groups", "hot_groups", "pooled_groups")
NUM_THRESHOLDS = 10
MAX_ROUNDS = 20
MAX_SWEEPS = 5
MAX_NODES = 200
# A step counts as this much in the programs, which keeps the solver's tolerances (1e-7) harmless.
SCALE = 1e4
# Cost in steps of exceeding a memory by its whole size, in the linear program.
OVERFLOW_COST = 1e3
REL_GAP = 1e-4


class InfeasibleError(ValueError):
    """No placement fits the limits."""


@dataclass(frozen=True)
class Limits:
    """The memory and the exchanges that a placement may use.

    Device memory is not read for a CPU, where all memory is the host's. ``host_bytes`` is a rank's
    share of its host's memory, ``replica_bytes`` that for hot rows with their optimizer state.
    """

    device_bytes: float
    host_bytes: float
    replica_bytes: float | None = None  # no limit beyond the memory itself
    may_pool: bool = True  # whether whole tables may exchange pooled vectors


@dataclass(frozen=True)
class Choice:
    """The fastest placement that was found, its step, and what the mean rank does in it."""

    num_hot: Mapping[str, int]
    tables: Mapping[str, TablePlacement]
    is_hot_dense: bool
    prediction: StepPrediction
    quantities: Mapping[str, float]


def search_placement(
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
    """Searches for the fastest placement of these tables in TorchRec's pipeline.

    Args:
        hot_range: The smallest and largest number of hot rows of a table. A table that is absent
            may have any number.
        at: The quantities of a step near the best one. Measured collectives become lines at its
            message sizes (``make_step_model``).
        narrow_frac: Bytes of a value on the wire, as a fraction of those of a float32.

    Raises:
        InfeasibleError: If nothing fits. The message gives a budget that does.
        CostsError: If the costs do not include the link between hosts.
    """
    ranges = [(hot_range or {}).get(d.name, (0, d.num_rows)) for d in demands]
    found: list[tuple[float, bool, StepModel, list[_Plan]]] = []
    # One rank exchanges nothing, so both exchanges of hot rows are equal there.
    for is_hot_dense in (False, True)[: min(world.num_ranks, 2)]:
        model = make_step_model(
            costs, world, workload, is_hot_dense=is_hot_dense, at=at, narrow_frac=narrow_frac
        )
        problem = _Problem(demands, ranges, costs, world, workload, limits, model)
        plans = _search(problem, [entry[-1] for entry in found])
        found.append((float(problem.step_s(problem.total(plans))), is_hot_dense, model, plans))
    _, is_hot_dense, model, plans = min(found, key=lambda entry: entry[0])
    num_hot = {demands[p.table].name: p.num_hot for p in plans}
    tables = {demands[p.table].name: _placement(p, demands[p.table], world) for p in plans}
    quantities = hot_cold_quantities(demands, num_hot, tables, world, workload.batch_size)
    return Choice(num_hot, tables, is_hot_dense, model.predict(quantities), quantities)


@dataclass(frozen=True)
class _Plan:
    """The plan of one table; the most frequent rows are replicated."""

    table: int
    mode: int  # index in MODES
    num_hot: int
    num_held: int  # num_hot and the rows after them that a device cache holds


def _placement(plan: _Plan, demand: TableDemand, world: World) -> TablePlacement:
    exchange, tier = MODES[plan.mode]
    # TABLE_WISE rows move as much as ROW_WISE ones on the mean rank, so the choice is made by what
    # TorchRec can do: a pooled table lies on one rank, a tiny one cannot be cut.
    by_table = exchange is Exchange.POOLED or demand.num_rows < world.num_ranks
    sharding = Sharding.TABLE_WISE if by_table else Sharding.ROW_WISE
    frac = (plan.num_held - plan.num_hot) / demand.num_rows
    return TablePlacement(exchange, sharding, tier, frac if tier is Tier.HOST_CACHED else None)


# ------------------------------------------------------------------ what plans take


def _is_allowed(costs: Costs, limits: Limits, exchange: Exchange, tier: Tier) -> bool:
    """Whether the limits allow this mode and the costs include the kernels that it runs."""
    is_pooled = exchange is Exchange.POOLED
    if is_pooled and not limits.may_pool:
        return False
    if costs.device == "cpu":
        return tier is Tier.DEVICE
    read, update = ("pooled", "pooled_update") if is_pooled else ("read", "update")
    kernels = {
        Tier.DEVICE: (f"{read}_device", f"{update}_device"),
        Tier.HOST: (f"{read}_host", f"{update}_host"),
        Tier.HOST_CACHED: (f"{read}_hit", f"{read}_miss", f"{update}_hit"),
    }
    return all(name in costs.kernels for name in kernels[tier])


def _table_memory(
    demand: TableDemand, num_ranks: int, is_routed_on_device: bool
) -> dict[str, Floats]:
    """Returns the MEMORIES of a table in each tier, its router, and a hot and a cached row.

    They are those of the mean rank and agree with ``hotrec.cost_model.memory``, except that wholly
    hot tables keep their shards.
    """
    router = ROUTER_BYTES * demand.num_rows
    sizes = {
        "routed": np.array([router * is_routed_on_device, router, 0.0]),
        "replica": np.array([replica_row_bytes(demand), 0.0, demand.row_bytes]),
        "held": np.array([cached_row_bytes(demand) / num_ranks, 0.0, 0.0]),
    }
    for tier in TIERS:
        share = np.array([*shard_row_bytes(demand, tier), 0])
        sizes[tier.value] = share * demand.num_rows / num_ranks
    return sizes


class _Problem:
    """The coefficients of the tables' plans under one step model.

    Seconds and bytes are linear in sums over the first rows of a table, except that communication
    counts only as far as computation does not hide it, and that tables of one dimension share the
    fixed cost of a message.

    Attributes:
        constant_K, flags_FK: What every placement and what each of FLAGS takes.
        base_TMK: What a table takes in a mode with no row hot or cached.
        hot_TM4K, held_TM4K: What each unit of ``sums`` of the hot rows, and of the hot and cached
            rows, adds.
        cuts_TJ4: At each cut between groups, the rows before it, the sums of their q and Q, and
            their share of the table's lookups (``hotrec.cost_model.demand``).
        can_TM: The modes that are allowed and fit on a rank.
    """

    def __init__(
        self,
        demands: Sequence[TableDemand],
        ranges: Sequence[tuple[int, int]],
        costs: Costs,
        world: World,
        workload: Workload,
        limits: Limits,
        model: StepModel,
    ) -> None:
        self.demands, self.num_ranks = demands, world.num_ranks
        is_one_memory = costs.device == "cpu"
        device_bytes = math.inf if is_one_memory else limits.device_bytes
        replica_bytes = math.inf if limits.replica_bytes is None else limits.replica_bytes
        self.limits_3 = np.array([device_bytes, limits.host_bytes, replica_bytes], np.float64)
        weights, self.constant_K = _weigh(model)
        self.num_stages = self.constant_K.size - 1 - len(MEMORIES)
        self.flags_FK = np.array([weights[flag] for flag in FLAGS])
        self.low_T, self.high_T = np.array(ranges, np.int64).T
        self.cuts_TJ4 = _cut(demands, ranges)
        can_M = [_is_allowed(costs, limits, *mode) for mode in MODES]
        self.can_TM = np.tile(can_M, (len(demands), 1))
        self.bytes_T = np.array([d.num_rows * d.row_bytes for d in demands])
        for m, (exchange, tier) in enumerate(MODES):
            if exchange is Exchange.POOLED:  # a rank holds the whole table, none of it hot
                is_host = is_one_memory or tier is not Tier.DEVICE
                room = limits.host_bytes if is_host else limits.device_bytes
                self.can_TM[:, m] &= (self.bytes_T <= room) & (self.low_T == 0)
        dims, self.dim_T = np.unique([d.dim for d in demands], return_inverse=True)
        self.num_dims = len(dims)
        shape = (len(demands), len(MODES), 4, self.constant_K.size)
        self.base_TMK = np.zeros((*shape[:2], shape[3]))
        self.hot_TM4K, self.held_TM4K = np.zeros(shape), np.zeros(shape)
        for t, demand in enumerate(demands):
            self._add_table(t, demand, workload, is_one_memory, weights)

    def _add_table(
        self,
        t: int,
        demand: TableDemand,
        workload: Workload,
        is_one_memory: bool,
        weights: Mapping[str, Floats],
    ) -> None:
        nothing = np.zeros(self.constant_K.size)
        row, ranks = BYTES_PER_FLOAT * demand.dim, self.num_ranks
        num_ids = workload.batch_size * demand.lookups_per_sample
        num_bags = workload.batch_size * demand.num_columns

        def of(items: str, num_bytes: str) -> Floats:
            return np.asarray(weights.get(items, nothing) + row * weights.get(num_bytes, nothing))

        is_routed_on_device = not (workload.is_routed_by_loader or is_one_memory)
        size = {}
        for name, sizes in _table_memory(demand, ranks, is_routed_on_device).items():
            if is_one_memory:
                sizes[:2] = 0.0, sizes[0] + sizes[1]
            size[name] = np.concatenate([nothing[: -len(MEMORIES)], sizes])
        sent_ids = num_ids + num_bags * BYTES_PER_LENGTH / BYTES_PER_ID
        sent = sent_ids * weights.get("pooled_sent_ids", nothing)
        sent = sent + num_bags * row * weights.get("pooled_sent_bytes", nothing)
        state = host_state_bytes(demand) / ranks * weights.get("state_bytes_host", nothing)
        _, all_q, all_any, _ = self.cuts_TJ4[t, -1]
        for m, (exchange, tier) in enumerate(MODES):
            is_cached = tier is Tier.HOST_CACHED
            is_rows = exchange is Exchange.ROWS
            state_Q = nothing if tier is Tier.DEVICE else state
            base, hot, held = self.base_TMK[t, m], self.hot_TM4K[t, m], self.held_TM4K[t, m]
            base += size[tier.value] + state_Q * all_any
            items, num_bytes = ("rows", "bytes") if is_rows else ("pooled_ids", "pooled_bytes")
            hit, miss = (
                of(f"{items}_{name}", f"{num_bytes}_{name}")
                for name in (("hit", "miss") if is_cached else (tier.value, tier.value))
            )
            if is_cached:
                held[0] += size["held"]
            if is_rows:
                base += size["routed"] + num_ids * of("lookups", "lookup_bytes") + miss * all_q
                hot[0] += size["replica"] + of("replica_rows", "replica_bytes") - held[0]
                hot[1] += of("hot_rows", "hot_bytes") - hit
                hot[2] += of("union_rows", "union_bytes") - state_Q
                held[1] += hit - miss
            else:
                base += (ranks - 1) / ranks * sent + num_ids * miss
                held[3] += num_ids * (hit - miss)

    @cached_property
    def unit_s(self) -> float:
        """The seconds of some placement, to scale the programs by."""
        plans = [
            _Plan(t, int(modes.argmax()), int(self.low_T[t]), int(self.low_T[t]))
            for t, modes in enumerate(self.can_TM)
        ]
        return max(float(self.step_s(self.total(plans))), 1e-12)

    def sums(self, table: int, num_rows: npt.ArrayLike) -> Floats:
        """Returns the columns of ``cuts_TJ4`` for the hottest rows, groups pro rata."""
        cuts, at = self.cuts_TJ4[table], np.asarray(num_rows, np.float64)
        return np.stack([np.interp(at, cuts[:, 0], c) for c in cuts.T], axis=-1)

    def take(self, plan: _Plan) -> Floats:
        """Returns float64 (K,), what a plan takes without FLAGS."""
        at = plan.table, plan.mode
        hot, held = self.sums(plan.table, [plan.num_hot, plan.num_held])
        return np.asarray(self.base_TMK[at] + hot @ self.hot_TM4K[at] + held @ self.held_TM4K[at])

    def flags(self, plan: _Plan) -> tuple[bool, bool, bool]:
        """Returns which of FLAGS a plan raises."""
        if MODES[plan.mode][0] is Exchange.POOLED:
            return False, False, True
        return plan.num_hot < self.demands[plan.table].num_rows, plan.num_hot > 0, False

    def total(self, plans: Sequence[_Plan]) -> Floats:
        """Returns float64 (K,), what one plan for each table takes together."""
        used = np.zeros((self.num_dims, len(FLAGS)), bool)
        for plan in plans:
            used[self.dim_T[plan.table]] |= self.flags(plan)
        taken = self.constant_K + np.sum([self.take(plan) for plan in plans], axis=0)
        return np.asarray(taken + used.sum(axis=0) @ self.flags_FK)

    def step_s(self, taken: Floats) -> Floats:
        """Returns the step's seconds, resources along the last axis."""
        exposed = np.maximum(taken[..., 1 : 1 + self.num_stages], 0).sum(axis=-1)
        return np.asarray(taken[..., 0] + exposed)

    def fits(self, taken: Floats) -> Mask:
        """Returns whether the last axis is within the limits, up to rounding."""
        return np.asarray((taken[..., -len(MEMORIES) :] <= self.limits_3 * (1 + 1e-9)).all(axis=-1))

    def evaluate(self, plans: Sequence[_Plan]) -> float:
        """Returns the step's seconds, infinite if a plan is not allowed or does not fit."""
        if not all(self.can_TM[plan.table, plan.mode] for plan in plans):
            return math.inf
        taken = self.total(plans)
        return float(self.step_s(taken)) if self.fits(taken) else math.inf

    def cheapest(self, prices_K: Floats) -> Iterator[tuple[float, _Plan]]:
        """Yields the cheapest plan of each table for each combination of FLAGS, with its price.

        The combinations are: no hot row, all rows hot, some rows hot, pooled.
        """
        num_tables, every = len(self.demands), np.arange(len(self.demands))
        shape = (num_tables, 4)
        price, mode = np.full(shape, np.inf), np.zeros(shape, np.int64)
        hot, held = mode.copy(), mode.copy()
        rows = self.cuts_TJ4[:, :, 0].astype(np.int64)
        is_in = (rows >= self.low_T[:, None]) & (rows <= self.high_T[:, None])
        for m, (exchange, tier) in enumerate(MODES):
            can = self.can_TM[:, m]
            if not can.any():
                continue
            base = np.where(can, self.base_TMK[:, m] @ prices_K, np.inf)
            start, end = (
                (self.cuts_TJ4 @ (unit[:, m] @ prices_K)[:, :, None])[:, :, 0]
                for unit in (self.hot_TM4K, self.held_TM4K)
            )
            start = np.where(is_in, start, np.inf) + base[:, None]
            last = np.full(num_tables, rows.shape[1] - 1)
            if tier is Tier.HOST_CACHED:
                # The best hot rows before each cut, then the best cut after them: a cache holds
                # at least one group.
                until = np.minimum.accumulate(start, axis=1)[:, :-1]
                some = 1 + (until + end[:, 1:]).argmin(axis=1)
                before = np.arange(rows.shape[1]) < some[:, None]
                first = np.where(before, start, np.inf).argmin(axis=1)
                cold = 1 + end[:, 1:].argmin(axis=1)
            else:
                some = first = start.argmin(axis=1)
                cold = np.zeros_like(last)
            pairs = [(0 * last, cold), (last, last), (first, some)]
            is_pooled = exchange is Exchange.POOLED
            for need, (h, c) in [(3, pairs[0])] if is_pooled else enumerate(pairs):
                values = start[every, h] + end[every, c]
                is_less = values < price[:, need]
                price[is_less, need], mode[is_less, need] = values[is_less], m
                hot[is_less, need] = rows[every, h][is_less]
                held[is_less, need] = rows[every, c][is_less]
        for t, n in np.argwhere(np.isfinite(price)):
            plan = _Plan(int(t), int(mode[t, n]), int(hot[t, n]), int(held[t, n]))
            yield float(price[t, n]), plan


def _weigh(model: StepModel) -> tuple[dict[str, Floats], Floats]:
    """Returns what one of each quantity takes, float64 (K,), and what every step takes."""
    stages = [n for n, form in model.stages.items() if form.wire.terms or form.wire.constant]
    size = 1 + len(stages) + len(MEMORIES)
    constant = np.zeros(size)
    weights: dict[str, Floats] = {flag: np.zeros(size) for flag in FLAGS}
    for name, form in model.stages.items():
        parts = [(0, form.compute, 1.0)]
        if name in stages:
            k = 1 + stages.index(name)
            parts += [(k, form.wire, 1.0), (k, form.cover, -model.overlap)]
        for k, part, factor in parts:
            constant[k] += factor * part.constant
            for quantity, coefficient in part.terms.items():
                weights.setdefault(quantity, np.zeros(size))[k] += factor * coefficient
    return weights, constant


def _cut(demands: Sequence[TableDemand], ranges: Sequence[tuple[int, int]]) -> Floats:
    """Returns ``cuts_TJ4``: sums at the cuts between groups and at the ends of the ranges."""
    tables = []
    for demand, ends in zip(demands, ranges, strict=True):
        rows = np.asarray(demand.rows_G, np.float64)
        values = [np.ones(rows.size), demand.by_rank_G, demand.by_any_G, demand.probs_G]
        sums = np.concatenate([np.zeros((1, 4)), np.cumsum(rows[:, None] * np.stack(values, 1), 0)])
        if sums[-1, 0] < demand.num_rows:  # rows that the profile never saw
            sums = np.concatenate([sums, sums[-1:]])
            sums[-1, 0] = demand.num_rows
        # A table that is never looked up misses nothing.
        sums[:, 3] = sums[:, 3] / sums[-1, 3] if sums[-1, 3] > 0 else 1.0
        at = np.union1d(sums[:, 0], ends)
        tables.append(np.stack([np.interp(at, sums[:, 0], column) for column in sums.T], axis=1))
    num_cuts = max(map(len, tables))
    return np.array([np.pad(t, ((0, num_cuts - len(t)), (0, 0)), mode="edge") for t in tables])


# ------------------------------------------------------------------ the search


def _search(problem: _Problem, others: Sequence[list[_Plan]]) -> list[_Plan]:
    """Returns the best plan found for every table; ``others`` are more placements to start from.

    Raises:
        InfeasibleError: If nothing fits.
    """
    best = min((*_simple_placements(problem), *others), key=problem.evaluate)
    if math.isinf(problem.evaluate(best)):
        best = _split(problem)
    best = _descend(problem, best)
    chosen = _generate(problem, best).choose(problem.evaluate(best))
    if chosen is not None:
        # The program's plans are far apart in a large table, so memory is shared out again among
        # the modes that it chose.
        fixed = copy(problem)
        fixed.can_TM = np.array([p.mode for p in chosen])[:, None] == np.arange(len(MODES))
        blended = _generate(fixed, chosen).blend()
        chosen = min(chosen, blended, key=problem.evaluate)
        if math.isfinite(problem.evaluate(chosen)):
            best = min(best, _descend(problem, chosen), key=problem.evaluate)
    return _prefer_device(problem, best)


def _split(problem: _Problem) -> list[_Plan]:
    """Splits whole tables over the tiers so that they take least host memory.

    Raises:
        InfeasibleError: If they do not fit.
    """
    pairs = [_smallest_plans(problem, t) for t in range(len(problem.demands))]
    # float64 (T, 2, 3): on the device and on the host, by MEMORIES.
    sizes = np.array([[problem.take(p)[-len(MEMORIES) :] for p in pair] for pair in pairs])
    limits, which = problem.limits_3, MEMORIES.index("host_bytes")
    total = max(float(sizes.sum()), 1.0)
    rows = np.concatenate([(sizes[:, 0] - sizes[:, 1]).T / total, np.zeros((3, 1))], axis=1)
    rows[which, -1] = -1.0  # the bytes by which host memory is exceeded
    answer = milp(
        np.append(np.zeros(len(pairs)), 1.0),
        integrality=np.append(np.ones(len(pairs)), 0),
        bounds=Bounds(0, np.append(np.ones(len(pairs)), np.inf)),
        constraints=LinearConstraint(
            rows, ub=np.minimum((limits - sizes[:, 1].sum(axis=0)) / total, 1e3)
        ),
        options={"mip_rel_gap": 1e-6, "node_limit": 10_000},
    )
    need = sizes[:, 1].sum(axis=0)
    if answer.x is None:
        name = MEMORIES[2 if need[2] > limits[2] else 0]
    else:
        side = np.where(answer.x[:-1] > 0.5, 0, 1)
        need, name = sizes[np.arange(len(pairs)), side].sum(axis=0), MEMORIES[which]
        plans = [pair[i] for pair, i in zip(pairs, side, strict=True)]
        if math.isfinite(problem.evaluate(plans)):
            return plans
    i = MEMORIES.index(name)
    raise InfeasibleError(
        f"{name}: expected at least {math.ceil(need[i])} on each of {problem.num_ranks} ranks for "
        f"{len(pairs)} tables, got {limits[i]:.0f}. Raise it, fix fewer rows hot, or use more "
        "ranks."
    )


def _smallest_plans(problem: _Problem, table: int) -> tuple[_Plan, _Plan]:
    """Returns the plans that take least memory on the device and on the host.

    Where only one of them is allowed it is both.
    """
    sides: tuple[list[_Plan], list[_Plan]] = ([], [])
    low, num_rows = int(problem.low_T[table]), problem.demands[table].num_rows
    for m in SMALLEST_MODES:
        if problem.can_TM[table, m]:
            tier = MODES[m][1]
            held = low + int(tier is Tier.HOST_CACHED and low < num_rows)
            sides[tier is not Tier.DEVICE].append(_Plan(table, m, low, held))
    return (sides[0] or sides[1])[0], (sides[1] or sides[0])[0]


def _generate(problem: _Problem, plans: Sequence[_Plan]) -> _Program:
    """Returns a program with the plans that are worth combining, these among them."""
    program = _Program(problem)
    program.add(plans)
    for _ in range(MAX_ROUNDS):
        if not program.add(program.price()):
            break
    return program


def _simple_placements(problem: _Problem) -> Iterator[list[_Plan]]:
    """Yields placements with all tables in one mode and one threshold of lookups per byte."""
    demands, low, high = problem.demands, problem.low_T, problem.high_T
    density = [d.probs_G * d.lookups_per_sample / d.row_bytes for d in demands]
    every = np.concatenate([values[values > 0] for values in density])
    spread = np.quantile(every, np.linspace(0, 1, NUM_THRESHOLDS)) if every.size else []
    sizes = [[0] * len(demands), [d.num_rows for d in demands]]
    for threshold in spread:
        hot = zip(demands, density, strict=True)
        sizes.append([int(d.rows_G[values >= threshold].sum()) for d, values in hot])
    for m, (exchange, tier) in enumerate(MODES):
        if tier is not Tier.HOST_CACHED:
            for rows in sizes[:1] if exchange is Exchange.POOLED else sizes:
                plans = enumerate(np.clip(rows, low, high).tolist())
                yield [_Plan(t, m, n, n) for t, n in plans]


class _Program:
    """The linear and mixed-integer program over a growing set of plans (Dantzig and Wolfe 1960).

    It minimises the step over the shares of the plans, which add up to 1 for each table, the
    exposed communication of each stage, the FLAGS of each dimension, and, in the relaxation, the
    overflow of each memory.
    """

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self.taken: dict[_Plan, Floats] = {}
        self.scale = SCALE / problem.unit_s
        limits_K = np.concatenate([np.zeros(1 + problem.num_stages), problem.limits_3])
        # The resources with a constraint, and their slack: exposed seconds, overflow of memory.
        self.bounded = 1 + np.flatnonzero(np.isfinite(limits_K[1:]))
        is_memory = self.bounded > problem.num_stages
        # Memories are scaled as seconds are: a rounding error of the solver must still fit.
        sizes = SCALE / np.maximum(limits_K[self.bounded], 1.0)
        self.factors = np.where(is_memory, sizes, self.scale)
        self.ends = (limits_K - problem.constant_K)[self.bounded] * self.factors
        self.slack_costs = np.where(is_memory, OVERFLOW_COST, 1.0)

    def add(self, plans: Sequence[_Plan]) -> int:
        """Adds plans and returns how many of them are new."""
        new = [plan for plan in plans if plan not in self.taken]
        self.taken |= {plan: self.problem.take(plan) for plan in new}
        return len(new)

    def price(self) -> list[_Plan]:
        """Returns plans that may improve the relaxation, none where it is within REL_GAP."""
        value, prices_K, shares_T, flags_TF = self.relax()
        plans, gains = [], np.zeros(len(self.problem.demands))
        for price, plan in self.problem.cheapest(prices_K):
            gain = shares_T[plan.table] - price - flags_TF[plan.table] @ self.problem.flags(plan)
            gains[plan.table] = max(gains[plan.table], gain)
            plans.append(plan)
        # The relaxation over all plans is at most the sum lower. Plans without a gain are added
        # too: the relaxation charges a message to any one of the tables that share it, so the
        # others' plans that do without it would come one table a round.
        return plans if gains.sum() > REL_GAP * abs(value) else []

    def relax(self) -> tuple[float, Floats, Floats, Floats]:
        """Returns the relaxation's value and the prices of resources, of tables, and of FLAGS."""
        problem = self.problem
        costs, upper, ends, equal = self._arrays()
        answer = linprog(costs, A_ub=upper, b_ub=ends, A_eq=equal, b_eq=np.ones(equal.shape[0]))
        assert answer.status == 0, answer.message
        self.shares = answer.x[: len(self.taken)]
        duals = -np.asarray(answer.ineqlin.marginals)
        prices_K = np.zeros(problem.constant_K.size)
        prices_K[0] = self.scale
        prices_K[self.bounded] = duals[: self.bounded.size] * self.factors
        flags_TF = duals[self.bounded.size :].reshape(-1, len(FLAGS))
        return float(answer.fun), prices_K, np.asarray(answer.eqlin.marginals), flags_TF

    def choose(self, most_s: float) -> list[_Plan] | None:
        """Returns the best whole plans below ``most_s``, or None if the solver finds none."""
        problem = self.problem
        value, prices_K, shares_T, flags_TF = self.relax()
        # A plan whose reduced cost exceeds the gap cannot be in a better placement.
        gap = (most_s - problem.constant_K[0]) * self.scale - value
        reduced = [
            prices_K @ taken - shares_T[plan.table] + flags_TF[plan.table] @ problem.flags(plan)
            for plan, taken in self.taken.items()
        ]
        self.taken = {
            plan: taken
            for (plan, taken), price in zip(self.taken.items(), reduced, strict=True)
            if price <= gap + 1e-6 * SCALE
        }
        costs, upper, ends, equal = self._arrays()
        slack = slice(len(self.taken), len(self.taken) + self.bounded.size)
        is_whole, highs = np.ones(costs.size), np.ones(costs.size)
        is_whole[slack] = 0
        highs[slack] = np.where(self.slack_costs == OVERFLOW_COST, 0.0, np.inf)
        answer = milp(
            costs,
            integrality=is_whole,
            bounds=Bounds(0.0, highs),
            constraints=[LinearConstraint(upper, ub=ends), LinearConstraint(equal, 1.0, 1.0)],
            options={"mip_rel_gap": REL_GAP, "node_limit": MAX_NODES},
        )
        if answer.x is None:
            return None
        chosen = [p for p, share in zip(self.taken, answer.x, strict=False) if share > 0.5]
        return sorted(chosen, key=lambda plan: plan.table)

    def blend(self) -> list[_Plan]:
        """Returns the mean of each table's plans, all of one mode, by their shares."""
        self.relax()
        mode_T = np.zeros(len(self.problem.demands), np.int64)
        rows_T2 = np.zeros((mode_T.size, 2))
        for plan, share in zip(self.taken, self.shares, strict=True):
            mode_T[plan.table] = plan.mode
            rows_T2[plan.table] += share * np.array([plan.num_hot, plan.num_held])
        rows_T2 = np.floor(rows_T2 + 1e-6).astype(np.int64)
        return [_Plan(t, int(m), *rows_T2[t].tolist()) for t, m in enumerate(mode_T)]

    def _arrays(self) -> tuple[Floats, sparse.csr_array, Floats, sparse.csr_array]:
        """Returns the costs, the upper-bounded rows with their ends, and the sums of shares.

        Columns: plans, slack of bounded resources, flags by dimension.
        """
        problem, num_plans, num_tables = self.problem, len(self.taken), len(self.problem.demands)
        taken_PK = np.array(list(self.taken.values()))
        table_P = np.array([plan.table for plan in self.taken])
        flags_ZK = np.tile(problem.flags_FK, (problem.num_dims, 1))
        plan_i, flag_i = np.nonzero([problem.flags(plan) for plan in self.taken])
        rows = table_P[plan_i] * len(FLAGS) + flag_i
        shape = (num_tables * len(FLAGS), num_plans)
        raised = sparse.coo_array((np.ones(rows.size), (rows, plan_i)), shape)
        is_of_dim = np.arange(problem.num_dims) == problem.dim_T[:, None]
        of_plans, of_flags = (
            k[:, self.bounded].T * self.factors[:, None] for k in (taken_PK, flags_ZK)
        )
        upper = sparse.block_array(
            [
                [of_plans, -sparse.eye_array(self.bounded.size), of_flags],
                [raised, None, -sparse.kron(is_of_dim, sparse.eye_array(len(FLAGS)))],
            ],
            format="csr",
        )
        ends = np.concatenate([self.ends, np.zeros(shape[0])])
        seconds = (taken_PK[:, 0] * self.scale, self.slack_costs, flags_ZK[:, 0] * self.scale)
        costs = np.concatenate(seconds)
        ones = np.ones(num_plans), (table_P, np.arange(num_plans))
        return costs, upper, ends, sparse.csr_array(ones, (num_tables, costs.size))


def _descend(problem: _Problem, plans: Sequence[_Plan]) -> list[_Plan]:
    """Improves one table at a time, all else equal, until no change helps."""
    plans = list(plans)
    taken = [problem.take(plan) for plan in plans]
    used_DF = np.zeros((problem.num_dims, len(FLAGS)), np.int64)
    for plan in plans:
        used_DF[problem.dim_T[plan.table]] += problem.flags(plan)
    rest_K = problem.constant_K + np.sum(taken, axis=0)
    before = problem.evaluate(plans)
    for _ in range(MAX_SWEEPS):
        for t, old in enumerate(plans):
            used_DF[problem.dim_T[t]] -= problem.flags(old)
            rest_K -= taken[t]
            plans[t] = _best_plan(problem, old, rest_K, used_DF)
            taken[t] = problem.take(plans[t])
            used_DF[problem.dim_T[t]] += problem.flags(plans[t])
            rest_K += taken[t]
        after = problem.evaluate(plans)
        if after >= before * (1 - REL_GAP):
            break
        before = after
    return plans


def _best_plan(problem: _Problem, old: _Plan, rest_K: Floats, used_DF: Integers) -> _Plan:
    """Returns the best plan of a table, all others as they are.

    They take ``rest_K`` without FLAGS; ``used_DF`` of them raise each flag.
    """
    t, num_rows = old.table, problem.demands[old.table].num_rows
    first = np.array([[old.mode], [old.num_hot], [old.num_held]])
    others = [_candidates(problem, old, rest_K, int(m)) for m in np.flatnonzero(problem.can_TM[t])]
    modes_P, hot_P, held_P = np.concatenate([first, *others], axis=1)
    is_pooled = modes_P >= MODES.index((Exchange.POOLED, Tier.DEVICE))
    flags_PF = np.stack([~is_pooled & (hot_P < num_rows), hot_P > 0, is_pooled], axis=1)
    used_PDF = np.repeat(used_DF[None] > 0, len(modes_P), axis=0)
    used_PDF[:, problem.dim_T[t]] |= flags_PF
    taken_PK = rest_K + used_PDF.sum(axis=1) @ problem.flags_FK + problem.base_TMK[t, modes_P]
    for num_P, unit_M4K in ((hot_P, problem.hot_TM4K[t]), (held_P, problem.held_TM4K[t])):
        taken_PK += np.einsum("pi,pik->pk", problem.sums(t, num_P), unit_M4K[modes_P])
    steps_s = np.where(problem.fits(taken_PK), problem.step_s(taken_PK), np.inf)
    best = int(steps_s.argmin())  # the old plan comes first, so that ties change nothing
    return _Plan(t, int(modes_P[best]), int(hot_P[best]), int(held_P[best]))


def _candidates(problem: _Problem, old: _Plan, rest_K: Floats, mode: int) -> Integers:
    """Returns plans of the table in a mode, int64 (3, P): modes, hot rows, held rows.

    One of the two numbers varies over all cuts, and up to what memory can still hold.
    """
    t, num_rows = old.table, problem.demands[old.table].num_rows
    exchange, tier = MODES[mode]
    low, high = int(problem.low_T[t]), int(problem.high_T[t])
    cuts = np.unique(problem.cuts_TJ4[t, :, 0].astype(np.int64))
    free = problem.limits_3 - (rest_K + problem.base_TMK[t, mode])[-len(MEMORIES) :]
    hot_bytes, held_bytes = (
        unit[t, mode, 0, -len(MEMORIES) :] for unit in (problem.hot_TM4K, problem.held_TM4K)
    )

    def fill(free_3: Floats, row_bytes: Floats) -> int:
        """Rows for which there is memory."""
        room = free_3[row_bytes > 0] / row_bytes[row_bytes > 0]
        return int(np.clip(np.floor(room.min(initial=num_rows)), 0, num_rows))

    hots = np.append(cuts, fill(free, hot_bytes + held_bytes))
    hots = np.array([0]) if exchange is Exchange.POOLED else hots[(hots >= low) & (hots <= high)]
    if tier is not Tier.HOST_CACHED:
        pairs = np.stack([hots, hots])
    else:
        parts = [np.stack([hots, np.full_like(hots, old.num_held)])]
        for hot in {int(np.clip(old.num_hot, low, high)) * (mode < 3), low}:
            held = np.append(cuts, [hot + 1, fill(free - hot * hot_bytes, held_bytes)])
            parts.append(np.stack([np.full_like(held, hot), held]))
        pairs = np.concatenate(parts, axis=1)
        # A cache holds at least one row of a table that is not wholly hot.
        pairs = pairs[:, pairs[1] >= np.minimum(pairs[0] + 1, num_rows)]
    return np.concatenate([np.full((1, pairs.shape[1]), mode), pairs])


def _prefer_device(problem: _Problem, plans: Sequence[_Plan]) -> list[_Plan]:
    """Moves as many tables to device memory as the same step allows, smallest first.

    A table whose rows are all hot, or whose work is hidden, takes as long in any tier.
    """
    plans = list(plans)
    taken, step_s = problem.total(plans), problem.evaluate(plans)
    for t in sorted(range(len(plans)), key=lambda t: problem.bytes_T[t]):
        old = plans[t]
        exchange, tier = MODES[old.mode]
        mode = MODES.index((exchange, Tier.DEVICE))
        if tier is not Tier.DEVICE and problem.can_TM[t, mode]:
            new = _Plan(t, mode, old.num_hot, old.num_hot)
            changed = taken + problem.take(new) - problem.take(old)
            if problem.fits(changed) and problem.step_s(changed) <= step_s:
                plans[t], taken = new, changed
    return plans
