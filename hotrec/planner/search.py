"""Searches for the placement with the least predicted step time that fits in memory.

A table's options are a mode (exchange and tier) and a number of hot rows, the most looked-up ones,
and for a device cache the number of rows that it holds. Each takes seconds and bytes that add up
over the tables, except that communication counts only where computation does not hide it. So:

1. Give each memory a price in seconds a byte, and communication the price 1 or 0: all of it
   exposed, or none. At these prices every table takes its cheapest option, for itself, among those
   that send the kinds of messages which this start allows. The price of a memory is the lowest at
   which all tables fit (bisection).
2. From the best starts, improve one table at a time, all others as they are, with what memory is
   left, until no change helps. Then both again, with options near the best ones found.

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
from hotrec.cost_model.forms import QUANTITIES, StepPrediction, Workload
from hotrec.cost_model.memory import mean_bytes
from hotrec.cost_model.quantities import ReadRows, hot_cold_quantities, table_quantities
from hotrec.cost_model.step import StepModel, make_step_model
from hotrec.types import Exchange, PipelineSpec, Rows, Sharding, TablePlacement, Tier, WireType

Mask = npt.NDArray[np.bool_]

# Letters of array shapes: T tables, J cuts between groups of equally frequent rows, P options, K
# resources (seconds of computation, then of communication beyond its cover by stage, then bytes by
# MEMORIES), F flags.
# Those that it chooses from; the user chooses Tier.CACHED.
TIERS = (Tier.DEVICE, Tier.HOST, Tier.HOST_CACHED)
MODES = tuple((exchange, tier) for exchange in Exchange for tier in TIERS)
FIRST_POOLED = MODES.index((Exchange.POOLED, Tier.DEVICE))
MEMORIES = ("device_bytes", "host_bytes", "replica_bytes")
# Fixed costs of messages, which the tables of one dimension share.
FLAGS = ("cold_groups", "hot_groups", "pooled_groups")
# Sets of messages that the tables of one dimension may send in a start.
KINDS = tuple(np.array(kinds, bool) for kinds in itertools.product((True, False), repeat=3))[:-1]
# Cuts of all tables together, and those of a table and of a cache that are tried at first.
MAX_CUTS, NUM_CUTS, NUM_CACHE_CUTS = 1 << 14, 48, 20
# Bisections of the logarithm of a price of a memory, between so many steps for all of it.
NUM_BISECTIONS, PRICES = 14, (1e-5, 1e5)
# Starts that are improved, and rounds over all tables.
NUM_STARTS, MAX_SWEEPS = 8, 5
# Of more tables only the best start is improved, and once: one table hardly matters there.
MAX_FEW_TABLES = 40
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
        demands: The tables.
        costs: The costs of the machine.
        world: Ranks and hosts.
        workload: The batch and the dense layers.
        limits: Memory and exchanges.
        hot_range: The smallest and largest number of hot rows of a table. A table that is absent
            may have any number.
        at: The quantities of a step near the best one. Measured collectives become lines at its
            message sizes (``make_step_model``).
        wire: Type of rows and gradients on the wire.

    Raises:
        InfeasibleError: If nothing fits. The message gives a budget that does.
        CostsError: If the costs do not include the link between hosts.
    """
    ranges = hot_range or {}
    tables = [
        _Table(
            demand,
            ranges.get(demand.name, (0, demand.num_rows)),
            costs,
            world,
            workload,
            limits,
            max(MAX_CUTS // len(demands), NUM_CUTS),
        )
        for demand in demands
    ]
    found: list[tuple[float, bool, StepModel, list[_Option]]] = []
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
        problem = _Problem(tables, model, limits)
        step_s, options = _search(problem, [entry[-1] for entry in found])
        found.append((step_s, is_hot_dense, model, options))
    _, is_hot_dense, model, options = min(found, key=lambda entry: entry[0])
    num_hot = {t.demand.name: o.num_hot for t, o in zip(tables, options, strict=True)}
    placed = {t.demand.name: t.place(o) for t, o in zip(tables, options, strict=True)}
    quantities = hot_cold_quantities(demands, num_hot, placed, world, workload.batch_size)
    return Choice(num_hot, placed, is_hot_dense, model.predict(quantities), quantities)


class _Option(NamedTuple):
    """What one table may do.

    Args:
        mode: Index in MODES.
        num_hot: Hot rows.
        num_held: Hot rows, and the rows after them that a device cache holds.
    """

    mode: int
    num_hot: int
    num_held: int


class _Table:
    """A table and its options, whatever the others do."""

    def __init__(
        self,
        demand: TableDemand,
        hot_range: tuple[int, int],
        costs: Costs,
        world: World,
        workload: Workload,
        limits: Limits,
        max_cuts: int,
    ) -> None:
        self.demand, self.world = demand, world
        self.low, self.high = hot_range
        self.is_one_memory = costs.device == "cpu"
        self._workload = workload
        # Sums over the hottest rows, up to each cut between groups: rows, q, Q and lookups.
        rows = np.asarray(demand.rows_G, np.float64)
        units = np.stack([np.ones(rows.size), demand.by_rank_G, demand.by_any_G, demand.probs_G])
        sums_4J = np.pad(np.cumsum(rows * units, axis=1), ((0, 0), (1, 0)))
        if sums_4J[0, -1] < demand.num_rows:  # rows that the profile never saw
            sums_4J = np.concatenate([sums_4J, sums_4J[:, -1:]], axis=1)
            sums_4J[0, -1] = demand.num_rows
        self._sums_4J = sums_4J
        cuts_J = _thinned(sums_4J[0].astype(np.int64), max_cuts)
        self.cuts_J = np.unique(np.append(cuts_J, [self.low, self.high]))
        self.modes = [m for m in range(len(MODES)) if self._is_allowed(*MODES[m], costs, limits)]

    def _is_allowed(self, exchange: Exchange, tier: Tier, costs: Costs, limits: Limits) -> bool:
        """Whether the limits allow a mode and the costs include the kernels that it runs."""
        is_pooled = exchange is Exchange.POOLED
        if is_pooled:  # a rank holds the whole table, none of it hot
            is_host = self.is_one_memory or tier is not Tier.DEVICE
            room = limits.host_bytes if is_host else limits.device_bytes
            whole = self.demand.num_rows * self.demand.row_bytes
            if not limits.may_pool or self.low > 0 or whole > room:
                return False
        if self.is_one_memory:
            return tier is Tier.DEVICE
        read, update = ("pooled", "pooled_update") if is_pooled else ("read", "update")
        kernels = {
            Tier.DEVICE: (f"{read}_device", f"{update}_device"),
            Tier.HOST: (f"{read}_host", f"{update}_host"),
            Tier.HOST_CACHED: (f"{read}_hit", f"{read}_miss", f"{update}_hit"),
        }
        return all(name in costs.kernels for name in kernels[tier])

    def place(self, option: _Option) -> TablePlacement:
        """The placement of an option.

        Rows of TABLE_WISE tables move as much as those of ROW_WISE ones on the mean rank, so the
        choice is made by what TorchRec can do: a pooled table lies on one rank, a tiny one cannot
        be cut.
        """
        exchange, tier = MODES[option.mode]
        by_table = exchange is Exchange.POOLED or self.demand.num_rows < self.world.num_ranks
        sharding = Sharding.TABLE_WISE if by_table else Sharding.ROW_WISE
        frac = (option.num_held - option.num_hot) / self.demand.num_rows
        return TablePlacement(exchange, sharding, tier, frac if tier is Tier.HOST_CACHED else None)

    def least_options(self) -> list[_Option]:
        """The option of each mode with the fewest hot and held rows."""
        found = []
        for mode in self.modes:
            hot = self.low if mode < FIRST_POOLED else 0
            is_cached = MODES[mode][1] is Tier.HOST_CACHED
            held = min(hot + 1, self.demand.num_rows) if is_cached else hot
            found.append(_Option(mode, hot, held))
        return found

    def first_numbers(self) -> Rows:
        """Options over the whole range, at some of the cuts, int64 (P, 3)."""
        within = self.cuts_J[(self.cuts_J >= self.low) & (self.cuts_J <= self.high)]
        hot, held = _thinned(within, NUM_CACHE_CUTS), _thinned(self.cuts_J, 2 * NUM_CACHE_CUTS)
        is_first = np.isin(self._of_hot[:, 1], _thinned(within, NUM_CUTS))
        parts = [self._of_hot[is_first | (self._of_hot[:, 0] >= FIRST_POOLED)]]
        for mode in self.modes:
            if MODES[mode][1] is Tier.HOST_CACHED:
                parts.append(self._of_cache(mode, hot, held))
        return np.concatenate(parts)

    def numbers_near(self, old: _Option) -> Rows:
        """Options at all cuts, int64 (P, 3); of a cache one number varies."""
        parts = [self._of_hot]
        for mode in self.modes:
            if MODES[mode][1] is Tier.HOST_CACHED:
                parts.append(self._of_cache(mode, np.array([old.num_hot]), self.cuts_J))
                if mode < FIRST_POOLED:
                    parts.append(self._of_cache(mode, self.cuts_J, np.array([old.num_held])))
        return np.concatenate(parts)

    @cached_property
    def _of_hot(self) -> Rows:
        """Options without a cache at all cuts."""
        hot = self.cuts_J[(self.cuts_J >= self.low) & (self.cuts_J <= self.high)]
        parts = [np.zeros((0, 3), np.int64)]
        for mode in self.modes:
            if MODES[mode][1] is not Tier.HOST_CACHED:
                of_mode = hot if mode < FIRST_POOLED else hot[:1] * 0
                parts.append(np.stack([0 * of_mode + mode, of_mode, of_mode], axis=1))
        return np.concatenate(parts)

    def _of_cache(self, mode: int, hot: Rows, held: Rows) -> Rows:
        """Options with all pairs of hot and held rows.

        A cache holds a row at least, of a table that is not wholly hot.
        """
        hot = hot[(hot >= self.low) & (hot <= self.high)] if mode < FIRST_POOLED else 0 * hot[:1]
        least = np.minimum(hot + 1, self.demand.num_rows)[:, None]
        pairs_HJ = np.broadcast_arrays(mode, hot[:, None], np.maximum(held, least))
        return np.stack(pairs_HJ, axis=-1).reshape(-1, 3)

    @cached_property
    def curves(self) -> dict[int, tuple[tuple[Floats, ...], tuple[Floats, ...]]]:
        """Work (J, Q) and bytes (J, M) of each mode at each cut: of hot rows, and of held ones.

        Those of an option are the sum of both, and linear between cuts.
        """
        found = {}
        for mode in self.modes:
            exchange, tier = MODES[mode]
            none, whole = 0 * self.cuts_J, 0 * self.cuts_J + self.demand.num_rows
            of_hot = self._take(exchange, tier, self.cuts_J, whole)
            of_held = tuple(0 * curve[:1] for curve in of_hot)
            if tier is Tier.HOST_CACHED:
                held = self._take(exchange, tier, none, self.cuts_J)
                of_held = tuple(curve - curve[-1] for curve in held)
            found[mode] = of_hot, of_held
        return found

    def _take(
        self, exchange: Exchange, tier: Tier, num_hot: Rows, num_held: Rows
    ) -> tuple[Floats, ...]:
        """What options of one mode do, by QUANTITIES, and their bytes, by MEMORIES."""
        done = self._work(exchange, tier, num_hot, num_held)
        work_PQ = np.zeros((num_hot.size, len(QUANTITIES)))
        for name, number in done.items():
            work_PQ[:, QUANTITIES.index(name)] = number
        bytes_PM = mean_bytes(
            self.demand,
            exchange,
            tier,
            num_hot.astype(np.float64),
            (num_held - num_hot).astype(np.float64),
            self.world.num_ranks,
            is_one_memory=self.is_one_memory,
            is_routed_on_device=not self._workload.is_routed_by_loader,
        )
        return work_PQ, bytes_PM

    def _work(
        self, exchange: Exchange, tier: Tier, num_hot: Rows, num_held: Rows
    ) -> dict[str, Floats]:
        """What a step does, by quantity; groups that are partly hot or held count pro rata."""
        (hot, hot_q, hot_any, _), (_, held_q, _, held_p) = (
            [np.interp(numbers, self._sums_4J[0], column) for column in self._sums_4J]
            for numbers in (num_hot, num_held)
        )
        _, all_q, all_any, all_p = self._sums_4J[:, -1]
        rows = ReadRows(hot, hot_q, hot_any, all_q - hot_q, all_any - hot_any, 0 * hot)
        hit, miss = held_q - hot_q, all_q - held_q
        if exchange is Exchange.POOLED:
            num_ids = self._workload.batch_size * self.demand.lookups_per_sample
            # A table that is never looked up misses nothing.
            hit = num_ids * (held_p / all_p if all_p > 0 else held_p + 1)
            miss = num_ids - hit
        is_cached = tier is Tier.HOST_CACHED
        served = {"hit": hit, "miss": miss} if is_cached else {tier.value: hit + miss}
        placed = TablePlacement(exchange, Sharding.TABLE_WISE, tier)
        batch_size = self._workload.batch_size
        return table_quantities(self.demand, placed, rows, served, self.world, batch_size)


def _thinned(numbers: Rows, count: int) -> Rows:
    """So many of the numbers, the first and the last among them."""
    at = np.linspace(0, numbers.size - 1, min(count, numbers.size))
    return numbers[np.unique(at.round().astype(np.int64))]


class _Problem:
    """What options take under one step model, and whether they fit.

    Attributes:
        constant_K, flags_FK: What every placement and what each of FLAGS takes.
        offered_T: The options of each table to choose from at prices, int64 (P, 3).
        taken_PK, raised_PF: Of these, one table after the other.
        at_TP: Indices of each table's options among these, the last repeated.
    """

    def __init__(self, tables: Sequence[_Table], model: StepModel, limits: Limits) -> None:
        self.tables = tables
        device_bytes = math.inf if tables[0].is_one_memory else limits.device_bytes
        replica_bytes = math.inf if limits.replica_bytes is None else limits.replica_bytes
        self.limits_M = np.array([device_bytes, limits.host_bytes, replica_bytes], np.float64)
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
                    weights_QK[QUANTITIES.index(name), k] += factor * coefficient
        self.flags_FK = weights_QK[[QUANTITIES.index(flag) for flag in FLAGS]]
        dims, self.dim_T = np.unique([t.demand.dim for t in tables], return_inverse=True)
        self.is_of_dim_DT = (np.arange(len(dims))[:, None] == self.dim_T).astype(np.int64)
        self._curves_T = [
            {
                mode: [self._weigh(curve, weights_QK) for curve in curves]
                for mode, curves in table.curves.items()
            }
            for table in tables
        ]
        self.offer([table.first_numbers() for table in tables])

    def offer(self, numbers_T: Sequence[Rows]) -> None:
        """Sets the options to choose from at prices."""
        self.offered_T = numbers_T
        found = [self.take(t, numbers_P3) for t, numbers_P3 in enumerate(numbers_T)]
        self.taken_PK, self.raised_PF = (np.concatenate(of) for of in zip(*found, strict=True))
        sizes = np.array([len(numbers_P3) for numbers_P3 in numbers_T])
        self.starts_T = np.cumsum(sizes) - sizes
        self.at_TP = self.starts_T[:, None] + np.minimum(np.arange(sizes.max()), sizes[:, None] - 1)

    def _weigh(self, curve: tuple[Floats, ...], weights_QK: Floats) -> Floats:
        work_JQ, bytes_JM = curve
        taken_JK = work_JQ @ weights_QK
        taken_JK[:, self.memory] = bytes_JM
        return np.asarray(taken_JK)

    def take(self, table: int, numbers_P3: Rows) -> tuple[Floats, Mask]:
        """What options of a table take without FLAGS, float64 (P, K), and the flags they raise."""
        modes, hot, held = numbers_P3.T
        taken_PK = np.empty((len(numbers_P3), self.constant_K.size))
        for mode in np.unique(modes):
            at = modes == mode
            of_hot, of_held = self._curves_T[table][int(mode)]
            cuts_J = self.tables[table].cuts_J
            taken_PK[at] = _between(of_hot, cuts_J, hot[at])
            if len(of_held) > 1:
                taken_PK[at] += _between(of_held, cuts_J, held[at])
        is_pooled = modes >= FIRST_POOLED
        is_cold = (hot < self.tables[table].demand.num_rows) & ~is_pooled
        return taken_PK, np.stack([is_cold, hot > 0, is_pooled], axis=1)

    def each(self, options: Sequence[_Option]) -> tuple[Floats, Mask]:
        """What one option for each table takes, float64 (T, K), and its flags, bool (T, F)."""
        found = [self.take(t, np.array([option])) for t, option in enumerate(options)]
        return np.concatenate([of[0] for of in found]), np.concatenate([of[1] for of in found])

    def options(self, at_T: Rows) -> list[_Option]:
        """The options with these indices."""
        pairs = zip(self.offered_T, at_T - self.starts_T, strict=True)
        return [_Option(*numbers_P3[at].tolist()) for numbers_P3, at in pairs]

    def count(self, raised_TF: Mask) -> Rows:
        """How many tables of each dimension raise each flag, int64 (D, F)."""
        return np.asarray(self.is_of_dim_DT @ raised_TF.astype(np.int64))

    def seconds(self, total_PK: Floats) -> Floats:
        """The step's seconds, infinite where it does not fit; resources along the last axis."""
        exposed = np.maximum(total_PK[..., 1 : self.memory.start], 0).sum(axis=-1)
        fits = (total_PK[..., self.memory] <= self.limits_M * (1 + 1e-9)).all(axis=-1)
        return np.where(fits, total_PK[..., 0] + exposed, np.inf)

    def step_of(self, taken_TK: Floats, raised_TF: Mask) -> float:
        """The step's seconds with these options of all tables."""
        num_raised_F = (self.count(raised_TF) > 0).sum(axis=0)
        total_K = self.constant_K + taken_TK.sum(axis=0) + num_raised_F @ self.flags_FK
        return float(self.seconds(total_K))


def _between(taken_JK: Floats, cuts_J: Rows, numbers_P: Rows) -> Floats:
    """A curve at numbers of rows, float64 (P, K)."""
    at = np.clip(np.searchsorted(cuts_J, numbers_P, "right") - 1, 0, cuts_J.size - 2)
    share_P = (numbers_P - cuts_J[at]) / (cuts_J[at + 1] - cuts_J[at])
    return np.asarray(taken_JK[at] + share_P[:, None] * (taken_JK[at + 1] - taken_JK[at]))


# ------------------------------------------------------------------ the search


def _search(problem: _Problem, others: Sequence[list[_Option]]) -> tuple[float, list[_Option]]:
    """Returns the least step found and its options; ``others`` are more placements to start from.

    Raises:
        InfeasibleError: If nothing fits.
    """
    is_few = len(problem.tables) <= MAX_FEW_TABLES
    starts = [*(others if is_few else ()), *_starts(problem, NUM_STARTS if is_few else 1)]
    step_s, best = min((_descend(problem, start) for start in starts), key=lambda entry: entry[0])
    if math.isinf(step_s):
        raise _infeasible(problem, starts[-1])
    if is_few:
        near = zip(problem.tables, best, strict=True)
        problem.offer([table.numbers_near(option) for table, option in near])
        more = [_descend(problem, start) for start in _starts(problem, NUM_STARTS)]
        step_s, best = min((step_s, best), *more, key=lambda entry: entry[0])
        return step_s, best
    return step_s, best


def _starts(problem: _Problem, count: int) -> list[list[_Option]]:
    """The best placements at prices, and the one that takes least memory."""
    exposures = (0.0, 1.0) if problem.memory.start > 1 else (0.0,)
    alike = [np.tile(kinds, (len(problem.is_of_dim_DT), 1)) for kinds in KINDS]
    apart = [np.array(kinds) for kinds in itertools.product(KINDS, repeat=2)]
    of_starts = apart if count > 1 and len(problem.is_of_dim_DT) == 2 else alike
    found = [_priced(problem, 1.0, exposed, of) for exposed in exposures for of in of_starts]
    found.sort(key=lambda at_T: problem.step_of(problem.taken_PK[at_T], problem.raised_PF[at_T]))
    distinct = list({at_T.tobytes(): at_T for at_T in found}.values())[:count]
    smallest = _priced(problem, 0.0, 0.0, alike[0])
    first = problem.step_of(problem.taken_PK[distinct[0]], problem.raised_PF[distinct[0]])
    kept = [*distinct, smallest] if math.isinf(first) else distinct
    return [problem.options(at_T) for at_T in kept]


def _infeasible(problem: _Problem, smallest: Sequence[_Option]) -> InfeasibleError:
    """The error of the options that take least memory."""
    need_M = problem.each(smallest)[0].sum(axis=0)[problem.memory]
    worst = int((need_M / np.maximum(problem.limits_M, 1.0)).argmax())
    return InfeasibleError(
        f"{MEMORIES[worst]}: expected at least {math.ceil(need_M[worst])} on each of "
        f"{problem.tables[0].world.num_ranks} ranks for {len(smallest)} tables, got "
        f"{problem.limits_M[worst]:.0f}. Raise it, fix fewer rows hot, or use more ranks."
    )


def _priced(problem: _Problem, computed: float, exposed: float, kinds_DF: Mask) -> Rows:
    """What tables choose, each for itself, with the memories that bind priced.

    Args:
        problem: The tables.
        computed: Price of a second of computation: 1, or 0 to take least memory.
        exposed: Price of a second of communication, 0..1.
        kinds_DF: Which of FLAGS options may raise, where a table has such an option.

    Returns:
        Indices of one option for each table, int64 (T,).
    """
    seconds_P = computed * problem.taken_PK[:, 0]
    seconds_P = seconds_P + exposed * problem.taken_PK[:, 1 : problem.memory.start].sum(axis=1)
    is_closed_TPF = problem.raised_PF[problem.at_TP] & ~kinds_DF[problem.dim_T][:, None]
    is_closed_TP = np.asarray(is_closed_TPF.any(axis=-1))
    is_closed_TP &= ~is_closed_TP.all(axis=1, keepdims=True)
    bytes_PM = problem.taken_PK[:, problem.memory] / np.maximum(problem.limits_M, 1.0)
    unit_s = max(float(seconds_P[problem.at_TP].min(axis=1).sum()), 1e-12)

    def choose(prices_M: Floats) -> Rows:
        """The cheapest options; prices are of a whole memory, in steps."""
        costs_P = seconds_P / unit_s + bytes_PM @ prices_M
        costs_TP = np.where(is_closed_TP, np.inf, costs_P[problem.at_TP])
        return problem.at_TP[np.arange(len(costs_TP)), costs_TP.argmin(axis=1)]

    prices_M = np.where(np.isfinite(problem.limits_M), PRICES[0] ** 2, 0.0)
    at_T = choose(prices_M)
    for _ in range(2 * len(MEMORIES)):
        used_M = bytes_PM[at_T].sum(axis=0)
        worst = int(used_M.argmax())
        if used_M[worst] <= 1:
            break
        low, high = math.log(max(prices_M[worst], PRICES[0])), math.log(PRICES[1])
        for _ in range(NUM_BISECTIONS):
            prices_M[worst] = math.exp((low + high) / 2)
            if bytes_PM[choose(prices_M)].sum(axis=0)[worst] <= 1:
                high = (low + high) / 2
            else:
                low = (low + high) / 2
        prices_M[worst] = math.exp(high)
        at_T = choose(prices_M)
    return at_T


def _descend(problem: _Problem, options: Sequence[_Option]) -> tuple[float, list[_Option]]:
    """Improves one table at a time, all else equal, until no change helps."""
    options = list(options)
    taken_TK, raised_TF = problem.each(options)
    step_s, used_DF = problem.step_of(taken_TK, raised_TF), problem.count(raised_TF)
    total_K = problem.constant_K + taken_TK.sum(axis=0)
    for _ in range(MAX_SWEEPS):
        before = step_s
        for t, table in enumerate(problem.tables):
            d = problem.dim_T[t]
            rest_K = total_K - taken_TK[t]
            used_DF[d] -= raised_TF[t]
            others_F = (used_DF > 0).sum(axis=0) - (used_DF[d] > 0)
            numbers_P3 = table.numbers_near(options[t])
            for is_last in (False, True):  # the second time between the cuts, where memory ends
                taken_PK, raised_PF = problem.take(t, numbers_P3)
                num_raised_PF = others_F + (raised_PF | (used_DF[d] > 0))
                steps_s = problem.seconds(rest_K + taken_PK + num_raised_PF @ problem.flags_FK)
                best = int(steps_s.argmin())
                if steps_s[best] < step_s:  # ties change nothing
                    step_s, options[t] = float(steps_s[best]), _Option(*numbers_P3[best].tolist())
                    taken_TK[t], raised_TF[t] = taken_PK[best], raised_PF[best]
                if is_last:
                    break
                least = table.least_options() if len(options) <= MAX_FEW_TABLES else []
                numbers_P3 = np.concatenate(
                    [_ends(problem, t, option, rest_K) for option in (options[t], *least)]
                )
                if len(numbers_P3) == 0:
                    break
            total_K = rest_K + taken_TK[t]
            used_DF[d] += raised_TF[t]
        if math.isinf(step_s) or step_s >= before * (1 - REL_GAP):
            break
    return step_s, options


def _ends(problem: _Problem, table: int, option: _Option, rest_K: Floats) -> Rows:
    """The option with as many hot rows, or held ones, as memory has room for; int64 (P, 3)."""
    of, (exchange, tier) = problem.tables[table], MODES[option.mode]
    is_cached = tier is Tier.HOST_CACHED
    free_M = problem.limits_M - rest_K[problem.memory]
    found = []
    for is_hot in (True, False):
        if is_hot and exchange is Exchange.POOLED or not is_hot and not is_cached:
            continue

        def with_rows(number: int, is_hot: bool = is_hot) -> _Option:
            held = option.num_held if is_hot and is_cached else number
            return _Option(option.mode, number if is_hot else option.num_hot, held)

        low = option.num_hot if is_hot else option.num_held
        high = of.demand.num_rows if not is_hot else of.high
        if is_hot and is_cached:
            high = min(high, option.num_held - 1)
        ends = [with_rows(low), with_rows(max(low, high))]
        used_PM = problem.take(table, np.array(ends))[0][:, problem.memory]
        # Memory is linear in the rows.
        row_M = (used_PM[1] - used_PM[0]) / max(high - low, 1)
        room = (free_M - used_PM[0])[row_M > 0] / row_M[row_M > 0]
        fill = min(high, low + math.floor(room.min(initial=1e18)))
        if fill > low:
            found.append(with_rows(fill))
    return np.array(found, np.int64).reshape(-1, 3)
