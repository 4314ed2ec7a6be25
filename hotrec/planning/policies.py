"""Policies: which rows are hot. Pure functions from counts to a ``Partition``.

A policy reads the int64 (R,) access counts of each table and chooses how many of its most accessed
rows are hot. Rows with fewer than ``min_count`` accesses, or none, are never hot, except in the
``fixed`` tables, whose hot rows ``fix_tables`` chose (overrides, small tables). Ties between tables
are broken by name, so the order of the tables does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hotrec.cost_model.histogram import (
    CountHistogram,
    build_histogram,
    merge_histograms,
    order_all_rows,
    top_rows,
)
from hotrec.types import Partition, Rows

Counts = Mapping[str, Rows]
# A table's override: wholly hot, wholly cold, a number of rows, or a fraction of the table's rows.
Override = str | int | float
# 0.29 * 100 is just below 29 in floating point, and must still floor to 29.
ROUNDING = 1e-6


@dataclass(frozen=True)
class ProfiledTables:
    """The tables of a profile, some with hot rows that were chosen before.

    Args:
        counts: The access counts of every table.
        fixed: The hot rows of the tables that were decided before.
        histograms: The counts of the other tables' rows that may be hot.
    """

    counts: Counts
    fixed: Mapping[str, Rows]
    histograms: Mapping[str, CountHistogram]

    @staticmethod
    def of(counts: Counts, fixed: Mapping[str, Rows] | None, min_count: int) -> ProfiledTables:
        if min_count < 1:
            raise ValueError(
                f"min_count: expected at least 1, since unseen rows are never hot, got {min_count}."
            )
        fixed = fixed or {}
        _check_known("fixed", fixed, counts)
        histograms = {
            table: _at_least(build_histogram(counts[table]), min_count)
            for table in counts
            if table not in fixed
        }
        return ProfiledTables(counts, fixed, histograms)

    def partition(self, num_hot: Mapping[str, int], policy: str) -> Partition:
        hot_rows: dict[str, Rows] = {}
        for table, counts in self.counts.items():
            if table in self.fixed:
                hot_rows[table] = self.fixed[table]
            else:
                hot_rows[table] = top_rows(counts, num_hot[table], self.histograms[table])
        num_rows = {table: int(counts.size) for table, counts in self.counts.items()}
        return Partition(num_rows=num_rows, hot_rows=hot_rows, policy=policy)


def _at_least(histogram: CountHistogram, min_count: int) -> CountHistogram:
    keep = histogram.values >= min_count
    return CountHistogram(
        values=histogram.values[keep],
        num_rows=histogram.num_rows[keep],
        heldout=histogram.heldout[keep],
        num_unseen=histogram.num_unseen + int(histogram.num_rows[~keep].sum()),
        heldout_unseen=histogram.heldout_unseen + int(histogram.heldout[~keep].sum()),
    )


def _check_known(what: str, named: Mapping[str, object], counts: Counts) -> None:
    unknown = sorted(set(named) - set(counts))
    if unknown:
        raise ValueError(f"{what}: expected tables of {sorted(counts)}, got {unknown}.")


def check_frac(name: str, value: float) -> None:
    """Raises ValueError unless the value is in 0..1."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: expected a fraction in 0..1, got {value}.")


