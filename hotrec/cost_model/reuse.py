"""Reuse: the share of a batch's rows that one of the batches shortly before it read.

Look-ahead fetches a batch's rows a step early, except urgent ones: those that the step before
updates. Independent batches meet again in popular rows alone. Batches of a stream that is sorted by
user also meet in the user's own rows, and then most rows may be urgent, so that there is little to
fetch early. So a profile of a loader, or of a log, also counts this, in the order in which batches
are trained, and among several batches before, since a plan may have larger batches or more ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from operator import pos
from typing import Any

import numpy as np

from hotrec.cost_model.blocks import Block, join
from hotrec.cost_model.demand import Floats, prob_both, prob_drawn
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.locality import DRAWN_FRAC, FREE_LOOKUPS, TableLocality, power_of_two
from hotrec.types import Rows, Schema

# Batches before a batch, among which its rows are looked for.
DISTANCES = (1, 2, 4, 8, 16)
# Batches whose rows are compared with those before; more would hardly change a mean.
ENOUGH_BATCHES = 64 + DISTANCES[-1]
# Largest batches that a log is cut into.
MAX_LOG_BATCH = 2048


@dataclass(frozen=True)
class TableReuse:
    """The measured share of one table.

    Args:
        batch_size: Samples of a batch.
        read_frac: The share for each of DISTANCES, or for the first of them if there were too few
            batches.
        is_of_log: Whether the batches follow one another in what all ranks divide among them,
            rather than in what one rank reads.
    """

    batch_size: int
    read_frac: tuple[float, ...]
    is_of_log: bool = False

    def at(self, distance: float) -> float:
        """The share among ``distance`` batches, by its logarithm between those measured.

        That of the nearest measured one beyond them.
        """
        logs = np.log(DISTANCES[: len(self.read_frac)])
        return float(np.interp(math.log(distance), logs, self.read_frac))

    def num_between(self, batch_size: int, world_size: int) -> int:
        """The samples between batches of consecutive steps, where they were measured."""
        return batch_size * (world_size if self.is_of_log else 1)


class ReuseMeter:
    """Compares the rows of each batch of a stream with those of the batches before.

    It takes the ids of one batch, and 12 bytes for each distinct row of the last 16.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        # Rows of all tables are numbered through: a table's are between two of these.
        self._ends = np.cumsum([0, *(table.num_rows for table in schema.tables)])
        # The distinct rows of the last batches, increasing, and the last batch that read each.
        self._held = np.empty(0, np.int64), np.empty(0, np.int32)
        # Of each batch, int64 (tables, 2 + distances): lookups, distinct rows, rows read before.
        self._found: list[Rows] = []
        self._batch_size = 0

    @property
    def has_enough(self) -> bool:
        """Whether further batches are not counted."""
        return len(self._found) == ENOUGH_BATCHES

    def observe(self, batch: Block) -> None:
        """Count the next batch of the stream."""
        if self.has_enough:
            return
        self._batch_size = max(self._batch_size, batch.num_samples)
        columns, num_lookups = [], []
        for table, first in zip(self._schema.tables, self._ends, strict=False):
            ids = [batch.rows[feature.name] for feature in self._schema.features_of(table.name)]
            columns += [of_feature + first for of_feature in ids]
            num_lookups.append(sum(of_feature.size for of_feature in ids))
        rows = np.unique(np.concatenate(columns))
        at = np.searchsorted(rows, self._ends)
        distances = self._distances(rows, len(self._found) + 1)
        again = [np.searchsorted(np.flatnonzero(distances <= far), at) for far in DISTANCES]
        self._found.append(np.stack([num_lookups, *np.diff([at, *again])], axis=1))
        if len(self._found) == ENOUGH_BATCHES:
            self._held = np.empty(0, np.int64), np.empty(0, np.int32)

    def _distances(self, rows: Rows, batch: int) -> Rows:
        """Batches since the one that read each of these distinct rows; many if none of the last."""
        held, last = self._held
        at = np.searchsorted(held, rows)
        is_held = np.zeros(rows.size, np.bool_)
        is_inside = at < held.size
        is_held[is_inside] = held[at[is_inside]] == rows[is_inside]
        distances = np.full(rows.size, DISTANCES[-1] + 1)
        distances[is_held] = batch - last[at[is_held]]
        last[at[is_held]] = batch
        held = np.insert(held, at[~is_held], rows[~is_held])
        last = np.insert(last, at[~is_held], batch)
        is_recent = last > batch - DISTANCES[-1]
        self._held = held[is_recent], last[is_recent]
        return distances

    def reuse(self) -> dict[str, TableReuse]:
        """The shares by table; empty after fewer than two batches."""
        shares: dict[str, TableReuse] = {}
        for name, counts in self._counts().items():
            # A batch counts where there are so many before it.
            of_distances = [counts[far:, (1, 2 + i)].sum(0) for i, far in enumerate(DISTANCES)]
            known = [(num, again) for num, again in of_distances if num > 0]
            if known:
                fracs = tuple(float(again / num) for num, again in known)
                shares[name] = TableReuse(self._batch_size, fracs)
        return shares

    def localities(self) -> dict[str, TableLocality]:
        """The distinct rows of whole batches, by table; also those too small for LocalityMeter."""
        found: dict[str, TableLocality] = {}
        for name, counts in self._counts().items():
            lookups, distinct = counts[:, :2].T.astype(np.float64)
            num, mean = len(distinct), float(distinct.mean())
            spread = float(distinct.std(ddof=1)) if num > 1 else 0.0
            found[name] = TableLocality(
                (self._batch_size,), (num,), (float(lookups.mean()),), (mean,), (spread,)
            )
        return found

    def _counts(self) -> dict[str, Rows]:
        """The counts of all batches by table, int64 (batches, 2 + distances); empty without any."""
        names = [table.name for table in self._schema.tables]
        return dict(zip(names, np.stack(self._found, axis=1), strict=True)) if self._found else {}


