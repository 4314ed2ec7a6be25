"""Policies: choose the hot rows from the int64 (R,) access counts of each table.

A policy chooses how many of each table's most accessed rows are hot. Rows without
an access are never hot, except in the ``fixed`` tables, whose hot rows
``CountedTables.of`` chose. Ties between tables are broken by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hotrec.cost_model.demand import prob_drawn
from hotrec.cost_model.histogram import (
    CountHistogram,
    merge_histograms,
    order_all_rows,
)
from hotrec.cost_model.profile import Profile
from hotrec.planner.counted import ROUNDING, CountedTables, Counts, Groups
from hotrec.types import POPULAR_ROW, Partition, PopularRows, RowShares


def choose_all_hot(counts: Counts) -> Partition:
    """Every row of every table, including rows never seen."""
    hot_rows = {table: order_all_rows(c) for table, c in counts.items()}
    return CountedTables(counts, hot_rows, {}).partition({}, "all hot")


def choose_all_cold(counts: Counts) -> Partition:
    """No row of any table."""
    hot_rows = dict.fromkeys(counts, np.empty(0, np.int64))
    return CountedTables(counts, hot_rows, {}).partition({}, "all cold")


def choose_fraction(counts: Counts | CountedTables, *, hot_frac: float) -> Partition:
    """The most accessed ``hot_frac`` of the rows of all tables, rounded down."""
    tables = CountedTables.of(counts)
    total = math.floor(hot_frac * sum(c.size for c in tables.counts.values()) + ROUNDING)
    taken = sum(rows.size for rows in tables.fixed.values())
    num_hot = _take_densest(tables.histograms, tables.ones, max(total - taken, 0))
    return tables.partition(num_hot, f"fraction {hot_frac:g} of all rows")


def choose_coverage(counts: Counts | CountedTables, *, coverage: float) -> Partition:
    """The fewest rows that serve at least ``coverage`` of the lookups of all tables.

    Raises:
        ValueError: If cold overrides leave too few rows to reach it.
    """
    tables = CountedTables.of(counts)
    total = sum(int(c.sum()) for c in tables.counts.values())
    taken = sum(int(tables.counts[table][rows].sum()) for table, rows in tables.fixed.items())
    together = merge_histograms(tables.histograms.values())
    num_hot = _take_densest(
        tables.histograms, tables.ones, _rows_to_cover(together, coverage, total, taken)
    )
    return tables.partition(num_hot, f"coverage {coverage:g} of all lookups")


def _rows_to_cover(
    histogram: CountHistogram, coverage: float, num_lookups: int, num_taken: int
) -> int:
    needed = math.ceil(coverage * num_lookups - ROUNDING) - num_taken
    if needed <= 0:
        return 0
    covered = np.cumsum(histogram.values * histogram.num_rows)
    reachable = int(covered[-1]) if covered.size else 0
    if reachable < needed:
        raise ValueError(
            f"coverage: expected at most {(reachable + num_taken) / num_lookups:.6f}, "
            f"the maximum that overrides allow, got {coverage}. Lower it."
        )
    group = int(np.searchsorted(covered, needed))
    before = int(covered[group] - histogram.values[group] * histogram.num_rows[group])
    in_group = -((before - needed) // int(histogram.values[group]))
    return int(histogram.num_rows[:group].sum()) + in_group


def choose_budget(
    counts: Counts | CountedTables,
    *,
    budget_bytes: int,
    row_bytes: Mapping[str, int],
) -> Partition:
    """Fill a byte budget per device with the rows with the most accesses per byte.

    All tables share the budget. If the next row does not fit, smaller rows of other tables may.

    Rows count with their optimizer state, including those of fixed tables.

    Raises:
        ValueError: If the fixed tables exceed the budget.
    """
    tables = CountedTables.of(counts)
    left = budget_bytes - tables.taken(row_bytes, budget_bytes)
    num_hot = _take_densest(tables.histograms, row_bytes, left)
    return tables.partition(num_hot, f"budget {budget_bytes:,} bytes per device")


def _take_densest(
    histograms: Mapping[str, CountHistogram], row_bytes: Mapping[str, int], budget: int
) -> dict[str, int]:
    """Takes rows in descending order of count per byte while they fit, skipping larger ones."""
    left = Groups.sort(histograms, row_bytes)
    bought = dict.fromkeys(histograms, 0)
    while left.size.size:  # once for each distinct row size
        taken = left.fill(budget)
        bought = {t: n + bought[t] for t, n in left.by_table(taken, histograms).items()}
        budget -= int(taken @ left.size)
        after = np.arange(taken.size) > np.argmin(np.append(taken == left.num_rows, False))
        left = left.at(after & (left.size <= budget))
    return bought


def choose_popular_rows(
    partition: Partition,
    profile: Profile,
    *,
    load_frac: float,
    global_batch_size: int,
    world_size: int,
) -> dict[str, PopularRows]:
    """Chooses the initial rows of the slots.

    Each rank starts with the most-read of its cold rows (``RowShares``) over all tables, as many as
    it has slots, but without rows that were never looked up.

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
            share, hot = RowShares(table, world_size), partition.hot(table)
            own = share.rows_of(rank, lookups.size)
            of_rank = np.array(lookups[own.start :: own.step])
            of_rank[(hot[share.owners(hot) == rank] - own.start) // own.step] = 0
            num_rows += of_rank.size
            rows = np.flatnonzero(of_rank)
            found.append((table, rows * own.step + own.start, of_rank[rows]))
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
    popular = {table: np.concatenate(parts) for table, parts in chosen.items()}
    return {table: rows[np.argsort(rows["row"], kind="stable")] for table, rows in popular.items()}