def check_positive(**values: float) -> None:
    """Raises ValueError unless all values are above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}: expected above 0, got {value}.")


def fix_tables(
    counts: Counts,
    *,
    overrides: Mapping[str, Override] | None = None,
    small_table_rows: int = 0,
    min_count: int = 1,
) -> dict[str, Rows]:
    """Chooses the hot rows of overridden and small tables.

    Args:
        counts: The access counts of every table.
        overrides: For a table "hot" (every row, also unseen ones), "cold" (none), or how many of
            its most accessed rows, as a number (int) or as a fraction of all its rows (float).
            Numbers and fractions take seen rows only, so there may be fewer.
        small_table_rows: Tables with at most this many rows are wholly hot, unless overridden.
        min_count: Rows with fewer accesses count as unseen.

    Returns:
        The hot rows of these tables, for the ``fixed`` argument of a policy.

    Raises:
        ValueError: If an override names an unknown table or has an invalid value.
    """
    overrides = overrides or {}
    _check_known("overrides", overrides, counts)
    fixed: dict[str, Rows] = {}
    for table, table_counts in counts.items():
        if table in overrides:
            fixed[table] = _override_rows(table, table_counts, overrides[table], min_count)
        elif table_counts.size <= small_table_rows:
            fixed[table] = order_all_rows(table_counts)
    return fixed


def _override_rows(table: str, counts: Rows, override: Override, min_count: int) -> Rows:
    if override == "hot":
        return order_all_rows(counts)
    if override == "cold":
        return np.empty(0, np.int64)
    if isinstance(override, float):
        check_frac(f"overrides.{table}", override)
        wanted = math.floor(override * counts.size + ROUNDING)
    elif isinstance(override, int) and not isinstance(override, bool):
        wanted = override
    else:
        raise ValueError(
            f"overrides.{table}: expected 'hot', 'cold', a number of rows or a fraction, "
            f"got {override!r}."
        )
    if not 0 <= wanted <= counts.size:
        raise ValueError(
            f"overrides.{table}: expected at most the table's {counts.size} rows, got {wanted}."
        )
    histogram = _at_least(build_histogram(counts), min_count)
    return top_rows(counts, min(wanted, histogram.num_distinct), histogram)


def choose_fraction(
    counts: Counts,
    *,
    hot_frac: float,
    per_table: bool = False,
    fixed: Mapping[str, Rows] | None = None,
    min_count: int = 1,
) -> Partition:
    """The most accessed ``hot_frac`` of the rows, rounded down.

    Args:
        per_table: Take the fraction of each table, not of all tables together. The rows of fixed
            tables count towards the fraction of all tables.

    Raises:
        ValueError: If ``hot_frac`` is outside 0..1.
    """
    check_frac("hot_frac", hot_frac)
    tables = ProfiledTables.of(counts, fixed, min_count)
    policy = f"fraction {hot_frac:g} {'of each table' if per_table else 'of all rows'}"
    if per_table:
        num_hot = {
            table: min(math.floor(hot_frac * counts[table].size + ROUNDING), h.num_distinct)
            for table, h in tables.histograms.items()
        }
    else:
        total = math.floor(hot_frac * sum(c.size for c in counts.values()) + ROUNDING)
        taken = sum(rows.size for rows in tables.fixed.values())
        num_hot = take_densest(tables.histograms, dict.fromkeys(counts, 1), max(total - taken, 0))
    return tables.partition(num_hot, policy)


def choose_coverage(
    counts: Counts,
    *,
    coverage: float,
    per_table: bool = False,
    fixed: Mapping[str, Rows] | None = None,
    min_count: int = 1,
) -> Partition:
    """The fewest rows that take at least ``coverage`` of the lookups.

    Args:
        per_table: Cover the lookups of each table, not of all tables together. The lookups of
            fixed hot rows count towards the coverage of all tables.

    Raises:
        ValueError: If ``coverage`` is outside 0..1, or cold overrides or ``min_count`` leave too
            few rows to reach it.
    """
    check_frac("coverage", coverage)
    tables = ProfiledTables.of(counts, fixed, min_count)
    policy = f"coverage {coverage:g} {'of each table' if per_table else 'of all lookups'}"
    if per_table:
        num_hot = {
            table: _rows_to_cover(h, coverage, int(counts[table].sum()), 0, f"table {table}")
            for table, h in tables.histograms.items()
        }
    else:
        total = sum(int(c.sum()) for c in counts.values())
        taken = sum(int(counts[table][rows].sum()) for table, rows in tables.fixed.items())
        together = merge_histograms(tables.histograms.values())
        num_together = _rows_to_cover(together, coverage, total, taken, "all tables")
        num_hot = take_densest(tables.histograms, dict.fromkeys(counts, 1), num_together)
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
    counts: Counts,
    *,
    budget_bytes: int,
    row_bytes: Mapping[str, int],
    memory_bytes: int | None = None,
    fixed: Mapping[str, Rows] | None = None,
    min_count: int = 1,
) -> Partition:
    """Fill a byte budget per device with the rows that have most accesses per byte.

    One budget for all tables. When the next row no longer fits, smaller rows of other tables may.

    Args:
        budget_bytes: Bytes of each device for all hot rows, with their optimizer state. The hot
            rows of fixed tables count too.
        row_bytes: Bytes of one row of each table, with its optimizer state.
        memory_bytes: The device's memory, which the budget must not exceed.

    Raises:
        ValueError: If the budget exceeds the memory, or the fixed tables the budget.
    """
    check_row_bytes(row_bytes, counts)
    if budget_bytes < 0:
        raise ValueError(f"budget_bytes: expected at least 0, got {budget_bytes}.")
    if memory_bytes is not None and budget_bytes > memory_bytes:
        raise ValueError(
            f"budget_bytes: expected at most the {memory_bytes} bytes of device memory, "
            f"got {budget_bytes}. Lower the hot budget."
        )
    tables = ProfiledTables.of(counts, fixed, min_count)
    taken = sum(rows.size * row_bytes[table] for table, rows in tables.fixed.items())
    if taken > budget_bytes:
        raise ValueError(
            f"budget_bytes: expected at least {taken} for the tables fixed hot "
            f"({sorted(t for t, r in tables.fixed.items() if r.size)}), got {budget_bytes}. "
            f"Raise the budget, or fix fewer tables."
        )
    num_hot = take_densest(tables.histograms, row_bytes, budget_bytes - taken)
    return tables.partition(num_hot, f"budget {budget_bytes:,} bytes per device")


def choose_min_accesses(
    counts: Counts,
    *,
    min_accesses_per_step: float,
    global_batch_size: int,
    num_samples: int,
    fixed: Mapping[str, Rows] | None = None,
    min_count: int = 1,
) -> Partition:
    """The rows that a global batch is expected to access often enough: the break-even rule.

    A row is hot if ``count * global_batch_size / num_samples >= min_accesses_per_step``.

    Args:
        min_accesses_per_step: The number of accesses from which replication pays.
        num_samples: The number of samples that were counted.

    Raises:
        ValueError: If a number is not above 0.
    """
    check_positive(
        min_accesses_per_step=min_accesses_per_step,
        global_batch_size=global_batch_size,
        num_samples=num_samples,
    )
    tables = ProfiledTables.of(counts, fixed, min_count)
    num_hot = {
        table: int(
            h.num_rows[h.values * global_batch_size >= min_accesses_per_step * num_samples].sum()
        )
        for table, h in tables.histograms.items()
    }
    return tables.partition(
        num_hot,
        f"at least {min_accesses_per_step:g} accesses per step of {global_batch_size} samples",
    )


def choose_all_hot(counts: Counts) -> Partition:
    """Every row of every table, also rows never seen."""
    num_rows = {table: int(c.size) for table, c in counts.items()}
    return Partition(num_rows, {t: order_all_rows(c) for t, c in counts.items()}, policy="all hot")


def choose_all_cold(counts: Counts) -> Partition:
    """No row of any table."""
    num_rows = {table: int(c.size) for table, c in counts.items()}
    return Partition(num_rows, {t: np.empty(0, np.int64) for t in counts}, policy="all cold")


def measure_hot_bytes(partition: Partition, row_bytes: Mapping[str, int]) -> int:
    """Bytes of a device's hot rows with their optimizer state."""
    return sum(partition.num_hot(table) * row_bytes[table] for table in partition.num_rows)


