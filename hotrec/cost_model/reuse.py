"""Reuse: the share of a batch's rows that one of the batches shortly before it read.

Look-ahead at a depth d fetches a batch's rows d batches early, except urgent ones: those that a
batch in flight updates. Independent batches meet again in popular rows alone. Batches of a stream
that is sorted by user also meet in the user's own rows, and then most rows may be urgent, at every
depth alike, so that there is little to fetch early. So a profile of a loader, which has its batches
in their order, also counts this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hotrec.cost_model.blocks import Block
from hotrec.cost_model.demand import Floats, prob_both, prob_drawn
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.locality import TableLocality
from hotrec.types import Schema

# Batches before a batch, among which its rows are looked for.
DEPTHS = (1, 2, 4, 8, 16)
# Batches whose rows are compared with those before; more would hardly change a mean.
ENOUGH_BATCHES = 64 + DEPTHS[-1]


@dataclass(frozen=True)
class TableReuse:
    """The measured share of one table.

    Args:
        batch_size: Samples of a batch.
        read_frac: The share for each of DEPTHS, or the first of them if there were too few batches.
    """

    batch_size: int
    read_frac: tuple[float, ...]

    def at(self, distance: float) -> float:
        """The share among ``distance`` batches, by its logarithm between those measured.

        That of the nearest measured one beyond them.
        """
        logs = np.log(DEPTHS[: len(self.read_frac)])
        return float(np.interp(math.log(distance), logs, self.read_frac))


class ReuseMeter:
    """Compares the rows of each batch of a stream with those of the batches before.

    It takes 4 bytes per row and the ids of one batch.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        # The last batch that read a row, from 1; 0: none.
        self._last = {table.name: np.zeros(table.num_rows, np.int32) for table in schema.tables}
        # By table, of each batch: lookups, distinct rows, and those of them that were read before.
        self._found: dict[str, list[list[int]]] = {table.name: [] for table in schema.tables}
        self._num_batches = self._batch_size = 0

    def observe(self, batch: Block) -> None:
        """Count the next batch of the stream."""
        if self._num_batches == ENOUGH_BATCHES:
            return
        self._num_batches += 1
        self._batch_size = max(self._batch_size, batch.num_samples)
        for table in self._schema.tables:
            columns = [batch.rows[feature.name] for feature in self._schema.features_of(table.name)]
            ids, last = np.concatenate(columns), self._last[table.name]
            rows = np.unique(ids)
            before = last[rows]
            last[rows] = self._num_batches
            distance = self._num_batches - before[before > 0]
            again = [int(np.count_nonzero(distance <= depth)) for depth in DEPTHS]
            self._found[table.name].append([ids.size, rows.size, *again])

    def reuse(self) -> dict[str, TableReuse]:
        """The shares by table; empty after fewer than two batches."""
        shares: dict[str, TableReuse] = {}
        for table, found in self._found.items():
            counts = np.asarray(found, np.int64).reshape(-1, 2 + len(DEPTHS))
            # A batch counts where there are so many before it.
            of_depths = [counts[depth:, (1, 2 + i)].sum(0) for i, depth in enumerate(DEPTHS)]
            known = [(num, again) for num, again in of_depths if num > 0]
            if known:
                fracs = tuple(float(again / num) for num, again in known)
                shares[table] = TableReuse(self._batch_size, fracs)
        return shares

    def localities(self) -> dict[str, TableLocality]:
        """The distinct rows of whole batches, by table; also those too small for LocalityMeter."""
        found: dict[str, TableLocality] = {}
        for table, of_batches in self._found.items():
            if of_batches:
                lookups, distinct = np.asarray(of_batches, np.float64)[:, :2].T
                num, mean = len(distinct), float(distinct.mean())
                spread = float(distinct.std(ddof=1)) if num > 1 else 0.0
                found[table] = TableLocality(
                    (self._batch_size,), (num,), (float(lookups.mean()),), (mean,), (spread,)
                )
        return found


def excess_reuse(
    histogram: CountHistogram, num_draws: float, reuse: TableReuse | None, num_samples: float
) -> float:
    """e, how far the measured share a is from the share s that independent batches have.

        a = s + e (1 - s)   if rows are read again for another reason than their popularity
        a = s (1 + e)       if rows are popular only within a sample, e < 0


    Args:
        histogram: Of the table.
        num_draws: Independent lookups equivalent to those of a measured batch.
        reuse: The share that the batches of one rank had; None for independent batches.
        num_samples: Samples of this rank among which the rows are looked for: those of its batches
            in flight.

    Returns:
        In -1..1.
    """
    if reuse is None:
        return 0.0
    distance = min(max(num_samples / reuse.batch_size, 1.0), DEPTHS[len(reuse.read_frac) - 1])
    read, again = _read_again(histogram, num_draws, distance * num_draws)
    num_read = float(histogram.num_rows @ read)
    independent = float(histogram.num_rows @ again) / num_read if num_read > 0 else 1.0
    difference = reuse.at(distance) - independent
    room = independent if difference < 0 else 1 - independent
    return difference / room if room > 0 else 0.0


def read_again(probs: Floats, again: Floats, excess: float) -> Floats:
    """Probabilities of reading a row that is read again, from independent ones."""
    return again + excess * (again if excess < 0 else probs - again)


def urgent_frac(
    histogram: CountHistogram, num_draws: tuple[float, float], depth: int, excess: float
) -> float:
    """The share of a rank's distinct rows that any rank reads in the ``depth`` batches before.

    Args:
        histogram: Of the table.
        num_draws: Independent lookups equivalent to those of a rank and of all ranks in a step.
        depth: The batches in flight.
        excess: ``excess_reuse`` at this depth.
    """
    of_rank, of_all = num_draws
    read, again = _read_again(histogram, of_rank, depth * of_all)
    num_read = float(histogram.num_rows @ read)
    urgent = float(histogram.num_rows @ read_again(read, again, excess))
    return urgent / num_read if num_read > 0 else 0.0


def _read_again(
    histogram: CountHistogram, num_draws: float, num_before: float
) -> tuple[Floats, Floats]:
    """The probabilities to read each row in a batch, and in both it and the lookups before."""
    counts, total = histogram.values.astype(np.float64), histogram.num_lookups
    read = prob_drawn(counts, total, num_draws)
    before = prob_drawn(counts, total, num_before)
    return read, prob_both(counts, total, num_draws + num_before, read, before)


def reuses_to_json(reuses: Mapping[str, TableReuse]) -> dict[str, Any]:
    """Returns the form in the manifest."""
    return {name: asdict(reuse) for name, reuse in reuses.items()}


def reuses_from_json(found: Mapping[str, Any]) -> dict[str, TableReuse]:
    """Reads the result of ``reuses_to_json``."""
    return {
        name: TableReuse(reuse["batch_size"], tuple(reuse["read_frac"]))
        for name, reuse in found.items()
    }
