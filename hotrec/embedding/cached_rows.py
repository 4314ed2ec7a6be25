"""Rows in host memory behind device slots that hold a row with its optimizer state.

Look-ahead announces on the host which rows the batches in flight read. A batch reserves the slots
of its rows when it is requested (``hotrec.embedding.slots``), and missing rows are moved while
earlier batches compute. Reads and updates only touch slots.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from hotrec.embedding.flat import put_rows
from hotrec.embedding.random_bits import round_randomly
from hotrec.embedding.row_store import RowStore
from hotrec.embedding.slots import Moves, SlotMap, fetches
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.comm_thread import CommunicationFuture, CommunicationThread, OnHost, record_use
from hotrec.runtime.stages import named_range
from hotrec.types import PopularRows, Rows


def to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device; the host does not wait for the copy."""
    here = numbers.pin_memory() if device.type == "cuda" else numbers
    return here.to(device, non_blocking=True)


# Rows that are moved at once when slots are filled initially, and when all are written back.
MAX_AT_ONCE = 1 << 16


class _MovesOnHost:
    """The facts of moves that the host needs, being copied; read by the mover's threads."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        parts = [moves.in_rows, moves.out_rows, moves.is_changed, moves.out_worth.view(torch.int32)]
        self._sizes = [part.numel() for part in parts]
        # In one copy.
        self._message = OnHost(torch.cat(parts)) if moves.in_rows.is_cuda else None
        self._parts = parts

    def _part(self, at: int) -> torch.Tensor:
        if self._message is None:
            return self._parts[at]
        return self._message.tensor().split(self._sizes)[at]

    def in_rows(self) -> torch.Tensor:
        """Rows to fetch."""
        return self._part(0)

    def out_rows(self) -> torch.Tensor:
        """The possibly changed ones among the evicted rows."""
        is_changed = self._part(2).bool()
        return self._part(1)[is_changed]

    def out_slots(self) -> torch.Tensor:
        """Their slots, on the device."""
        is_changed = self._part(2).bool()
        if is_changed.all():
            return self._moves.out_slots
        record_use(self._moves.out_slots)
        at = to_device(is_changed.nonzero()[:, 0], self._moves.out_slots.device)
        return self._moves.out_slots.index_select(0, at)

    def next_read(self) -> int:
        """The first batch that may read an evicted row."""
        return self._moves.next_read(float(self._part(3).int().view(torch.float32)))


class RowMover:
    """Moves rows between host memory and slots in both directions at once.

    Host memory, link and slots each have a thread and a stream per direction; only the slots are
    shared. The host gathers the rows of one move while those of another cross the link. Each thread
    keeps its order. A row that is fetched while it is still being written back waits for that.

    Args:
        host: Weights and states in host memory, each (R, ...).
        slots: The same of the slots, each (S, ...), on the device.
        device: The device.
        mapped: Device views of the host tensors that the device reads directly; None for those that
            the host gathers.
    """

    def __init__(
        self,
        host: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
        device: torch.device,
        mapped: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        self._parts = list(zip(host, mapped or [None] * len(host), slots, strict=True))
        self._device = device
        self._gathering = CommunicationThread(torch.device("cpu"), "gather rows")
        # Only tasks that read or write slots have to wait for earlier steps.
        self._fetching = CommunicationThread(device, "fetch rows", is_apart=True)
        self._filling = CommunicationThread(device, "fill slots")
        self._returning = CommunicationThread(device, "return rows", is_apart=True)
        self._writing = CommunicationThread(device, "write rows back", is_apart=True)
        self._leaving: deque[tuple[_MovesOnHost, CommunicationFuture[None]]] = deque()
        self.row_bytes = sum(part[:1].numel() * part.element_size() for part in host)
        self.num_written = 0

    def submit(self, moves: Moves, key: int) -> CommunicationFuture[None]:
        """Start to move rows (see ``put_back``); the result is ready once they are in slots."""
        while self._leaving and self._leaving[0][1].done():
            self._leaving.popleft()
        here, before = _MovesOnHost(moves), list(self._leaving)

        def gather() -> list[torch.Tensor | None]:
            rows = here.in_rows()
            for left, written in before:
                if left.next_read() <= moves.number:
                    written.result()
            return self.gather(rows)

        def fetch() -> list[torch.Tensor]:
            gathered_now = gathered.wait()
            if known is not None:
                torch.cuda.current_stream(self._device).wait_event(known)
                record_use(moves.in_rows)
            return self.copy_to_device(moves.in_rows, gathered_now)

        known = torch.cuda.current_stream().record_event() if moves.in_rows.is_cuda else None
        gathered = self._gathering.submit(gather)
        fetched = self._fetching.submit(fetch)
        if moves.out_rows.numel():
            # Before others are put there.
            held = self._filling.submit(lambda: self.read_slots(here.out_slots()))
            returned = self._returning.submit(lambda: self.copy_to_host(held.wait()))
            written = self._writing.submit(
                lambda: self.put_back(here.out_rows(), returned.wait(), key)
            )
            self._leaving.append((here, written))
        return self._filling.submit(lambda: self.put_in_slots(moves.in_slots, fetched.wait()))

    def gather(self, rows: torch.Tensor) -> list[torch.Tensor | None]:
        """Rows int64 (K,) of host memory with states, None for what the device reads directly."""
        with named_range("gather rows"):
            return [
                None if mapped is not None else self._staged(host, rows)
                for host, mapped, _ in self._parts
            ]

    def _staged(self, host: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        # Gathered into pinned memory at once, from which the copy does not wait.
        is_pinned = self._device.type == "cuda"
        shape = (rows.numel(), *host.shape[1:])
        staged = torch.empty(shape, dtype=host.dtype, pin_memory=is_pinned)
        return torch.index_select(host, 0, rows, out=staged)

    def copy_to_device(
        self, rows: torch.Tensor, gathered: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Copy the result of ``gather`` to the device, and add what the device reads directly."""
        with named_range("fetch rows"):
            arrived = []
            for (_, mapped, _), staged in zip(self._parts, gathered, strict=True):
                if staged is not None:
                    arrived.append(staged.to(self._device, non_blocking=True))
                else:
                    assert mapped is not None
                    arrived.append(mapped.index_select(0, rows))
            return arrived

    def put_in_slots(self, slots: torch.Tensor, fetched: Sequence[torch.Tensor]) -> None:
        """Write the result of ``copy_to_device`` into slots int64 (K,)."""
        record_use(slots, *fetched)
        for (_, _, of_slots), values in zip(self._parts, fetched, strict=True):
            put_rows(of_slots, slots, values.to(of_slots.dtype))

    def read_slots(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Rows and states of slots int64 (K,), on the device."""
        record_use(slots)
        return [of_slots.index_select(0, slots) for _, _, of_slots in self._parts]

    def copy_to_host(self, held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Start to copy the result of ``read_slots`` to the host."""
        if self._device.type == "cpu":
            return list(held)
        record_use(*held)
        here = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in held]
        return [to.copy_(part, non_blocking=True) for to, part in zip(here, held, strict=True)]

    def put_back(self, rows: torch.Tensor, returned: Sequence[torch.Tensor], key: int) -> None:
        """Write the result of ``copy_to_host`` to host rows int64 (K,).

        Rows of another type than in the slots are rounded stochastically, keyed by the update.
        """
        with named_range("write rows back"):
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            for (host, _, _), here in zip(self._parts, returned, strict=True):
                if host.dtype is here.dtype:
                    put_rows(host, rows, here)
                else:  # as integers, since numpy lacks bf16
                    rounded = round_randomly(here, key, rows)
                    put_rows(host.view(torch.int16), rows, rounded.view(torch.int16))
        self.num_written += rows.numel()

    def drain(self) -> None:
        """Wait until all rows have been moved."""
        for thread in self._threads:
            thread.drain()

    def close(self) -> None:
        """Stop the threads."""
        for thread in self._threads:
            thread.close()

    @property
    def _threads(self) -> tuple[CommunicationThread, ...]:
        """In the order in which rows pass them."""
        return self._gathering, self._fetching, self._filling, self._returning, self._writing