def check_hot_bytes(partition: Partition, row_bytes: Mapping[str, int], memory_bytes: int) -> None:
    """Checks that the hot rows fit the device's memory.

    Args:
        partition: The partition of any policy.
        row_bytes: Bytes of one hot row in training: weight, optimizer state, gradients.
        memory_bytes: The device's memory for hot rows.

    Raises:
        ValueError: If they do not fit.
    """
    hot_bytes = measure_hot_bytes(partition, row_bytes)
    if hot_bytes > memory_bytes:
        raise ValueError(
            f"partition ({partition.policy}): expected hot rows, with optimizer state and "
            f"gradients, of at most {memory_bytes} bytes, the device's memory, got {hot_bytes}. "
            "Choose fewer hot rows."
        )


def check_row_bytes(row_bytes: Mapping[str, int], counts: Counts) -> None:
    """Raises ValueError unless every table has a row size above 0."""
    for table in counts:
        if table not in row_bytes or row_bytes[table] <= 0:
            raise ValueError(
                f"row_bytes.{table}: expected the bytes of a row, above 0, "
                f"got {row_bytes.get(table)}."
            )


def sort_by_density(
    histograms: Mapping[str, CountHistogram], row_bytes: Mapping[str, int]
) -> tuple[Rows, Rows, Rows, Rows]:
    """Sorts the groups of equal count of all tables by count per byte, falling.

    Returns:
        int64 (G,) each: the table's place among the sorted names, and a row's count, the number of
        rows and a row's bytes.
    """
    names, empty = sorted(histograms), np.empty(0, np.int64)
    tables = [histograms[name] for name in names]
    table_of = np.repeat(np.arange(len(names)), [h.values.size for h in tables])
    size = np.array([row_bytes[name] for name in names], np.int64)[table_of]
    values = np.concatenate([empty, *(h.values for h in tables)])
    num_rows = np.concatenate([empty, *(h.num_rows for h in tables)])
    # Names are sorted and the sort is stable: equal densities go by table name.
    order = np.argsort(-(values / size), kind="stable")
    return table_of[order], values[order], num_rows[order], size[order]


def take_densest(
    histograms: Mapping[str, CountHistogram], row_bytes: Mapping[str, int], budget: int
) -> dict[str, int]:
    """Takes rows in falling order of count per byte while they fit a budget.

    A row that does not fit does not stop smaller rows of other tables: whole groups are taken up to
    the first that does not fit, then a part of that one, then the loop goes on without this row
    size. So it runs once for each distinct row size.

    Returns:
        The number of rows of each table.
    """
    table_of, _, num_rows, size = sort_by_density(histograms, row_bytes)
    bought = np.zeros(len(histograms), np.int64)
    while True:
        affordable = size <= budget
        table_of, size, num_rows = table_of[affordable], size[affordable], num_rows[affordable]
        if not size.size:
            break
        spent = np.cumsum(size * num_rows)
        whole = int(np.searchsorted(spent, budget, side="right"))
        np.add.at(bought, table_of[:whole], num_rows[:whole])
        budget -= int(spent[whole - 1]) if whole else 0
        if whole == size.size:
            break
        part = budget // int(size[whole])
        bought[table_of[whole]] += part
        budget -= part * int(size[whole])
        table_of, size, num_rows = table_of[whole + 1 :], size[whole + 1 :], num_rows[whole + 1 :]
    return dict(zip(sorted(histograms), bought.tolist(), strict=True))
