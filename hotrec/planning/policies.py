"""Policies: which rows are hot, from the int64 (R,) access counts of each table.

A policy chooses how many of each table's most accessed rows are hot. Rows with fewer than
``min_count`` accesses, or none, are never hot, except in the ``fixed`` tables, whose hot rows
``Tables.of`` chose. Ties between tables are broken by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrec.config.groups import (
    AllColdPlacement,
    AllHotPlacement,
    BreakEvenPlacement,
    BudgetPlacement,
    CoveragePlacement,
    FaePlacement,
    FractionPlacement,
    FreqCachePlacement,
    HotColdConfig,
    PolicyConfig,
    ScarsPlacement,
    TieredConfig,
)
from hotrec.cost_model.costs import World
from hotrec.cost_model.demand import Floats, prob_drawn, prob_met
from hotrec.cost_model.forms import BYTES_PER_FLOAT
from hotrec.cost_model.histogram import (
    CountHistogram,
    build_histogram,
    merge_histograms,
    order_all_rows,
    top_rows,
)
from hotrec.cost_model.memory import NUM_REPLICA_GRADIENTS
from hotrec.cost_model.profile import Profile
from hotrec.planning.machine import Machine
from hotrec.types import POPULAR_ROW, Partition, PopularRows, Rows

MIB = 1 << 20
Counts = Mapping[str, Rows]
# A table's override: wholly hot, wholly cold, a number of rows, or a fraction of the table's rows.
Override = str | int | float
# 0.29 * 100 is just below 29 in floating point, and must still floor to 29.
ROUNDING = 1e-6


def choose_partition(
    placement: HotColdConfig,
    profile: Profile,
    machine: Machine,
    *,
    row_bytes: Mapping[str, int],
    dim: int,
) -> Partition:
    """Applies a configured policy.

    Args:
        machine: The ranks, with costs for SCARS.
        row_bytes: Bytes of one row of each table, with its optimizer state.

    Raises:
        ValueError: If the policy cannot be satisfied, or its hot rows exceed the device's memory.
    """
    partition = _apply(placement, profile, machine, row_bytes, dim)
    # Users budget for rows and their optimizer state; the gradients must fit too.
    grads = NUM_REPLICA_GRADIENTS * BYTES_PER_FLOAT * dim
    hot_bytes = sum(partition.num_hot(t) * (size + grads) for t, size in row_bytes.items())
    if hot_bytes > machine.replica_bytes:
        raise ValueError(
            f"partition ({partition.policy}): expected hot rows, with optimizer state and "
            f"gradients, of at most {machine.replica_bytes} bytes, the device's memory, got "
            f"{hot_bytes}. Choose fewer hot rows."
        )
    return partition


def _apply(
    placement: HotColdConfig,
    profile: Profile,
    machine: Machine,
    row_bytes: Mapping[str, int],
    dim: int,
) -> Partition:
    given: dict[str, Any] = {}
    if isinstance(placement, PolicyConfig):
        given = {"overrides": placement.overrides, "small_table_rows": placement.small_table_rows}
    tables = Tables.of(profile.counts, min_count=profile.sampling.min_count, **given)
    rates: dict[str, Any] = {
        "global_batch_size": machine.batch_size * machine.world_size,
        "num_samples": profile.num_samples,
    }
    match placement:
        case FractionPlacement(hot_frac=hot_frac, per_table=per_table):
            return choose_fraction(tables, hot_frac=hot_frac, per_table=per_table)
        case CoveragePlacement(coverage_frac=coverage, per_table=per_table):
            return choose_coverage(tables, coverage=coverage, per_table=per_table)
        case BudgetPlacement(hot_budget_mib=budget):
            budget_bytes = int(budget * MIB)
            if budget_bytes > machine.replica_bytes:
                raise ValueError(
                    f"budget_bytes: expected at most the {machine.replica_bytes} bytes of device "
                    f"memory, got {budget_bytes}. Lower the hot budget."
                )
            return choose_budget(tables, budget_bytes=budget_bytes, row_bytes=row_bytes)
        case BreakEvenPlacement(min_accesses_per_step=accesses):
            return choose_min_accesses(tables, min_accesses_per_step=accesses, **rates)
        case FaePlacement(hot_budget_mib=budget, small_table_mib=small):
            return choose_fae(
                tables,
                budget_bytes=int(budget * MIB),
                row_bytes=row_bytes,
                small_table_bytes=int(small * MIB),
            )
        case FreqCachePlacement(cached_frac=frac):
            dims = dict.fromkeys(profile.counts, dim)
            return choose_freq_cache(tables, dims=dims, cached_frac=frac)
        case ScarsPlacement(hot_budget_mib=budget):
            cold_row_s, hot_row_s = _row_seconds(machine, dim)
            return choose_scars(
                tables,
                memory_bytes=machine.replica_bytes if budget is None else int(budget * MIB),
                row_bytes=row_bytes,
                cold_row_s=cold_row_s,
                hot_row_s=hot_row_s,
                **rates,
            )
        case AllHotPlacement():
            return choose_all_hot(profile.counts)
        case AllColdPlacement():
            return choose_all_cold(profile.counts)
    raise AssertionError(placement)


def _row_seconds(machine: Machine, dim: int) -> tuple[float, float]:
    """Seconds to send a cold row and its gradient, and a hot row in a dense all-reduce."""
    assert machine.costs is not None
    world = World(machine.world_size, machine.local_world_size)
    num_bytes = 2 * (world.num_ranks - 1) / world.num_ranks * BYTES_PER_FLOAT * dim
    to_all, reduce = (machine.costs.collective(k, world) for k in ("all_to_all", "all_reduce"))
    return num_bytes * to_all.per_byte_s, num_bytes * reduce.per_byte_s


def policy_parameters(placement: HotColdConfig) -> dict[str, object]:
    """Returns the configuration keys of this policy alone, which reports show with its name."""
    shared = {item for item in TieredConfig.__dataclass_fields__ if item != "kind"}
    return {
        name: getattr(value, "name", value)
        for name, value in vars(placement).items()
        if name not in shared
    }


# ------------------------------------------------------------------ tables with a decision


def num_overridden(
    overrides: Mapping[str, Override], num_rows: Mapping[str, int]
) -> dict[str, int]:
    """Returns the number of hot rows of each overridden table.

    Raises:
        ValueError: If an override names an unknown table, or more rows than it has.
    """
    unknown = sorted(set(overrides) - set(num_rows))
    if unknown:
        raise ValueError(f"overrides: expected tables of {sorted(num_rows)}, got {unknown}.")
    found = {}
    for table, override in overrides.items():
        if isinstance(override, int):
            rows = override
        else:
            frac = float({"hot": 1.0, "cold": 0.0}.get(str(override), override))
            rows = math.floor(frac * num_rows[table] + ROUNDING)
        if not 0 <= rows <= num_rows[table]:
            raise ValueError(
                f"overrides.{table}: expected at most the table's {num_rows[table]} rows, or a "
                f"fraction in 0..1, got {override}."
            )
        found[table] = rows
    return found


def _at_least(histogram: CountHistogram, min_count: int) -> CountHistogram:
    keep = histogram.values >= min_count
    values, num_rows, heldout = (
        column[keep] for column in (histogram.values, histogram.num_rows, histogram.heldout)
    )
    return dataclasses.replace(histogram, values=values, num_rows=num_rows, heldout=heldout)


@dataclass(frozen=True)
class Tables:
    """The tables of a profile: the hot rows of those decided before, the counts of the others."""

    counts: Counts
    fixed: Mapping[str, Rows]
    histograms: Mapping[str, CountHistogram]  # of the rows that may be hot, sorted by name

    @staticmethod
    def of(
        counts: Counts | Tables,
        *,
        overrides: Mapping[str, Override] | None = None,
        small_table_rows: int = 0,
        min_count: int = 1,
    ) -> Tables:
        """Chooses the hot rows of overridden and small tables.

        Args:
            overrides: For a table "hot" (every row, also unseen ones), "cold" (none), or how many
                of its most accessed rows, as a number (int) or as a fraction of all its rows
                (float). Numbers and fractions take seen rows only, so there may be fewer.
            small_table_rows: Tables with at most this many rows are wholly hot, unless overridden.
            min_count: Rows with fewer accesses count as unseen.

        Raises:
            ValueError: If an override names an unknown table, or more rows than it has.
        """
        if isinstance(counts, Tables):
            return counts
        overrides = overrides or {}
        wanted = num_overridden(overrides, {table: c.size for table, c in counts.items()})
        fixed, histograms = dict[str, Rows](), dict[str, CountHistogram]()
        for table, c in sorted(counts.items()):
            histogram = _at_least(build_histogram(c), min_count)
            if overrides.get(table, "hot" if c.size <= small_table_rows else None) == "hot":
                fixed[table] = order_all_rows(c)
            elif table in wanted:
                fixed[table] = top_rows(c, min(wanted[table], histogram.num_distinct), histogram)
            else:
                histograms[table] = histogram
        return Tables(counts, fixed, histograms)

    @property
    def ones(self) -> dict[str, int]:
        """The size of a row where rows are counted."""
        return dict.fromkeys(self.histograms, 1)

    def taken(self, row_bytes: Mapping[str, int], budget_bytes: int) -> int:
        """Returns the bytes of the fixed tables' hot rows, which must not exceed the budget."""
        taken = sum(rows.size * row_bytes[table] for table, rows in self.fixed.items())
        if taken > budget_bytes:
            hot = sorted(table for table, rows in self.fixed.items() if rows.size)
            raise ValueError(
                f"budget_bytes: expected at least {taken} for the tables fixed hot ({hot}), got "
                f"{budget_bytes}. Raise the budget, or fix fewer tables."
            )
        return taken

    def num_where(self, is_hot: Callable[[Rows], npt.NDArray[np.bool_]]) -> dict[str, int]:
        """Returns the number of rows with such a count by table."""
        return {t: int(h.num_rows[is_hot(h.values)].sum()) for t, h in self.histograms.items()}

    def partition(self, num_hot: Mapping[str, int], policy: str) -> Partition:
        hot_rows = {
            table: self.fixed[table]
            if table in self.fixed
            else top_rows(counts, num_hot[table], self.histograms[table])
            for table, counts in self.counts.items()
        }
        num_rows = {table: int(counts.size) for table, counts in self.counts.items()}
        return Partition(num_rows=num_rows, hot_rows=hot_rows, policy=policy)


