"""Rows in host memory behind device slots that hold a row with its optimizer state.

Look-ahead says on the host which rows the batches in flight read, so slots are decided there: a
batch reserves the slots of its rows when it is requested, and what it lacks is moved while earlier
batches compute. Reads and updates touch slots alone. Some slots hold the rows that were looked up
most for good. The others turn over: rows of batches in flight stay, the next to go are those with
the smallest decayed count of lookups (Colossal-AI's frequency-ordered cache and ScratchPipe's
look-forward cache, in one).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.cpu_rows import RowsInMemory, fbgemm_rows
from hotrec.embedding.flat import put_rows, table_begins
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.comm_thread import CommunicationFuture, CommunicationThread
from hotrec.runtime.stages import named_range
from hotrec.types import Placement, Rows, Tier

Slots = npt.NDArray[np.int32]

# Batches after which a lookup counts half.
HALF_LIFE = 256
# New lookups weigh more instead of old ones less, up to this weight.
MOST_WEIGHT = 1e30
# Slots that are ranked at once, as a share of those that turn over.
QUEUE_FRAC = 1 / 8


class TooFewSlotsError(ValueError):
    """The batches in flight read more rows than there are slots for."""

    def __init__(self, num_needed: int, num_slots: int) -> None:
        super().__init__(f"expected at least {num_needed} slots, got {num_slots}")
        self.num_needed, self.num_slots = num_needed, num_slots


class RowMover:
    """Moves rows between host memory and slots, on a thread and a stream of its own.

    Tasks run in order, so a row is fetched only after it has been written back.

    Args:
        host: Weights and states in host memory, each (R, ...).
        slots: The same of the slots, each (S, ...), on the device.
        device: The device.
    """

    def __init__(
        self, host: list[torch.Tensor], slots: list[torch.Tensor], device: torch.device
    ) -> None:
        self._pairs = list(zip(host, slots, strict=True))
        self._device = device
        self._thread = CommunicationThread(device, "row cache")
        self.row_bytes = sum(part[:1].numel() * part.element_size() for part in slots)

    def submit(
        self, out_rows: Rows, out_slots: Slots, in_rows: Rows, in_slots: Slots
    ) -> CommunicationFuture[list[torch.Tensor]]:
        """Write rows back from their slots and fetch others into these slots among others.

        The result is there when the others are; what was read is written to the host afterwards.
        """
        fetched = self._thread.submit(partial(self.fetch, in_rows, in_slots, out_slots))
        if out_rows.size:
            self._thread.submit(lambda: self.put_back(out_rows, fetched.result()))
        return fetched

    def fetch(self, rows: Rows, slots: Slots, leaving: Slots) -> list[torch.Tensor]:
        """Fetch rows into slots, of which ``leaving`` are read first; what they held."""
        with named_range("fetch rows"):
            held = self.read_slots(leaving)
            for host, of_slots in self._pairs:
                arriving = host.index_select(0, torch.from_numpy(rows).to(host.device))
                if self._device.type == "cuda" and not arriving.is_cuda:
                    arriving = arriving.pin_memory()
                index = torch.from_numpy(slots).long().to(self._device)
                put_rows(of_slots, index, arriving.to(self._device, non_blocking=True))
            return held

    def read_slots(self, slots: Slots) -> list[torch.Tensor]:
        """Rows and states of slots, on their way to the host."""
        index = torch.from_numpy(slots).long().to(self._device)
        parts = [of_slots.index_select(0, index) for _, of_slots in self._pairs]
        if self._device.type == "cpu":
            return parts
        here = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
        return [to.copy_(part, non_blocking=True) for to, part in zip(here, parts, strict=True)]

    def put_back(self, rows: Rows, held: list[torch.Tensor]) -> None:
        """Write to the host what ``read_slots`` returned."""
        with named_range("write rows back"):
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            for (host, _), values in zip(self._pairs, held, strict=True):
                put_rows(host, torch.from_numpy(rows).to(host.device), values.to(host.device))

    def drain(self) -> None:
        """Wait until all tasks are done."""
        self._thread.drain()

    def close(self) -> None:
        """Let the thread end."""
        self._thread.close()


class CachedRows:
    """The rows of a fused FBGEMM module, in host memory, behind slots on a device.

    A batch has a number; numbers rise. ``reserve`` gives a batch slots for its rows, ``wait`` waits
    until they are filled, ``read`` and ``update`` take slots, and ``release`` gives all batches up
    to a number back. ``flush`` writes changed rows back, which state dicts read. One thread at a
    time may call these.

    Args:
        host: Rows and states in host memory.
        num_slots: The number of slots S.
        resident_rows: Rows that get slots for good, int64, distinct, at most S.
        optimizer: Has the learning rate.
        spec: The update rule.
        device: Where the slots are.
    """

    def __init__(
        self,
        host: tuple[torch.Tensor, Mapping[str, torch.Tensor]],
        num_slots: int,
        resident_rows: Rows,
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        device: torch.device,
    ) -> None:
        weights, states = host
        empty = [
            torch.zeros((num_slots, *part.shape[1:]), device=device)
            for part in (weights, *states.values())
        ]
        self._slots = RowsInMemory(
            empty[0], dict(zip(states, empty[1:], strict=True)), optimizer, spec
        )
        self._tensors = ([weights, *states.values()], empty)
        self._device = device
        self.num_slots, self.num_rows = num_slots, weights.shape[0]
        self._resident_rows = resident_rows
        self._slot_of_row = np.full(self.num_rows, -1, np.int32)
        self._lookups = np.zeros(self.num_rows, np.float32)  # decayed
        self._weight = 1.0  # of a lookup now
        self._first = np.zeros(num_slots, np.int64)  # scratch
        self.num_lookups = self.num_read = self.num_misses = self.num_evictions = 0
        self.read_bytes = self.written_bytes = 0
        self.wait_s = 0.0
        self.restart()

    def __call__(self, features: KeyedJaggedTensor) -> torch.Tensor:
        raise RuntimeError(
            "placement.cold_tier=cached: expected the pipeline look_ahead, which fills the slots, "
            "got a lookup without it. Set pipeline=look_ahead."
        )

    @property
    def learning_rate(self) -> float:
        return self._slots.learning_rate

    def tensors(self) -> list[torch.Tensor]:
        """The slots, and the maps on the host."""
        maps: list[npt.NDArray[Any]] = [self._slot_of_row, self._lookups]
        maps += [self._row_of_slot, self._last_use, self._is_changed, self._first]
        return self._tensors[1] + [torch.from_numpy(array) for array in maps]

    def restart(self) -> None:
        """Forget what the slots hold, since the rows may have been written; start new numbers."""
        self._mover = RowMover(*self._tensors, self._device)
        self._slot_of_row.fill(-1)
        self._row_of_slot = np.full(self.num_slots, -1, np.int64)
        self._last_use = np.full(self.num_slots, -1, np.int64)  # the last batch that reads it
        self._is_changed = np.zeros(self.num_slots, np.bool_)
        self._reserved: deque[tuple[int, Slots]] = deque()
        self._released = -1
        self._queue = np.empty(0, np.int32)  # slots to give away, the first first
        self._queued_at = -1  # the batch that was released when they were ranked
        self._moved: CommunicationFuture[list[torch.Tensor]] | None = None
        self._is_warm = False

    def reserve(self, rows_K: torch.Tensor, number: int) -> torch.Tensor:
        """Give a batch slots for its rows, int64 (K,), with repetition, and start to fill them.

        Returns:
            The slot of each row, int64 (K,), on the device.

        Raises:
            TooFewSlotsError: if the batches in flight hold too many slots.
        """
        self._warm_up()
        rows = rows_K.cpu().numpy()
        slots = self._slot_of_row[rows]
        self._last_use[slots[slots >= 0]] = number  # before others are given away
        missing = np.unique(rows[slots < 0])
        taken = self._take(missing.size)
        old = self._row_of_slot[taken]
        is_changed = self._is_changed[taken]
        self._slot_of_row[old[old >= 0]] = -1
        self._row_of_slot[taken], self._last_use[taken] = missing, number
        self._is_changed[taken] = False
        self._slot_of_row[missing] = taken
        self._move(old[is_changed], taken[is_changed], missing, taken)
        slots = self._slot_of_row[rows]
        self._reserved.append((number, slots))
        self._count(rows, slots)
        self.num_misses += missing.size
        self.num_evictions += int(np.count_nonzero(old >= 0))
        return torch.from_numpy(slots).long().to(self._device)

    def _warm_up(self) -> None:
        """Fetch the resident rows, once the rows have been initialised or loaded."""
        if not self._is_warm:
            slots = np.arange(self._resident_rows.size, dtype=np.int32)
            self._row_of_slot[slots] = self._resident_rows
            self._slot_of_row[self._resident_rows] = slots
            self._move(self._resident_rows[:0], slots[:0], self._resident_rows, slots)
            self._is_warm = True

    def _move(self, out_rows: Rows, out_slots: Slots, in_rows: Rows, in_slots: Slots) -> None:
        if in_rows.size:
            self._moved = self._mover.submit(out_rows, out_slots, in_rows, in_slots)
            self.read_bytes += in_rows.size * self._mover.row_bytes
            self.written_bytes += out_rows.size * self._mover.row_bytes

    def _take(self, num: int) -> Slots:
        """Slots of no batch in flight, of the rows with the fewest lookups."""
        queue = self._queue[self._last_use[self._queue] <= self._queued_at]
        if queue.size < num:
            first = self._resident_rows.size
            is_free = self._last_use[first:] <= self._released
            free = (first + np.flatnonzero(is_free)).astype(np.int32)
            if free.size < num:
                raise TooFewSlotsError(self.num_slots - free.size + num, self.num_slots)
            # Ranking all slots in every step would cost more than moving the rows.
            size = min(free.size, max(num, math.ceil(QUEUE_FRAC * is_free.size)))
            rows = self._row_of_slot[free]
            lookups = np.where(rows < 0, -1.0, self._lookups[rows])
            fewest = np.argpartition(lookups, size - 1)[:size]
            queue = free[fewest[np.argsort(lookups[fewest], kind="stable")]]
            self._queued_at = self._released
        self._queue = queue[num:]
        return queue[:num]

    def _count(self, rows: Rows, slots: Slots) -> None:
        self._lookups[rows] += self._weight  # once per batch, also where a row is repeated
        self._weight *= 2 ** (1 / HALF_LIFE)
        if self._weight > MOST_WEIGHT:
            self._lookups /= self._weight
            self._weight = 1.0
        self._first[slots] = order = np.arange(slots.size)
        self.num_lookups += slots.size
        self.num_read += int(np.count_nonzero(self._first[slots] == order))

    def wait(self) -> None:
        """Wait until the slots of all batches that reserved some hold their rows."""
        if self._moved is not None:
            start = time.perf_counter()
            self._moved.wait()
            self.wait_s += time.perf_counter() - start
            self._moved = None

    def read(self, slots_K: torch.Tensor) -> torch.Tensor:
        """Copy the rows of slots, float (K, D)."""
        return self._slots.read(slots_K)

    def update(
        self, slots_K: torch.Tensor, grad_KD: torch.Tensor, learning_rate: float, num_updates: int
    ) -> None:
        """Update the rows of slots once, see ``RowsInMemory.update``."""
        self._slots.update(slots_K, grad_KD, learning_rate, num_updates)

    def release(self, number: int, *, is_changed: bool) -> None:
        """Give back the slots of the batches up to ``number``, whose updates are all made."""
        while self._reserved and self._reserved[0][0] <= number:
            _, slots = self._reserved.popleft()
            if is_changed:
                self._is_changed[slots] = True
        self._released = number

    def flush(self) -> None:
        """Write the changed rows of all slots back."""
        self._mover.drain()
        slots = np.flatnonzero(self._is_changed).astype(np.int32)
        rows = self._row_of_slot[slots]
        self._mover.put_back(rows, self._mover.read_slots(slots))
        self.written_bytes += rows.size * self._mover.row_bytes
        self._is_changed[slots] = False

    def close(self) -> None:
        """Let the mover's thread end."""
        self._mover.close()


