"""Policies: which rows are hot. Pure functions from counts to a ``Partition``.

Each takes int64 (R,) access counts per table and settles how many of the most accessed rows of
each table are hot; a row that the profile never saw, or saw less than ``min_count`` times, is never
hot. ``fix_tables`` decides some tables beforehand (overrides, small tables); every policy takes its
result as ``fixed`` and decides the others around it. Equal ranks across tables go by table name, so
the outcome does not depend on the order of the tables.
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
# Forgives the rounding of a fraction such as 0.29 * 100 when it is made a whole number.
ROUNDING = 1e-6


@dataclass(frozen=True)
class _Tables:
    """The tables that a policy still decides, with those that were decided for it."""

    counts: Counts
    fixed: Mapping[str, Rows]
    histograms: Mapping[str, CountHistogram]

    @staticmethod
    def of(counts: Counts, fixed: Mapping[str, Rows] | None, min_count: int) -> _Tables:
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
        return _Tables(counts, fixed, histograms)

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


def _check_frac(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: expected a fraction in 0..1, got {value}.")


def fix_tables(
    counts: Counts,
    *,
    overrides: Mapping[str, Override] | None = None,
    small_table_rows: int = 0,
    min_count: int = 1,
) -> dict[str, Rows]:
    """Decide some tables before a policy decides the others.

    Args:
        overrides: per table "hot" (every row, also unseen ones), "cold" (none), an int (that many
            of the most accessed rows) or a float (that fraction of the table's rows); the last two
            take seen rows only, so they may end with fewer.
        small_table_rows: tables with at most this many rows are wholly hot, unless overridden.

    Returns:
        The hot rows of the decided tables, for the ``fixed`` argument of a policy.

    Raises:
        ValueError: if an override names no table or cannot be read.
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
        _check_frac(f"overrides.{table}", override)
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
        per_table: the fraction of each table; else of the rows of all tables together, where the
            rows of fixed tables count towards it.

    Raises:
        ValueError: if ``hot_frac`` is outside 0..1.
    """
    _check_frac("hot_frac", hot_frac)
    tables = _Tables.of(counts, fixed, min_count)
    policy = f"fraction {hot_frac:g} {'of each table' if per_table else 'of all rows'}"
    if per_table:
        num_hot = {
            table: min(math.floor(hot_frac * counts[table].size + ROUNDING), h.num_distinct)
            for table, h in tables.histograms.items()
        }
    else:
        total = math.floor(hot_frac * sum(c.size for c in counts.values()) + ROUNDING)
        taken = sum(rows.size for rows in tables.fixed.values())
        num_hot = _take_densest(tables.histograms, dict.fromkeys(counts, 1), max(total - taken, 0))
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
        per_table: of each table's lookups; else of all lookups together, where those that fixed
            tables take count towards it.

    Raises:
        ValueError: if ``coverage`` is outside 0..1, or cold overrides or ``min_count`` leave too
            few rows to reach it.
    """
    _check_frac("coverage", coverage)
    tables = _Tables.of(counts, fixed, min_count)
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
        num_hot = _take_densest(tables.histograms, dict.fromkeys(counts, 1), num_together)
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
            f"which is all that overrides and min_count leave, got {coverage}. Lower it."
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
        budget_bytes: for hot rows and their optimizer state, on each device; fixed tables are paid
            from it too.
        row_bytes: bytes of one row with its optimizer state, per table.
        memory_bytes: the device's memory, which the budget must not exceed.

    Raises:
        ValueError: if the budget exceeds the memory, or the fixed tables the budget.
    """
    _check_row_bytes(row_bytes, counts)
    if budget_bytes < 0:
        raise ValueError(f"budget_bytes: expected at least 0, got {budget_bytes}.")
    if memory_bytes is not None and budget_bytes > memory_bytes:
        raise ValueError(
            f"budget_bytes: expected at most the {memory_bytes} bytes of device memory, "
            f"got {budget_bytes}. Lower the hot budget."
        )
    tables = _Tables.of(counts, fixed, min_count)
    taken = sum(rows.size * row_bytes[table] for table, rows in tables.fixed.items())
    if taken > budget_bytes:
        raise ValueError(
            f"budget_bytes: expected at least {taken} for the tables fixed hot "
            f"({sorted(t for t, r in tables.fixed.items() if r.size)}), got {budget_bytes}. "
            f"Raise the budget, or fix fewer tables."
        )
    num_hot = _take_densest(tables.histograms, row_bytes, budget_bytes - taken)
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
        min_accesses_per_step: above 0; where replication starts to pay.
        num_samples: samples that the counts were taken over.

    Raises:
        ValueError: if an argument is not above 0.
    """
    for name, value in (
        ("min_accesses_per_step", min_accesses_per_step),
        ("global_batch_size", global_batch_size),
        ("num_samples", num_samples),
    ):
        if not value > 0:
            raise ValueError(f"{name}: expected above 0, got {value}.")
    tables = _Tables.of(counts, fixed, min_count)
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


def choose_all_hot(counts: Counts, *, fixed: Mapping[str, Rows] | None = None) -> Partition:
    """Every row of every table, also rows never seen, except in fixed tables."""
    fixed = fixed or {}
    _check_known("fixed", fixed, counts)
    return Partition(
        num_rows={table: int(c.size) for table, c in counts.items()},
        hot_rows={t: fixed[t] if t in fixed else order_all_rows(c) for t, c in counts.items()},
        policy="all hot",
    )


def choose_all_cold(counts: Counts, *, fixed: Mapping[str, Rows] | None = None) -> Partition:
    """No row of any table, except in fixed tables."""
    fixed = fixed or {}
    _check_known("fixed", fixed, counts)
    return Partition(
        num_rows={table: int(c.size) for table, c in counts.items()},
        hot_rows={table: fixed.get(table, np.empty(0, np.int64)) for table in counts},
        policy="all cold",
    )


def measure_hot_bytes(partition: Partition, row_bytes: Mapping[str, int]) -> int:
    """Bytes of a device's hot rows with their optimizer state."""
    return sum(partition.num_hot(table) * row_bytes[table] for table in partition.num_rows)


def check_hot_bytes(partition: Partition, row_bytes: Mapping[str, int], memory_bytes: int) -> None:
    """Refuse a partition, of whatever policy, whose hot rows exceed the device's memory.

    Args:
        partition: which rows are hot.
        row_bytes: of one hot row in training: weight, optimizer state, gradients.
        memory_bytes: of the device, for hot rows.

    Raises:
        ValueError: if they do.
    """
    hot_bytes = measure_hot_bytes(partition, row_bytes)
    if hot_bytes > memory_bytes:
        raise ValueError(
            f"partition ({partition.policy}): expected hot rows, with optimizer state and "
            f"gradients, of at most {memory_bytes} bytes, the device's memory, got {hot_bytes}. "
            "Choose fewer hot rows."
        )


def _check_row_bytes(row_bytes: Mapping[str, int], counts: Counts) -> None:
    for table in counts:
        if table not in row_bytes or row_bytes[table] <= 0:
            raise ValueError(
                f"row_bytes.{table}: expected the bytes of a row, above 0, "
                f"got {row_bytes.get(table)}."
            )


def _take_densest(
    histograms: Mapping[str, CountHistogram], row_bytes: Mapping[str, int], budget: int
) -> dict[str, int]:
    """Rows per table that a budget buys, in falling order of count / row_bytes.

    Works on groups of equal count: sorts them once, then takes whole groups up to the first that
    does not fit, a part of that one, and goes on with the tables whose rows still fit. After each
    such stop a row size drops out, so the loop runs once per distinct size.
    """
    names = sorted(histograms)
    num_hot = dict.fromkeys(names, 0)
    if not names:
        return num_hot
    tables = [histograms[name] for name in names]
    table_of = np.repeat(np.arange(len(names)), [h.values.size for h in tables])
    size = np.array([row_bytes[name] for name in names], np.int64)[table_of]
    values = np.concatenate([h.values for h in tables])
    num_rows = np.concatenate([h.num_rows for h in tables])
    # Names are sorted and the sort is stable: equal densities go by table name.
    order = np.argsort(-(values / size), kind="stable")
    table_of, size, num_rows = table_of[order], size[order], num_rows[order]
    bought = np.zeros(len(names), np.int64)
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
    return {name: int(bought[i]) for i, name in enumerate(names)}
