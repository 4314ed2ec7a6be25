"""Searches for the placement with the least predicted step time that fits in memory.

A table plan is a mode (what is exchanged, and the memory tier), a number of replicated hot rows,
and the number of rows that a device cache holds; both take a table's rows in falling order of
frequency. Seconds and bytes are linear in sums over the first rows of that order, except that
communication counts only as far as computation does not hide it, and that tables of one dimension
share the fixed cost of a message. Tables depend on each other through these and through memory.

The search starts from simple placements (one frequency threshold for all tables, in one tier).
Column generation (Dantzig and Wolfe 1960) then proposes plans: a linear program over the plans so
far prices memory and communication, and at these prices each table adds its cheapest plan. One
mixed-integer program (HiGHS) selects a plan for each table, and a last descent changes one table
at a time, which fills the memory that whole plans leave over. This is a heuristic: the result fits
in memory, but no bound on its distance from the optimum is computed.

Symbols: T tables, J cuts between groups of equally frequent rows, M modes, K resources (seconds of
computation, then of exposed communication by stage, then bytes by MEMORIES), P plans, F flags, D.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from hotrec.cost_model.costs import Costs, World
from hotrec.cost_model.demand import Floats, TableDemand, take_rows
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

MODES = tuple((exchange, tier) for exchange in Exchange for tier in Tier)
MEMORIES = ("device_bytes", "host_bytes", "replica_bytes")
# Fixed costs of messages, which the tables of one dimension share.
FLAGS = ("cold_groups", "hot_groups", "pooled_groups")
NUM_THRESHOLDS = 10
# Shares of the hot rows that are tried as smaller hot sets where the step is not linear.
HOT_SHARES = (0.0, *(2.0**-k for k in range(10, 0, -1)), 0.75)
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
    """The memory and the options that a placement may use.

    Args:
        device_bytes: Device memory of each rank for tables. It is not read for a CPU, where all
            memory is the host's.
        host_bytes: Each rank's share of its host's memory for tables.
        replica_bytes: Memory of each rank for hot rows with their optimizer state. None sets no
            limit beyond the memory itself.
        tiers: The tiers that sharded rows may use.
        exchanges: The exchanges that a table may use.
        shardings: The shardings that a table may use. POOLED needs TABLE_WISE.
        hot_exchanges: Whether gradients of hot rows may be exchanged as touched rows (False) or
            as a dense all-reduce (True).

    Raises:
        ValueError: If a size is negative or not a number, or an option is empty.
    """

    device_bytes: float
    host_bytes: float
    replica_bytes: float | None = None
    tiers: tuple[Tier, ...] = tuple(Tier)
    exchanges: tuple[Exchange, ...] = tuple(Exchange)
    shardings: tuple[Sharding, ...] = tuple(Sharding)
    hot_exchanges: tuple[bool, ...] = (False, True)

    def __post_init__(self) -> None:
        for name in MEMORIES:
            size = getattr(self, name)
            if size is not None and not size >= 0:
                raise ValueError(f"limits {name}: expected at least 0, got {size}.")
        for name in ("tiers", "exchanges", "shardings", "hot_exchanges"):
            if not getattr(self, name):
                raise ValueError(f"limits {name}: expected at least one, got none.")

    def sizes(self, is_one_memory: bool) -> Floats:
        """Returns float64 (3,) by MEMORIES, infinite where there is no limit."""
        device = math.inf if is_one_memory else self.device_bytes
        replica = math.inf if self.replica_bytes is None else self.replica_bytes
        return np.array([device, self.host_bytes, replica], np.float64)

    def allows(self, costs: Costs, exchange: Exchange, tier: Tier) -> bool:
        """Whether the options allow this mode and the costs include the kernels that it runs."""
        is_pooled = exchange is Exchange.POOLED
        if exchange not in self.exchanges or tier not in self.tiers:
            return False
        if is_pooled and Sharding.TABLE_WISE not in self.shardings:
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


@dataclass(frozen=True)
class Choice:
    """The fastest placement that was found.

    Args:
        num_hot: The number of replicated rows of each table.
        tables: The placement of each table's other rows.
        is_hot_dense: Whether gradients of hot rows are exchanged by a dense all-reduce.
        prediction: The predicted step.
        quantities: What the mean rank does in this step.
    """

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
        demands: The demand of every table.
        costs: The costs of the machine.
        world: The ranks and hosts.
        workload: The batch and the dense layers.
        limits: The memory and the options that are allowed.
        hot_range: The smallest and largest number of hot rows of a table. A table that is absent
            may have any number.
        at: The quantities of a step near the best one. Measured collectives become lines at its
            message sizes (``make_step_model``).
        narrow_frac: Bytes of a value on the wire, as a fraction of those of a float32.

    Raises:
        InfeasibleError: If nothing fits. The message gives the smallest budget that fits.
        ValueError: If there is no table, two have one name, or a range is outside its table.
        CostsError: If the costs do not include the link between hosts.
    """
    hot_range = dict(hot_range or {})
    _check(demands, hot_range)
    memory = _Memory(
        demands,
        world,
        can_M=np.array([limits.allows(costs, *mode) for mode in MODES]),
        is_one_memory=costs.device == "cpu",
        is_routed_on_device=not workload.is_routed_by_loader,
        low={name: span[0] for name, span in hot_range.items()},
    )
    # One rank exchanges nothing, so both exchanges of hot rows are equal there.
    hot_exchanges = sorted(set(limits.hot_exchanges))[: 1 if world.num_ranks == 1 else None]
    found: list[tuple[float, bool, StepModel, list[_Plan]]] = []
    for is_hot_dense in hot_exchanges if memory.can_M.any() else ():
        model = make_step_model(
            costs, world, workload, is_hot_dense=is_hot_dense, at=at, narrow_frac=narrow_frac
        )
        problem = _Problem(memory, model, limits, workload.batch_size, hot_range)
        plans = _search(problem, memory, limits, [entry[-1] for entry in found])
        if plans is not None:
            found.append((problem.step_s(problem.total(plans)), is_hot_dense, model, plans))
    if not found:
        raise _explain(memory, limits)
    _, is_hot_dense, model, plans = min(found, key=lambda entry: entry[0])
    num_hot = {demands[p.table].name: p.num_hot for p in plans}
    tables = {demands[p.table].name: p.placement(demands[p.table], world) for p in plans}
    quantities = hot_cold_quantities(demands, num_hot, tables, world, workload.batch_size)
    return Choice(num_hot, tables, is_hot_dense, model.predict(quantities), quantities)


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


