"""Replays the rows that batches read through caches of host rows, and counts what moves.

A cache holds all rows of a batch while it is computed. Every row that is read is changed, so each
one that leaves is written back. The policies differ in which rows leave:

    look_ahead  ours, by its own code (``hotrec.embedding.slots``), with the batches that it knows
    lru         those read longest ago
    lfu         those read in the fewest batches so far
    frequency   those with the fewest lookups in the profile (Colossal-AI's cache)
    belady      those read again last, of the whole stream: no policy moves fewer (Belady, IBM
                Systems Journal 5(2), 1966), as far as rows are in no batch in flight. Look-ahead
                comes to it with depth 0, no resident rows and a window as long as the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hotrec.embedding.slots import SlotMap, TooFewSlotsError
from hotrec.types import Rows

LOOK_AHEAD = "look_ahead"


@dataclass(frozen=True)
class Stream:
    """What batches read of rows that are numbered over all tables.

    Args:
        rows: Distinct rows of each batch, int64 (U,).
        lookups: How often each of them is looked up, int64 (U,).
        counts: Lookups of every row in the profile, int64 (R,).
    """

    rows: Sequence[Rows]
    lookups: Sequence[Rows]
    counts: Rows


@dataclass(frozen=True)
class Replayed:
    """What a policy did with a number of slots, over the batches after the first ones.

    Args:
        row_hit_frac: Hits among the distinct rows of batches.
        lookup_hit_frac: Hits among lookups.
        num_in: Rows fetched per batch.
        num_out: Rows written back per batch.
    """

    policy: str
    num_slots: int
    row_hit_frac: float
    lookup_hit_frac: float
    num_in: float
    num_out: float


# The rows of a batch that were missing, bool (U,), and the number of rows that left.
Step = tuple[np.ndarray, int]


def replay(
    stream: Stream,
    policy: str,
    num_slots: int,
    num_skipped: int,
    *,
    depth: int,
    window: int,
    resident: Rows,
) -> Replayed | None:
    """Replay a stream through a policy.

    Args:
        policy: One of POLICIES.
        num_skipped: First batches, which are not counted.
        depth: Batches that look-ahead holds beside the one that is computed.
        window: Further batches that it knows.
        resident: Rows that look-ahead keeps for good.

    Returns:
        None if the batches that are held read more rows than there are slots.
    """
    if policy == LOOK_AHEAD:
        steps = _look_ahead(stream, num_slots, depth, window, resident)
    else:
        steps = _ranked(stream, num_slots, RANKINGS[policy](stream))
    num_rows = num_lookups = missed_lookups = num_in = num_out = 0
    try:
        for number, (is_missing, num_left) in enumerate(steps):
            if number >= num_skipped:
                lookups = stream.lookups[number]
                num_rows += is_missing.size
                num_lookups += int(lookups.sum())
                missed_lookups += int(lookups[is_missing].sum())
                num_in += int(np.count_nonzero(is_missing))
                num_out += num_left
    except TooFewSlotsError:
        return None
    num_batches = len(stream.rows) - num_skipped
    return Replayed(
        policy,
        num_slots,
        1 - num_in / num_rows,
        1 - missed_lookups / num_lookups,
        num_in / num_batches,
        num_out / num_batches,
    )


def _look_ahead(
    stream: Stream, num_slots: int, depth: int, window: int, resident: Rows
) -> Iterator[Step]:
    slots = SlotMap(stream.counts.size, num_slots, resident)
    known = 0
    for number, rows in enumerate(stream.rows):
        while window and known <= min(number + window, len(stream.rows) - 1):
            slots.foresee(stream.rows[known], known)
            known += 1
        if number > depth:
            slots.release(number - depth - 1, is_changed=True)
        _, moves = slots.reserve(rows, number)
        yield np.isin(rows, moves.in_rows, assume_unique=True), moves.out_rows.size


# The rank of each row of a batch among the rows that leave, the least first.
Ranking = Callable[[int], np.ndarray]


def _ranked(stream: Stream, num_slots: int, ranks_of: Ranking) -> Iterator[Step]:
    """A cache whose rows of the least rank leave."""
    slot_of_row = np.full(stream.counts.size, -1, np.int64)
    row_of_slot = np.full(num_slots, -1, np.int64)
    ranks = np.full(num_slots, -np.inf)
    for number, rows in enumerate(stream.rows):
        if rows.size > num_slots:
            raise TooFewSlotsError(rows.size, num_slots)
        slots = slot_of_row[rows]
        is_missing = slots < 0
        ranks[slots[~is_missing]] = np.inf
        missing = rows[is_missing]
        taken = np.argpartition(ranks, max(missing.size - 1, 0))[: missing.size]
        left = row_of_slot[taken]
        slot_of_row[left[left >= 0]] = -1
        row_of_slot[taken], slot_of_row[missing] = missing, taken
        ranks[slot_of_row[rows]] = ranks_of(number)
        yield is_missing, int(np.count_nonzero(left >= 0))


def _by_recency(stream: Stream) -> Ranking:
    # Within a batch in the order of its rows.
    return lambda number: number + np.linspace(0, 1, stream.rows[number].size, endpoint=False)


def _by_uses(stream: Stream) -> Ranking:
    uses = np.zeros(stream.counts.size)

    def count(number: int) -> np.ndarray:
        uses[stream.rows[number]] += 1
        return uses[stream.rows[number]]

    return count


def _by_profile(stream: Stream) -> Ranking:
    return lambda number: stream.counts[stream.rows[number]].astype(np.float64)


def _by_next_use(stream: Stream) -> Ranking:
    next_use = np.full(stream.counts.size, np.inf)
    following = []
    for number in range(len(stream.rows) - 1, -1, -1):
        following.append(next_use[stream.rows[number]])
        next_use[stream.rows[number]] = number
    following.reverse()
    # A finite rank for rows that are never read again: -inf marks an empty slot.
    last = float(len(stream.rows))
    return lambda number: -np.minimum(following[number], last)


RANKINGS = {
    "lru": _by_recency,
    "lfu": _by_uses,
    "frequency": _by_profile,
    "belady": _by_next_use,
}
POLICIES = (LOOK_AHEAD, *RANKINGS)