def is_cached(placement: Placement, tables: Sequence[str]) -> bool:
    """Whether the cold rows of these tables are behind slots.

    Raises:
        ValueError: if only some of them are.
    """
    cached = [table for table in tables if placement.tables[table].tier is Tier.CACHED]
    if cached and len(cached) < len(tables):
        raise ValueError(
            f"placement tier: expected cached for all tables of one dimension or for none, got "
            f"{len(cached)} of {len(tables)}. Give {sorted(set(tables) - set(cached))[0]} the "
            "tier of the others."
        )
    return bool(cached)


def use_cached_rows(
    lookup: nn.Module, spec: OptimizerSpec, placement: Placement, device: torch.device
) -> None:
    """Replace the kernels of TorchRec's ``GroupedEmbeddingsLookup`` by ``CachedRows``, in place."""
    kernels: Any = lookup._emb_modules
    for kernel in kernels:
        tables = kernel.config.embedding_tables
        num_slots, residents = 0.0, [np.empty(0, np.int64)]
        begins = table_begins([table.local_rows for table in tables]).tolist()
        for table, begin in zip(tables, begins, strict=True):
            num_slots += (placement.tables[table.name].cache_load_frac or 0.0) * table.local_rows
            first = table.local_metadata.shard_offsets[0] if table.local_rows else 0
            rows = placement.resident_rows.get(table.name, residents[0]) - first
            residents.append(rows[(rows >= 0) & (rows < table.local_rows)] + begin)
        size = math.ceil(num_slots)
        kernel.forward = CachedRows(
            fbgemm_rows(kernel.emb_module, spec),
            size,
            np.concatenate(residents)[:size],
            kernel.fused_optimizer,
            spec,
            device,
        )
