"""Rows in host memory behind device slots that hold a row with its optimizer state.

Look-ahead says on the host which rows the batches in flight read. A batch reserves the slots of its
rows when it is requested (``hotrec.embedding.slots``), and what it lacks is moved while earlier
batches compute. Reads and updates touch slots alone.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.cpu_rows import RowsInMemory, fbgemm_rows
from hotrec.embedding.flat import put_rows, table_begins
from hotrec.embedding.random_bits import round_randomly
from hotrec.embedding.slots import Moves, SlotMap, Slots
from hotrec.embedding.snapshot import keep
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.comm_thread import CommunicationFuture, CommunicationThread
from hotrec.runtime.stages import named_range
from hotrec.types import Placement, Rows, Tier


def to_device(slots: Slots, device: torch.device) -> torch.Tensor:
    """Slots as int64 on a device; the host does not wait for the copy."""
    here = torch.from_numpy(slots).long()
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


class RowMover:
    """Moves rows between host memory and slots, both ways at once.

    Each way has a thread and a stream of its own and keeps its order. A row that is fetched while
    it is still being written back waits for that.

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
        self._fetching = CommunicationThread(device, "fetch rows")
        self._writing = CommunicationThread(device, "write rows back")
        self._leaving: deque[tuple[Rows, CommunicationFuture[None]]] = deque()
        self.row_bytes = sum(part[:1].numel() * part.element_size() for part in host)

    def submit(self, moves: Moves, key: int) -> CommunicationFuture[list[torch.Tensor]]:
        """Start to move rows, see ``put_back``; those fetched are there with the result."""
        while self._leaving and self._leaving[0][1].done():
            self._leaving.popleft()
        before = [
            written
            for rows, written in self._leaving
            if np.isin(moves.in_rows, rows, assume_unique=True).any()
        ]
        fetched = self._fetching.submit(
            partial(self.fetch, moves.in_rows, moves.in_slots, moves.out_slots, before)
        )
        if moves.out_rows.size:
            written = self._writing.submit(
                lambda: self.put_back(moves.out_rows, fetched.wait(), key)
            )
            self._leaving.append((moves.out_rows, written))
        return fetched

    def fetch(
        self,
        rows: Rows,
        slots: Slots,
        leaving: Slots,
        before: Sequence[CommunicationFuture[None]] = (),
    ) -> list[torch.Tensor]:
        """Fetch rows into slots, of which ``leaving`` are read first; what they held."""
        with named_range("fetch rows"):
            held = self.read_slots(leaving)
            for written in before:
                written.wait()
            for host, of_slots in self._pairs:
                index = torch.from_numpy(rows).to(host.device)
                # Gathered into pinned memory at once, from which the copy does not wait.
                is_staged = self._device.type == "cuda" and not host.is_cuda
                shape = (rows.size, *host.shape[1:])
                arriving = torch.empty(
                    shape, dtype=host.dtype, device=host.device, pin_memory=is_staged
                )
                torch.index_select(host, 0, index, out=arriving)
                arrived = arriving.to(self._device, non_blocking=True).to(of_slots.dtype)
                put_rows(of_slots, to_device(slots, self._device), arrived)
            return held

    def read_slots(self, slots: Slots) -> list[torch.Tensor]:
        """Rows and states of slots, on their way to the host."""
        index = to_device(slots, self._device)
        parts = [of_slots.index_select(0, index) for _, of_slots in self._pairs]
        if self._device.type == "cpu":
            return parts
        here = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
        return [to.copy_(part, non_blocking=True) for to, part in zip(here, parts, strict=True)]

    def put_back(self, rows: Rows, held: list[torch.Tensor], key: int) -> None:
        """Write to the host what ``read_slots`` returned.

        Rows of another type than in the slots are rounded at random, by a key of this moment.
        """
        with named_range("write rows back"):
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            for (host, _), values in zip(self._pairs, held, strict=True):
                index, values = torch.from_numpy(rows).to(host.device), values.to(host.device)
                keep(host, index)
                if host.dtype is values.dtype:
                    put_rows(host, index, values)
                else:  # as integers, since numpy lacks bf16
                    rounded = round_randomly(values, host.dtype, key, index)
                    put_rows(host.view(torch.int16), index, rounded.view(torch.int16))
            if any(host.is_cuda for host, _ in self._pairs):  # FBGEMM's state of one float a row
                torch.cuda.current_stream(self._device).synchronize()

    def drain(self) -> None:
        """Wait until all rows have been moved."""
        self._fetching.drain()
        self._writing.drain()

    def close(self) -> None:
        """Let the threads end."""
        self._fetching.close()
        self._writing.close()


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
        self._is_rounded = weights.dtype is not torch.float32
        # The last update, which checkpoints set, too.
        self.update_count = torch.zeros((), dtype=torch.int64)
        empty = [
            torch.zeros((num_slots, *part.shape[1:]), device=device)
            for part in (weights, *states.values())
        ]
        self._rows = RowsInMemory(
            empty[0], dict(zip(states, empty[1:], strict=True)), optimizer, spec
        )
        self._tensors = ([weights, *states.values()], empty)
        self._device = device
        self.slots = SlotMap(weights.shape[0], num_slots, resident_rows)
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
        return self._rows.learning_rate

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        """The rows in host memory, and their states."""
        return self._tensors[0]

    def tensors(self) -> list[torch.Tensor]:
        """The slots, and the maps on the host."""
        return self._tensors[1] + [torch.from_numpy(array) for array in self.slots.arrays()]

    def restart(self) -> None:
        """Forget what the slots hold, since the rows may have been written; start new numbers."""
        self._mover = RowMover(*self._tensors, self._device)
        # What was started for each batch, in the order of their numbers.
        self._moved: deque[tuple[int, CommunicationFuture[list[torch.Tensor]]]] = deque()
        # Fetched later: the rows may not have been initialised or loaded.
        self._resident: Moves | None = self.slots.clear()

    def foresee(self, rows_K: torch.Tensor, number: int) -> None:
        """Say which rows, int64 (K,), a batch will reserve slots for."""
        self.slots.foresee(rows_K.cpu().numpy(), number)

    def reserve(self, rows_K: torch.Tensor, number: int) -> torch.Tensor:
        """Give a batch slots for its rows, int64 (K,), with repetition, and start to fill them.

        Returns:
            The slot of each row, int64 (K,), on the device.

        Raises:
            TooFewSlotsError: if the batches in flight hold too many slots.
        """
        slots_K, moves = self.slots.reserve(rows_K.cpu().numpy(), number)
        for to_move in (self._resident, moves):
            if to_move is not None and to_move.in_rows.size:
                moved = self._mover.submit(to_move, int(self.update_count))
                self._moved.append((number, moved))
                self.read_bytes += to_move.in_rows.size * self._mover.row_bytes
                self.written_bytes += to_move.out_rows.size * self._mover.row_bytes
        self._resident = None
        return to_device(slots_K, self._device)

    def wait(self, number: int) -> None:
        """Wait until the slots of all batches up to a number hold their rows."""
        start = time.perf_counter()
        while self._moved and self._moved[0][0] <= number:
            self._moved.popleft()[1].wait()
        self.wait_s += time.perf_counter() - start

    def read(self, slots_K: torch.Tensor) -> torch.Tensor:
        """Copy the rows of slots, float (K, D)."""
        return self._rows.read(slots_K)

    def update(
        self, slots_K: torch.Tensor, grad_KD: torch.Tensor, learning_rate: float, num_updates: int
    ) -> None:
        """Update the rows of slots once, see ``RowsInMemory.update``."""
        self.update_count.fill_(num_updates)
        self._rows.update(slots_K, grad_KD, learning_rate, num_updates)

    def release(self, number: int, *, is_changed: bool) -> None:
        """Give back the slots of the batches up to ``number``, whose updates are all made."""
        self.slots.release(number, is_changed=is_changed)

    def flush(self) -> None:
        """Write the changed rows of all slots back.

        If that rounds them and no batch is in flight, the slots are emptied. So a run that goes on
        after a checkpoint reads the rows that one resumed from it reads, and evicts as it does.
        """
        self._mover.drain()
        rows, slots = self.slots.take_changed()
        self._mover.put_back(rows, self._mover.read_slots(slots), int(self.update_count))
        self.written_bytes += rows.size * self._mover.row_bytes
        if self._is_rounded and not self.slots.has_batches:
            self._resident = self.slots.clear()

    def refresh(self, rows: Rows) -> None:
        """Fetch rows again that were written in host memory, with no batch in flight."""
        slots = self.slots.slots_of(rows)
        here, nothing = slots >= 0, slots[:0]
        moves = Moves(rows[:0], nothing, rows[here], slots[here])
        self._mover.submit(moves, int(self.update_count)).wait()

    def close(self) -> None:
        """Let the mover's threads end."""
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


def refresh_slots(lookup: nn.Module, written: Mapping[str, Rows]) -> bool:
    """Fetch rows again that were written in host memory, by table; whether the lookup has slots."""
    kernels: Any = lookup._emb_modules
    cached = [kernel for kernel in kernels if isinstance(kernel.forward, CachedRows)]
    for kernel in cached:
        tables = kernel.config.embedding_tables
        begins = table_begins([table.local_rows for table in tables]).tolist()
        for table, begin in zip(tables, begins, strict=True):
            first = table.local_metadata.shard_offsets[0] if table.local_rows else 0
            rows = written.get(table.name, np.empty(0, np.int64)) - first
            kernel.forward.refresh(rows[(rows >= 0) & (rows < table.local_rows)] + begin)
    return bool(cached)
