"""Searches for the placement with the shortest predicted step that fits in memory.

A table's options are an exchange and a number of hot rows, the most-read ones. Each has seconds and
bytes that add up over the tables, except that communication counts only if computation does not
hide it. So:

1. Put all options on a grid: cuts between groups of equally frequent rows, at most ``MAX_CUTS`` of
   all tables.
2. Give each memory a price in seconds a byte, and communication the price 1 or 0: all of it
   exposed, or none. At these prices every table independently takes its cheapest option among those
   that send the kinds of messages which this start allows. The price of a memory is the lowest at
   which all tables fit (bisection). Kinds of messages that cannot be faster than the best start,
   because even the cheapest options at some prices are not, are pruned.
3. From the best starts, improve one table at a time, with the others fixed and the remaining
   memory, until no change helps. With many tables only the best start is improved, in its largest
   tables.

This is a heuristic: no bound on the distance from the optimum is computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hotrec.cost_model.costs import Costs, World
from hotrec.cost_model.demand import Floats, TableDemand
from hotrec.cost_model.forms import QUANTITIES, SPARSE_DIST, StepPrediction, Workload
from hotrec.cost_model.memory import mean_bytes
from hotrec.cost_model.quantities import ReadRows, hot_cold_quantities, table_quantities
from hotrec.cost_model.step import StepModel, make_step_model
from hotrec.types import (
    Exchange,
    PipelineKind,
    PipelineSpec,
    Rows,
    Sharding,
    TablePlacement,
)

Mask = npt.NDArray[np.bool_]

# Letters of array shapes: T tables, L modes, J cuts between groups of equally frequent rows, P
# options, D dimensions, F flags, Q quantities, K resources (seconds of computation, then of
# communication beyond its cover by stage, then bytes by MEMORIES).
MODES = tuple(Exchange)
INDEX = {name: i for i, name in enumerate(QUANTITIES)}
MEMORIES = ("device_bytes", "host_bytes", "replica_bytes")
# Fixed costs of messages, which the tables of one dimension share.
FLAGS = ("cold_groups", "hot_groups", "pooled_groups")
# Sets of messages that the tables of one dimension may send in a start.
KINDS = tuple(np.array(kinds, bool) for kinds in itertools.product((True, False), repeat=3))[:-1]
# Cuts of all tables together, and at least of each.
MAX_CUTS, NUM_CUTS = 1 << 14, 48
# Bisections of the logarithm of a memory's price, within these bounds in steps for all of it.
NUM_BISECTIONS, PRICES = 14, (1e-5, 1e5)
# Starts to improve, and rounds over all tables.
NUM_STARTS, MAX_SWEEPS = 8, 5
# With more tables, one start and this many of its tables are improved: one table hardly matters.
MAX_FEW_TABLES = 40
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


@dataclass(frozen=True)
class Choice:
    """Result of the search: placement, step, and quantities of the mean rank."""

    num_hot: Mapping[str, int]
    tables: Mapping[str, TablePlacement]
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
    pipeline: PipelineSpec = SPARSE_DIST,
) -> Choice:
    """Searches for the fastest placement of these tables in TorchRec's pipeline.

    Args:
        demands: The tables.
        costs: The costs of the machine.
        world: Ranks and hosts.
        workload: The batch and the dense layers.
        limits: Memory and exchanges.
        hot_range: The smallest and largest number of hot rows of a table. A table that is absent
            may have any number.
        at: The quantities of a step near the best one. Measured collectives become lines at its
            message sizes (``make_step_model``).
        pipeline: Provides the type and the levels of what travels.

    Raises:
        InfeasibleError: If nothing fits. The message gives a budget that does.
        CostsError: If the costs do not include the link between hosts.
    """
    num_cuts = max(MAX_CUTS // len(demands), NUM_CUTS)
    ranges = [(hot_range or {}).get(demand.name, (0, demand.num_rows)) for demand in demands]
    tables = [
        _Table(demand, span, costs.device == "cpu", world, workload, limits, num_cuts)
        for demand, span in zip(demands, ranges, strict=True)
    ]
    grid = _Grid(tables)
    model = make_step_model(
        costs, world, workload, pipeline=pipeline.with_kind(PipelineKind.sparse_dist), at=at
    )
    options_T2 = _search(_Problem(grid, model, limits))
    num_hot = {d.name: int(hot) for d, hot in zip(demands, options_T2[:, 1], strict=True)}
    placed = {d.name: grid.place(t, options_T2[t]) for t, d in enumerate(demands)}
    quantities = hot_cold_quantities(demands, num_hot, placed, world, workload.batch_size)
    return Choice(num_hot, placed, model.predict(quantities), quantities)


class _Table:
    """A table, the modes that it may have, and sums over its hottest rows."""

    def __init__(
        self,
        demand: TableDemand,
        hot_range: tuple[int, int],
        is_one_memory: bool,
        world: World,
        workload: Workload,
        limits: Limits,
        num_cuts: int,
    ) -> None:
        self.demand, self.world, self._workload = demand, world, workload
        self.low, self.high = hot_range
        self.is_one_memory = is_one_memory
        # Sums over the hottest rows, up to each cut between groups: rows, q, Q, and the probability
        # that a host reads a row.
        rows = np.asarray(demand.rows_G, np.float64)
        by_host_G = 0 * rows if demand.by_host_G is None else demand.by_host_G
        units = np.stack([np.ones(rows.size), demand.by_rank_G, demand.by_any_G, by_host_G])
        sums_4J = np.zeros((4, rows.size + 1))
        np.cumsum(rows * units, axis=1, out=sums_4J[:, 1:])
        if sums_4J[0, -1] < demand.num_rows:  # rows that the profile never saw
            sums_4J = np.concatenate([sums_4J, sums_4J[:, -1:]], axis=1)
            sums_4J[0, -1] = demand.num_rows
        self._sums_4J = sums_4J
        at = np.linspace(0, sums_4J.shape[1] - 1, min(num_cuts, sums_4J.shape[1]))
        cuts_J = sums_4J[0, at.round().astype(np.int64)].astype(np.int64)
        self.cuts_J = np.unique(np.append(cuts_J, [self.low, self.high]))
        self.modes = [m for m, of in enumerate(MODES) if self._is_allowed(of, limits)]

    def _is_allowed(self, exchange: Exchange, limits: Limits) -> bool:
        """Whether the limits allow an exchange."""
        if exchange is Exchange.ROWS:
            return True
        # A rank holds the whole table, none of it hot.
        room = limits.host_bytes if self.is_one_memory else limits.device_bytes
        fits = self.demand.num_rows * self.demand.row_bytes <= room
        return limits.may_pool and self.demand.is_pooled and self.low == 0 and fits

    def sums(self, num_rows: Rows) -> Floats:
        """The four sums over the hottest rows; a group that is cut counts pro rata."""
        rows = self._sums_4J[0]
        return np.stack([np.interp(num_rows, rows, column) for column in self._sums_4J])

    def take(self, mode: int, hot_4P: Floats) -> tuple[Floats, Floats]:
        """The work of options of one mode, by QUANTITIES, and their bytes, by MEMORIES.

        Args:
            mode: Index in MODES.
            hot_4P: Sums over the hot rows of each.
        """
        exchange, demand = MODES[mode], self.demand
        hot, hot_q, hot_any, hot_host = hot_4P
        _, all_q, all_any, all_host = self._sums_4J[:, -1]
        none = 0 * hot
        of_host = hot_host, all_host - hot_host, none
        rows = ReadRows(hot_q, hot_any, all_q - hot_q, all_any - hot_any, none, *of_host)
        placed = TablePlacement(exchange, Sharding.TABLE_WISE)
        done = table_quantities(demand, placed, rows, self.world, self._workload.batch_size)
        bytes_PM = mean_bytes(
            demand,
            exchange,
            hot,
            self.world.num_ranks,
            is_one_memory=self.is_one_memory,
            is_routed_on_device=not self._workload.is_routed_by_loader,
        )
        work_PQ = np.zeros((len(bytes_PM), len(QUANTITIES)))
        for name, number in done.items():
            work_PQ[:, INDEX[name]] = number
        return work_PQ, bytes_PM


class _Grid:
    """The options of all tables, and their work, for any step model.

    An option (l, hot) is a mode and a number of hot rows. Its work is linear between the points of
    the grid.

    Attributes:
        modes: Indices in MODES of the modes that some table may have.
        is_pooled_L: Whether a mode exchanges pooled vectors.
        cuts_TJ: Numbers of hot rows, between groups; the last is repeated.
        is_open_TLJ: Whether a table may have a mode with so many hot rows.
        raised_TLJF: Which of FLAGS it raises.
        work_TLJQ, bytes_TLJM: The curves of hot rows, by QUANTITIES and MEMORIES.
        row_bytes_TLM: Bytes of each hot row.
        bytes_T: Bytes of each table.
    """

    def __init__(self, tables: Sequence[_Table]) -> None:
        self.tables = tables
        self.modes = sorted({mode for table in tables for mode in table.modes})
        self.is_pooled_L = np.array([MODES[m] is Exchange.POOLED for m in self.modes])
        self.bytes_T = np.array([t.demand.num_rows * t.demand.row_bytes for t in tables])
        self.num_rows_T = np.array([table.demand.num_rows for table in tables])
        size = max(table.cuts_J.size for table in tables)
        at_J = np.arange(size)
        self.cuts_TJ = np.stack([t.cuts_J[np.minimum(at_J, t.cuts_J.size - 1)] for t in tables])
        shape = len(tables), len(self.modes)
        self.is_open_TLJ = np.zeros((*shape, size), bool)
        self.work_TLJQ = np.zeros((*shape, size, len(QUANTITIES)))
        self.bytes_TLJM = np.zeros((*shape, size, len(MEMORIES)))
        for t, table in enumerate(tables):
            hot_4J = table.sums(self.cuts_TJ[t])
            for i, mode in enumerate(self.modes):
                if mode not in table.modes:
                    continue
                low, high = (0, 0) if self.is_pooled_L[i] else (table.low, table.high)
                self.is_open_TLJ[t, i] = (low <= hot_4J[0]) & (hot_4J[0] <= high)
                self.work_TLJQ[t, i], self.bytes_TLJM[t, i] = table.take(mode, hot_4J)
        of_all_TLM = self.bytes_TLJM[:, :, -1] - self.bytes_TLJM[:, :, 0]
        self.row_bytes_TLM = of_all_TLM / self.num_rows_T[:, None, None]
        self.raised_TLJF = self.raised(
            self.num_rows_T[:, None, None],
            np.arange(len(self.modes))[:, None],
            self.cuts_TJ[:, None],
        )

    def raised(self, num_rows: Rows, modes: Rows, hot: Rows) -> Mask:
        """Which of FLAGS options raise, bool (..., F)."""
        is_pooled = self.is_pooled_L[modes]
        raised = np.empty((*np.broadcast_shapes(hot.shape, modes.shape), len(FLAGS)), bool)
        raised[..., 0] = (hot < num_rows) & ~is_pooled
        raised[..., 1], raised[..., 2] = hot > 0, is_pooled
        return raised

    def place(self, t: int, option_2: Rows) -> TablePlacement:
        """The placement of an option.

        Rows of TABLE_WISE tables move as much as those of ROW_WISE ones on the mean rank, so the
        choice is made by what TorchRec can do: a pooled table lies on one rank, a tiny one cannot
        be cut.
        """
        table, exchange = self.tables[t], MODES[self.modes[option_2[0]]]
        is_tiny = table.demand.num_rows < table.world.num_ranks
        by_table = exchange is Exchange.POOLED or is_tiny
        return TablePlacement(exchange, Sharding.TABLE_WISE if by_table else Sharding.ROW_WISE)

    def least(self, t: int) -> Rows:
        """For each mode, the option with the fewest hot rows, int64 (P, 2)."""
        modes = np.flatnonzero(self.is_open_TLJ[t].any(axis=1))
        return np.stack([modes, np.where(self.is_pooled_L[modes], 0, self.tables[t].low)], axis=1)


class _Problem:
    """The cost of options under one step model, and whether they fit.

    Attributes:
        constant_K, flags_FK: The cost of every placement and of each of FLAGS.
        taken_TLJK: The curves of the grid.
    """

    def __init__(self, grid: _Grid, model: StepModel, limits: Limits) -> None:
        self.grid, tables = grid, grid.tables
        device_bytes = math.inf if tables[0].is_one_memory else limits.device_bytes
        replica_bytes = math.inf if limits.replica_bytes is None else limits.replica_bytes
        self.limits_M = np.array([device_bytes, limits.host_bytes, replica_bytes], np.float64)
        self.sizes_M = np.maximum(self.limits_M, 1.0)
        stages = [form for form in model.stages.values() if form.wire.terms or form.wire.constant]
        size = 1 + len(stages) + len(MEMORIES)
        self.memory = slice(size - len(MEMORIES), size)
        self.constant_K, weights_QK = np.zeros(size), np.zeros((len(QUANTITIES), size))
        for form in model.stages.values():
            parts = [(0, form.compute, 1.0)]
            if form in stages:
                k = 1 + stages.index(form)
                parts += [(k, form.wire, 1.0), (k, form.cover, -model.overlap)]
            for k, part, factor in parts:
                self.constant_K[k] += factor * part.constant
                for name, coefficient in part.terms.items():
                    weights_QK[INDEX[name], k] += factor * coefficient
        self.flags_FK = weights_QK[[INDEX[flag] for flag in FLAGS]]
        dims, self.dim_T = np.unique([t.demand.dim for t in tables], return_inverse=True)
        self.is_of_dim_DT = (np.arange(len(dims))[:, None] == self.dim_T).astype(np.int64)
        self.taken_TLJK = grid.work_TLJQ @ weights_QK
        self.taken_TLJK[..., self.memory] = grid.bytes_TLJM
        computed_TLJ = np.where(grid.is_open_TLJ, self.taken_TLJK[..., 0], np.inf)
        self.unit_s = max(float(computed_TLJ.min(axis=(1, 2)).sum()), 1e-12)
        self._at_cuts: dict[int, tuple[Rows, Floats, Mask]] = {}

    @cached_property
    def least(self) -> list[tuple[Rows, Floats]]:
        """For each table, the options of each mode with the fewest rows, and their cost."""
        least_T = [self.grid.least(t) for t in range(len(self.dim_T))]
        return [(least_P2, self.take(t, least_P2)[0]) for t, least_P2 in enumerate(least_T)]

    def take(self, t: int, options_P2: Rows) -> tuple[Floats, Mask]:
        """Cost of options of a table without FLAGS, float64 (P, K), and the flags they raise."""
        grid, (modes, hot) = self.grid, options_P2.T
        taken_PK = _between(self.taken_TLJK[t], modes, grid.cuts_TJ[t], hot)
        return taken_PK, grid.raised(grid.num_rows_T[t], modes, hot)

    def at_cuts(self, t: int) -> tuple[Rows, Floats, Mask]:
        """Options at all cuts, int64 (P, 2), their cost and flags."""
        if t not in self._at_cuts:
            modes, at = np.nonzero(self.grid.is_open_TLJ[t])
            options_P2 = np.stack([modes, self.grid.cuts_TJ[t, at]], axis=1)
            of_table = self.taken_TLJK[t, modes, at], self.grid.raised_TLJF[t, modes, at]
            self._at_cuts[t] = options_P2, *of_table
        return self._at_cuts[t]

    def ends(self, t: int, options_P2: Rows, taken_PK: Floats, rest_K: Floats) -> Rows:
        """Options with as many more hot rows as fit in memory; int64 (P, 2)."""
        grid, (modes, hot) = self.grid, options_P2.T
        free_PM = self.limits_M - (rest_K + taken_PK)[:, self.memory]
        max_hot = np.where(grid.is_pooled_L[modes], 0, grid.tables[t].high)
        # Memory is linear in the rows.
        row_PM = grid.row_bytes_TLM[t, modes]
        room_PM = np.divide(free_PM, row_PM, out=np.full_like(row_PM, 1e18), where=row_PM > 0)
        fill = np.minimum(hot + np.floor(room_PM.min(axis=1)).astype(np.int64), max_hot)
        return np.stack([modes, fill], axis=1)[fill > hot]

    def each(self, options_T2: Rows) -> tuple[Floats, Mask]:
        """Cost of one option for each table, float64 (T, K), and its flags, bool (T, F)."""
        found = [self.take(t, options_T2[t : t + 1]) for t in range(len(options_T2))]
        return np.concatenate([of[0] for of in found]), np.concatenate([of[1] for of in found])

    def count(self, raised_TF: Mask) -> Rows:
        """How many tables of each dimension raise each flag, int64 (D, F)."""
        return np.asarray(self.is_of_dim_DT @ raised_TF.astype(np.int64))

    def seconds(self, total_PK: Floats) -> Floats:
        """The step's seconds, infinite if it does not fit; resources along the last axis."""
        exposed = np.maximum(total_PK[..., 1 : self.memory.start], 0).sum(axis=-1)
        fits = (total_PK[..., self.memory] <= self.limits_M * (1 + 1e-9)).all(axis=-1)
        return np.where(fits, total_PK[..., 0] + exposed, np.inf)

    def used(self, taken_TK: Floats) -> Floats:
        """The share of each memory that is used, float64 (M,)."""
        return np.asarray(taken_TK[:, self.memory].sum(axis=0) / self.sizes_M)

    def step_of(self, taken_TK: Floats, raised_TF: Mask) -> float:
        """The step's seconds with these options of all tables."""
        num_raised_F = (self.count(raised_TF) > 0).sum(axis=0)
        total_K = self.constant_K + taken_TK.sum(axis=0) + num_raised_F @ self.flags_FK
        return float(self.seconds(total_K))