# ------------------------------------------------------------------ policies


def choose_all_hot(counts: Counts) -> Partition:
    """Every row of every table, also rows never seen."""
    hot_rows = {table: order_all_rows(c) for table, c in counts.items()}
    return Tables(counts, hot_rows, {}).partition({}, "all hot")


def choose_all_cold(counts: Counts) -> Partition:
    """No row of any table."""
    hot_rows = dict.fromkeys(counts, np.empty(0, np.int64))
    return Tables(counts, hot_rows, {}).partition({}, "all cold")


def choose_fraction(
    counts: Counts | Tables,
    *,
    hot_frac: float,
    per_table: bool = False,
) -> Partition:
    """The most accessed ``hot_frac`` of the rows, rounded down.

    Args:
        per_table: Take the fraction of each table, not of all tables together. The rows of fixed
            tables count towards the fraction of all tables.
    """
    tables = Tables.of(counts)
    policy = f"fraction {hot_frac:g} {'of each table' if per_table else 'of all rows'}"
    if per_table:
        num_hot = {
            table: min(math.floor(hot_frac * tables.counts[table].size + ROUNDING), h.num_distinct)
            for table, h in tables.histograms.items()
        }
    else:
        total = math.floor(hot_frac * sum(c.size for c in tables.counts.values()) + ROUNDING)
        taken = sum(rows.size for rows in tables.fixed.values())
        num_hot = _take_densest(tables.histograms, tables.ones, max(total - taken, 0))
    return tables.partition(num_hot, policy)


