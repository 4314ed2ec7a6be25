"""Routes the columns whose rows are exchanged: distinct hot slots and cold rows, and bags of them.

Backward of pooling is pooling again, over the transposed incidence of ids and bags; routing
prepares both directions, so that neither needs atomics and both are bitwise reproducible.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.routing.bags import find_bags
from hotrec.routing.checks import KeyLengths, check_weights, refuse_ids
from hotrec.routing.features import Column, RoutedGroup, hot_name, hot_rows
from hotrec.routing.sorting import find_runs, sort_keys
from hotrec.types import Partition

COLD = -1


class GroupRouter:
    """Routes the columns of one embedding dimension.

    Memory: 4 bytes per row of its tables, shared by forked loader workers.

    Args:
        columns: in output order, the columns of a table next to each other.
        partition: names every table of the columns.
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
        # Sorted keys hold the hot rows of all tables, then the cold ones: where each table's end.
        self._key_ends = torch.cat([self._table_ends, self._table_ends + self._total_rows])
        wanted = [table in self.hot_tables for table in tables]
        wanted += [table in self.cold_tables for table in tables]
        self._kept = [at for at, is_wanted in enumerate(wanted) if is_wanted]
        self._kept_T = torch.tensor(self._kept)
        table_of_F = torch.tensor([tables.index(column.table) for column in columns])
        self._num_rows_F = self._num_rows_T[table_of_F]
        self._begin_of_F = (self._table_ends - self._num_rows_T)[table_of_F]
        self._is_mean_F = torch.tensor([c.is_mean for c in columns])
        self._has_mean = bool(self._is_mean_F.any())
        self._slots = torch.full((self._total_rows,), COLD, dtype=torch.int32)
        for table, end in zip(tables, self._table_ends.tolist(), strict=True):
            hot = hot_rows(partition, table) + (end - partition.num_rows[table])
            self._slots[hot] = torch.arange(hot.numel(), dtype=torch.int32)

    def to(self, device: torch.device) -> GroupRouter:
        """The same with its maps on the device where ``route`` is to run."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(moved, name, value.to(device))
        return moved

    @torch.no_grad()
    def route(self, features: KeyedJaggedTensor, known: Sequence[KeyLengths]) -> RoutedGroup:
        """Route the ids of a batch; the device is asked once.

        Args:
            features: keys are this group's column features, in order; values are rows.
            known: of the columns, from ``check_lengths``.

        Raises:
            ValueError: if an id lies outside its table.
        """
        num_columns, batch_size = len(self.columns), features.stride()
        lengths_FB = features.lengths().view(num_columns, batch_size).long()
        rows_K = features.values().long()
        all_one = all(key.shortest == key.longest == 1 for key in known)
        bags = find_bags(lengths_FB, rows_K.numel(), all_one=all_one)
        limit_K = bags.per_column(self._num_rows_F)
        is_outside_K = (rows_K < 0) | (rows_K >= limit_K)

        # One sort serves everything: hot rows before cold ones, each by table and row. Ids outside
        # their tables are refused below; until then they must not reach beyond the map.
        key_K = rows_K + bags.per_column(self._begin_of_F)
        key_K.clamp_(0, self._total_rows - 1)
        is_cold_K = self._slots.index_select(0, key_K) == COLD  # half of an index's time on CPU
        key_K += is_cold_K.long() * self._total_rows
        sorted_K, by_row_K = sort_keys(key_K, 2 * self._total_rows)
        runs = find_runs(sorted_K)
        positions_K = torch.empty_like(key_K).scatter_(0, by_row_K, runs.run_K)

        ends = torch.searchsorted(runs.keys, self._key_ends)
        lengths_U = runs.begins.diff(append=runs.begins.new_full((1,), rows_K.numel()))
        longest = lengths_U.max() if rows_K.numel() else lengths_U.new_zeros(())
        facts = torch.stack([is_outside_K.any().long(), runs.num[0], longest])
        *ends_here, any_outside, num_rows, longest_row = torch.cat([ends, facts]).tolist()
        if any_outside:
            refuse_ids(self.columns, self._num_rows_F, rows_K, is_outside_K, lengths_FB.sum(1))
        num_hot = ends_here[len(self.tables) - 1]

        scales_K = self._scales(features, lengths_FB, bags.bag_K)
        return RoutedGroup(
            rows=self._rows(runs.keys[:num_rows], num_hot, ends, ends_here),
            positions_K=bags.by_bag(positions_K),
            bag_offsets=bags.offsets,
            bags_K=bags.bag_K.index_select(0, by_row_K),
            row_offsets_U=runs.begins[:num_rows],
            scales_K=None if scales_K is None else bags.by_bag(scales_K),
            row_scales_K=None if scales_K is None else scales_K[by_row_K],
            num_hot_lookups=(sorted_K < self._total_rows).sum(),
            longest_bag=max((key.longest for key in known), default=0),
            longest_row=longest_row,
        )

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
            values=torch.cat([self._slots[hot].long(), cold - begin_of_cold]),
            lengths=lengths.index_select(0, self._kept_T).int(),
            stride=1,
            length_per_key=[lengths_here[at] for at in self._kept],
        )

    def _scales(
        self, features: KeyedJaggedTensor, lengths_FB: torch.Tensor, bag_K: torch.Tensor
    ) -> torch.Tensor | None:
        """The factor of each id, float32 (K,) in the features' order; None if all are 1."""
        weights_K = features.weights_or_none()
        if weights_K is None and not self._has_mean:
            return None
        if weights_K is None:
            scales_K = torch.ones(bag_K.numel(), device=bag_K.device)
        else:
            scales_K = check_weights(weights_K)
        if self._has_mean:
            divisor_bag = torch.where(self._is_mean_F, lengths_FB.t(), 1).reshape(-1)
            scales_K = scales_K / divisor_bag[bag_K]
        return scales_K