def _between(curves_LJK: Floats, curve: Rows, points_J: Rows, numbers_P: Rows) -> Floats:
    """A curve of each at numbers of rows, float64 (P, K)."""
    at = np.searchsorted(points_J, numbers_P, "right") - 1
    after = np.minimum(at + 1, points_J.size - 1)
    share_P = (numbers_P - points_J[at]) / np.maximum(points_J[after] - points_J[at], 1)
    taken_PK = curves_LJK[curve, at]
    return np.asarray(taken_PK + share_P[:, None] * (curves_LJK[curve, after] - taken_PK))


# ------------------------------------------------------------------ the search


class _StartPoint(NamedTuple):
    """An initial placement.

    Args:
        step_s: The step's seconds.
        options_T2: An option for each table, int64 (T, 2).
        taken_TK: Their cost without FLAGS.
        prices_M: The prices of memory at which they are cheapest.
    """

    step_s: float
    options_T2: Rows
    taken_TK: Floats
    prices_M: Floats


def _search(problem: _Problem) -> Rows:
    """Returns the options of the shortest step found.

    Raises:
        InfeasibleError: If nothing fits.
    """
    is_few = len(problem.dim_T) <= MAX_FEW_TABLES
    starts = _starts(problem, NUM_STARTS if is_few else 1)
    improved = (_descend(problem, start.options_T2) for start in starts)
    step_s, best = min(improved, key=lambda entry: entry[0])
    if math.isinf(step_s):
        raise _infeasible(problem, starts[-1])
    return best


