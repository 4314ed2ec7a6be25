"""The owners of the cold rows of one embedding dimension, and the positions of rows there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.routing.sorting import sort_keys
from hotrec.runtime.hosts import Hosts
from hotrec.types import RowShares

MAX_ROWS = 1 << 31  # of a rank, for positions to fit into int32


@dataclass
class RequestedRows:
    """The cold rows of one group that a batch reads, by owner."""

    order_U: torch.Tensor | None  # the batch's cold rows in the order of their owners, int64
    positions_U: torch.Tensor  # their positions on the owner in that order, in the type sent
    num_to_W: torch.Tensor | None  # rows of each owner in that order, int64; None for one rank


class RowOwners:
    """Finds the owners of the cold rows of one group, and their positions there.

    The shares of a rank have consecutive positions, table after table, the same on every rank.
    Requested rows are in the order of their owners' ranks. With ``hosts`` they are in that of the
    owners' local ranks and, of each local rank, of hosts; see ``hotrec.embedding.relay``.

    Args:
        num_rows: Rows of each cold table of the group.
        world_size: Number of ranks W.
        device: The device of the batches.
        hosts: The hosts, for an exchange in two levels.
    """

    def __init__(
        self,
        num_rows: Mapping[str, int],
        world_size: int,
        device: torch.device,
        hosts: Hosts | None = None,
    ) -> None:
        self._world_size = world_size
        self.shares = {table: RowShares(table, world_size) for table in num_rows}
        sizes = [share.num_places(num_rows[table]) for table, share in self.shares.items()]
        ends = [0, *accumulate(sizes)]
        self.begins = dict(zip(num_rows, ends, strict=False))  # the first position of each table
        self.num_positions = ends[-1]
        self.sent_type = torch.int32 if self.num_positions <= MAX_ROWS else torch.int64
        # A row's key is its number from here on; key mod W owns it, at position key div W.
        begins = [self.begins[t] * world_size + share.shift for t, share in self.shares.items()]
        self._begins_T = torch.tensor(begins, dtype=torch.int64, device=device)
        self._place_of_W: torch.Tensor | None = None
        if hosts is not None:
            order = torch.tensor([rank for rail in hosts.rails for rank in rail])
            self._place_of_W = order.argsort().to(device)

    def find(self, rows: KeyedJaggedTensor, num_hot_keys: int) -> RequestedRows:
        """Find the owners of the cold rows of a routed batch."""
        lengths_T = rows.lengths()[num_hot_keys:]
        cold_U = rows.values()[sum(rows.length_per_key()[:num_hot_keys]) :]
        begin_U = torch.repeat_interleave(self._begins_T, lengths_T, output_size=cold_U.numel())
        key_U, world_size = cold_U + begin_U, self._world_size
        if world_size == 1:
            return RequestedRows(None, key_U, None)
        owner_U = key_U % world_size
        if self._place_of_W is not None:
            owner_U = self._place_of_W.index_select(0, owner_U)
        sorted_U, order_U = sort_keys(owner_U, world_size)
        ranks_W = torch.arange(world_size, device=key_U.device)
        ends_W = torch.searchsorted(sorted_U, ranks_W, right=True)
        positions_U = key_U.index_select(0, order_U).div_(world_size, rounding_mode="floor")
        return RequestedRows(
            order_U, positions_U.to(self.sent_type), ends_W.diff(prepend=ends_W.new_zeros(1))
        )
