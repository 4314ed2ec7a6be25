"""Routes the columns whose rows are exchanged: distinct hot slots and cold rows, and their ids.

Backward of pooling is pooling over the transposed incidence of ids and bags; routing prepares both.
Without pooling each id is its own bag, and only the transposed incidence is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.routing.checks import KeyLengths, refuse_ids, scale_ids
from hotrec.routing.features import (
    Column,
    RoutedGroup,
    RoutedRows,
    RoutedSequences,
    find_means,
    hot_name,
    hot_rows,
)
from hotrec.routing.sorting import find_runs, sort_keys
from hotrec.types import Partition

COLD = -1


@dataclass(frozen=True)
class _Bags:
    """The bags of a batch; bag ``b * F + f`` is sample b of column f."""

    shape: tuple[int, int]  # F and B
    bag_K: torch.Tensor  # the bag of each id in the features' order (feature-major), int64
    offsets: torch.Tensor  # the start of each bag among the ids ordered by bag, int64 (B * F,)
    lengths_FB: torch.Tensor | None  # int64; None if every bag has one id

    def by_bag(self, values_K: torch.Tensor) -> torch.Tensor:
        """Reorder values from the features' order to the order of the bags."""
        num_columns, batch_size = self.shape
        if self.lengths_FB is None:
            return values_K.view(self.shape).t().reshape(-1)
        cells = torch.arange(self.offsets.numel(), dtype=torch.int32, device=values_K.device)
        by_bag: torch.Tensor = torch.ops.fbgemm.permute_1D_sparse_data(
            cells.view(num_columns, batch_size).t().reshape(-1),
            self.lengths_FB.reshape(-1),
            values_K,
            None,
            values_K.numel(),
        )[1]
        return by_bag


def _find_bags(lengths_FB: torch.Tensor, num_ids: int, *, all_one: bool) -> _Bags:
    """Find the bags of int64 (F, B) lengths, all 1 or not."""
    num_columns, batch_size = shape = (lengths_FB.shape[0], lengths_FB.shape[1])
    bags = torch.arange(num_columns * batch_size, device=lengths_FB.device)
    bag_of_cell = bags.view(batch_size, num_columns).t().reshape(-1)
    if all_one:
        return _Bags(shape, bag_of_cell, bags, None)
    bag_K = torch.repeat_interleave(bag_of_cell, lengths_FB.reshape(-1), output_size=num_ids)
    lengths_bag = lengths_FB.t().reshape(-1)
    return _Bags(shape, bag_K, lengths_bag.cumsum(0) - lengths_bag, lengths_FB)