def _starts(problem: _Problem, count: int) -> list[_StartPoint]:
    """The best placements at prices, and the one with the least memory if none of them fits."""
    exposures = (0.0, 1.0) if problem.memory.start > 1 else (0.0,)
    num_dims = len(problem.is_of_dim_DT)
    alike = [np.tile(kinds, (num_dims, 1)) for kinds in KINDS]
    apart = [np.array(kinds) for kinds in itertools.product(KINDS, repeat=2)]
    of_starts = apart if count > 1 and num_dims == 2 else alike
    found: list[_StartPoint] = []
    for exposed, kinds_DF in itertools.product(exposures, of_starts):
        best = min(found, key=lambda start: start.step_s, default=None)
        found += _priced(problem, 1.0, exposed, kinds_DF, best)
    found.sort(key=lambda start: start.step_s)
    distinct = list({start.options_T2.tobytes(): start for start in found}.values())[:count]
    if math.isinf(distinct[0].step_s):
        distinct += _priced(problem, 0.0, 0.0, alike[0], None)
    return distinct


def _infeasible(problem: _Problem, smallest: _StartPoint) -> InfeasibleError:
    """The error of the options with the least memory."""
    need_M = smallest.taken_TK.sum(axis=0)[problem.memory]
    worst = int((need_M / problem.sizes_M).argmax())
    slots = ", or give the rows of another placement slots (placement.cold_tier=cached)"
    return InfeasibleError(
        f"{MEMORIES[worst]}: expected at least {math.ceil(need_M[worst])} on each of "
        f"{problem.grid.tables[0].world.num_ranks} ranks for {len(problem.dim_T)} tables, got "
        f"{problem.limits_M[worst]:.0f}. Raise it, fix fewer rows hot, use more ranks"
        f"{slots if MEMORIES[worst] == 'device_bytes' else ''}."
    )


