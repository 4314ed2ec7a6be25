"""Locality: distinct rows that batches read, and the equivalent number of independent lookups.

The lookups of a batch are not independent: a sample may read a row more than once, and a batch is a
random sample of one chunk, whose samples are close in time. With histories of about ninety ids per
sample, n is four fifths of the lookups; one number per table fits hot and cold rows to 2 or 3%.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import pos
from typing import Any

import numpy as np
from scipy.optimize import brentq

from hotrec.cost_model.blocks import Block, IntArray, take_bags
from hotrec.cost_model.demand import prob_drawn
from hotrec.cost_model.histogram import CountHistogram
from hotrec.types import Rows, Schema

MIN_BATCH_SIZE, MAX_BATCH_SIZE = 64, 1 << 16
# A draw has this fraction of a stream's samples, plus FREE_LOOKUPS (less than 0.1 s) for short
# streams, but at most ENOUGH_BATCHES of the largest batches.
DRAWN_FRAC = 1 / 32
FREE_LOOKUPS = 1 << 21
ENOUGH_BATCHES = 32
# Batches come from at least MIN_DRAWS places of the stream, and one draw gives at most
# BATCHES_PER_DRAW of each size. A stream of unknown length is assumed to have MIN_DRAWS blocks.
MIN_DRAWS = 4
BATCHES_PER_DRAW = 4
# Smaller deviations from independence are ignored: the curve is flat there, so noise would change
# the number of draws a lot.
NEGLIGIBLE_FRAC = 0.002


@dataclass(frozen=True)
class TableLocality:
    """Measured distinct rows of one table per batch; entry i belongs to one batch size.

    Args:
        batch_sizes: Batch sizes, increasing.
        num_batches: The number of batches drawn, at least 1.
        lookups: Mean lookups of a batch.
        mean: Mean distinct rows of a batch.
        spread: Standard deviation of the distinct rows; 0 for one batch.
    """

    batch_sizes: tuple[int, ...]
    num_batches: tuple[int, ...]
    lookups: tuple[float, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...]


class LocalityMeter:
    """Draws batches from the blocks of a stream and counts their distinct rows.

    A draw is some samples of one block in random order: one large batch, split into smaller ones by
    powers of two. All draws have the same size, as far as the blocks allow, and are evenly spread
    over the stream. Memory for the ids of one draw is needed. ``num_samples`` of the stream are
    None if unknown.
    """

    def __init__(self, schema: Schema, *, num_samples: int | None = None) -> None:
        self._schema = schema
        self._rng = np.random.default_rng([0, 1])
        self._num_samples = num_samples
        self._draw_size, self._drawn_frac, self._samples_due = 0, 0.0, 0.0
        # By batch size, for each batch: lookups and distinct rows of each table.
        self._found: dict[int, list[list[tuple[int, int]]]] = {}

    def observe(self, block: Block) -> None:
        """Draws batches from a block."""
        num_lookups = sum(rows.size for rows in block.rows.values())
        if num_lookups == 0:
            return
        if self._draw_size == 0:
            self._plan(block.num_samples, num_lookups / block.num_samples)
        self._samples_due += self._drawn_frac * block.num_samples
        size = min(self._draw_size, power_of_two(block.num_samples))
        while (
            size >= MIN_BATCH_SIZE
            and self._samples_due >= size
            and len(self._found.get(size, ())) < ENOUGH_BATCHES
        ):
            self._samples_due -= size
            self._draw(block, size)

    def _plan(self, num_in_block: int, lookups_per_sample: float) -> None:
        expected = self._num_samples or MIN_DRAWS * num_in_block
        num_drawn = min(
            DRAWN_FRAC * expected + FREE_LOOKUPS / lookups_per_sample,
            ENOUGH_BATCHES * MAX_BATCH_SIZE,
        )
        self._drawn_frac = num_drawn / expected
        size = power_of_two(num_drawn / MIN_DRAWS)
        self._draw_size = min(max(size, MIN_BATCH_SIZE), MAX_BATCH_SIZE)

    def _draw(self, block: Block, num_drawn: int) -> None:
        chosen = self._rng.choice(block.num_samples, num_drawn, replace=False)
        drawn = {name: take_bags(block, name, chosen) for name in block.rows}
        size = MIN_BATCH_SIZE
        while size <= num_drawn:
            found = self._found.setdefault(size, [])
            for first in range(0, min(num_drawn, size * BATCHES_PER_DRAW), size):
                found.append(self._count(drawn, first, first + size))
            size *= 2

    def _count(
        self, drawn: Mapping[str, tuple[IntArray, Rows]], first: int, last: int
    ) -> list[tuple[int, int]]:
        """Lookups and distinct rows of each table in samples ``first`` to ``last`` of a draw."""
        counts = []
        for table in self._schema.tables:
            columns = [drawn[feature.name] for feature in self._schema.features_of(table.name)]
            parts = [rows[offsets[first] : offsets[last]] for rows, offsets in columns]
            num_lookups = sum(part.size for part in parts)
            counts.append((num_lookups, count_distinct(parts, table.num_rows)))
        return counts

    def localities(self) -> dict[str, TableLocality]:
        """Measured locality by table; empty if no block was large enough."""
        if not self._found:
            return {}
        sizes = sorted(self._found)
        # (batches, tables, 2) each
        arrays = [np.asarray(self._found[size], np.float64) for size in sizes]
        return {
            table.name: TableLocality(
                batch_sizes=tuple(sizes),
                num_batches=tuple(len(array) for array in arrays),
                lookups=tuple(float(array[:, i, 0].mean()) for array in arrays),
                mean=tuple(float(array[:, i, 1].mean()) for array in arrays),
                spread=tuple(
                    float(array[:, i, 1].std(ddof=1)) if len(array) > 1 else 0.0 for array in arrays
                ),
            )
            for i, table in enumerate(self._schema.tables)
        }


def power_of_two(number: float) -> int:
    """The largest power of two that is not above a number; 0 for numbers below 1."""
    return 1 << int(math.log2(number)) if number >= 1 else 0


def count_distinct(parts: Sequence[IntArray], num_rows: int) -> int:
    """Distinct rows among several vectors of rows of one table."""
    num_ids = sum(part.size for part in parts)
    if num_ids == 0:
        return 0
    if num_rows <= 4 * num_ids:
        # Marking is faster than sorting if the table is not much larger than the batch.
        seen = np.zeros(num_rows, np.bool_)
        for part in parts:
            seen[part] = True
        return int(np.count_nonzero(seen))
    # np.unique takes ten times as long.
    rows = np.sort(np.concatenate(parts))
    return int(np.count_nonzero(rows[1:] != rows[:-1])) + 1


def effective_draws(
    histogram: CountHistogram,
    locality: TableLocality | None,
    batch_size: int,
    lookups_per_sample: float,
) -> float:
    """The number of independent lookups that read as many distinct rows as a batch does.

    The ratio to the batch's lookups is interpolated between the neighbouring measured batch sizes,
    log-log, and is that of the nearest one beyond them (a batch is drawn inside one block, so none
    larger than a block is measured).

    The histogram must be that of the part of the data in which the locality was measured. Without a
    locality, lookups are assumed independent.
    """
    num_lookups = batch_size * lookups_per_sample
    if locality is None or num_lookups <= 0 or histogram.num_lookups == 0:
        return num_lookups
    sizes = np.asarray(locality.batch_sizes, np.float64)
    after = int(np.searchsorted(sizes, batch_size))
    around = sorted({max(after - 1, 0), min(after, sizes.size - 1)})
    logs = [math.log(_draw_ratio(histogram, locality, i)) for i in around]
    log_ratio = np.interp(math.log(batch_size), np.log(sizes[around]), logs)
    return num_lookups * math.exp(float(log_ratio))


def step_draws(
    histogram: CountHistogram,
    locality: TableLocality | None,
    *,
    batch_size: int,
    world_size: int,
    lookups_per_sample: float,
) -> tuple[float, float]:
    """``effective_draws`` of a rank's batch and of the global batch, the latter no smaller."""
    of_rank = effective_draws(histogram, locality, batch_size, lookups_per_sample)
    of_all = effective_draws(histogram, locality, batch_size * world_size, lookups_per_sample)
    return of_rank, max(of_rank, of_all)