class LogReuse:
    """The reuse of a log whose blocks are its chunks, in its order and shuffled as in training.

    Args:
        schema: The tables.
        num_samples: Samples of the log.
        seed: Seed of the shuffled order.
        batch_size: Samples of a batch; None for as many as are counted in a small part of the time
            of a profile.
    """

    def __init__(
        self, schema: Schema, num_samples: int, *, seed: int = 0, batch_size: int | None = None
    ) -> None:
        self._schema, self._num_samples, self._batch_size = schema, num_samples, batch_size
        self._rng = np.random.default_rng([seed, 2])
        self._orders: tuple[_Batches, ...] = ()

    def observe(self, block: Block) -> None:
        """Count the next chunk of the log."""
        if block.num_samples == 0:
            return
        if not self._orders:
            num_lookups = sum(rows.size for rows in block.rows.values())
            size = self._batch_size or self._size(num_lookups / block.num_samples)
            self._orders = _Batches(self._schema, size), _Batches(self._schema, size)
        in_order, shuffled = self._orders
        if not in_order.meter.has_enough:
            in_order.observe(block)
        if not shuffled.meter.has_enough:
            most = ENOUGH_BATCHES * shuffled.batch_size
            shuffled.observe(block.at(self._rng.permutation(block.num_samples)[:most]))

    def _size(self, lookups_per_sample: float) -> int:
        num_counted = DRAWN_FRAC * self._num_samples + FREE_LOOKUPS / max(lookups_per_sample, 1)
        size = power_of_two(min(num_counted, self._num_samples) / ENOUGH_BATCHES)
        return min(max(size, 1), MAX_LOG_BATCH)

    def reuses(self) -> tuple[dict[str, TableReuse], dict[str, TableReuse]]:
        """The shares by table in the order of the log, and those of shuffled chunks."""
        in_order, shuffled = (order.reuse() for order in self._orders) if self._orders else ({}, {})
        return in_order, shuffled


class _Batches:
    """Cuts a stream of blocks into the batches of a meter."""

    def __init__(self, schema: Schema, batch_size: int) -> None:
        self.meter, self.batch_size = ReuseMeter(schema), batch_size
        self._rest: Block | None = None

    def observe(self, block: Block) -> None:
        joined = block if self._rest is None else join(self._rest, block)
        self._rest = None
        for piece in joined.pieces(self.batch_size):
            if piece.num_samples < self.batch_size:
                self._rest = piece
            elif not self.meter.has_enough:
                self.meter.observe(piece)
            else:
                break

    def reuse(self) -> dict[str, TableReuse]:
        if self._rest is not None:
            self.meter.observe(self._rest)
            self._rest = None
        reuse = self.meter.reuse()
        return {table: replace(of_table, is_of_log=True) for table, of_table in reuse.items()}


def excess_reuse(
    histogram: CountHistogram, num_draws: float, reuse: TableReuse, num_samples: float
) -> float:
    """e, how far the measured share a is from the share s that independent batches have.

        a = s + e (1 - s)   if rows are read again for another reason than their popularity
        a = s (1 + e)       if rows are popular only within a sample, e < 0


    Args:
        histogram: Of the table.
        num_draws: Independent lookups equivalent to those of a measured batch.
        reuse: The measured share.
        num_samples: Samples among which the rows are looked for: those of the batch before, of this
            rank, or of all if all were measured.

    Returns:
        In -1..1.
    """
    distance = min(max(num_samples / reuse.batch_size, 1.0), DISTANCES[len(reuse.read_frac) - 1])
    counts, total = histogram.values.astype(np.float64), histogram.num_lookups
    num_before = distance * num_draws
    read, before = prob_drawn(counts, total, num_draws), prob_drawn(counts, total, num_before)
    again = prob_both(counts, total, num_draws + num_before, read, before)
    num_read = float(histogram.num_rows @ read)
    independent = float(histogram.num_rows @ again) / num_read if num_read > 0 else 1.0
    difference = reuse.at(distance) - independent
    room = independent if difference < 0 else 1 - independent
    return difference / room if room > 0 else 0.0


def read_again(probs: Floats, again: Floats, excess: float) -> Floats:
    """Probabilities of reading a row that is read again, from independent ones."""
    return again + excess * (again if excess < 0 else probs - again)


def reuses_to_json(reuses: Mapping[str, TableReuse]) -> dict[str, Any]:
    """Returns the form in the manifest."""
    return {name: asdict(reuse) for name, reuse in reuses.items()}


def reuses_from_json(found: Mapping[str, Any]) -> dict[str, TableReuse]:
    """Reads the result of ``reuses_to_json``."""
    return {
        name: TableReuse(**{**reuse, "read_frac": tuple(map(pos, reuse["read_frac"]))})
        for name, reuse in found.items()
    }