def _priced(
    problem: _Problem, computed: float, exposed: float, kinds_DF: Mask, best: _StartPoint | None
) -> list[_StartPoint]:
    """The independent choices of tables, with prices for memories that are full.

    Args:
        problem: The tables.
        computed: Price of a second of computation: 1, or 0 to minimise memory.
        exposed: Price of a second of communication, 0..1.
        kinds_DF: Which of FLAGS options may raise, if a table has such an option.
        best: The best start so far.

    Returns:
        One start; none if its lower bound exceeds the best start.
    """
    grid, is_open_TLJ = problem.grid, problem.grid.is_open_TLJ
    kinds_TF = kinds_DF[problem.dim_T]
    is_wanted_TLJ = is_open_TLJ & ~(grid.raised_TLJF & ~kinds_TF[:, None, None]).any(axis=-1)
    is_wanted_TLJ |= is_open_TLJ & ~is_wanted_TLJ.any(axis=(1, 2), keepdims=True)
    prices_K = np.zeros(problem.memory.stop)
    prices_K[0], prices_K[1 : problem.memory.start] = computed, exposed
    seconds_TLJ = np.where(is_wanted_TLJ, problem.taken_TLJK @ prices_K, np.inf)

    def choose(prices_M: Floats) -> tuple[float, _StartPoint]:
        """The cheapest options and what they cost."""
        costs_TLJ = seconds_TLJ + grid.bytes_TLJM @ (prices_M / problem.sizes_M)
        costs_TP, all_T = costs_TLJ.reshape(len(costs_TLJ), -1), np.arange(len(costs_TLJ))
        modes, at = np.divmod(costs_TP.argmin(axis=1), costs_TLJ.shape[-1])
        hot, taken_TK = grid.cuts_TJ[all_T, at], problem.taken_TLJK[all_T, modes, at]
        raised_TF = grid.raised_TLJF[all_T, modes, at]
        step_s = problem.step_of(taken_TK, raised_TF)
        options_T2 = np.stack([modes, hot], axis=1)
        start = _StartPoint(step_s, options_T2, taken_TK, prices_M.copy())
        return float(costs_TP.min(axis=1).sum()), start

    prices_M = problem.unit_s * PRICES[0] ** 2 * np.isfinite(problem.limits_M)
    if best is not None:
        # At any prices, the cheapest options minus the price of all memory bound what fits from
        # below. With few tables, the best start's prices would prune starts that improve to better
        # ones.
        is_few = len(problem.dim_T) <= MAX_FEW_TABLES
        for bound_M in (prices_M,) if is_few else (prices_M, best.prices_M):
            cost_s = choose(bound_M)[0] - float(bound_M.sum()) + problem.constant_K @ prices_K
            if cost_s >= best.step_s:
                return []
    start = choose(prices_M)[1]
    for _ in range(2 * len(MEMORIES)):
        used_M = problem.used(start.taken_TK)
        worst = int(used_M.argmax())
        if used_M[worst] <= 1:
            break
        ends = max(prices_M[worst] / problem.unit_s, PRICES[0]), PRICES[1]
        low, high = (math.log(end * problem.unit_s) for end in ends)
        for _ in range(NUM_BISECTIONS):
            prices_M[worst] = math.exp((low + high) / 2)
            if problem.used(choose(prices_M)[1].taken_TK)[worst] <= 1:
                high = (low + high) / 2
            else:
                low = (low + high) / 2
        prices_M[worst] = math.exp(high)
        start = choose(prices_M)[1]
    return [start]


