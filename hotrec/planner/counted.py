"""The input of policies: the tables of a profile, and their rows by descending density."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrec.cost_model.histogram import CountHistogram, build_histogram, order_all_rows, top_rows
from hotrec.types import Partition, Rows

Counts = Mapping[str, Rows]
# A table's override: entirely hot, entirely cold, a number of rows, or a fraction of its rows.
Override = str | int | float
# 0.29 * 100 is just below 29 in floating point, and must still floor to 29.
ROUNDING = 1e-6


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


@dataclass(frozen=True)
class CountedTables:
    """The tables of a profile: hot rows of the fixed tables, counts of the others."""

    counts: Counts
    fixed: Mapping[str, Rows]
    histograms: Mapping[str, CountHistogram]  # of the rows that may be hot, sorted by name

    @staticmethod
    def of(
        counts: Counts | CountedTables,
        *,
        overrides: Mapping[str, Override] | None = None,
    ) -> CountedTables:
        """Chooses the hot rows of overridden tables.

        Args:
            overrides: For a table "hot" (all rows, including unseen ones), "cold" (none), or how
                many of its most accessed rows, as a number (int) or as a fraction of all its rows
                (float). Numbers and fractions only select seen rows, so there may be fewer.

        Raises:
            ValueError: If an override names an unknown table, or more rows than it has.
        """
        if isinstance(counts, CountedTables):
            return counts
        overrides = overrides or {}
        wanted = num_overridden(overrides, {table: c.size for table, c in counts.items()})
        fixed, histograms = dict[str, Rows](), dict[str, CountHistogram]()
        for table, c in sorted(counts.items()):
            histogram = build_histogram(c)
            if overrides.get(table) == "hot":
                fixed[table] = order_all_rows(c)
            elif table in wanted:
                fixed[table] = top_rows(c, min(wanted[table], histogram.num_distinct), histogram)
            else:
                histograms[table] = histogram
        return CountedTables(counts, fixed, histograms)

    @property
    def ones(self) -> dict[str, int]:
        """Unit row sizes by table, for budgets in rows."""
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
        """Returns the number of rows, by table, whose count satisfies a condition."""
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


@dataclass(frozen=True)
class Groups:
    """Groups of rows of one table and count, by descending density: int64 (G,) each."""

    table: Rows  # the table's place among the names
    value: Rows  # a row's count
    num_rows: Rows
    size: Rows  # of a row

    @staticmethod
    def sort(
        histograms: Mapping[str, CountHistogram],
        sizes: Mapping[str, int],
        weights: Mapping[str, int] | None = None,
    ) -> Groups:
        """Sorts by count per weight (by default the size), ties by table."""
        tables, empty = list(histograms.values()), np.empty(0, np.int64)
        table = np.repeat(np.arange(len(tables)), [h.values.size for h in tables])
        size, weight = (
            np.array([by_name[name] for name in histograms], np.int64)[table]
            for by_name in (sizes, weights or sizes)
        )
        values = np.concatenate([empty, *(h.values for h in tables)])
        num_rows = np.concatenate([empty, *(h.num_rows for h in tables)])
        return Groups(table, values, num_rows, size).at(
            np.argsort(-(values / weight), kind="stable")
        )

    def at(self, keep: npt.NDArray[Any] | slice) -> Groups:
        return Groups(self.table[keep], self.value[keep], self.num_rows[keep], self.size[keep])

    def fill(self, budget: float) -> Rows:
        """The rows of each group that fit, in order until the first that does not; int64 (G,)."""
        spent = np.cumsum(self.size * self.num_rows) - self.size * self.num_rows
        fitting = np.floor((budget - spent) / self.size + 1e-9).astype(np.int64)
        return np.clip(fitting, 0, self.num_rows)

    def by_table(self, num_rows: Rows, names: Mapping[str, object]) -> dict[str, int]:
        """Sums the numbers of rows of groups by table."""
        total = np.zeros(len(names), np.int64)
        np.add.at(total, self.table, num_rows)
        return dict(zip(names, total.tolist(), strict=True))
