"""Searches for the placement with the shortest predicted step that fits in memory.

A table's options are a number of hot rows, the most-read ones, or the exchange of pooled vectors.

1. The starts are a grid: of the rows of all tables, in order of lookups per byte, a prefix is hot;
   of the tables, those that gain most by it exchange pooled vectors.
2. From the best starts, the tables of a dimension together, and then one table at a time, take the
   best of their options, with the others fixed and the remaining memory, until no change helps. Of
   many tables only the largest change one by one: one table hardly matters.

All of these steps are predicted by the same formula as plans, for many options at once.

This is a heuristic: no bound on the distance from the optimum is computed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotrec.cost_model.costs import Costs, World
from hotrec.cost_model.demand import Floats, TableDemand
from hotrec.cost_model.memory import mean_bytes
from hotrec.cost_model.quantities import ReadRows, table_quantities
from hotrec.cost_model.step import QUANTITIES, TIERS, Workload, predict_step
from hotrec.types import Exchange, PipelineSpec, Rows, TablePlacement

# Letters of array shapes: T tables, P options or starts, D dimensions, F flags, Q quantities, S
# sums, M memories.
INDEX = {name: i for i, name in enumerate(QUANTITIES)}
MEMORIES = ("device_bytes", "host_bytes", "replica_bytes")
# Messages that the tables of one dimension share.
FLAGS = ("cold_groups", "hot_groups", "pooled_groups")
Mask = npt.NDArray[np.bool_]
# Quantities that are larger on the rank with the most pooled tables.
POOLED_LOADS = (
    *(f"pooled_ids_{tier}" for tier in TIERS),
    *(f"pooled_bytes_{tier}" for tier in TIERS),
    "pooled_sent_bytes",
)
# Cuts of all tables together, and at least of each.
MAX_CUTS, NUM_CUTS = 1 << 14, 48
# Prefixes of the rows that are hot, as shares of those that fit, and numbers of pooled tables.
SHARES = np.array([0.0, *(2.0 ** -(k / 2) for k in range(44, -1, -1))])
NUM_POOLED = 10
# Starts to improve, rounds over all tables, and tables that change.
NUM_STARTS, MAX_SWEEPS, MAX_TABLES = 4, 5, 40
REL_GAP = 1e-4


class InfeasibleError(ValueError):
    """No placement fits the limits."""


@dataclass(frozen=True)
class Limits:
    """The memory and the exchanges that a placement may use.

    Device memory is ignored on CPU, where all memory is the host's. ``host_bytes`` is a rank's
    share of its host's memory, ``replica_bytes`` that for hot rows with their optimizer state.
    """

    device_bytes: float
    host_bytes: float
    replica_bytes: float | None = None  # no limit except the memory itself
    may_pool: bool = True  # whether whole tables may exchange pooled vectors


def search_placement(
    demands: Sequence[TableDemand],
    costs: Costs,
    world: World,
    workload: Workload,
    limits: Limits,
    *,
    pipeline: PipelineSpec,
    hot_range: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[dict[str, int], dict[str, TablePlacement]]:
    """Searches for the fastest placement of these tables.

    Args:
        demands: The tables.
        costs: The costs of the machine.
        world: Ranks and hosts.
        workload: The batch and the dense layers.
        limits: Memory and exchanges.
        pipeline: The pipeline.
        hot_range: The smallest and largest number of hot rows of a table. A table that is absent
            may have any number.

    Returns:
        The number of hot rows of each table, and its placement.

    Raises:
        InfeasibleError: If nothing fits. The message gives a budget that does.
        CostsError: If the costs do not include the link between hosts.
    """
    spans = [(hot_range or {}).get(demand.name, (0, demand.num_rows)) for demand in demands]
    tables = [
        _Table(demand, span, costs, world, workload, limits)
        for demand, span in zip(demands, spans, strict=True)
    ]
    problem = _Problem(tables, costs, world, workload, limits, pipeline)
    best = min(map(problem.improve, problem.starts()), key=lambda state: state.step_s)
    if math.isinf(best.step_s):
        raise problem.infeasible()
    num_hot, placed = {}, {}
    for demand, option in zip(demands, best.options, strict=True):
        is_pooled = bool(option.is_pooled_P[0])
        num_hot[demand.name] = int(option.hot_P[0])
        exchange = Exchange.POOLED if is_pooled else Exchange.ROWS
        placed[demand.name] = TablePlacement(exchange)
    return num_hot, placed


def pooled_imbalance(pooled: Sequence[TableDemand], world: World) -> float:
    """The pooled work of the busiest rank over the mean, with greedy assignment of the tables."""
    loads = [d.dim * (d.lookups_per_sample + d.num_columns) for d in pooled]
    ranks = [0.0] * world.num_ranks
    for load in sorted(loads, reverse=True):
        heapq.heapreplace(ranks, ranks[0] + load)
    return max(ranks) * len(ranks) / sum(loads) if loads else 1.0


class _Options(NamedTuple):
    """Options of a table: hot rows, whether pooled, its work, its bytes, and which of FLAGS."""

    hot_P: Rows
    is_pooled_P: Mask
    work_QP: Floats
    bytes_MP: Floats
    raised_FP: Mask

    def at(self, p: int) -> _Options:
        """One of them; the only one, if there are no others."""
        p = min(p, self.hot_P.size - 1)
        return _Options._make(part[..., p : p + 1] for part in self)


class _Table:
    """A table, and sums over its hottest rows."""

    def __init__(
        self,
        demand: TableDemand,
        span: tuple[int, int],
        costs: Costs,
        world: World,
        workload: Workload,
        limits: Limits,
    ) -> None:
        self.demand, self.world, self.workload = demand, world, workload
        self.low, self.high = span
        self.is_one_memory = costs.device == "cpu"
        # A rank holds a pooled table whole, none of it hot.
        room = limits.host_bytes if self.is_one_memory else limits.device_bytes
        self.may_pool = limits.may_pool and demand.is_pooled and self.low == 0
        self.may_pool &= demand.num_rows * demand.row_bytes <= room
        # Sums over the hottest rows, up to each cut between groups: rows, q, Q, urgent rows, and
        # the same of a host.
        rows, none = np.asarray(demand.rows_G, np.float64), np.zeros(demand.rows_G.size)
        by_both_G = demand.by_both_G
        columns = (
            *(none + 1, demand.by_rank_G, demand.by_any_G),
            demand.by_rank_G * demand.by_any_G if by_both_G is None else by_both_G,
            *(demand.by_host_G, demand.by_host_both_G),
        )
        units = np.stack([none if column is None else column for column in columns])
        sums_SJ = np.zeros((len(columns), rows.size + 1))
        np.cumsum(rows * units, axis=1, out=sums_SJ[:, 1:])
        if sums_SJ[0, -1] < demand.num_rows:  # rows that the profile never saw
            sums_SJ = np.concatenate([sums_SJ, sums_SJ[:, -1:]], axis=1)
            sums_SJ[0, -1] = demand.num_rows
        self.sums_SJ = sums_SJ

    def at_cuts(self, num_cuts: int) -> _Options:
        """Options at cuts between groups of equally frequent rows, and pooled if it may be."""
        rows_J = self.sums_SJ[0].astype(np.int64)
        at = np.linspace(0, rows_J.size - 1, min(num_cuts, rows_J.size)).round().astype(np.int64)
        cuts = np.unique(np.append(rows_J[at], [self.low, self.high]))
        cuts = cuts[(self.low <= cuts) & (cuts <= self.high)]
        return self._with_pooled(self.take(cuts), may_pool=self.may_pool)

    def ends(self, *, may_pool: bool) -> _Options:
        """The fewest and the most hot rows, and pooled if it may be."""
        return self._with_pooled(self.take(np.array([self.low, self.high])), may_pool=may_pool)

    def _with_pooled(self, options: _Options, *, may_pool: bool) -> _Options:
        pooled = [self.take(np.zeros(1, np.int64), is_pooled=True)] if may_pool else []
        return _joined(options, *pooled)

    def groups(self) -> tuple[Floats, Floats]:
        """Lookups per byte, and rows, of each group of the rows that may be hot or not."""
        demand = self.demand
        rows_G = np.diff(np.clip(self.sums_SJ[0], self.low, self.high))
        density = demand.probs_G * demand.lookups_per_sample / demand.row_bytes
        return np.append(density, 0.0)[: rows_G.size], rows_G

    def take(self, hot_P: Rows, *, is_pooled: bool = False) -> _Options:
        """Options with these numbers of hot rows; a group that is cut counts pro rata."""
        demand, exchange = self.demand, Exchange.POOLED if is_pooled else Exchange.ROWS
        hot, q, any_, urgent, host, host_urgent = (
            np.interp(hot_P, self.sums_SJ[0], column) for column in self.sums_SJ
        )
        _, all_q, all_any, all_urgent, all_host, all_host_urgent = self.sums_SJ[:, -1]
        rows = ReadRows(
            *(q, any_, all_q - q, all_any - any_, all_urgent - urgent),
            *(host, all_host - host, all_host_urgent - host_urgent),
        )
        placed = TablePlacement(exchange)
        done = table_quantities(demand, placed, rows, self.world, self.workload.batch_size)
        work_QP = np.zeros((len(QUANTITIES), hot_P.size))
        for name, number in done.items():
            work_QP[INDEX[name]] = number
        bytes_PM = mean_bytes(
            demand,
            exchange,
            hot,
            self.world.num_ranks,
            is_one_memory=self.is_one_memory,
            is_routed_on_device=not self.workload.is_routed_by_loader,
        )
        is_pooled_P = np.full(hot_P.size, is_pooled)
        raised_FP = np.stack([(hot_P < demand.num_rows) & ~is_pooled_P, hot_P > 0, is_pooled_P])
        return _Options(hot_P, is_pooled_P, work_QP, bytes_PM.T, raised_FP)

    @cached_property
    def row_bytes(self) -> Floats:
        """Bytes of each hot row, by MEMORIES."""
        ends_MP = self.take(np.array([0, self.demand.num_rows])).bytes_MP
        return np.asarray(ends_MP[:, 1] - ends_MP[:, 0]) / self.demand.num_rows


@dataclass
class _State:
    """An option of each table, and the step's seconds; infinite if it does not fit."""

    options: list[_Options]
    step_s: float