def choose_coverage(
    counts: Counts | Tables,
    *,
    coverage: float,
    per_table: bool = False,
) -> Partition:
    """The fewest rows that take at least ``coverage`` of the lookups.

    Args:
        per_table: Cover the lookups of each table, not of all tables together. The lookups of
            fixed hot rows count towards the coverage of all tables.

    Raises:
        ValueError: If cold overrides or ``min_count`` leave too few rows to reach it.
    """
    tables = Tables.of(counts)
    policy = f"coverage {coverage:g} {'of each table' if per_table else 'of all lookups'}"
    if per_table:
        num_hot = {
            table: _rows_to_cover(h, coverage, int(tables.counts[table].sum()), 0, f"table {table}")
            for table, h in tables.histograms.items()
        }
    else:
        total = sum(int(c.sum()) for c in tables.counts.values())
        taken = sum(int(tables.counts[table][rows].sum()) for table, rows in tables.fixed.items())
        together = merge_histograms(tables.histograms.values())
        num_together = _rows_to_cover(together, coverage, total, taken, "all tables")
        num_hot = _take_densest(tables.histograms, tables.ones, num_together)
    return tables.partition(num_hot, policy)


def _rows_to_cover(
    histogram: CountHistogram, coverage: float, num_lookups: int, num_taken: int, where: str
) -> int:
    needed = math.ceil(coverage * num_lookups - ROUNDING) - num_taken
    if needed <= 0:
        return 0
    covered = np.cumsum(histogram.values * histogram.num_rows)
    reachable = int(covered[-1]) if covered.size else 0
    if reachable < needed:
        raise ValueError(
            f"coverage of {where}: expected at most {(reachable + num_taken) / num_lookups:.6f}, "
            f"the most that overrides and min_count allow, got {coverage}. Lower it."
        )
    group = int(np.searchsorted(covered, needed))
    before = int(covered[group] - histogram.values[group] * histogram.num_rows[group])
    in_group = -((before - needed) // int(histogram.values[group]))
    return int(histogram.num_rows[:group].sum()) + in_group


def choose_budget(
    counts: Counts | Tables,
    *,
    budget_bytes: int,
    row_bytes: Mapping[str, int],
) -> Partition:
    """Fill a byte budget per device with the rows that have most accesses per byte.

    One budget for all tables. When the next row no longer fits, smaller rows of other tables may.

    Rows count with their optimizer state, those of fixed tables too.

    Raises:
        ValueError: If the fixed tables exceed the budget.
    """
    tables = Tables.of(counts)
    left = budget_bytes - tables.taken(row_bytes, budget_bytes)
    num_hot = _take_densest(tables.histograms, row_bytes, left)
    return tables.partition(num_hot, f"budget {budget_bytes:,} bytes per device")


def choose_min_accesses(
    counts: Counts | Tables,
    *,
    min_accesses_per_step: float,
    global_batch_size: int,
    num_samples: int,
) -> Partition:
    """The rows that a global batch is expected to access often enough: the break-even rule.

    A row is hot if ``count * global_batch_size / num_samples >= min_accesses_per_step``.
    """
    tables = Tables.of(counts)
    needed = min_accesses_per_step * num_samples
    return tables.partition(
        tables.num_where(lambda values: values * global_batch_size >= needed),
        f"at least {min_accesses_per_step:g} accesses per step of {global_batch_size} samples",
    )


@dataclass(frozen=True)
class _Groups:
    """Groups of rows of one table and count, by falling density: int64 (G,) each."""

    table: Rows  # the table's place among the names
    value: Rows  # a row's count
    num_rows: Rows
    size: Rows  # of a row

    @staticmethod
    def sort(
        histograms: Mapping[str, CountHistogram],
        sizes: Mapping[str, int],
        weights: Mapping[str, int] | None = None,
    ) -> _Groups:
        """Sorts by count per weight, by default the size; ties by table."""
        tables, empty = list(histograms.values()), np.empty(0, np.int64)
        table = np.repeat(np.arange(len(tables)), [h.values.size for h in tables])
        size, weight = (
            np.array([by_name[name] for name in histograms], np.int64)[table]
            for by_name in (sizes, weights or sizes)
        )
        values = np.concatenate([empty, *(h.values for h in tables)])
        num_rows = np.concatenate([empty, *(h.num_rows for h in tables)])
        return _Groups(table, values, num_rows, size).at(
            np.argsort(-(values / weight), kind="stable")
        )

    def at(self, keep: npt.NDArray[Any] | slice) -> _Groups:
        return _Groups(self.table[keep], self.value[keep], self.num_rows[keep], self.size[keep])

    def fill(self, budget: float) -> Rows:
        """The rows of each group that fit, in this order until one does not; int64 (G,)."""
        spent = np.cumsum(self.size * self.num_rows) - self.size * self.num_rows
        fitting = np.floor((budget - spent) / self.size + 1e-9).astype(np.int64)
        return np.clip(fitting, 0, self.num_rows)

    def by_table(self, num_rows: Rows, names: Mapping[str, object]) -> dict[str, int]:
        """Sums a number of rows of each group by table."""
        total = np.zeros(len(names), np.int64)
        np.add.at(total, self.table, num_rows)
        return dict(zip(names, total.tolist(), strict=True))


def _take_densest(
    histograms: Mapping[str, CountHistogram], row_bytes: Mapping[str, int], budget: int
) -> dict[str, int]:
    """Takes rows in falling order of count per byte while they fit, passing over larger ones."""
    left = _Groups.sort(histograms, row_bytes)
    bought = dict.fromkeys(histograms, 0)
    while left.size.size:  # once for each distinct row size
        taken = left.fill(budget)
        bought = {t: n + bought[t] for t, n in left.by_table(taken, histograms).items()}
        budget -= int(taken @ left.size)
        after = np.arange(taken.size) > np.argmin(np.append(taken == left.num_rows, False))
        left = left.at(after & (left.size <= budget))
    return bought


# ------------------------------------------------------------------ policies of other systems


def choose_fae(
    counts: Counts | Tables,
    *,
    budget_bytes: int,
    row_bytes: Mapping[str, int],
    small_table_bytes: int,
) -> Partition:
    """FAE's hot set: one access threshold for all tables, lowered until the budget is full.

    Tables smaller than ``small_table_bytes`` are wholly hot, rows never seen too. Of the others all
    rows with at least t accesses are, t being the lowest that fits; rows of equal count stay
    together. Adnan et al., PVLDB 15(1) 2022, sections 3 and 4. Unlike the code published with it,
    rows that the sample never saw do not fill the budget.

    Raises:
        ValueError: If the budget does not hold the small and fixed tables.
    """
    tables = Tables.of(counts)
    free = {
        table: histogram
        for table, histogram in tables.histograms.items()
        if tables.counts[table].size * row_bytes[table] >= small_table_bytes
    }
    small = {t: order_all_rows(tables.counts[t]) for t in tables.histograms if t not in free}
    tables = Tables(tables.counts, {**tables.fixed, **small}, free)
    groups = _Groups.sort(tables.histograms, row_bytes, tables.ones)
    spent = tables.taken(row_bytes, budget_bytes) + np.cumsum(groups.size * groups.num_rows)
    # A threshold takes the rows of its count in every table, so only the sum after the last of
    # them counts.
    is_last = np.append(groups.value[1:] != groups.value[:-1], True)[: groups.value.size]
    threshold = groups.value[is_last & (spent <= budget_bytes)].min(initial=np.iinfo(np.int64).max)
    num_hot = tables.num_where(lambda values: values >= threshold)
    return tables.partition(num_hot, f"FAE, {budget_bytes:,} bytes")


def choose_freq_cache(
    counts: Counts | Tables,
    *,
    dims: Mapping[str, int],
    cached_frac: float,
) -> Partition:
    """The most accessed rows of all tables, as a frequency-aware cache keeps them on the device.

    Rows go by access count alone, whatever their size, until the next one exceeds ``cached_frac``
    of all embedding parameters. Fang et al., arXiv 2208.05321: 1.5% of the parameters.

    The hot rows of fixed tables count too.
    """
    tables = Tables.of(counts)
    budget = cached_frac * sum(rows.size * dims[table] for table, rows in tables.counts.items())
    budget -= sum(rows.size * dims[table] for table, rows in tables.fixed.items())
    groups = _Groups.sort(tables.histograms, dims, tables.ones)
    num_hot = groups.by_table(groups.fill(budget), tables.histograms)
    return tables.partition(num_hot, f"frequency cache, {cached_frac:g} of the parameters")


def choose_scars(
    counts: Counts | Tables,
    *,
    memory_bytes: int,
    row_bytes: Mapping[str, int],
    num_samples: int,
    global_batch_size: int,
    cold_row_s: float,
    hot_row_s: float,
) -> Partition:
    """The hot set that makes the mean step of hot and mixed batches shortest, without tiers.

    After SCARS (arXiv 2411.01611): coalesced cold rows, batches of all-hot samples, throughput
    under a memory bound. The objective is our reading of it, not its text. c a row's count, K_t the
    lookups of table t in the profile, L_t its lookups per sample, B the global batch, k hot rows:

        U(k) = sum over cold rows of 1 - (1 - c / K_t)^(B L_t)     coalesced cold rows of a batch
        f(k) = product over tables of H_t^L_t                       share of all-hot samples
        minimise (1 - f(k)) cold_row_s U(k) + hot_row_s k           over the k densest rows

    Rows are taken by count per byte, rows of one table and count together, except those that the
    memory cuts off.

    Args:
        memory_bytes: Bytes for all hot rows with their optimizer state, also of fixed tables.
        cold_row_s: Seconds to send a coalesced cold row and its gradient.
        hot_row_s: Seconds of a hot row in the all-reduce.

    Raises:
        ValueError: If the fixed tables exceed the memory.
    """
    tables = Tables.of(counts)
    groups = _Groups.sort(tables.histograms, row_bytes)
    num_rows = groups.fill(memory_bytes - tables.taken(row_bytes, memory_bytes))
    groups = dataclasses.replace(groups, num_rows=num_rows).at(num_rows > 0)
    all_hot, cold_rows = _scars_curve(tables, groups, num_samples, global_batch_size)
    sizes = np.append(0, np.cumsum(groups.num_rows))
    best = int(np.argmin((1 - all_hot) * cold_row_s * cold_rows + hot_row_s * sizes))
    best_groups = groups.at(slice(best))
    num_hot = best_groups.by_table(best_groups.num_rows, tables.histograms)
    return tables.partition(num_hot, f"SCARS, {memory_bytes:,} bytes")


def _scars_curve(
    tables: Tables, groups: _Groups, num_samples: int, global_batch_size: int
) -> tuple[Floats, Floats]:
    """Returns f and U of ``choose_scars`` with the first 0..G groups hot, float64 (G + 1,)."""
    # What each group adds to the start: to log f, to the tables without a hot lookup, to U.
    log_hot, num_none, cold_rows = np.zeros((3, groups.table.size + 1))
    place = {table: i for i, table in enumerate(tables.histograms)}
    for table, counts in tables.counts.items():
        whole = build_histogram(counts)
        total = max(whole.num_lookups, 1)
        num_draws = total * global_batch_size / num_samples
        cold_rows[0] += whole.num_rows @ prob_met(whole.values / total, num_draws)
        num_none[0] += whole.num_lookups > 0
        if table in tables.fixed:
            values = counts[tables.fixed[table]]
            at, rows, starts = (
                np.zeros(values.size, np.int64),
                np.ones_like(values),
                slice(-1, None),
            )
        else:
            at = 1 + np.flatnonzero(groups.table == place[table])
            values, rows, starts = groups.value[at - 1], groups.num_rows[at - 1], slice(None)
        np.subtract.at(cold_rows, at, rows * prob_met(values / total, num_draws))
        covered = np.cumsum(values * rows)[starts]
        if covered.size and covered[-1]:
            logs = np.diff(np.log(covered / total), prepend=0.0)
            log_hot[at[starts]] += total / num_samples * logs
            num_none[at[0]] -= 1
    all_hot = np.exp(np.minimum(np.cumsum(log_hot), 0.0)) * (np.cumsum(num_none) <= 0)
    return all_hot, np.maximum(np.cumsum(cold_rows), 0.0)


def choose_popular_rows(
    partition: Partition,
    profile: Profile,
    *,
    load_frac: float,
    global_batch_size: int,
    world_size: int,
) -> dict[str, PopularRows]:
    """Chooses the cold rows with which slots begin.

    Each rank, of TorchRec's row-wise shards, begins with those of its rows that were looked up
    most, of all tables together, as many as it has slots; never one that was not looked up.

    Args:
        partition: The hot rows, which have replicas.
        load_frac: Slots, as a fraction of a rank's rows.
        global_batch_size: Samples of a step of all ranks.
        world_size: World size.

    Returns:
        By table, in ascending order of the rows.
    """
    counts = profile.counts
    chosen: dict[str, list[PopularRows]] = {table: [] for table in counts}
    for rank in range(world_size):
        num_rows, found = 0, []
        for table, lookups in counts.items():
            begin = rank * -(-lookups.size // world_size)
            block = np.array(lookups[begin : begin + -(-lookups.size // world_size)])
            hot = partition.hot(table) - begin
            block[hot[(hot >= 0) & (hot < block.size)]] = 0
            num_rows += block.size
            rows = np.flatnonzero(block)
            found.append((table, rows + begin, block[rows]))
        order = np.argsort(-np.concatenate([part for *_, part in found]), kind="stable")
        is_kept = np.zeros(order.size, np.bool_)
        is_kept[order[: math.ceil(load_frac * num_rows)]] = True
        for table, rows, part in found:
            is_of_table, is_kept = is_kept[: part.size], is_kept[part.size :]
            kept = np.empty(np.count_nonzero(is_of_table), POPULAR_ROW)
            kept["row"] = rows[is_of_table]
            if kept.size:
                total = int(counts[table].sum())
                num_drawn = total / profile.num_samples * global_batch_size
                kept["prob"] = prob_drawn(part[is_of_table].astype(np.float64), total, num_drawn)
            chosen[table].append(kept)
    return {table: np.concatenate(parts) for table, parts in chosen.items()}
