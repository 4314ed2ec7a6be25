"""Where cold rows live: which rank owns a row, and at which position among the rank's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.routing.sorting import sort_keys


@dataclass(frozen=True)
class Shard:
    """A piece of a table on a rank.

    Args:
        table: name.
        first_row: of the table.
        num_rows: in the piece.
        position: of its first row among all the rank's rows of the group.
    """

    table: str
    first_row: int
    num_rows: int
    position: int


@dataclass
class Asked:
    """The cold rows of one group that one batch reads, by owner.

    Args:
        order_U: int64 (U,), the batch's cold rows in the order of their owners.
        positions_U: int32 (U,), in that order, positions on the owner.
        num_to_W: int64 (W,), rows asked of each rank.
    """

    order_U: torch.Tensor
    positions_U: torch.Tensor
    num_to_W: torch.Tensor


class ColdLayout:
    """The places of all cold rows of one group, known to every rank.

    Args:
        tables: the group's cold tables, in order.
        num_rows: rows of every table.
        shards: of every rank, by rank.
        device: where rows are looked up.

    Raises:
        RuntimeError: if the shards do not hold every row of every table once.
    """

    def __init__(
        self,
        tables: Sequence[str],
        num_rows: Mapping[str, int],
        shards: Sequence[Sequence[Shard]],
        device: torch.device,
    ) -> None:
        self.tables = tuple(tables)
        self.world_size = len(shards)
        begins, begin = {}, 0
        for table in tables:
            begins[table] = begin
            begin += num_rows[table]
        pieces = sorted(
            (begins[shard.table] + shard.first_row, shard.num_rows, rank, shard.position)
            for rank, of_rank in enumerate(shards)
            for shard in of_rank
            if shard.num_rows
        )
        # Each piece begins where the one before it ends, and the last one ends with the tables.
        firsts = [*(piece[0] for piece in pieces), begin]
        ends = [0, *(piece[0] + piece[1] for piece in pieces)]
        wrong = [end for first, end in zip(firsts, ends, strict=True) if first != end]
        if wrong:
            raise RuntimeError(
                f"shards of {list(tables)}: expected each of {begin} rows on one rank, got a gap "
                f"or an overlap at row {wrong[0]} of the tables laid one after the other. Use the "
                "pinned torchrec (see `hotrec doctor`)."
            )
        self._begins_T = torch.tensor([begins[table] for table in tables], device=device)
        self._first_S = torch.tensor([piece[0] for piece in pieces], device=device)
        self._rank_S = torch.tensor([piece[2] for piece in pieces], device=device)
        self._shift_S = torch.tensor([piece[3] - piece[0] for piece in pieces], device=device)

    def find(self, rows: KeyedJaggedTensor, num_hot_keys: int) -> Asked:
        """Find the owners of the cold rows of a routed batch.

        Args:
            rows: stride 1, keys are the hot tables, then this layout's tables; rows ascend within
                a table.
            num_hot_keys: how many keys are hot tables.
        """
        lengths_T = rows.lengths().long()
        num_hot = sum(rows.length_per_key()[:num_hot_keys])
        lengths_T = lengths_T[num_hot_keys:]
        cold_U = rows.values()[num_hot:]
        key_U = cold_U + torch.repeat_interleave(
            self._begins_T, lengths_T, output_size=cold_U.numel()
        )
        # Keys ascend, so a piece's rows are where its first row and the next one's would stand.
        ends_S = torch.searchsorted(key_U, self._first_S[1:])
        lengths_S = ends_S.diff(
            prepend=ends_S.new_zeros(1), append=ends_S.new_full((1,), key_U.numel())
        )
        num = key_U.numel()
        owner_U = torch.repeat_interleave(self._rank_S, lengths_S, output_size=num)
        position_U = key_U + torch.repeat_interleave(self._shift_S, lengths_S, output_size=num)
        _, order_U = sort_keys(owner_U, self.world_size)
        num_to_W = lengths_S.new_zeros(self.world_size).index_add_(0, self._rank_S, lengths_S)
        return Asked(order_U, position_U.index_select(0, order_U).int(), num_to_W)
