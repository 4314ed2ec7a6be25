"""Rows grouped by access count, the input of every policy and prediction.

L lookups allow about sqrt(2 L) distinct counts, so one pass over the rows replaces sorting them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from hotrec.types import Rows

SLICE_ROWS = 1 << 20
# Counts below this are tallied in an array that fits the cache. With L lookups, at most L / 65536
# rows are above it, which are sorted individually.
TALLIED_COUNTS = 1 << 16


@dataclass(frozen=True)
class CountHistogram:
    """The number of rows with each count, highest count first, and the number never seen.

    Args:
        values: int64 (V,), the distinct counts, descending, all above 0.
        num_rows: int64 (V,), rows with that count.
        heldout: int64 (V,), total held-out lookups of those rows; 0 without held-out data.
        num_unseen: Rows with count 0.
        heldout_unseen: Held-out lookups of the rows with count 0.
    """

    values: Rows
    num_rows: Rows
    heldout: Rows
    num_unseen: int
    heldout_unseen: int

    @property
    def num_distinct(self) -> int:
        return int(self.num_rows.sum())

    @property
    def num_lookups(self) -> int:
        return int((self.values * self.num_rows).sum())

    @property
    def num_heldout_lookups(self) -> int:
        return int(self.heldout.sum()) + self.heldout_unseen

    @property
    def total_rows(self) -> int:
        return self.num_distinct + self.num_unseen


def slices(size: int) -> Iterator[slice]:
    """Splits 0..size into slices with small temporaries."""
    for start in range(0, size, SLICE_ROWS):
        yield slice(start, min(start + SLICE_ROWS, size))


def build_histogram(counts: Rows, heldout: Rows | None = None) -> CountHistogram:
    """Groups the rows of one table by count, in one pass and O(V) memory.

    Args:
        counts: int64 (R,), accesses per row; may be memory-mapped.
        heldout: int64 (R,), accesses per row in the held-out data.

    Raises:
        ValueError: If a count is negative, or the two arrays differ in shape.
    """
    if heldout is not None and heldout.shape != counts.shape:
        raise ValueError(
            f"held-out counts: expected shape {counts.shape}, got {heldout.shape}. "
            f"Profile both parts with one schema."
        )
    tally = np.zeros(TALLIED_COUNTS + 1, np.int64)
    heldout_tally = np.zeros(TALLIED_COUNTS + 1, np.float64)  # whole numbers, exact to 2**53
    tall_values: list[Rows] = []
    tall_heldout: list[Rows] = []
    for part in slices(counts.size):
        values = counts[part]
        if values.min() < 0:
            row = part.start + int(np.argmin(values))
            raise ValueError(f"counts at row {row}: expected at least 0, got {values.min()}.")
        clipped = np.minimum(values, TALLIED_COUNTS)
        tally += np.bincount(clipped, minlength=TALLIED_COUNTS + 1)
        weights = np.zeros(values.size, np.int64) if heldout is None else heldout[part]
        if heldout is not None:
            heldout_tally += np.bincount(clipped, weights=weights, minlength=TALLIED_COUNTS + 1)
        tall = np.flatnonzero(clipped == TALLIED_COUNTS)
        if tall.size:
            tall_values.append(values[tall])
            tall_heldout.append(weights[tall])
    seen = np.flatnonzero(tally[1:TALLIED_COUNTS]) + 1
    low = CountHistogram(
        values=seen[::-1].astype(np.int64),
        num_rows=tally[seen][::-1].copy(),
        heldout=np.rint(heldout_tally[seen][::-1]).astype(np.int64),
        num_unseen=int(tally[0]),
        heldout_unseen=round(float(heldout_tally[0])),
    )
    if not tall_values:
        return low
    values = np.concatenate(tall_values)
    ones = np.ones(values.size, np.int64)
    tall_rows = CountHistogram(values, ones, np.concatenate(tall_heldout), 0, 0)
    return merge_histograms([low, tall_rows])


def merge_histograms(histograms: Iterable[CountHistogram]) -> CountHistogram:
    """The histogram of several tables' rows together."""
    empty = np.empty(0, np.int64)
    parts = [CountHistogram(empty, empty, empty, 0, 0), *histograms]
    order = np.argsort(-np.concatenate([h.values for h in parts]), kind="stable")
    values = np.concatenate([h.values for h in parts])[order]
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])[: values.size])

    def together(columns: list[Rows]) -> Rows:
        # reduceat rejects an empty list of starts
        column = np.concatenate(columns)[order]
        return np.add.reduceat(column, starts) if starts.size else column

    return CountHistogram(
        values=values[starts],
        num_rows=together([h.num_rows for h in parts]),
        heldout=together([h.heldout for h in parts]),
        num_unseen=sum(h.num_unseen for h in parts),
        heldout_unseen=sum(h.heldout_unseen for h in parts),
    )


def top_rows(counts: Rows, num_hot: int, histogram: CountHistogram) -> Rows:
    """The ``num_hot`` most accessed rows, in descending order of count, ties by row number.

    Two passes over the rows by slices, then a sort of the chosen ones: O(R + H log H).

    Args:
        counts: int64 (R,), accesses per row.
        num_hot: At most the number of rows seen.
        histogram: Histogram of these counts.

    Returns:
        int64 (num_hot,).
    """
    if num_hot == 0:
        return np.empty(0, np.int64)
    ends = np.cumsum(histogram.num_rows)
    assert num_hot <= ends[-1], (num_hot, int(ends[-1]))
    group = int(np.searchsorted(ends, num_hot))
    threshold = histogram.values[group]
    num_above = int(ends[group] - histogram.num_rows[group])
    chosen: list[Rows] = []
    num_ties = num_hot - num_above
    for part in slices(counts.size):
        values = counts[part]
        candidates = np.flatnonzero(values >= threshold)
        is_tie = values[candidates] == threshold
        # The ties with the smallest row numbers win, and rows are in ascending order here.
        keep = ~is_tie | (np.cumsum(is_tie) <= num_ties)
        num_ties -= min(num_ties, int(np.count_nonzero(is_tie)))
        chosen.append(candidates[keep] + part.start)
    rows = np.concatenate(chosen)
    return rows[np.argsort(-counts[rows], kind="stable")]


def order_all_rows(counts: Rows) -> Rows:
    """All rows of a table, including those never seen, by descending count, ties by number."""
    seen = np.concatenate([np.flatnonzero(counts[s]) + s.start for s in slices(counts.size)])
    unseen = np.concatenate([np.flatnonzero(counts[s] == 0) + s.start for s in slices(counts.size)])
    return np.concatenate([seen[np.argsort(-counts[seen], kind="stable")], unseen])