def _descend(problem: _Problem, options_T2: Rows) -> tuple[float, Rows]:
    """Improves one table at a time, with the others fixed, until no change helps."""
    options_T2, (taken_TK, raised_TF) = options_T2.copy(), problem.each(options_T2)
    is_few = len(options_T2) <= MAX_FEW_TABLES
    step_s, used_DF = problem.step_of(taken_TK, raised_TF), problem.count(raised_TF)
    total_K = problem.constant_K + taken_TK.sum(axis=0)
    order = np.arange(len(options_T2))
    if not is_few and not math.isinf(step_s):
        order = np.argsort(-problem.grid.bytes_T, kind="stable")[:MAX_FEW_TABLES]
    for _ in range(MAX_SWEEPS):
        before = step_s
        for t in map(int, order):
            d = problem.dim_T[t]
            rest_K = total_K - taken_TK[t]
            used_DF[d] -= raised_TF[t]
            others_F = (used_DF > 0).sum(axis=0) - (used_DF[d] > 0)
            options_P2, taken_PK, raised_PF = problem.at_cuts(t)
            for is_last in (False, True):  # the second time between the cuts, where memory ends
                num_raised_PF = others_F + (raised_PF | (used_DF[d] > 0))
                steps_s = problem.seconds(rest_K + taken_PK + num_raised_PF @ problem.flags_FK)
                best = int(steps_s.argmin())
                if steps_s[best] < step_s:  # ties change nothing
                    step_s, options_T2[t] = float(steps_s[best]), options_P2[best]
                    taken_TK[t], raised_TF[t] = taken_PK[best], raised_PF[best]
                if is_last:
                    break
                options_P2, taken_PK = options_T2[t : t + 1], taken_TK[t : t + 1]
                if is_few:
                    options_P2 = np.concatenate([options_P2, problem.least[t][0]])
                    taken_PK = np.concatenate([taken_PK, problem.least[t][1]])
                options_P2 = problem.ends(t, options_P2, taken_PK, rest_K)
                if len(options_P2) == 0:
                    break
                taken_PK, raised_PF = problem.take(t, options_P2)
            total_K = rest_K + taken_TK[t]
            used_DF[d] += raised_TF[t]
        if math.isinf(step_s) or step_s >= before * (1 - REL_GAP):
            break
    return step_s, options_T2
