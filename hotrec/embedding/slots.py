"""Which rows have a device slot: decided on the host, from the rows that batches in flight read.

Slots begin with the rows that the profile found most popular. Rows of batches in flight stay. Of
the rest, rows that no known batch reads go first, by the smallest decayed count of lookups, which
begins with the profile's, then those that known batches read last (Colossal-AI's frequency-ordered
cache and ScratchPipe's look-forward cache, in one; Belady's rule as far as batches are known).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrec.types import PopularRows, Rows

Slots = npt.NDArray[np.int32]

# Batches after which a lookup counts half.
HALF_LIFE = 512
# New lookups weigh more instead of old ones less, up to this weight.
MOST_WEIGHT = 1e30
# More than the decayed lookups of any row.
FORESEEN_WORTH = 1e60
# Slots that are ranked at once, as a share of all, and the share of them that
# batches may read until they are ranked again: a ranking knows nothing of the batches that come
# into the window after it.
QUEUE_FRAC = 1 / 8
# No known batch reads the row.
NEVER = np.iinfo(np.int64).max


class TooFewSlotsError(ValueError):
    """The batches in flight read more rows than there are slots for."""

    def __init__(self, num_needed: int, num_slots: int) -> None:
        super().__init__(f"expected at least {num_needed} slots, got {num_slots}")
        self.num_needed, self.num_slots = num_needed, num_slots


@dataclass(frozen=True)
class Moves:
    """Rows to write back from slots, then rows to fetch, into these slots among others."""

    out_rows: Rows
    out_slots: Slots
    in_rows: Rows
    in_slots: Slots


class _Window:
    """Rows of the known batches, and the batch that reads each of them next."""

    def __init__(self, num_rows: int) -> None:
        # Where the last known batch that reads a row has it. Valid if the row is there.
        self.place_of_row = np.full(num_rows, -1, np.int32)
        self.clear()

    def clear(self) -> None:
        """Forget all batches."""
        self._rows = np.empty(0, np.int64)
        self._next = np.empty(0, np.int64)
        self._batches: deque[tuple[int, int, int]] = deque()  # number, begin and end of its rows
        self._begin = self._end = 0

    @property
    def last(self) -> int | None:
        """The number of the last known batch, if any."""
        return self._batches[-1][0] if self._batches else None

    def add(self, rows: Rows, number: int) -> None:
        """Add a batch, rows in any order, with repetition."""
        if self._end + rows.size > self._rows.size:
            self._make_room(rows.size)
        places = self.place_of_row[rows]
        known = np.flatnonzero((places >= self._begin) & (places < self._end))
        known = known[self._rows[places[known]] == rows[known]]
        self._next[places[known]] = number
        begin, self._end = self._end, self._end + rows.size
        self._rows[begin : self._end] = rows
        self._next[begin : self._end] = NEVER
        self.place_of_row[rows] = np.arange(begin, self._end, dtype=np.int32)
        self._batches.append((number, begin, self._end))

    def take(self, number: int) -> tuple[Rows, Rows] | None:
        """Forget the batches up to ``number``: its rows, and when they are read next, if known."""
        found = None
        while self._batches and self._batches[0][0] <= number:
            of_batch, begin, self._begin = self._batches.popleft()
            if of_batch == number:
                found = self._rows[begin : self._begin], self._next[begin : self._begin]
        return found

    def _make_room(self, num_added: int) -> None:
        """Move the known batches to the front of arrays that hold twice as much."""
        shift, num_known = self._begin, self._end - self._begin
        rows, following = np.empty((2, 2 * (num_known + num_added)), np.int64)
        rows[:num_known] = self._rows[shift : self._end]
        following[:num_known] = self._next[shift : self._end]
        self.place_of_row[rows[:num_known]] = np.arange(num_known, dtype=np.int32)
        self._batches = deque((n, b - shift, e - shift) for n, b, e in self._batches)
        self._rows, self._next, self._begin, self._end = rows, following, 0, num_known


class SlotMap:
    """Gives batches slots for their rows; batches have rising numbers.

    Args:
        num_rows: The number of rows R.
        num_slots: The number of slots S.
        popular: Rows whose popularity is known, distinct; as many as fit begin in slots.
    """

    def __init__(self, num_rows: int, num_slots: int, popular: PopularRows) -> None:
        self.num_slots = num_slots
        self._popular = popular[np.argsort(-popular["prob"], kind="stable")]
        self._lookups = np.zeros(num_rows, np.float32)  # decayed
        self._slot_of_row = np.full(num_rows, -1, np.int32)
        self._first = np.zeros(num_slots, np.int64)  # scratch
        self._window = _Window(num_rows)
        self.num_lookups = self.num_read = self.num_misses = self.num_evictions = 0
        self.clear()

    def arrays(self) -> list[npt.NDArray[Any]]:
        """The maps."""
        maps: list[npt.NDArray[Any]] = [self._slot_of_row, self._lookups]
        maps += [self._window.place_of_row, self._row_of_slot, self._last_use]
        maps += [self._last_foreseen, self._next_use]
        return [*maps, self._is_changed, self._first]

    @property
    def has_batches(self) -> bool:
        """Whether batches hold slots."""
        return bool(self._reserved)

    def clear(self) -> Moves:
        """Forget slots, lookups and numbers; the rows to fetch, with which the slots begin."""
        self._lookups.fill(0)
        # As many as if batches had read them for ever: 1 + 2^(-1 / HALF_LIFE) + ... in each.
        most = 1 / -math.expm1(-math.log(2) / HALF_LIFE)
        self._lookups[self._popular["row"]] = most * self._popular["prob"]
        self._weight = 1.0  # of a lookup now
        self._slot_of_row.fill(-1)
        self._row_of_slot = np.full(self.num_slots, -1, np.int64)
        self._last_use = np.full(self.num_slots, -1, np.int64)  # the last batch that reads it
        self._is_changed = np.zeros(self.num_slots, np.bool_)
        self._reserved: deque[tuple[int, Slots]] = deque()
        self._released = -1
        self._window.clear()
        # The last and the first known batch that reads the row.
        self._last_foreseen = np.full(self.num_slots, -1, np.int64)
        self._next_use = np.full(self.num_slots, NEVER, np.int64)
        self._queue = np.empty(0, np.int32)  # slots to give away, the first first
        # When they were ranked, the batch that was released, and the last one known.
        self._queued_at = self._queued_until = -1
        self._num_read_since = 0
        rows = self._popular["row"][: self.num_slots].copy()
        slots = np.arange(rows.size, dtype=np.int32)
        self._row_of_slot[slots], self._slot_of_row[rows] = rows, slots
        return Moves(rows[:0], slots[:0], rows, slots)

    def foresee(self, rows: Rows, number: int) -> None:
        """Say which rows a batch will reserve slots for, before ``reserve``."""
        self._window.add(rows, number)
        slots = self._slot_of_row[rows]
        slots = slots[slots >= 0]
        self._last_foreseen[slots] = number
        self._next_use[slots] = np.minimum(self._next_use[slots], number)

    def reserve(self, rows: Rows, number: int) -> tuple[Slots, Moves]:
        """Give a batch slots for its rows, (K,) with repetition, until ``release(number)``.

        Returns:
            The slot of each row, (K,), and what has to be moved.

        Raises:
            TooFewSlotsError: if the batches in flight hold too many slots.
        """
        known = self._window.take(number)
        slots = self._slot_of_row[rows]
        self._last_use[slots[slots >= 0]] = number  # before others are given away
        missing = np.unique(rows[slots < 0])
        taken = self._take(missing.size, number)
        old, is_changed = self._row_of_slot[taken], self._is_changed[taken]
        self._slot_of_row[old[old >= 0]] = -1
        self._slot_of_row[missing] = taken
        self._row_of_slot[taken], self._last_use[taken] = missing, number
        self._is_changed[taken] = False
        self._next_use[taken] = NEVER
        if known is not None:
            self._next_use[self._slot_of_row[known[0]]] = known[1]
        slots = self._slot_of_row[rows]
        self._num_read_since += slots.size
        self._reserved.append((number, slots))
        self._count(rows, slots)
        self.num_misses += missing.size
        self.num_evictions += int(np.count_nonzero(old >= 0))
        return slots, Moves(old[is_changed], taken[is_changed], missing, taken)

    def _take(self, num: int, number: int) -> Slots:
        """Slots of no batch in flight, of the rows that are known to be read last or least."""
        is_left = self._last_use[self._queue] <= self._queued_at
        queue = self._queue[is_left & (self._last_foreseen[self._queue] <= self._queued_until)]
        is_stale = num > 0 and self._num_read_since > QUEUE_FRAC * self.num_slots
        if queue.size < num or is_stale:
            free = np.flatnonzero(self._last_use <= self._released).astype(np.int32)
            if free.size < num:
                raise TooFewSlotsError(self.num_slots - free.size + num, self.num_slots)
            # Ranking all slots in every step would cost more than moving the rows.
            size = min(free.size, max(num, math.ceil(QUEUE_FRAC * self.num_slots)))
            worth = self._worth(free, number)
            least = np.flatnonzero(worth <= np.partition(worth, size - 1)[size - 1])
            # Of equal ones the first, however much of the window is known: many are read seldom.
            queue = free[least[np.argsort(worth[least], kind="stable")]][:size]
            self._queued_at = self._released
            last = self._window.last
            self._queued_until = self._released if last is None else last
            self._num_read_since = 0
        self._queue = queue[num:]
        return queue[:num]

    def _worth(self, slots: Slots, number: int) -> npt.NDArray[np.float64]:
        """Those to be given away first have the smallest."""
        rows = self._row_of_slot[slots]
        worth = np.where(rows < 0, -1.0, self._lookups[rows]).astype(np.float64)
        next_use = self._next_use[slots]
        is_read = next_use != NEVER
        worth[is_read] = FORESEEN_WORTH / np.maximum(next_use[is_read] - number, 1)
        return worth

    def _count(self, rows: Rows, slots: Slots) -> None:
        self._lookups[rows] += self._weight  # once per batch, also where a row is repeated
        self._weight *= 2 ** (1 / HALF_LIFE)
        if self._weight > MOST_WEIGHT:
            self._lookups /= self._weight
            self._weight = 1.0
        self._first[slots] = order = np.arange(slots.size)
        self.num_lookups += slots.size
        self.num_read += int(np.count_nonzero(self._first[slots] == order))

    def slots_of(self, rows: Rows) -> Slots:
        """The slot of each row, (K,); -1 for none."""
        return self._slot_of_row[rows]

    def release(self, number: int, *, is_changed: bool) -> None:
        """Give back the slots of the batches up to ``number``, whose updates are all made."""
        while self._reserved and self._reserved[0][0] <= number:
            _, slots = self._reserved.popleft()
            if is_changed:
                self._is_changed[slots] = True
        self._released = number

    def take_changed(self) -> tuple[Rows, Slots]:
        """The changed rows and their slots, which from now on count as unchanged."""
        slots = np.flatnonzero(self._is_changed).astype(np.int32)
        self._is_changed[slots] = False
        return self._row_of_slot[slots], slots