class _Problem:
    """The tables, and the cost of their options."""

    def __init__(
        self,
        tables: Sequence[_Table],
        costs: Costs,
        world: World,
        workload: Workload,
        limits: Limits,
        pipeline: PipelineSpec,
    ) -> None:
        self.tables, self.world, self.batch_size = tables, world, workload.batch_size
        self._step = costs, world, workload, pipeline
        num_cuts = max(MAX_CUTS // len(tables), NUM_CUTS)
        self.at_cuts = [table.at_cuts(num_cuts) for table in tables]
        device_bytes = math.inf if costs.device == "cpu" else limits.device_bytes
        replica_bytes = math.inf if limits.replica_bytes is None else limits.replica_bytes
        self.limits_M = np.array([device_bytes, limits.host_bytes, replica_bytes], np.float64)
        dims = [table.demand.dim for table in tables]
        self.is_of_dim_DT = np.array([[dim == of for of in dims] for dim in sorted(set(dims))])
        self.largest = np.argsort([-t.demand.num_rows * t.demand.row_bytes for t in tables])

    def seconds(self, options: Sequence[_Options]) -> Floats:
        """The step's seconds with options of all tables; infinite where they do not fit."""
        groups_FP = sum(
            reduce(
                np.logical_or, (options[t].raised_FP for t in np.flatnonzero(is_of_dim_T).tolist())
            )
            + 0.0
            for is_of_dim_T in self.is_of_dim_DT
        )
        work_QP = _sum(of.work_QP for of in options)
        quantities: dict[str, Any] = dict(zip(QUANTITIES, work_QP, strict=True))
        quantities |= dict(zip(FLAGS, np.asarray(groups_FP), strict=True))
        imbalance = self._imbalance(options)
        quantities |= {name: quantities[name] * imbalance for name in POOLED_LOADS}
        step_s = predict_step(*self._step, quantities).step_s
        bytes_MP = _sum(of.bytes_MP for of in options)
        fits = (bytes_MP <= self.limits_M[:, None] * (1 + 1e-9)).all(axis=0)
        return np.where(fits, step_s, np.inf)

    def _imbalance(self, options: Sequence[_Options]) -> Floats:
        """``pooled_imbalance`` of options, of which only the last is pooled, if several differ."""
        of_first, of_last = (
            pooled_imbalance(
                [
                    table.demand
                    for table, of in zip(self.tables, options, strict=True)
                    if of.is_pooled_P[at]
                ],
                self.world,
            )
            for at in (0, -1)
        )
        is_last_P = reduce(np.logical_or, (of.is_pooled_P != of.is_pooled_P[0] for of in options))
        return np.where(is_last_P, of_last, of_first)

    def starts(self) -> list[_State]:
        """The best of the grid: two prefixes of hot rows for some sets of pooled tables."""
        gains = [
            -t.demand.dim
            * (t.sums_SJ[1, -1] - self.batch_size * t.demand.num_columns if t.may_pool else 0.0)
            for t in self.tables
        ]
        order = [int(t) for t in np.argsort(gains, kind="stable") if self.tables[t].may_pool]
        found = []
        for number in np.unique(np.linspace(0, len(order), NUM_POOLED + 1).round().astype(int)):
            options = self._prefixes(order[:number])
            step_s = self.seconds(options)
            found += [
                _State([of.at(p) for of in options], float(step_s[p]))
                for p in np.argsort(step_s, kind="stable")[:2]
            ]
        return sorted(found, key=lambda state: state.step_s)[:NUM_STARTS]

    def _prefixes(self, pooled: Collection[int]) -> list[_Options]:
        """For all tables, the options of prefixes of hot rows with these pooled tables."""
        free = [t for t in range(len(self.tables)) if t not in pooled]
        least = [
            table.take(np.array([table.low]), is_pooled=t in pooled)
            for t, table in enumerate(self.tables)
        ]
        room_M = self.limits_M - _sum(of.bytes_MP for of in least)[:, 0]
        parts = [self.tables[t].groups() for t in free]
        density_G, rows_G = (np.concatenate([[], *(of[i] for of in parts)]) for i in range(2))
        of_G = np.repeat(free, [of[0].size for of in parts]).astype(np.int64)
        order = np.argsort(-density_G, kind="stable")
        ends_G = np.cumsum(rows_G[order])
        row_bytes_TM = np.stack([table.row_bytes for table in self.tables])
        used_MG = np.cumsum((row_bytes_TM[of_G] * rows_G[:, None])[order], axis=0).T
        most = 0.0
        if order.size:
            most = min(float(np.interp(r, u, ends_G)) for r, u in zip(room_M, used_MG, strict=True))
        begins_G = np.empty_like(rows_G)
        begins_G[order] = ends_G - rows_G[order]
        prefixes_P = np.unique(np.floor(SHARES * most))
        options = []
        for t, table in enumerate(self.tables):
            begins, rows = begins_G[of_G == t], rows_G[of_G == t]
            hot_P = table.low + np.zeros(prefixes_P.size, np.int64)
            if rows.size:
                knots = np.stack([begins, begins + rows], axis=1).ravel()
                before = np.cumsum(rows) - rows
                taken = np.stack([before, before + rows], axis=1).ravel()
                hot_P += np.floor(np.interp(prefixes_P, knots, taken) + 1e-6).astype(np.int64)
            options.append(table.take(hot_P, is_pooled=t in pooled))
        return options

    def improve(self, state: _State) -> _State:
        """Changes all tables of a dimension, then one at a time, until no change helps."""
        for _ in range(MAX_SWEEPS):
            before = state.step_s
            for is_of_dim_T in self.is_of_dim_DT:
                of_dim = np.flatnonzero(is_of_dim_T).tolist()
                may_pool = all(self.tables[t].may_pool for t in of_dim)
                options = [*state.options]
                for t in of_dim:
                    options[t] = self.tables[t].ends(may_pool=may_pool)
                self._take(state, options)
            for t in self.largest[:MAX_TABLES].tolist():
                options = [*state.options]
                options[t] = self.at_cuts[t]
                self._take(state, options)
            if math.isinf(state.step_s) or state.step_s >= before * (1 - REL_GAP):
                break
        return state

    def _take(self, state: _State, options: Sequence[_Options]) -> None:
        steps_s = self.seconds(options)
        best = int(steps_s.argmin())
        if steps_s[best] < state.step_s:  # ties change nothing
            state.options = [of.at(best) for of in options]
            state.step_s = float(steps_s[best])

    def infeasible(self) -> InfeasibleError:
        """The error where even the options with the least memory do not fit."""
        least = [
            min((of.at(p) for p in range(of.hot_P.size)), key=lambda of: float(of.bytes_MP.sum()))
            for of in self.at_cuts
        ]
        need_M = _sum(of.bytes_MP for of in least)[:, 0]
        worst = int((need_M / np.maximum(self.limits_M, 1.0)).argmax())
        slots = ", or give the rows of another placement slots (placement.cold_tier=cached)"
        return InfeasibleError(
            f"{MEMORIES[worst]}: expected at least {math.ceil(need_M[worst])} on each of "
            f"{self.world.num_ranks} ranks for {len(self.tables)} tables, got "
            f"{self.limits_M[worst]:.0f}. Raise it, fix fewer rows hot, use more ranks"
            f"{slots if MEMORIES[worst] == 'device_bytes' else ''}."
        )


def _sum(parts: Iterable[Floats]) -> Floats:
    """The sum, of single options first."""
    return np.asarray(reduce(np.add, sorted(parts, key=np.size)))


def _joined(*options: _Options) -> _Options:
    return _Options(*(np.concatenate(parts, axis=-1) for parts in zip(*options, strict=True)))
