"""Chooses the rows with a device slot, on the device, from the rows that batches read.

Slots are initialized with the most popular rows of the profile. Rows of batches in flight are never
evicted. Of the rest, rows that no known batch reads are evicted first, lowest decayed count of
lookups first (counts are initialized from the profile), then those whose next read is latest
(Colossal-AI's frequency-ordered cache combined with ScratchPipe's look-forward cache; Belady's rule
as far as batches are known).

No step scans all rows or all slots. A clock hand sweeps over the slots; victims are the
lowest-ranked of the slots it passes, a few times as many as needed (CLOCK: Corbato, 1968; ranking a
sample: Redis). The map is stored next to the slots, so the device decides alone; the host only
reads the number of missing rows of a step, and later their numbers.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from hotrec.embedding.flat import put_rows
from hotrec.runtime.mapped_memory import ask_for_huge_pages
from hotrec.types import PopularRows

# Half-life of a lookup's count, in batches.
HALF_LIFE = 512
# New lookups get a larger weight instead of decaying old ones, up to this weight.
MAX_WEIGHT = 1e20
# More than the decayed lookups of any row, at most MAX_WEIGHT / (1 - 2^(-1 / HALF_LIFE)). A power
# of two, so that a sum of bits times this is never rounded to less than its highest bit.
FORESEEN_WORTH = 2.0**80
# More than that of any row that known batches read.
IN_FLIGHT = 1e37
# Slots that the hand passes, besides those of batches in flight: per needed slot, and per row of
# the batch if few are needed. With fewer, more rows miss (docs/gpus.md).
EXAMINED = 6
EXAMINED_OF_READ = 3
# Maximum number of known batches without slots: each has a bit of a row's int32, except the sign.
MAX_KNOWN = 31
_ALL_BITS = (1 << MAX_KNOWN) - 1


class TooFewSlotsError(ValueError):
    """The batches in flight need more slots than there are."""

    def __init__(self, num_needed: int, num_slots: int) -> None:
        super().__init__(f"expected at least {num_needed} slots, got {num_slots}")
        self.num_needed, self.num_slots = num_needed, num_slots


@dataclass(frozen=True)
class Moves:
    """Rows to write back from slots, then rows to fetch, into these slots and others.

    Args:
        out_rows: Evicted rows, int64 (O,).
        out_slots: Their slots, int64 (O,).
        is_changed: Whether host memory may have another value than the slot, bool (O,).
        out_worth: Minus the highest worth among the evicted rows, float32 (1,).
        in_rows: Rows to fetch, int64 (I,), distinct.
        in_slots: Their slots, int64 (I,).
        number: The batch that reads them.
        last_known: The last known batch, this one or a later one.
    """

    out_rows: torch.Tensor
    out_slots: torch.Tensor
    is_changed: torch.Tensor
    out_worth: torch.Tensor
    in_rows: torch.Tensor
    in_slots: torch.Tensor
    number: int = -1
    last_known: int = -1

    def next_read(self, out_worth: float) -> int:
        """The first batch that may read one of the evicted rows, from the value above."""
        bits = -out_worth / FORESEEN_WORTH
        if bits < 1:
            return self.last_known + 1
        return self.number + MAX_KNOWN - 1 - int(math.log2(bits))


def fetches(rows: torch.Tensor, slots: torch.Tensor) -> Moves:
    """Moves of rows int64 (I,) into slots int64 (I,), without evictions."""
    return Moves(rows[:0], slots[:0], rows[:0].bool(), rows[:0].float(), rows, slots)


class SlotMap:
    """Allocates slots for the rows of batches, which have increasing numbers.

    Rows and slots have places: that of a row is its number, that of slot s is R + s. A place has
    two numbers. For a row that is not in a slot they are minus the decayed count of its lookups
    (float32) and a bit for each known batch that reads it (int32), at the row's place. For a row in
    a slot they are at the slot's place, and the row's has that place instead of a count. As
    integers counts are negative and places are not.

    Args:
        num_rows: The number of rows R.
        num_slots: The number of slots S.
        popular: Rows of known popularity, distinct; as many as fit are in slots at the start.
        device: Where the map is.

    Raises:
        ValueError: if places do not fit into int32.
    """

    def __init__(
        self, num_rows: int, num_slots: int, popular: PopularRows, device: torch.device
    ) -> None:
        num_places = num_rows + num_slots
        if num_places >= 1 << 31:
            raise ValueError(
                f"rows behind slots: expected fewer than {1 << 31} rows and slots on a rank, got "
                f"{num_places}. Use more ranks."
            )
        self.num_slots, self._num_rows = num_slots, num_rows
        self._popular = popular[np.argsort(-popular["prob"], kind="stable")]
        # As one number, to move both together.
        self._pairs = ask_for_huge_pages(torch.empty(num_places, dtype=torch.int64, device=device))
        self._places, self._reads = _halves(self._pairs)
        self._counts = self._places.view(torch.float32)
        self._row_of_slot = torch.empty(num_slots, dtype=torch.int64, device=device)
        # The last batch that reads a slot, after that of none.
        self._last_use = torch.empty(num_slots + 1, dtype=torch.int32, device=device)
        self.num_read = self.num_misses = self.num_evictions = 0
        self.clear()

    def tensors(self) -> list[torch.Tensor]:
        """The map."""
        return [self._pairs, self._row_of_slot, self._last_use]

    @property
    def has_batches(self) -> bool:
        """Whether batches have slots, or are announced."""
        return bool(self._held or self._announced) or self._last_known > self.last_reserved

    def clear(self, last: int = -1) -> Moves:
        """Reset slots and counts; returns the initial rows to fetch.

        Args:
            last: The batch before the next one: numbers may go on while the slots begin anew.
        """
        device = self._pairs.device
        self._counts.fill_(-0.0)
        self._reads.zero_()
        rows = torch.from_numpy(self._popular["row"].copy()).to(device)
        # The steady state of constant lookups: 1 + 2^(-1 / HALF_LIFE) + ... in each.
        most = 1 / -math.expm1(-math.log(2) / HALF_LIFE)
        counts = torch.from_numpy(self._popular["prob"].astype(np.float32))
        self._counts.index_copy_(0, rows, counts.to(device) * -most)
        self._weight = 1.0  # of a lookup now
        self._row_of_slot.fill_(-1)
        self._last_use.fill_(-1)
        self._held: deque[tuple[int, int]] = deque()  # batches with slots, and how many
        self._num_held = 0
        # Slots that only batches up to these read: may be evicted; equal to host memory.
        self._released = self._unchanged = last
        self.last_reserved = self._last_known = last
        self._announced: deque[tuple[torch.Tensor, int]] = deque()
        rows = rows[: self.num_slots]
        self._num_filled, self._hand = rows.numel(), 0
        slots = _spread(rows.numel(), device)
        counted = self._pairs.index_select(0, rows)
        put_rows(self._pairs, self._give(rows, slots, -1), counted)
        return fetches(rows, slots)

    def foresee(self, rows: torch.Tensor, number: int) -> None:
        """Announce the rows int64 (U,), distinct, of a future batch."""
        self._announced.append((rows, number))
        self._learn()

    def _learn(self) -> None:
        """Mark the rows of as many announced batches as there are bits."""
        while self._announced and self._announced[0][1] <= self.last_reserved + MAX_KNOWN:
            rows, number = self._announced.popleft()
            found = self._find(rows)[1]
            pairs = self._pairs.index_select(0, found)
            pairs |= _bit(number)
            put_rows(self._pairs, found, pairs)
            self._last_known = number

    def _find(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The places of the slots of rows int64 (U,), negative for none, and of their numbers."""
        places = _halves(self._pairs.index_select(0, rows))[0]
        return places, torch.maximum(places, rows)  # a slot's place is beyond those of rows

    def reserve(self, rows: torch.Tensor, number: int) -> tuple[torch.Tensor, Moves]:
        """Allocate slots for the rows of a batch, int64 (U,), distinct, until ``release(number)``.

        The host only waits for the number of missing rows.

        Returns:
            The slot of each row, int64 (U,), and the moves.

        Raises:
            TooFewSlotsError: if the batches in flight use too many slots.
        """
        places, found = self._find(rows)
        pairs = self._pairs.index_select(0, found)
        # Before evictions; the first is for rows without a slot.
        before = self._num_rows - 1
        self._last_use.index_fill_(0, found.clamp(min=before).sub_(before), number)
        missing = _positions(places < 0)
        moves, given = self._take(rows.index_select(0, missing), rows.numel(), number)
        found.index_copy_(0, missing, given)
        pairs &= ~_bit(number)
        _halves(pairs)[0].view(torch.float32).sub_(self._weight)
        put_rows(self._pairs, found, pairs)
        self._held.append((number, rows.numel()))
        self._num_held += rows.numel()
        self.last_reserved = number
        self._learn()
        self._count(rows.numel(), moves)
        return found - self._num_rows, moves

    def _take(self, rows: torch.Tensor, num_read: int, number: int) -> tuple[Moves, torch.Tensor]:
        """Allocate slots for rows of a batch, free ones first; returns their places."""
        num_empty = min(rows.numel(), self.num_slots - self._num_filled)
        empty, places = rows[:0], rows[:0]
        if num_empty:
            first, self._num_filled = self._num_filled, self._num_filled + num_empty
            empty = torch.arange(first, first + num_empty, device=rows.device)
            places = self._give(rows[:num_empty], empty, number)
        if num_empty == rows.numel():
            return fetches(rows, empty), places
        slots, worth = self._choose(rows.numel() - num_empty, num_read, number)
        old = self._row_of_slot.index_select(0, slots)
        is_changed = self._last_use[1:].index_select(0, slots) > self._unchanged
        pairs = self._pairs[self._num_rows :].index_select(0, slots)
        put_rows(self._pairs, old, pairs)
        given = self._give(rows[num_empty:], slots, number)
        taken = torch.cat([empty, slots]) if num_empty else slots
        known = max(number, self._last_known)
        moves = Moves(old, slots, is_changed, worth, rows, taken, number, known)
        return moves, torch.cat([places, given]) if num_empty else given

    def _give(self, rows: torch.Tensor, slots: torch.Tensor, number: int) -> torch.Tensor:
        """Assign slots to rows for a batch, not yet their numbers; returns the slots' places."""
        places = slots + self._num_rows
        put_rows(self._pairs, rows, places)  # and no bits
        put_rows(self._row_of_slot, slots, rows)
        self._last_use[1:].index_fill_(0, slots, number)
        return places

    def _choose(self, num: int, num_read: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of rows to evict, of no batch in flight, int64 (num,), and their worth."""
        max_held = self._num_held + num_read - num
        passed = max(EXAMINED * num, EXAMINED_OF_READ * num_read)
        size = min(self.num_slots, passed + max_held)
        begin = min(self._hand, self.num_slots - size)
        worth = self._minus_worth(begin, begin + size, number)
        if size < num + max_held:  # these are all slots
            num_free = int((worth > -IN_FLIGHT).sum())
            if num_free < num:
                raise TooFewSlotsError(self.num_slots - num_free + num, self.num_slots)
        self._hand = (begin + size) % self.num_slots
        positions, least = _largest(worth, num)
        return positions + begin, least

    def _minus_worth(self, begin: int, end: int, number: int) -> torch.Tensor:
        """Minus the worth of the rows in a range of slots, float32."""
        here = slice(self._num_rows + begin, self._num_rows + end)
        counts, reads = self._counts[here], self._reads[here]
        # The bits as a number, turned so that this batch has the highest and the next one the next.
        # It is rounded after that: the same batches are worth the same under all numbers.
        turn = number % MAX_KNOWN
        turned = (reads & (_ALL_BITS >> turn)).bitwise_left_shift_(turn)
        turned.bitwise_or_(reads >> (MAX_KNOWN - turn))
        worth = torch.add(counts, turned, alpha=-FORESEEN_WORTH)
        is_held = self._last_use[1 + begin : 1 + end] > self._released
        return worth.add_(is_held, alpha=-IN_FLIGHT)

    def _count(self, num_rows: int, moves: Moves) -> None:
        self.num_read += num_rows
        self.num_misses += moves.in_rows.numel()
        self.num_evictions += moves.out_rows.numel()
        self._weight *= 2 ** (1 / HALF_LIFE)
        if self._weight > MAX_WEIGHT:
            scaled = (self._counts / self._weight).view(torch.int32)
            self._places.copy_(torch.where(self._places < 0, scaled, self._places))
            self._weight = 1.0

    def slots_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The slot of each row, int64 (K,); negative for none."""
        places = self._places.index_select(0, rows).long()
        return torch.where(places < 0, -1, places - self._num_rows)

    def release(self, number: int, *, is_changed: bool) -> None:
        """Free the slots of all batches up to ``number``, once their updates are done."""
        while self._held and self._held[0][0] <= number:
            self._num_held -= self._held.popleft()[1]
        if not is_changed and self._unchanged == self._released:
            self._unchanged = number
        self._released = number

    def take_changed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the possibly changed rows and their slots, and mark them unchanged.

        None are if no batch was released since the last call: rows in host memory may be newer.
        """
        if self._unchanged == self._released:
            slots = self._row_of_slot[:0]
            return slots, slots
        slots = _positions(self._last_use[1:] > self._unchanged)
        self._unchanged = self._released
        return self._row_of_slot.index_select(0, slots), slots


def _bit(number: int) -> int:
    """The bit of a batch in a pair; that of the next one is lower, but where they begin anew."""
    return 1 << (32 + MAX_KNOWN - 1 - number % MAX_KNOWN)


def _halves(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two int32 of each int64, in the same memory."""
    halves = pairs.view(torch.int32).view(-1, 2)
    return halves[:, 0], halves[:, 1]


def _spread(num: int, device: torch.device) -> torch.Tensor:
    """0..num - 1 in an order in which neighbours are far apart.

    The hand should meet rows of all popularities at every position.
    """
    step = max(1, round(0.618 * num))
    while math.gcd(step, num) > 1:
        step += 1
    return torch.arange(num, device=device) * step % max(num, 1)


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask is set, int64; the host waits for their number."""
    if mask.is_cuda:
        return mask.nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def _largest(values: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the largest values, int64 (num,), of equal ones the first; the least (1,)."""
    if values.is_cuda:
        ranked, order = values.sort(descending=True, stable=True)
        return order[:num], ranked[num - 1 : num]
    # Torch's sort takes a hundred times as long.
    here = values.numpy()
    cut = here.size - num
    least = np.partition(here, cut)[cut : cut + 1].copy()
    found = np.flatnonzero(here >= least)
    surplus = np.flatnonzero(here[found] == least)[num - found.size :] if found.size > num else ()
    return torch.from_numpy(np.delete(found, surplus)), torch.from_numpy(least)