# ------------------------------------------------------------------ what plans take


@dataclass(frozen=True)
class _Plan:
    """The plan of one table.

    Args:
        table: The table's index.
        mode: The index of the exchange and tier in MODES.
        num_hot: The number of replicated rows.
        num_held: ``num_hot`` and the rows after them that a device cache holds.
    """

    table: int
    mode: int
    num_hot: int
    num_held: int

    def placement(self, demand: TableDemand, world: World) -> TablePlacement:
        exchange, tier = MODES[self.mode]
        # TABLE_WISE rows move as much as ROW_WISE ones on the mean rank, so the choice is made by
        # what TorchRec can do: a pooled table lies on one rank, a tiny one cannot be cut.
        by_table = exchange is Exchange.POOLED or demand.num_rows < world.num_ranks
        sharding = Sharding.TABLE_WISE if by_table else Sharding.ROW_WISE
        frac = (self.num_held - self.num_hot) / demand.num_rows
        return TablePlacement(exchange, sharding, tier, frac if tier is Tier.HOST_CACHED else None)


@dataclass(frozen=True)
class _Memory:
    """The memory that tables take on the mean rank.

    It agrees with ``hotrec.cost_model.memory``, except that wholly hot tables keep their shards.

    Args:
        demands: The demand of every table.
        world: The ranks and hosts.
        can_M: The allowed modes.
        is_one_memory: Whether device memory is the host's, as on a CPU.
        is_routed_on_device: Whether the device also holds a router entry for every row.
        low: The smallest number of hot rows of a table, 0 where absent.
    """

    demands: Sequence[TableDemand]
    world: World
    can_M: Mask
    is_one_memory: bool
    is_routed_on_device: bool
    low: Mapping[str, int]

    def sizes(self, demand: TableDemand) -> dict[str, Floats]:
        """Returns the MEMORIES of a table in each tier, its router, and a hot and a cached row."""
        shares = {t.value: shard_row_bytes(demand, t) for t in Tier}
        sizes = {
            name: np.array([*share, 0]) * demand.num_rows / self.world.num_ranks
            for name, share in shares.items()
        }
        router = ROUTER_BYTES * demand.num_rows
        sizes["routed"] = np.array([router * self.is_routed_on_device, router, 0.0])
        sizes["replica"] = np.array([replica_row_bytes(demand), 0.0, demand.row_bytes])
        sizes["held"] = np.array([cached_row_bytes(demand) / self.world.num_ranks, 0.0, 0.0])
        if self.is_one_memory:
            sizes["routed"][0] = 0.0
            sizes = {name: np.array([0.0, s[0] + s[1], s[2]]) for name, s in sizes.items()}
        return sizes

    def can_pool(self, demand: TableDemand, tier: Tier, limits: Limits) -> bool:
        """Whether a rank can hold the whole table, none of whose rows must be hot."""
        is_host = self.is_one_memory or tier is not Tier.DEVICE
        room = limits.host_bytes if is_host else limits.device_bytes
        return demand.num_rows * demand.row_bytes <= room and not self.low.get(demand.name, 0)

    def smallest_plans(self, limits: Limits) -> tuple[list[tuple[_Plan, _Plan]], Floats]:
        """Returns each table's plans that take least memory on the device and on the host.

        Where only one of them is allowed it is both. Also returns their MEMORIES, float64
        (T, 2, 3). Every table needs an allowed mode.
        """
        pairs, sizes = [], np.zeros((len(self.demands), 2, len(MEMORIES)))
        for t, demand in enumerate(self.demands):
            takes, low = self.sizes(demand), self.low.get(demand.name, 0)
            plans: list[_Plan | None] = [None, None]
            for m in (3, 0, 4, 1, 5, 2):  # pooled first, which needs no router; cached last
                exchange, tier = MODES[m]
                is_pooled, side = exchange is Exchange.POOLED, int(tier is not Tier.DEVICE)
                if not self.can_M[m] or plans[side] is not None:
                    continue
                if is_pooled and not self.can_pool(demand, tier, limits):
                    continue
                held = low + int(tier is Tier.HOST_CACHED and low < demand.num_rows)
                plans[side] = _Plan(t, m, low, held)
                sizes[t, side] = takes[tier.value] + low * takes["replica"]
                sizes[t, side] += (held - low) * takes["held"] + (not is_pooled) * takes["routed"]
            some = [(plan, size) for plan, size in zip(plans, sizes[t].copy(), strict=True) if plan]
            sizes[t] = some[0][1], some[-1][1]
            pairs.append((some[0][0], some[-1][0]))
        return pairs, sizes

    def split(self, limits: Limits, short: str) -> tuple[list[_Plan], float]:
        """Splits whole tables over the tiers so that one memory is exceeded by least.

        Args:
            limits: The limits of the other memories are kept.
            short: "device" or "host", the memory that may be exceeded.

        Returns:
            The plans, and the bytes per rank by which the memory is exceeded, infinite where the
            others alone are too small.
        """
        pairs, sizes = self.smallest_plans(limits)
        limits_3, which = limits.sizes(self.is_one_memory), MEMORIES.index(f"{short}_bytes")
        total = max(float(sizes.sum()), 1.0)
        rows = np.concatenate([(sizes[:, 0] - sizes[:, 1]).T / total, np.zeros((3, 1))], axis=1)
        rows[which, -1] = -1.0
        ends = np.minimum((limits_3 - sizes[:, 1].sum(axis=0)) / total, 1e3)
        answer = milp(
            np.append(np.zeros(len(pairs)), 1.0),
            integrality=np.append(np.ones(len(pairs)), 0),
            bounds=Bounds(0, np.append(np.ones(len(pairs)), np.inf)),
            constraints=LinearConstraint(rows, ub=ends),
            options={"mip_rel_gap": 1e-6, "node_limit": 10_000},
        )
        if answer.x is None:
            return [host for _, host in pairs], math.inf
        side = np.where(answer.x[:-1] > 0.5, 0, 1)
        used = sizes[np.arange(len(pairs)), side].sum(axis=0)[which]
        plans = [pair[i] for pair, i in zip(pairs, side, strict=True)]
        return plans, max(float(used - limits_3[which]), 0.0)


