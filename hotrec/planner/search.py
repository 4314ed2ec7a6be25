"""Searches for the placement with the least predicted step time that fits in memory.

Simple placements (one frequency threshold for all tables) start the search. A descent changes one
table at a time, and a mixed-integer program shares out memory between all of them. This is a
heuristic: no bound on the distance from the optimum is computed.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp

from hotrec.cost_model.costs import Costs, World
from hotrec.cost_model.demand import Floats, TableDemand
from hotrec.cost_model.forms import (
    BYTES_PER_FLOAT,
    BYTES_PER_ID,
    StepPrediction,
    Workload,
)
from hotrec.cost_model.memory import (
    ROUTER_BYTES,
    cached_row_bytes,
    replica_row_bytes,
    shard_row_bytes,
)
from hotrec.cost_model.quantities import BYTES_PER_LENGTH, host_state_bytes, hot_cold_quantities
from hotrec.cost_model.step import StepModel, make_step_model
from hotrec.types import Exchange, PipelineSpec, Sharding, TablePlacement, Tier, WireType

Mask = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

# Letters of array shapes: T tables, J cuts between groups of equally frequent rows, M modes, K
# resources (seconds of computation, then of exposed communication by stage, then bytes by
# MEMORIES), P plans, F flags, D dimensions, Q prices.
# Those that it chooses from; the user chooses Tier.CACHED.
TIERS = (Tier.DEVICE, Tier.HOST, Tier.HOST_CACHED)
MODES = tuple((exchange, tier) for exchange in Exchange for tier in TIERS)
FIRST_POOLED = MODES.index((Exchange.POOLED, Tier.DEVICE))
# Pooled first, which needs no router; cached last.
SMALLEST_MODES = (3, 0, 4, 1, 5, 2)
MEMORIES = ("device_bytes", "host_bytes", "replica_bytes")
# Fixed costs of messages, which the tables of one dimension share.
FLAGS = ("cold_groups", "hot_groups", "pooled_groups")
NUM_THRESHOLDS = 10
MAX_SWEEPS = 5
# Programs solved one after another, and the prices of a memory in each: from PRICES[0] to PRICES[1]
# steps for all of it.
NUM_PROGRAMS, NUM_PRICES, PRICES = 3, 8, (1e-2, 1e2)
MAX_NODES = 200
# A step counts as this much in the program, which keeps the solver's tolerances (1e-7) harmless.
SCALE = 1e4
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
    wire: WireType = WireType.fp32,
) -> Choice:
    """Searches for the fastest placement of these tables in TorchRec's pipeline.

    Args:
        hot_range: The smallest and largest number of hot rows of a table. A table that is absent
            may have any number.
        at: The quantities of a step near the best one. Measured collectives become lines at its
            message sizes (``make_step_model``).
        wire: Type of rows and gradients on the wire, as in ``PipelineSpec``.

    Raises:
        InfeasibleError: If nothing fits. The message gives a budget that does.
        CostsError: If the costs do not include the link between hosts.
    """
    ranges = [(hot_range or {}).get(d.name, (0, d.num_rows)) for d in demands]
    found: list[tuple[float, bool, StepModel, list[_Plan]]] = []
    # One rank exchanges nothing, so both exchanges of hot rows are equal there.
    for is_hot_dense in (False, True)[: min(world.num_ranks, 2)]:
        model = make_step_model(
            costs,
            world,
            workload,
            pipeline=PipelineSpec(wire=wire),
            is_hot_dense=is_hot_dense,
            at=at,
        )
        problem = _Problem(demands, ranges, costs, world, workload, limits, model)
        plans = _search(problem, [entry[-1] for entry in found])
        found.append((float(problem.step_s(problem.total(plans))), is_hot_dense, model, plans))
    _, is_hot_dense, model, plans = min(found, key=lambda entry: entry[0])
    num_hot = {demands[p.table].name: p.num_hot for p in plans}
    tables = {demands[p.table].name: _placement(p, demands[p.table], world) for p in plans}
    quantities = hot_cold_quantities(demands, num_hot, tables, world, workload.batch_size)
    return Choice(num_hot, tables, is_hot_dense, model.predict(quantities), quantities)


class _Plan(NamedTuple):
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
        """The seconds of some placement, to scale the program by."""
        plans = [
            _Plan(t, int(modes.argmax()), int(self.low_T[t]), int(self.low_T[t]))
            for t, modes in enumerate(self.can_TM)
        ]
        return max(float(self.step_s(self.total(plans))), 1e-12)

    def sums(self, table: int, num_rows: npt.ArrayLike) -> Floats:
        """Returns the columns of ``cuts_TJ4`` for the hottest rows, groups pro rata."""
        cuts, at = self.cuts_TJ4[table], np.asarray(num_rows, np.float64)
        return np.stack([np.interp(at, cuts[:, 0], c) for c in cuts.T], axis=-1)

    def take(
        self, table: int, mode: Integers | int, num_hot: Integers | int, num_held: Integers | int
    ) -> Floats:
        """Returns float64 (..., K), what plans of a table take without FLAGS."""
        taken = self.base_TMK[table][mode]
        for num_rows, unit in ((num_hot, self.hot_TM4K), (num_held, self.held_TM4K)):
            rows = self.sums(table, num_rows)[..., None, :]
            taken = taken + (rows @ unit[table][mode])[..., 0, :]
        return np.asarray(taken)

    def flags(self, table: int, mode: Integers | int, num_hot: Integers | int) -> Mask:
        """Returns bool (..., F), which of FLAGS plans of a table raise."""
        is_pooled, hot = np.asarray(mode) >= FIRST_POOLED, np.asarray(num_hot)
        is_partly_cold = ~is_pooled & (hot < self.demands[table].num_rows)
        return np.stack([is_partly_cold, hot > 0, is_pooled], axis=-1)

    def total(self, plans: Sequence[_Plan]) -> Floats:
        """Returns float64 (K,), what one plan for each table takes together."""
        used = np.zeros((self.num_dims, len(FLAGS)), bool)
        for plan in plans:
            used[self.dim_T[plan.table]] |= self.flags(*plan[:3])
        taken = self.constant_K + np.sum([self.take(*plan) for plan in plans], axis=0)
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
    for number in range(NUM_PROGRAMS):
        combined = _combine(problem, best, number / NUM_PROGRAMS)
        if combined is None:
            break
        before, best = best, min(best, _descend(problem, combined), key=problem.evaluate)
        if problem.evaluate(best) >= problem.evaluate(before) * (1 - REL_GAP):
            break
    return _prefer_device(problem, best)


def _split(problem: _Problem) -> list[_Plan]:
    """Splits whole tables over the tiers so that they take least host memory.

    Raises:
        InfeasibleError: If they do not fit.
    """
    pairs = [_smallest_plans(problem, t) for t in range(len(problem.demands))]
    # float64 (T, 2, 3): on the device and on the host, by MEMORIES.
    sizes = np.array([[problem.take(*p)[-len(MEMORIES) :] for p in pair] for pair in pairs])
    limits, which = problem.limits_3, MEMORIES.index("host_bytes")
    total = max(float(sizes.sum()), 1.0)
    rows = np.concatenate([(sizes[:, 0] - sizes[:, 1]).T / total, np.zeros((3, 1))], axis=1)
    rows[which, -1] = -1.0  # the bytes by which host memory is exceeded
    answer = _solve(
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


def _combine(problem: _Problem, around: Sequence[_Plan], shift: float) -> list[_Plan] | None:
    """Returns the best of the plans worth trying for all tables, None if the solver finds none.

    A mixed-integer program over the plans, the exposed communication of each stage, and the FLAGS
    of each dimension. ``shift`` is that of ``_prices``.
    """
    prices_KQ = _prices(problem, around, shift)
    plans = [plan for old in around for plan in _worth_trying(problem, old, prices_KQ)]
    taken_PK = np.array([problem.take(*plan) for plan in plans])
    flags_ZK = np.tile(problem.flags_FK, (problem.num_dims, 1))
    num_plans, num_flags = len(plans), len(flags_ZK)
    limits_K = np.concatenate([np.zeros(1 + problem.num_stages), problem.limits_3])
    bounded = 1 + np.flatnonzero(np.isfinite(limits_K[1:]))
    is_stage = bounded <= problem.num_stages
    # Memories are scaled as seconds are: a rounding error of the solver must still fit.
    scale = SCALE / problem.unit_s
    factors = np.where(is_stage, scale, SCALE / np.maximum(limits_K[bounded], 1.0))
    of_plans, of_flags = (k[:, bounded].T * factors[:, None] for k in (taken_PK, flags_ZK))
    exposed = np.eye(bounded.size)[:, is_stage]
    # The shares of a table's plans with a flag, which is that of its dimension.
    table_P = np.array([plan.table for plan in plans])
    plan_i, flag_i = np.nonzero([problem.flags(*plan[:3]) for plan in plans])
    shape = (len(around) * len(FLAGS), num_plans)
    rows = table_P[plan_i] * len(FLAGS) + flag_i
    raised = sparse.coo_array((np.ones(rows.size), (rows, plan_i)), shape)
    is_of_dim = np.arange(problem.num_dims) == problem.dim_T[:, None]
    flags = sparse.kron(is_of_dim, sparse.eye_array(len(FLAGS)))
    upper = sparse.block_array(
        [[of_plans, -exposed, of_flags], [raised, None, -flags]], format="csr"
    )
    ends = np.append((limits_K - problem.constant_K)[bounded] * factors, np.zeros(shape[0]))
    seconds = (taken_PK[:, 0] * scale, np.ones(exposed.shape[1]), flags_ZK[:, 0] * scale)
    costs = np.concatenate(seconds)
    at = np.arange(costs.size)
    most = np.where((at < num_plans) | (at >= costs.size - num_flags), 1.0, np.inf)
    ones = np.ones(num_plans), (table_P, np.arange(num_plans))
    shares = sparse.csr_array(ones, (len(around), costs.size))
    answer = _solve(
        costs,
        integrality=at < num_plans,
        bounds=Bounds(0.0, most),
        constraints=[LinearConstraint(upper, ub=ends), LinearConstraint(shares, 1.0, 1.0)],
        options={"mip_rel_gap": REL_GAP, "node_limit": MAX_NODES, "presolve": False},
    )
    if answer.x is None:
        return None
    return [plan for plan, share in zip(plans, answer.x, strict=False) if share > 0.5]


def _solve(costs: Floats, **problem: Any) -> OptimizeResult:
    """``milp``, silent: HiGHS prints lines to standard output that no option turns off.

    There a command prints its result, and nothing else.
    """
    if sys.stdout is None:  # closed by whoever started the process
        return milp(costs, **problem)
    sys.stdout.flush()
    standard_output = os.dup(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    try:
        return milp(costs, **problem)
    finally:
        ctypes.CDLL(None).fflush(None)  # what C buffers
        os.dup2(standard_output, 1)
        os.close(standard_output)


def _prices(problem: _Problem, around: Sequence[_Plan], shift: float) -> Floats:
    """Returns prices of the resources to try, float64 (K, Q).

    Communication costs nothing, all its seconds, or those of the stages that expose some in these
    plans; a memory nothing or one of up to NUM_PRICES. ``shift`` from 0 to 1 moves these by one.
    """
    exposed = problem.total(around)[1 : 1 + problem.num_stages] > 0
    stages = np.unique([exposed & False, exposed | True, exposed], axis=0).astype(np.float64)
    # Combinations of three memories are many; the programs' shifts make up for fewer prices.
    num_prices = NUM_PRICES // 2 if np.isfinite(problem.limits_3).all() else NUM_PRICES
    ratio = (PRICES[1] / PRICES[0]) ** (1 / num_prices)
    grid = np.append(0.0, PRICES[0] * ratio ** (np.arange(num_prices) + shift))
    memories = np.meshgrid(*(grid if math.isfinite(n) else [0.0] for n in problem.limits_3))
    of_memory = np.stack(memories).reshape(len(MEMORIES), -1)
    of_memory *= problem.unit_s / np.maximum(problem.limits_3, 1.0)[:, None]
    of_stage = np.repeat(stages.T, of_memory.shape[1], axis=1)
    seconds = np.ones((1, of_stage.shape[1]))
    return np.concatenate([seconds, of_stage, np.tile(of_memory, len(stages))])


def _worth_trying(problem: _Problem, old: _Plan, prices_KQ: Floats) -> list[_Plan]:
    """Returns ``old`` and the plans of its table that are cheapest at some prices.

    They are the cheapest of those that raise the same FLAGS, whose cost the tables share.
    """
    plans_3P = _candidates(problem, old, problem.constant_K)
    prices_PQ = problem.take(old.table, *plans_3P) @ prices_KQ
    kind_P = problem.flags(old.table, *plans_3P[:2]) @ (1 << np.arange(len(FLAGS)))
    found = {old: None}
    for kind in np.unique(kind_P):
        of_kind = np.flatnonzero(kind_P == kind)
        for at in np.unique(of_kind[prices_PQ[of_kind].argmin(axis=0)]):
            found[_Plan(old.table, *plans_3P[:, at].tolist())] = None
    return list(found)


def _descend(problem: _Problem, plans: Sequence[_Plan]) -> list[_Plan]:
    """Improves one table at a time, all else equal, until no change helps."""
    plans = list(plans)
    taken = [problem.take(*plan) for plan in plans]
    used_DF = np.zeros((problem.num_dims, len(FLAGS)), np.int64)
    for plan in plans:
        used_DF[problem.dim_T[plan.table]] += problem.flags(*plan[:3])
    rest_K = problem.constant_K + np.sum(taken, axis=0)
    before = problem.evaluate(plans)
    for _ in range(MAX_SWEEPS):
        for t, old in enumerate(plans):
            used_DF[problem.dim_T[t]] -= problem.flags(*old[:3])
            rest_K -= taken[t]
            plans[t] = _best_plan(problem, old, rest_K, used_DF)
            taken[t] = problem.take(*plans[t])
            used_DF[problem.dim_T[t]] += problem.flags(*plans[t][:3])
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
    t = old.table
    # The old plan comes first, so that ties change nothing.
    plans_3P = np.insert(_candidates(problem, old, rest_K), 0, old[1:], axis=1)
    used_PDF = np.repeat(used_DF[None] > 0, plans_3P.shape[1], axis=0)
    used_PDF[:, problem.dim_T[t]] |= problem.flags(t, *plans_3P[:2])
    taken_PK = rest_K + used_PDF.sum(axis=1) @ problem.flags_FK + problem.take(t, *plans_3P)
    steps_s = np.where(problem.fits(taken_PK), problem.step_s(taken_PK), np.inf)
    return _Plan(t, *plans_3P[:, steps_s.argmin()].tolist())


def _candidates(problem: _Problem, old: _Plan, rest_K: Floats) -> Integers:
    """Returns plans of a table, int64 (3, P): modes, hot rows, held rows.

    One of the two numbers varies over all cuts, and up to what memory can still hold.
    """
    modes = np.flatnonzero(problem.can_TM[old.table]).tolist()
    return np.concatenate([_of_mode(problem, old, rest_K, mode) for mode in modes], axis=1)


def _of_mode(problem: _Problem, old: _Plan, rest_K: Floats, mode: int) -> Integers:
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
        for hot in {int(np.clip(old.num_hot, low, high)) * (mode < FIRST_POOLED), low}:
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
            changed = taken + problem.take(*new) - problem.take(*old)
            if problem.fits(changed) and problem.step_s(changed) <= step_s:
                plans[t], taken = new, changed
    return plans