class GroupRouter:
    """Routes the pooled columns of one embedding dimension, those of a table next to each other.

    Memory: 4 bytes per row of its tables, shared by forked loader workers.
    """

    def __init__(self, columns: Sequence[Column], partition: Partition) -> None:
        tables = list(dict.fromkeys(column.table for column in columns))
        self.columns = tuple(columns)
        self.tables = tuple(tables)
        self.hot_tables = tuple(t for t in tables if partition.num_hot(t) > 0)
        self.cold_tables = tuple(t for t in tables if partition.num_hot(t) < partition.num_rows[t])
        self.keys = [hot_name(t) for t in self.hot_tables] + list(self.cold_tables)
        self._num_rows_T = torch.tensor([partition.num_rows[t] for t in tables])
        self._table_ends = self._num_rows_T.cumsum(0)
        self._total_rows = int(self._table_ends[-1])
        # Sorted keys have the hot rows of all tables, then the cold ones: the ends of each table's.
        self._key_ends = torch.cat([self._table_ends, self._table_ends + self._total_rows])
        wanted = [table in self.hot_tables for table in tables]
        wanted += [table in self.cold_tables for table in tables]
        self._kept = [at for at, is_wanted in enumerate(wanted) if is_wanted]
        self._kept_T = torch.tensor(self._kept)
        table_of_F = torch.tensor([tables.index(column.table) for column in columns])
        self._num_rows_F = self._num_rows_T[table_of_F]
        self._begins = (self._table_ends - self._num_rows_T)[table_of_F].tolist()
        self._is_mean_F = find_means(columns)
        self._hot_keys = self._hot_keys_of(partition)
        self._map: torch.Tensor | None = None

    def _hot_keys_of(self, partition: Partition) -> list[torch.Tensor]:
        """The hot rows of each table, counted over all tables."""
        return [
            hot_rows(partition, table) + (end - partition.num_rows[table])
            for table, end in zip(self.tables, self._table_ends.tolist(), strict=True)
        ]

    @property
    def slots(self) -> torch.Tensor:
        """The hot slot of each row of all tables, or COLD; int32 (R,).

        Built at the first use, so not for planning: 2 s for 200 M rows.
        """
        if self._map is None:
            device = self._num_rows_T.device
            self._map = torch.full((self._total_rows,), COLD, dtype=torch.int32, device=device)
            self._write_slots(self._map)
        return self._map

    def _write_slots(self, slots: torch.Tensor) -> None:
        for hot in self._hot_keys:
            slots[hot] = torch.arange(hot.numel(), dtype=torch.int32, device=slots.device)

    def follow(self, partition: Partition) -> None:
        """Route by new hot rows, the same number of each table."""
        slots = self.slots
        for old in self._hot_keys:
            slots[old] = COLD
        self._hot_keys = self._hot_keys_of(partition)
        self._write_slots(slots)

    @torch.no_grad()
    def route(self, features: KeyedJaggedTensor, known: Sequence[KeyLengths]) -> RoutedRows:
        """Route a batch of the columns' features, in order, with one read from the device."""
        num_ids = features.values().numel()
        lengths_FB = features.lengths().view(len(self.columns), features.stride()).long()
        all_one = all(key.shortest == key.longest == 1 for key in known)
        bags = _find_bags(lengths_FB, num_ids, all_one=all_one)
        found, by_row_K = self._find_rows(features, known)
        scales_K = scale_ids(features.weights_or_none(), self._is_mean_F, lengths_FB, num_ids)
        found.positions_K = bags.by_bag(found.positions_K)
        return RoutedGroup(
            **vars(found),
            bag_offsets=bags.offsets,
            bags_K=bags.bag_K.index_select(0, by_row_K),
            scales_K=None if scales_K is None else bags.by_bag(scales_K),
            row_scales_K=None if scales_K is None else scales_K[by_row_K],
            longest_bag=max((key.longest for key in known), default=0),
        )

    def _find_rows(
        self, features: KeyedJaggedTensor, known: Sequence[KeyLengths]
    ) -> tuple[RoutedRows, torch.Tensor]:
        """The distinct rows, with ids in the features' order; and the ids sorted by row."""
        rows_K = features.values().long()
        sizes_F = [key.num_ids for key in known]
        any_outside_here = self._any_outside(rows_K, sizes_F)

        # A single sort: hot rows before cold ones, each by table and row. Ids outside their tables
        # are refused below; until then they must not index beyond the map.
        key_K = rows_K.clone()
        torch._foreach_add_(key_K.split(sizes_F), self._begins)
        key_K.clamp_(0, self._total_rows - 1)
        cold_K = self.slots.index_select(0, key_K).bitwise_right_shift_(31)  # -1 if COLD, else 0
        key_K.sub_(cold_K, alpha=self._total_rows)
        sorted_K, by_row_K = sort_keys(key_K, 2 * self._total_rows)
        runs = find_runs(sorted_K)
        positions_K = torch.empty_like(key_K).scatter_(0, by_row_K, runs.run_K)

        ends = torch.searchsorted(runs.keys, self._key_ends)
        lengths_U = runs.begins.diff(append=runs.begins.new_full((1,), rows_K.numel()))
        longest = lengths_U.max() if rows_K.numel() else lengths_U.new_zeros(())
        facts = torch.stack([any_outside_here, runs.num[0], longest])
        *ends_here, any_outside, num_rows, longest_row = torch.cat([ends, facts]).tolist()
        if any_outside:
            lengths_F = torch.tensor(sizes_F, device=rows_K.device)
            refuse_ids(self.columns, self._num_rows_F, rows_K, lengths_F)
        num_hot = ends_here[len(self.tables) - 1]
        found = RoutedRows(
            rows=self._rows(runs.keys[:num_rows], num_hot, ends, ends_here),
            positions_K=positions_K,
            row_offsets_U=runs.begins[:num_rows],
            num_hot_lookups=lengths_U[:num_hot].sum(),
            longest_row=longest_row,
        )
        return found, by_row_K

    def _any_outside(self, rows_K: torch.Tensor, sizes_F: Sequence[int]) -> torch.Tensor:
        """Whether an id is outside its table, int64 ()."""
        used = [at for at, num_ids in enumerate(sizes_F) if num_ids > 0]
        if not used:
            return rows_K.new_zeros(())
        parts = rows_K.split(sizes_F)
        largest = torch.stack(torch._foreach_max([parts[at] for at in used]))
        limits = self._num_rows_F if len(used) == len(sizes_F) else self._num_rows_F[used]
        return ((largest >= limits).any() | (rows_K.min() < 0)).long()

    def _rows(
        self, distinct_U: torch.Tensor, num_hot: int, ends: torch.Tensor, ends_here: list[int]
    ) -> KeyedJaggedTensor:
        """The distinct rows, hot ones first, as features of the hot and of the cold tables."""
        hot, cold = distinct_U[:num_hot], distinct_U[num_hot:] - self._total_rows
        lengths = ends.diff(prepend=ends.new_zeros(1))
        begin_of_cold = torch.repeat_interleave(
            self._table_ends - self._num_rows_T,
            lengths[len(self.tables) :],
            output_size=cold.numel(),
        )
        lengths_here = [end - begin for begin, end in zip([0, *ends_here], ends_here, strict=False)]
        return KeyedJaggedTensor(
            keys=self.keys,
            values=torch.cat([self.slots[hot].long(), cold - begin_of_cold]),
            lengths=lengths.index_select(0, self._kept_T).int(),
            stride=1,
            length_per_key=[lengths_here[at] for at in self._kept],
        )


class SequenceRouter(GroupRouter):
    """The same for columns that are not pooled.

    Args:
        columns: See ``GroupRouter``.
        partition: See ``GroupRouter``.
        need_indices: Whether the output contains the ids.
    """

    def __init__(
        self, columns: Sequence[Column], partition: Partition, *, need_indices: bool
    ) -> None:
        super().__init__(columns, partition)
        self._need_indices = need_indices

    @torch.no_grad()
    def route(self, features: KeyedJaggedTensor, known: Sequence[KeyLengths]) -> RoutedRows:
        found, by_row_K = self._find_rows(features, known)
        return RoutedSequences(
            **vars(found),
            by_row_K=by_row_K,
            lengths_FB=features.lengths().view(len(self.columns), features.stride()),
            ids_K=features.values() if self._need_indices else None,
            num_ids_F=[key.num_ids for key in known],
        )
