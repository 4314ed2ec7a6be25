"""What each table can do, and what that takes.

A plan of a table is a mode (exchange and tier), its hottest rows that are replicated, and, behind a
device cache, the next ones that are held there. Rows of one table are taken in falling order of
their probability. What a plan takes is linear in cumulative sums over its rows.

Symbols: T tables, J = cuts between groups (of rows never seen too), M modes, A amounts, K
resources; W ranks, R rows, D; q, Q, p as in ``hotrec.cost_model.demand``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hotrec.cost_model.costs import World
from hotrec.cost_model.demand import Floats, TableDemand
from hotrec.cost_model.forms import BYTES_PER_FLOAT, BYTES_PER_ID, TIERS
from hotrec.cost_model.memory import (
    ROUTER_BYTES,
    cached_row_bytes,
    replica_row_bytes,
    shard_row_bytes,
)
from hotrec.cost_model.quantities import BYTES_PER_LENGTH, host_state_bytes
from hotrec.cost_model.step import StepModel
from hotrec.types import Exchange, Sharding, TablePlacement, Tier

Mask = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
MODES: tuple[tuple[Exchange, Tier], ...] = (
    (Exchange.ROWS, Tier.DEVICE),
    (Exchange.ROWS, Tier.HOST),
    (Exchange.ROWS, Tier.HOST_CACHED),
    (Exchange.POOLED, Tier.DEVICE),
    (Exchange.POOLED, Tier.HOST),
    (Exchange.POOLED, Tier.HOST_CACHED),
)
ROWS_DEVICE, ROWS_HOST, ROWS_CACHED, POOLED_DEVICE, POOLED_HOST, POOLED_CACHED = range(6)
# What a plan does with one table, in the order of the columns of ``units_TAK``.
AMOUNTS = (
    "routed",  # 1: its ids are routed and pooled from rows
    "sent",  # 1: its ids and pooled vectors travel
    "device",  # cold rows of a rank, by tier
    "host",
    "hit",
    "miss",
    "hot",  # hot rows of a rank
    "union",  # hot rows of any rank
    "state",  # cold rows of any rank in a host tier, whose optimizer state crosses the bus
    "replica",  # hot rows
    "held",  # rows in a device cache
    "in_device",  # 1: the whole table lies in this tier
    "in_host",
    "in_host_cached",
    "pooled_device",  # share of its lookups, by tier
    "pooled_host",
    "pooled_hit",
    "pooled_miss",
)
MEMORIES = ("device_bytes", "host_bytes", "replica_bytes")
FLAGS = ("cold_groups", "hot_groups", "pooled_groups")


@dataclass(frozen=True)
class TablePlan:
    """What one table does.

    Args:
        table: its position in the problem.
        mode: position in MODES.
        num_hot: hottest rows, replicated.
        num_held: ``num_hot`` and the rows after them that a device cache holds.
    """

    table: int
    mode: int
    num_hot: float
    num_held: float

    def placement(self, demand: TableDemand, world: World) -> TablePlacement:
        exchange, tier = MODES[self.mode]
        is_small = demand.num_rows < world.num_ranks
        by_table = exchange is Exchange.POOLED or is_small
        sharding = Sharding.TABLE_WISE if by_table else Sharding.ROW_WISE
        num_cached = self.num_held - self.num_hot
        frac = num_cached / demand.num_rows if tier is Tier.HOST_CACHED else None
        return TablePlacement(exchange, sharding, tier, frac)


@dataclass(frozen=True)
class Problem:
    """All tables, with what each thing takes.

    Args:
        demands: of the tables.
        world: ranks and hosts.
        constant_K: seconds that every plan pays.
        flags_FK: what a message group takes, by FLAGS.
        units_TAK: what one of each of AMOUNTS takes. Resources: 0 seconds of computation, then by
            stage with messages what travels less what hides it, then MEMORIES.
        can_TM: modes that are allowed and fit a rank.
        cuts_TJ4: at each cut between groups the rows before it, the sums of their q and Q, and
            their share of the table's lookups.
        low_T, high_T: fewest and most hot rows.
        limits_3: of MEMORIES, infinite where there is none.
        dims: distinct dimensions, rising; tables of one share messages.
        dim_T: of each table, its place in ``dims``.
    """

    demands: tuple[TableDemand, ...]
    world: World
    constant_K: Floats
    flags_FK: Floats
    units_TAK: Floats
    can_TM: Mask
    cuts_TJ4: Floats
    low_T: Integers
    high_T: Integers
    limits_3: Floats
    dims: tuple[int, ...]
    dim_T: Integers

    @property
    def num_tables(self) -> int:
        return len(self.demands)

    @property
    def num_excess(self) -> int:
        """Stages with messages."""
        return self.constant_K.size - 1 - len(MEMORIES)

    def sums(self, table: int, num_rows: float) -> Floats:
        """float64 (4,): ``cuts_TJ4`` of the hottest rows; part of a group in proportion."""
        cuts = self.cuts_TJ4[table]
        j = int(np.searchsorted(cuts[:, 0], num_rows, side="left"))
        if j == 0 or cuts[j, 0] == num_rows:
            return np.asarray(cuts[j])
        share = (num_rows - cuts[j - 1, 0]) / (cuts[j, 0] - cuts[j - 1, 0])
        return np.asarray(cuts[j - 1] + share * (cuts[j] - cuts[j - 1]))

    def take(self, plan: TablePlan) -> Floats:
        """float64 (K,): what a plan takes, without message groups."""
        table, mode = plan.table, plan.mode
        hot, held = self.sums(table, plan.num_hot), self.sums(table, plan.num_held)
        total = self.cuts_TJ4[table, -1]
        does = dict.fromkeys(AMOUNTS, 0.0)
        exchange, tier = MODES[mode]
        does[f"in_{tier.value}"] = 1.0
        if tier is not Tier.DEVICE:
            does["state"] = total[2] - hot[2]
        if tier is Tier.HOST_CACHED:
            does["held"] = held[0] - hot[0]
        if exchange is Exchange.ROWS:
            does.update(routed=1.0, hot=hot[1], union=hot[2], replica=hot[0])
            if tier is Tier.HOST_CACHED:
                does.update(hit=held[1] - hot[1], miss=total[1] - held[1])
            else:
                does[tier.value] = total[1] - hot[1]
        else:
            does["sent"] = 1.0
            if tier is Tier.HOST_CACHED:
                does.update(pooled_hit=held[3], pooled_miss=1.0 - held[3])
            else:
                does[f"pooled_{tier.value}"] = 1.0
        return np.asarray(np.array([does[a] for a in AMOUNTS]) @ self.units_TAK[table])

    def flags(self, plan: TablePlan) -> tuple[bool, bool, bool]:
        """Which message groups of its dimension a plan needs."""
        if MODES[plan.mode][0] is Exchange.POOLED:
            return False, False, True
        return plan.num_hot < self.demands[plan.table].num_rows, plan.num_hot > 0, False

    def total(self, plans: Sequence[TablePlan]) -> Floats:
        """float64 (K,): what one plan of each table takes together, message groups included."""
        used = {
            (int(self.dim_T[plan.table]), f)
            for plan in plans
            for f, flag in enumerate(self.flags(plan))
            if flag
        }
        taken = self.constant_K + np.sum([self.take(plan) for plan in plans], axis=0)
        return np.asarray(taken + np.sum([self.flags_FK[f] for _, f in used], axis=0))

    def step_s(self, taken: Floats) -> float:
        """Seconds of a step that takes this."""
        return float(taken[0] + np.maximum(taken[1 : 1 + self.num_excess], 0).sum())

    def fits(self, taken: Floats) -> bool:
        """Within the limits, up to rounding."""
        return bool((taken[-len(MEMORIES) :] <= self.limits_3 * (1 + 1e-9)).all())

    def round_plan(self, plan: TablePlan) -> TablePlan:
        """Whole rows, fewer rather than more; a cache that holds nothing is none."""
        num_hot, num_held = (float(np.floor(n + 1e-6)) for n in (plan.num_hot, plan.num_held))
        num_hot = max(num_hot, float(self.low_T[plan.table]))
        num_held = max(num_held, num_hot)
        if MODES[plan.mode][1] is not Tier.HOST_CACHED:
            return replace(plan, num_hot=num_hot, num_held=num_hot)
        if num_held == num_hot and self.can_TM[plan.table, plan.mode - 1]:
            return TablePlan(plan.table, plan.mode - 1, num_hot, num_hot)
        if num_held == num_hot < self.demands[plan.table].num_rows:
            num_held += 1
        return replace(plan, num_hot=num_hot, num_held=num_held)


def build_problem(
    demands: Sequence[TableDemand],
    model: StepModel,
    world: World,
    batch_size: int,
    *,
    can_TM: Mask,
    limits_3: Floats,
    is_one_memory: bool,
    is_routed_on_device: bool,
    hot_range: Mapping[str, tuple[int, int]],
) -> Problem:
    """Coefficients of a step model for a set of tables.

    Args:
        batch_size: B, per rank.
        can_TM: modes allowed; those with device_bytes or host_bytes beyond a rank drop out.
        is_one_memory: device memory is the host's, as on CPU.
        is_routed_on_device: the router's rows are kept on the device too.
        hot_range: fewest and most hot rows, by table; 0 and all of them where absent.
    """
    weights, constant_K = _weigh(model)
    cuts_TJ4 = _cut(demands, hot_range)
    ranges = [hot_range.get(d.name, (0, d.num_rows)) for d in demands]
    dims = tuple(sorted({d.dim for d in demands}))
    units = [
        _units(d, weights, world, batch_size, is_one_memory, is_routed_on_device) for d in demands
    ]
    low_T = np.array([low for low, _ in ranges], np.int64)
    can_TM = can_TM.copy()
    for t, demand in enumerate(demands):
        whole = demand.num_rows * demand.row_bytes
        for mode, (exchange, tier) in enumerate(MODES):
            is_host = is_one_memory or tier is not Tier.DEVICE
            fits = whole <= limits_3[1 if is_host else 0]
            is_pooled = exchange is Exchange.POOLED
            can_TM[t, mode] &= not is_pooled or (fits and low_T[t] == 0)
    return Problem(
        tuple(demands),
        world,
        constant_K,
        np.array([weights[flag] for flag in FLAGS]),
        np.array(units),
        can_TM,
        cuts_TJ4,
        low_T,
        np.array([high for _, high in ranges], np.int64),
        limits_3,
        dims,
        np.array([dims.index(d.dim) for d in demands], np.int64),
    )


def _weigh(model: StepModel) -> tuple[dict[str, Floats], Floats]:
    """What one of each quantity takes, float64 (K,), and what every step takes."""
    talking = [name for name, form in model.stages.items() if form.wire.terms or form.wire.constant]
    size = 1 + len(talking) + len(MEMORIES)
    constant = np.zeros(size)
    weights: dict[str, Floats] = {flag: np.zeros(size) for flag in FLAGS}
    for name, form in model.stages.items():
        parts = [(0, form.compute, 1.0)]
        if name in talking:
            k = 1 + talking.index(name)
            parts += [(k, form.wire, 1.0), (k, form.cover, -model.overlap)]
        for k, part, factor in parts:
            constant[k] += factor * part.constant
            for quantity, coefficient in part.terms.items():
                weights.setdefault(quantity, np.zeros(size))[k] += factor * coefficient
    return weights, constant


def _units(
    demand: TableDemand,
    weights: Mapping[str, Floats],
    world: World,
    batch_size: int,
    is_one_memory: bool,
    is_routed_on_device: bool,
) -> Floats:
    """float64 (A, K) of one table."""
    size = weights[FLAGS[0]].size
    nothing = np.zeros(size)
    row = BYTES_PER_FLOAT * demand.dim
    num_ids = batch_size * demand.lookups_per_sample
    ranks = world.num_ranks
    others = (ranks - 1) / ranks

    def of(items: str, num_bytes: str, factor: float = 1.0) -> Floats:
        both = weights.get(items, nothing) + row * weights.get(num_bytes, nothing)
        return np.asarray(factor * both)

    units = {name: nothing.copy() for name in AMOUNTS}
    units["routed"] = of("lookups", "lookup_bytes", num_ids)
    num_bags = batch_size * demand.num_columns
    num_sent = num_ids + num_bags * BYTES_PER_LENGTH / BYTES_PER_ID
    units["sent"] = others * (
        num_sent * weights.get("pooled_sent_ids", nothing)
        + num_bags * row * weights.get("pooled_sent_bytes", nothing)
    )
    for tier in TIERS:
        units[tier] = of(f"rows_{tier}", f"bytes_{tier}")
        units[f"pooled_{tier}"] = of(f"pooled_ids_{tier}", f"pooled_bytes_{tier}", num_ids)
    units["hot"] = of("hot_rows", "hot_bytes")
    state_bytes = host_state_bytes(demand) / ranks
    units["state"] = state_bytes * weights.get("state_bytes_host", nothing)
    units["union"] = of("union_rows", "union_bytes")
    units["replica"] = of("replica_rows", "replica_bytes")
    for name, sizes in table_memory(demand, world, is_one_memory, is_routed_on_device).items():
        units[name][-len(MEMORIES) :] += sizes
    return np.array([units[name] for name in AMOUNTS])


def table_memory(
    demand: TableDemand, world: World, is_one_memory: bool, is_routed_on_device: bool
) -> dict[str, Floats]:
    """What one of each of AMOUNTS takes of MEMORIES on the mean rank, float64 (3,).

    As ``hotrec.cost_model.memory``, but for wholly hot tables: here these keep their shards.
    """
    share = demand.num_rows / world.num_ranks
    state, behind = shard_row_bytes(demand, Tier.HOST)
    cached_state, cached_behind = shard_row_bytes(demand, Tier.HOST_CACHED)
    router = ROUTER_BYTES * demand.num_rows
    on_device = router if is_routed_on_device and not is_one_memory else 0
    sizes = {
        "routed": [on_device, router, 0],
        "replica": [replica_row_bytes(demand), 0, demand.row_bytes],
        "held": [cached_row_bytes(demand) / world.num_ranks, 0, 0],
        "in_device": [share * demand.row_bytes, 0, 0],
        "in_host": [share * state, share * behind, 0],
        "in_host_cached": [share * cached_state, share * cached_behind, 0],
    }
    taken = {name: np.array(size, np.float64) for name, size in sizes.items()}
    if is_one_memory:
        for size in taken.values():
            size[0], size[1] = 0.0, size[0] + size[1]
    return taken


def _cut(
    demands: Sequence[TableDemand], hot_range: Mapping[str, tuple[int, int]]
) -> npt.NDArray[np.float64]:
    """Cumulative sums at the cuts between groups and at the ends of ``hot_range``."""
    tables = []
    for demand in demands:
        rows = np.asarray(demand.rows_G, np.float64)
        values = np.stack(
            [np.ones(rows.size), demand.by_rank_G, demand.by_any_G, demand.probs_G], axis=1
        )
        sums = np.concatenate([np.zeros((1, 4)), np.cumsum(rows[:, None] * values, axis=0)])
        if sums[-1, 0] < demand.num_rows:
            sums = np.concatenate([sums, sums[-1:]])
            sums[-1, 0] = demand.num_rows
        # Shares of the lookups; a table that nobody looks up misses nothing.
        sums[:, 3] = sums[:, 3] / sums[-1, 3] if sums[-1, 3] > 0 else 1.0
        at = np.union1d(sums[:, 0], hot_range.get(demand.name, (0, demand.num_rows)))
        tables.append(np.stack([np.interp(at, sums[:, 0], column) for column in sums.T], axis=1))
    num_cuts = max((len(table) for table in tables), default=1)
    return np.array(
        [np.concatenate([t, np.repeat(t[-1:], num_cuts - len(t), axis=0)]) for t in tables]
    )
