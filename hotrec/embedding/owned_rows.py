"""The owners of cold rows, and reads and updates of the rows that this rank owns.

A rank's rows of one embedding dimension have consecutive positions, shard after shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.cached_rows import CachedRows
from hotrec.embedding.fused import set_update_count, update_count
from hotrec.embedding.fused_rows import FusedRows
from hotrec.embedding.torchrec import Kernel
from hotrec.routing.sorting import sort_keys
from hotrec.runtime.comm_thread import HostInts, ints_on
from hotrec.runtime.hosts import Hosts
from hotrec.types import RowOrder

MAX_ROWS = 1 << 31  # of a rank, for positions to fit into int32


@dataclass(frozen=True)
class Shard:
    """Rows from ``first_row`` of a table on a rank, at ``position`` among its rows of the group."""

    table: str
    first_row: int
    num_rows: int
    position: int


@dataclass
class RequestedRows:
    """The cold rows of one group that a batch reads, by owner."""

    order_U: torch.Tensor | None  # the batch's cold rows in the order of their owners, int64
    positions_U: torch.Tensor  # their positions on the owner in that order, in the type sent
    num_to_W: torch.Tensor | None  # rows of each owner in that order, int64; None for one rank


class RowOwners:
    """Finds the owners of the cold rows of one group from the shards of each rank.

    Requested rows are in the order of their owners' ranks. With ``hosts`` they are in that of the
    owners' local ranks and, of each local rank, of hosts; see ``hotrec.embedding.relay``.

    Args:
        tables: The cold tables of the group.
        num_rows: Rows of each of them.
        shards: The shards of each rank.
        device: The device of the batches.
        hosts: The hosts, for an exchange in two levels.
        orders: The order in which the rows of each table are stored in its shards; None for that of
            their ids. One rank ignores it.

    Raises:
        RuntimeError: if the shards do not contain every row of every table exactly once.
    """

    def __init__(
        self,
        tables: Sequence[str],
        num_rows: Mapping[str, int],
        shards: Sequence[Sequence[Shard]],
        device: torch.device,
        hosts: Hosts | None = None,
        orders: Mapping[str, RowOrder] | None = None,
    ) -> None:
        self._world_size = len(shards)
        order = range(len(shards)) if hosts is None else [r for rail in hosts.rails for r in rail]
        place_of = {rank: place for place, rank in enumerate(order)}
        ends_of = dict(zip(tables, accumulate(num_rows[table] for table in tables), strict=True))
        begins = {table: end - num_rows[table] for table, end in ends_of.items()}
        num_all = max(ends_of.values())
        pieces = sorted(
            (begins[shard.table] + shard.first_row, shard.num_rows, place_of[rank], shard.position)
            for rank, of_rank in enumerate(shards)
            for shard in of_rank
            if shard.num_rows
        )
        # Each shard begins where the previous one ends, and the last one ends with the tables.
        firsts = [*(piece[0] for piece in pieces), num_all]
        ends = [0, *(piece[0] + piece[1] for piece in pieces)]
        wrong = [end for first, end in zip(firsts, ends, strict=True) if first != end]
        if wrong:
            raise RuntimeError(
                f"shards of {list(tables)}: expected each of {num_all} rows on exactly one rank, "
                f"got a gap or an overlap at row {wrong[0]} of the concatenated tables. Use the "
                "pinned torchrec (see `hotrec doctor`)."
            )
        self.num_positions = max(s.position + s.num_rows for of_rank in shards for s in of_rank)
        self.sent_type = torch.int32 if self.num_positions <= MAX_ROWS else torch.int64
        if self._world_size == 1:  # which has whole tables: keys are positions
            begins = {shard.table: shard.position for shard in shards[0]}
        self._begins_T = torch.tensor([begins[table] for table in tables], device=device)
        self._first_S = torch.tensor([piece[0] for piece in pieces], device=device)
        self._rank_S = torch.tensor([piece[2] for piece in pieces], device=device)
        self._shift_S = torch.tensor([piece[3] - piece[0] for piece in pieces], device=device)
        spread = {t: order for t, order in (orders or {}).items() if order.factor != 1}
        self._is_spread = bool(spread)
        self._is_wide = any(order.is_wide for order in spread.values())
        in_order = RowOrder(1, is_spread=False)
        of_tables = [spread.get(table, in_order) for table in tables]
        self._factor_T = torch.tensor([order.factor for order in of_tables], device=device)
        self._offset_T = torch.tensor([order.offset for order in of_tables], device=device)
        self._num_rows_T = torch.tensor([num_rows[table] for table in tables], device=device)

    def find(self, rows: KeyedJaggedTensor, num_hot_keys: int) -> RequestedRows:
        """Find the owners of the cold rows of a routed batch, which ascend within a table."""
        lengths_T = rows.lengths()[num_hot_keys:]
        cold_U = rows.values()[sum(rows.length_per_key()[:num_hot_keys]) :]
        num = cold_U.numel()
        begin_U = torch.repeat_interleave(self._begins_T, lengths_T, output_size=num)
        if self._world_size == 1:
            return RequestedRows(None, cold_U + begin_U, None)
        if self._is_spread:
            return self._find_spread(cold_U, begin_U, lengths_T)
        key_U = cold_U + begin_U
        # Keys ascend, so the rows of a shard end where the next shard's first row would be.
        ends_S = torch.searchsorted(key_U, self._first_S[1:])
        lengths_S = ends_S.diff(prepend=ends_S.new_zeros(1), append=ends_S.new_full((1,), num))
        owner_U = torch.repeat_interleave(self._rank_S, lengths_S, output_size=num)
        position_U = key_U + torch.repeat_interleave(self._shift_S, lengths_S, output_size=num)
        _, order_U = sort_keys(owner_U, self._world_size)
        num_to_W = lengths_S.new_zeros(self._world_size).index_add_(0, self._rank_S, lengths_S)
        return RequestedRows(
            order_U, position_U.index_select(0, order_U).to(self.sent_type), num_to_W
        )

    def _find_spread(
        self, cold_U: torch.Tensor, begin_U: torch.Tensor, lengths_T: torch.Tensor
    ) -> RequestedRows:
        """The same if rows are spread: stored rows do not ascend within a table."""
        of_orders = (
            torch.repeat_interleave(of_T, lengths_T, output_size=cold_U.numel())
            for of_T in (self._factor_T, self._offset_T, self._num_rows_T)
        )
        key_U = begin_U + RowOrder.mapped(cold_U, *of_orders, is_wide=self._is_wide)
        shard_U = torch.searchsorted(self._first_S, key_U, right=True) - 1
        owner_U = self._rank_S.index_select(0, shard_U)
        position_U = key_U + self._shift_S.index_select(0, shard_U)
        sorted_U, order_U = sort_keys(owner_U, self._world_size)
        ranks_W = torch.arange(self._world_size, device=owner_U.device)
        ends_W = torch.searchsorted(sorted_U, ranks_W, right=True)
        num_to_W = ends_W.diff(prepend=ends_W.new_zeros(1))
        return RequestedRows(
            order_U, position_U.index_select(0, order_U).to(self.sent_type), num_to_W
        )


# Begin, end and rows of a part.
Part = tuple[int, int, CachedRows | FusedRows]


class OwnedRows:
    """All cold rows of one group that this rank owns.

    Ranks request them by position. They are read and updated at a place: the position, or a slot if
    they are cached.
    """

    def __init__(self, kernels: Sequence[tuple[Kernel, CachedRows | FusedRows]], dim: int) -> None:
        self.kernels, self._dim = kernels, dim
        self.shards: list[Shard] = []
        self._by_position: list[Part] = []
        self._parts: list[Part] = []  # by place
        end, num_places = 0, 0
        for kernel, part in kernels:
            held, begin = kernel.shards, end
            self.shards += [Shard(s.table, s.first_row, s.num_rows, end + s.begin) for s in held]
            end += sum(shard.num_rows for shard in held)
            size = part.slots.num_slots if isinstance(part, CachedRows) else end - begin
            self._by_position.append((begin, end, part))
            self._parts.append((num_places, num_places + size, part))
            num_places += size
        self.num_places = num_places
        self._last_update: tuple[int, float] | None = None  # not yet in FBGEMM's counter
        self.caches = [part for _, part in kernels if isinstance(part, CachedRows)]

    @property
    def learning_rate(self) -> float:
        """The optimizer's current learning rate; 0 without rows."""
        return self._parts[0][2].learning_rate if self._parts else 0.0

    @property
    def num_updates(self) -> int:
        """The number of updates so far; 0 if they are not counted."""
        of_parts = [
            int(part.update_count) if isinstance(part, CachedRows) else update_count(part.module)
            for _, part in self.kernels
        ]
        return max(of_parts, default=0)

    def _split(
        self, places_K: torch.Tensor, parts: Sequence[Part]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Sort places by part: their order, and the rows of each part; reads the device once."""
        sorted_K, order_K = sort_keys(places_K, parts[-1][1])
        # A key at a part's end belongs to the next one.
        ends = ints_on(places_K.device, [end for _, end, _ in parts])
        cuts = HostInts(torch.searchsorted(sorted_K, ends)).wait()
        bounds = zip([0, *cuts], cuts, parts, strict=False)
        return order_K, [sorted_K[first:last] - begin for first, last, (begin, _, _) in bounds]

    def foresee(self, positions_K: torch.Tensor, number: int) -> None:
        """Announce the rows, at positions int64 (K,), of a future batch."""
        if not self.caches:  # on a rank without rows
            return
        rows = [positions_K]
        if len(self._parts) > 1:
            _, rows = self._split(positions_K, self._by_position)
        for rows_K, (_, _, part) in zip(rows, self._parts, strict=True):
            if isinstance(part, CachedRows):
                part.foresee(rows_K, number)

    def reserve(self, positions_K: torch.Tensor, number: int) -> torch.Tensor:
        """The places int64 (K,) of the rows at positions int64 (K,), until ``release(number)``.

        Raises:
            TooFewSlotsError: if the batches in flight need more slots than there are.
        """
        if not self.caches:
            return positions_K
        if len(self._parts) == 1:
            return self.caches[0].reserve(positions_K, number)
        order_K, rows = self._split(positions_K, self._by_position)
        places = [
            begin + (part.reserve(rows_K, number) if isinstance(part, CachedRows) else rows_K)
            for rows_K, (begin, _, part) in zip(rows, self._parts, strict=True)
        ]
        return torch.empty_like(positions_K).index_copy_(0, order_K, torch.cat(places))

    def wait(self, number: int) -> None:
        """Wait until the rows of all batches up to a number are in their slots."""
        for cache in self.caches:
            cache.wait(number)

    def release(self, number: int, *, is_changed: bool) -> None:
        """Free the places of all batches up to ``number``, once their updates are done."""
        for cache in self.caches:
            cache.release(number, is_changed=is_changed)

    def flush(self) -> None:
        """Write changed rows, and the count of updates, back to where state dicts read them."""
        for cache in self.caches:
            cache.flush()
        if self._last_update is None:
            return
        (count, learning_rate), self._last_update = self._last_update, None
        for _, part in self.kernels:
            if isinstance(part, FusedRows):
                set_update_count(part.module, count)
                part.module.set_learning_rate(learning_rate)

    def restart(self) -> None:
        """Invalidate slots, drop the pending update count, and restart batch numbers."""
        self._last_update = None
        for cache in self.caches:
            cache.restart()

    def close(self) -> None:
        """Stop the threads of caches."""
        for cache in self.caches:
            cache.close()

    def look_up(self, positions_K: torch.Tensor) -> torch.Tensor:
        """The rows float (K, D) at int64 (K,) positions, between steps: of slots or behind them."""
        if not self.caches:
            return self.read(positions_K)
        return self._read(positions_K, self._by_position, CachedRows.look_up)

    def read(self, places_K: torch.Tensor) -> torch.Tensor:
        """The rows float (K, D) at int64 (K,) places."""
        return self._read(places_K, self._parts, lambda part, rows_K: part.read(rows_K))

    def _read(
        self,
        keys_K: torch.Tensor,
        parts: Sequence[Part],
        read: Callable[[Any, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        if len(parts) == 1:
            return read(parts[0][2], keys_K)
        out = torch.empty(keys_K.numel(), self._dim, device=keys_K.device)
        if out.numel() == 0:
            return out
        order_K, rows = self._split(keys_K, parts)
        found = [
            read(part, rows_K)
            for rows_K, (_, _, part) in zip(rows, parts, strict=True)
            if rows_K.numel()
        ]
        return out.index_copy_(0, order_K, torch.cat(found))

    def update(
        self,
        places_K: torch.Tensor,
        grad_KD: torch.Tensor,
        learning_rate: float,
        count: int,
        *,
        is_distinct: bool,
    ) -> None:
        """Update the rows at the places once; gradients of the same row are summed in order.

        ``count`` is the number of previous updates, for Adam's bias correction. If the rows are
        known to be distinct, the gradients are overwritten.
        """
        self._last_update = (count + 1, learning_rate)
        if places_K.numel() == 0:
            return
        rows, grads = [places_K], [grad_KD]
        if len(self._parts) > 1:
            order_K, rows = self._split(places_K, self._parts)
            sizes = [rows_K.numel() for rows_K in rows]
            grads = list(grad_KD.index_select(0, order_K).split(sizes))
        for rows_K, part_grads, (_, _, part) in zip(rows, grads, self._parts, strict=True):
            if rows_K.numel() == 0:
                continue
            part.update(rows_K, part_grads, learning_rate, count + 1, is_distinct=is_distinct)