class _Problem:
    """The coefficients of the tables' plans under one step model.

    Attributes:
        constant_K: What every placement takes.
        flags_FK: What each of FLAGS takes.
        base_TMK: What a table takes in a mode with no row hot or cached.
        hot_TM4K: What is added for each unit of ``sums`` of the hot rows.
        held_TM4K: What is added for each unit of ``sums`` of the hot and cached rows.
        cuts_TJ4: At each cut between groups, the rows before it, the sums of their q and Q, and
            their share of the table's lookups (``hotrec.cost_model.demand``).
        can_TM: The modes that are allowed and fit on a rank.
        low_T, high_T: The smallest and largest number of hot rows.
        limits_3: The limits of MEMORIES.
    """

    def __init__(
        self,
        memory: _Memory,
        model: StepModel,
        limits: Limits,
        batch_size: int,
        hot_range: Mapping[str, tuple[int, int]],
    ) -> None:
        self.demands = demands = memory.demands
        self.limits_3 = limits.sizes(memory.is_one_memory)
        weights, self.constant_K = _weigh(model)
        self.num_stages = self.constant_K.size - 1 - len(MEMORIES)
        self.flags_FK = np.array([weights[flag] for flag in FLAGS])
        ranges = [hot_range.get(d.name, (0, d.num_rows)) for d in demands]
        self.low_T, self.high_T = np.array(ranges, np.int64).T
        self.cuts_TJ4 = _cut(demands, ranges)
        self.can_TM = np.tile(memory.can_M, (len(demands), 1))
        for m, (exchange, tier) in enumerate(MODES):
            if exchange is Exchange.POOLED:
                self.can_TM[:, m] &= [memory.can_pool(d, tier, limits) for d in demands]
        dims = sorted({d.dim for d in demands})
        self.num_dims, self.dim_T = len(dims), np.array([dims.index(d.dim) for d in demands])
        shape = (len(demands), len(MODES), 4, self.constant_K.size)
        self.base_TMK = np.zeros((*shape[:2], shape[3]))
        self.hot_TM4K, self.held_TM4K = np.zeros(shape), np.zeros(shape)
        for t, demand in enumerate(demands):
            self._add_table(t, demand, memory, weights, batch_size)

    def _add_table(
        self,
        t: int,
        demand: TableDemand,
        memory: _Memory,
        weights: Mapping[str, Floats],
        batch_size: int,
    ) -> None:
        nothing = np.zeros(self.constant_K.size)
        row, ranks = BYTES_PER_FLOAT * demand.dim, memory.world.num_ranks
        num_ids = batch_size * demand.lookups_per_sample
        num_bags = batch_size * demand.num_columns

        def of(items: str, num_bytes: str) -> Floats:
            return np.asarray(weights.get(items, nothing) + row * weights.get(num_bytes, nothing))

        size = {
            name: np.concatenate([np.zeros(nothing.size - len(MEMORIES)), sizes])
            for name, sizes in memory.sizes(demand).items()
        }
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
        return max(self.step_s(self.total(plans)), 1e-12)

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

    def step_s(self, taken: Floats) -> float:
        return float(self.steps_s(taken[None])[0])

    def steps_s(self, taken_PK: Floats) -> Floats:
        """Returns the step's seconds for each row."""
        exposed = np.maximum(taken_PK[:, 1 : 1 + self.num_stages], 0).sum(axis=1)
        return np.asarray(taken_PK[:, 0] + exposed)

    def fits(self, taken: Floats) -> Mask:
        """Returns whether the last axis is within the limits, up to rounding."""
        return np.asarray((taken[..., -len(MEMORIES) :] <= self.limits_3 * (1 + 1e-9)).all(axis=-1))

    def evaluate(self, plans: Sequence[_Plan]) -> float:
        """Returns the step's seconds, infinite if a plan is not allowed or does not fit."""
        if not all(self.can_TM[plan.table, plan.mode] for plan in plans):
            return math.inf
        taken = self.total(plans)
        return self.step_s(taken) if self.fits(taken) else math.inf

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
            start = _dot(self.cuts_TJ4, self.hot_TM4K[:, m] @ prices_K)
            start = np.where(is_in, start, np.inf) + base[:, None]
            end = _dot(self.cuts_TJ4, self.held_TM4K[:, m] @ prices_K)
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