class CachedRows(RowStore):
    """Rows in host memory, behind slots on a device, which its own ``weights_RD`` and states are.

    ``flush`` writes changed rows back, which state dicts read. One thread at a time may call the
    methods.

    Args:
        host: Rows and states in host memory.
        num_slots: The number of slots S.
        popular: Positions of known popularity, distinct; as many as fit are in slots at the start.
        spec: The update rule.
        device: Where the slots are.
        mapped: Tensors that the device reads directly in host memory, see ``RowMover``.
        is_distinct: Whether a batch never repeats a row, as with one rank.
    """

    def __init__(
        self,
        host: tuple[torch.Tensor, Mapping[str, torch.Tensor]],
        num_slots: int,
        popular: PopularRows,
        spec: OptimizerSpec,
        device: torch.device,
        mapped: Sequence[torch.Tensor | None] | None = None,
        *,
        is_distinct: bool = False,
    ) -> None:
        weights, states = host
        self._is_rounded = weights.dtype is not torch.float32
        slots, *of_slots = (
            torch.zeros((num_slots, *part.shape[1:]), device=device)
            for part in (weights, *states.values())
        )
        super().__init__(slots, dict(zip(states, of_slots, strict=True)), spec)
        self._host, self._mapped, self._device = [weights, *states.values()], mapped, device
        self.slots = SlotMap(weights.shape[0], num_slots, popular, device)
        self._is_distinct = is_distinct
        self._started: RowMover | None = None
        self.num_lookups = self.read_bytes = self._written_bytes = 0
        self.wait_s = 0.0
        self.restart()

    def look_up(self, rows_K: torch.Tensor) -> torch.Tensor:
        """Copy rows, float (K, D), from slots or else from host memory, between steps."""
        if self._started is not None:
            self._started.drain()
        weights = self._host[0]
        found_KD = weights.index_select(0, rows_K.to(weights.device)).to(self._device).float()
        if self._first is None:  # otherwise no slot is filled yet
            slots_K = self.slots.slots_of(rows_K)
            here = slots_K >= 0
            found_KD[here] = self.read(slots_K[here])
        return found_KD

    def memory(self) -> list[torch.Tensor]:
        """The rows in host memory, and their states."""
        return self._host

    def tensors(self) -> list[torch.Tensor]:
        """The slots and their map."""
        return [*super().memory(), *self.slots.tensors()]

    @property
    def written_bytes(self) -> int:
        """Bytes of rows that were written back so far."""
        mover = self._started
        return self._written_bytes + (mover.num_written * mover.row_bytes if mover else 0)

    @property
    def _mover(self) -> RowMover:
        # Created when rows first move: a process has few streams.
        if self._started is None:
            self._started = RowMover(self._host, super().memory(), self._device, self._mapped)
        return self._started

    def restart(self) -> None:
        """Invalidate all slots, because host rows may have changed; restart batch numbers."""
        self._written_bytes, self._started = self.written_bytes, None
        # The started moves of each batch, in the order of their numbers.
        self._moved: deque[tuple[int, CommunicationFuture[None]]] = deque()
        # Fetched later: the rows may not have been initialised or loaded.
        self._first: Moves | None = self.slots.clear()

    def foresee(self, rows_K: torch.Tensor, number: int) -> None:
        """Announce the rows int64 (K,) of a future batch."""
        self.slots.foresee(rows_K if self._is_distinct else rows_K.unique(), number)

    def reserve(self, rows_K: torch.Tensor, number: int) -> torch.Tensor:
        """Allocate slots for the rows of a batch, int64 (K,), and start to fill them.

        Returns:
            The slot of each row, int64 (K,), on the device.

        Raises:
            TooFewSlotsError: if the batches in flight use too many slots.
        """
        rows_U, inverse_K = rows_K, None
        if not self._is_distinct:
            rows_U, inverse_K = rows_K.unique(return_inverse=True)
        slots_U, moves = self.slots.reserve(rows_U, number)
        self.num_lookups += rows_K.numel()
        if self._first is not None:
            self._wait_for_writes()
            # The slots' memory is not taken a second time: two of these are on their way at once.
            first = self._first
            record_use(first.in_rows, first.in_slots)  # made by whoever restarted
            for rows, slots in _parts(first.in_rows, first.in_slots):
                self._move(fetches(rows, slots), number)
                if len(self._moved) > 1:
                    self._moved[-2][1].wait()
            self._first = None
        self._move(moves, number)
        return slots_U if inverse_K is None else slots_U.index_select(0, inverse_K)

    def _move(self, moves: Moves, number: int) -> None:
        if moves.in_rows.numel():
            moved = self._mover.submit(moves, int(self.update_count))
            self._moved.append((number, moved))
            self.read_bytes += moves.in_rows.numel() * self._mover.row_bytes

    def wait(self, number: int) -> None:
        """Wait until the slots of all batches up to a number are filled."""
        start = time.perf_counter()
        while self._moved and self._moved[0][0] <= number:
            self._moved.popleft()[1].wait()
        self.wait_s += time.perf_counter() - start

    def release(self, number: int, *, is_changed: bool) -> None:
        """Free the slots of all batches up to ``number``, once their updates are done."""
        self.slots.release(number, is_changed=is_changed)

    def flush(self) -> None:
        """Write the changed rows of all slots back.

        If that rounds them and no batch is in flight, the slots are emptied. So a run that
        continues after a checkpoint and a run resumed from it read the same rows and evict alike.
        """
        self._mover.drain()
        # In parts, since the slots may fill the device.
        for rows, slots in _parts(*self.slots.take_changed()):
            held = self._mover.copy_to_host(self._mover.read_slots(slots))
            self._mover.put_back(rows.cpu(), held, int(self.update_count))
        if self._is_rounded and not self.slots.has_batches:
            self._first = self.slots.clear(self.slots.last_reserved)

    def refresh(self, rows: Rows) -> None:
        """Refetch rows that were written in host memory, with no batch in flight."""
        wanted = to_device(torch.from_numpy(rows), self._device)
        slots = self.slots.slots_of(wanted)
        here = slots >= 0
        self._wait_for_writes()
        self._mover.submit(fetches(wanted[here], slots[here]), int(self.update_count)).wait()

    def _wait_for_writes(self) -> None:
        """Wait for the device's queued writes to host memory, which the mover does not."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Stop the mover's threads."""
        if self._started is not None:
            self._started.close()
        self._written_bytes, self._started = self.written_bytes, None


def _parts(rows: torch.Tensor, slots: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(rows.split(MAX_AT_ONCE), slots.split(MAX_AT_ONCE), strict=True)