def _draw_ratio(histogram: CountHistogram, locality: TableLocality, index: int) -> float:
    """Effective draws per lookup of the measured batches of one size; 1 if none read a row."""
    # Lookups of these batches: bags differ, so other batches of the same size would differ too.
    num_lookups = locality.lookups[index]
    target = locality.mean[index]
    error = locality.spread[index] / math.sqrt(locality.num_batches[index])
    independent = distinct_rows(histogram, num_lookups)
    if target == 0 or abs(independent - target) <= max(2 * error, NEGLIGIBLE_FRAC * target):
        return 1.0
    return _solve_draws(histogram, target) / num_lookups


def distinct_rows(histogram: CountHistogram, num_draws: float) -> float:
    """The rows that independent lookups are expected to read."""
    counts = histogram.values.astype(np.float64)
    return float(histogram.num_rows @ prob_drawn(counts, histogram.num_lookups, num_draws))


def _solve_draws(histogram: CountHistogram, num_distinct: float) -> float:
    """The draws that read ``num_distinct`` rows on average, at most all lookups."""
    most = float(histogram.num_lookups)
    if histogram.num_distinct <= num_distinct:
        return most
    draws: float = brentq(
        lambda draws: distinct_rows(histogram, draws) - num_distinct, 0.0, most, rtol=1e-7
    )
    return draws


def localities_to_json(localities: Mapping[str, TableLocality]) -> dict[str, Any] | None:
    """Returns the form in the manifest: the batches once, then lookups and rows of each table."""
    if not localities:
        return None
    tables = {name: asdict(table) for name, table in localities.items()}
    batches = {
        key: [table.pop(key) for table in tables.values()][0]
        for key in ("batch_sizes", "num_batches")
    }
    return {**batches, "tables": tables}


def localities_from_json(found: Mapping[str, Any] | None) -> dict[str, TableLocality]:
    """Reads the result of ``localities_to_json``."""
    if found is None:
        return {}
    batches = {key: found[key] for key in ("batch_sizes", "num_batches")}
    return {
        # ``pos`` raises a TypeError for what is not a number.
        name: TableLocality(**{key: tuple(map(pos, v)) for key, v in (batches | table).items()})
        for name, table in found["tables"].items()
    }