def _dot(cuts_TJ4: Floats, price_T4: Floats) -> Floats:
    return np.asarray((cuts_TJ4 @ price_T4[:, :, None])[:, :, 0])


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


def _search(
    problem: _Problem, memory: _Memory, limits: Limits, others: Sequence[list[_Plan]]
) -> list[_Plan] | None:
    """Returns the best plan found for every table, or None if nothing fits.

    Args:
        problem: The coefficients of the tables.
        memory: What the tables take, for a start where memory is tight.
        limits: The limits of the memory.
        others: More placements to start from.
    """
    if not problem.can_TM.any(axis=1).all():
        return None
    best = min((*_simple_placements(problem), *others), key=problem.evaluate)
    if math.isinf(problem.evaluate(best)):
        best, _ = memory.split(limits, "host")
        if math.isinf(problem.evaluate(best)):
            return None
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
    """The linear and mixed-integer program over a growing set of plans.

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
        highs = np.full(costs.size, np.inf)
        answer = linprog(
            costs,
            A_ub=upper,
            b_ub=ends,
            A_eq=equal,
            b_eq=np.ones(equal.shape[0]),
            bounds=np.stack([np.zeros_like(highs), highs], axis=1),
            method="highs",
        )
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
            constraints=[
                LinearConstraint(upper, ub=ends),
                LinearConstraint(equal, lb=1.0, ub=1.0),
            ],
            options={"mip_rel_gap": REL_GAP, "node_limit": MAX_NODES},
        )
        if answer.x is None:
            return None
        chosen = [p for p, share in zip(self.taken, answer.x, strict=False) if share > 0.5]
        return sorted(chosen, key=lambda plan: plan.table)

    def blend(self) -> list[_Plan]:
        """Returns the mean of each table's plans by their shares in the relaxation.

        The plans of a table must be of one mode. Their mean takes as much memory as the shares.
        """
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
    """Improves one table at a time, all else equal, until no change helps.

    Args:
        problem: The coefficients of the tables.
        plans: A plan for each table; together they fit.
    """
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

    Args:
        problem: The coefficients of the tables.
        old: The table's plan, which the result is not worse than.
        rest_K: What all other tables take, without FLAGS.
        used_DF: The number of other tables that raise each flag.
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
    steps_s = np.where(problem.fits(taken_PK), problem.steps_s(taken_PK), np.inf)
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
    for t in sorted(range(len(plans)), key=lambda t: _table_bytes(problem.demands[t])):
        old = plans[t]
        exchange, tier = MODES[old.mode]
        mode = MODES.index((exchange, Tier.DEVICE))
        if tier is not Tier.DEVICE and problem.can_TM[t, mode]:
            new = _Plan(t, mode, old.num_hot, old.num_hot)
            changed = taken + problem.take(new) - problem.take(old)
            if problem.fits(changed) and problem.step_s(changed) <= step_s:
                plans[t], taken = new, changed
    return plans


def _table_bytes(demand: TableDemand) -> int:
    return demand.num_rows * demand.row_bytes


# ------------------------------------------------------------------ where nothing fits


def _explain(memory: _Memory, limits: Limits) -> InfeasibleError:
    """Returns the error that names the smallest budget that fits, or the option to allow."""
    demands, can_M = memory.demands, memory.can_M
    if not can_M.any():
        return InfeasibleError(
            f"limits: expected a tier and exchange that the costs have times of, got tiers "
            f"{[t.value for t in limits.tiers]} and exchanges "
            f"{[e.value for e in limits.exchanges]}. Allow tier device and exchange rows."
        )
    kept = sum(memory.low.get(d.name, 0) * d.row_bytes for d in demands)
    if limits.replica_bytes is not None and kept > limits.replica_bytes:
        return InfeasibleError(
            f"replica_bytes: expected at least {kept} for the rows fixed hot, got "
            f"{limits.replica_bytes:g}. Raise it to {kept}, or fix fewer rows."
        )
    tiers = [MODES[m][1] for m in np.flatnonzero(can_M)]
    stuck = [d for d in demands if not any(memory.can_pool(d, tier, limits) for tier in tiers)]
    if stuck and not can_M[: len(Tier)].any():
        widest, budget = max(stuck, key=_table_bytes), limits.host_bytes
        if num_low := memory.low.get(widest.name, 0):
            return InfeasibleError(
                f"table {widest.name}: expected exchange rows for its {num_low} fixed hot rows, "
                f"got exchange pooled. Allow exchange rows, or fix none."
            )
        if not memory.is_one_memory:
            budget = max(limits.device_bytes, limits.host_bytes)
        return InfeasibleError(
            f"table {widest.name}: expected at most {budget:g} bytes, which one rank can hold, "
            f"got {_table_bytes(widest)}. Allow exchange rows, which spreads it."
        )
    return _nearest_change(memory, limits)


def _nearest_change(memory: _Memory, limits: Limits) -> InfeasibleError:
    """Returns the error for the memory that lacks least, and the number of ranks that suffices."""
    num_tables, num_ranks = len(memory.demands), memory.world.num_ranks
    changes = []
    for name in ("host",) if memory.is_one_memory else ("device", "host"):
        size = _smallest_budget(memory, limits, name)
        if size is not None:
            key = f"{name}_bytes"
            changes.append((size - getattr(limits, key), key, size))
    if not changes:
        need = memory.smallest_plans(limits)[1][:, 1].sum(axis=0)
        return InfeasibleError(
            f"device_bytes and host_bytes: expected at least {math.ceil(need[0])} and "
            f"{math.ceil(need[1])} per rank for {num_tables} tables on {num_ranks} ranks, "
            f"got {limits.device_bytes:g} and {limits.host_bytes:g}. Raise both."
        )
    more, key, size = min(changes)
    message = (
        f"{key}: expected at least {size} per rank for {num_tables} tables on "
        f"{num_ranks} ranks (the smallest that does, all else as it is), got "
        f"{getattr(limits, key):g}. Raise it by {math.ceil(more)}"
    )
    for factor in (2, 4, 8, 16, 32):
        wider = World(factor * num_ranks, memory.world.ranks_per_host)
        if replace(memory, world=wider).split(limits, "host")[1] == 0:
            return InfeasibleError(f"{message}, or use {wider.num_ranks} ranks of this size.")
    return InfeasibleError(message + ".")


def _smallest_budget(memory: _Memory, limits: Limits, name: str) -> int | None:
    """Returns the smallest whole size of a memory that fits, None where it alone does not help."""
    key = f"{name}_bytes"
    low, (_, more) = math.floor(getattr(limits, key)), memory.split(limits, name)
    if not 0 < more < math.inf:
        return None
    # A larger memory can hold pooled tables whole, which take less: hence the bisection.
    high = math.ceil(low + more) + 1
    while high - low > 1:
        middle = (low + high) // 2
        changed = Limits(**{**vars(limits), key: float(middle)})
        is_short = memory.split(changed, name)[1] > 0
        low, high = (middle, high) if is_short else (low, middle)
    return high


# ------------------------------------------------------------------ what callers do with it


def compare(choice: Choice, baselines: Mapping[str, StepPrediction]) -> tuple[str, str]:
    """Compares the choice with other ways to train and explains which is fastest.

    A baseline that is as fast wins, because users run it already.

    Args:
        choice: The choice of ``search_placement``.
        baselines: The predicted steps by name, such as "torchrec planner".

    Returns:
        "hot_cold" or the baseline's name; a sentence that explains it.
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
        demands: The demand of every table.
        num_hot: The number of hot rows of each table.
        share: The share of them to keep, 0..1, rounded down.
        fixed: Tables that keep all of their hot rows and do not count.

    Returns:
        The number of hot rows of every table.
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
