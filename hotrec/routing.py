"""Routing: ids of a batch -> the distinct hot slots and cold rows it reads, and how to pool them.

Runs in loader workers or on the device, on whole tensors, never in a loop over samples. The
distinct rows become a ``KeyedJaggedTensor`` of stride 1 (one "sample" per rank, whose bag of a
table is the set of rows the batch reads), which makes TorchRec's ``EmbeddingCollection`` exchange
each row once however often the batch reads it. Pooling then happens locally, over these rows.

Backward of pooling is pooling again, over the transposed incidence of ids and bags; routing
prepares both directions, so that neither needs atomics and both are bitwise reproducible.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from hotrec.bags import find_bags
from hotrec.sorting import sort_keys
from hotrec.types import Partition

COLD = -1


@dataclass(frozen=True)
class Column:
    """One pooled output: a feature read from a table.

    Args:
        name: key in the output ``KeyedTensor`` (the feature, or "feature@table" if several tables
            read it), as TorchRec names it.
        feature: key in the input ``KeyedJaggedTensor``.
        table: table that is read.
        is_mean: mean pooling, else sum.
    """

    name: str
    feature: str
    table: str
    is_mean: bool


def hot_name(table: str) -> str:
    """The name of the table of hot replicas, and of its feature."""
    return f"{table}_hot"


def hot_rows(partition: Partition, table: str) -> torch.Tensor:
    """The hot rows of a table in slot order, int64 (H,): a copy, whatever memory they come from."""
    return torch.from_numpy(np.array(partition.hot(table), order="C"))


@dataclass
class RoutedGroup(Pipelineable):
    """The routed ids of all columns of one embedding dimension.

    Args:
        rows: stride 1; keys are the hot tables, then the cold tables; values int64 (U,), distinct
            within a table: hot slots, then rows.
        positions_K: int64, index into the U looked-up rows (hot ones first), in the order of the
            bags; bag ``b * F + f`` is sample b of column f.
        bag_offsets: int64 (B * F,), where each bag starts in ``positions_K``.
        bags_K: int64, the same ids sorted by row: the bag of each.
        row_offsets_U: int64, where each row starts in ``bags_K``.
        scales_K: float32 in the order of the bags, factor of each id (per-sample weight, 1 / length
            of the bag for mean pooling), or None if all are 1.
        row_scales_K: the same factors in the order of ``bags_K``.
        num_hot_lookups: int64 (), how many of the K ids are hot.
    """

    rows: KeyedJaggedTensor
    positions_K: torch.Tensor
    bag_offsets: torch.Tensor
    bags_K: torch.Tensor
    row_offsets_U: torch.Tensor
    scales_K: torch.Tensor | None
    row_scales_K: torch.Tensor | None
    num_hot_lookups: torch.Tensor

    def _map(self, method: str, *args: object, **kwargs: object) -> RoutedGroup:
        moved: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            moved[item.name] = None if value is None else getattr(value, method)(*args, **kwargs)
        return RoutedGroup(**moved)

    def to(self, device: torch.device, non_blocking: bool = False) -> RoutedGroup:
        return self._map("to", device, non_blocking=non_blocking)

    def pin_memory(self) -> RoutedGroup:
        return self._map("pin_memory")

    def record_stream(self, stream: torch.Stream) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                value.record_stream(stream)


@dataclass
class RoutedFeatures(Pipelineable):
    """What the router makes of a ``KeyedJaggedTensor``: one group per embedding dimension.

    Args:
        groups: in the order of the collection's dimensions.
        batch_size: B.
        fingerprint: of the router, so that a collection can refuse what another one's made.
    """

    groups: list[RoutedGroup]
    batch_size: int
    fingerprint: int

    def stride(self) -> int:
        """Samples in the batch, as ``KeyedJaggedTensor.stride`` says it."""
        return self.batch_size

    @property
    def num_distinct(self) -> list[int]:
        """U of each group: the distinct rows that this rank's batch reads."""
        return [group.rows.values().numel() for group in self.groups]

    @property
    def num_lookups(self) -> int:
        return sum(group.positions_K.numel() for group in self.groups)

    def num_hot_lookups(self) -> int:
        """Ids of the batch that are hot (waits for the device)."""
        return sum(int(group.num_hot_lookups) for group in self.groups)

    def to(self, device: torch.device, non_blocking: bool = False) -> RoutedFeatures:
        return RoutedFeatures(
            [group.to(device, non_blocking=non_blocking) for group in self.groups],
            self.batch_size,
            self.fingerprint,
        )

    def pin_memory(self) -> RoutedFeatures:
        groups = [group.pin_memory() for group in self.groups]
        return RoutedFeatures(groups, self.batch_size, self.fingerprint)

    def record_stream(self, stream: torch.Stream) -> None:
        for group in self.groups:
            group.record_stream(stream)


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
        self._is_hot_T = torch.tensor([t in self.hot_tables for t in tables])
        self._is_cold_T = torch.tensor([t in self.cold_tables for t in tables])
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
        """Move the maps to the device where ``route`` is to run; returns self."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device))
        return self

    @torch.no_grad()
    def route(self, features: KeyedJaggedTensor) -> RoutedGroup:
        """Route the ids of a batch.

        Args:
            features: keys are this group's column features, in order; values are rows.

        Raises:
            ValueError: if an id lies outside its table.
        """
        num_columns, batch_size = len(self.columns), features.stride()
        lengths_FB = features.lengths().view(num_columns, batch_size).long()
        rows_K = features.values().long()
        num_ids = rows_K.numel()
        lengths_F = lengths_FB.sum(1)
        bags = find_bags(lengths_FB, num_ids)
        limit_K = bags.per_column(self._num_rows_F)
        is_outside = (rows_K < 0) | (rows_K >= limit_K)
        if is_outside.any():
            self._raise_outside(rows_K, lengths_F, is_outside)

        # One sort serves everything: hot rows before cold ones, each by table and row.
        key_K = rows_K + bags.per_column(self._begin_of_F)
        key_K += (self._slots[key_K] == COLD).long() * self._total_rows
        sorted_K, by_row_K = sort_keys(key_K, 2 * self._total_rows)
        distinct_U, position_of_sorted_K, counts_U = torch.unique_consecutive(
            sorted_K, return_inverse=True, return_counts=True
        )
        positions_K = torch.empty_like(key_K).index_copy_(0, by_row_K, position_of_sorted_K)
        num_hot = int(torch.searchsorted(distinct_U, self._total_rows))

        scales_K = self._scales(features, lengths_FB, bags.bag_K)
        return RoutedGroup(
            rows=self._rows(distinct_U, num_hot),
            positions_K=bags.by_bag(positions_K),
            bag_offsets=bags.offsets,
            bags_K=bags.bag_K.index_select(0, by_row_K),
            row_offsets_U=counts_U.cumsum(0) - counts_U,
            scales_K=None if scales_K is None else bags.by_bag(scales_K),
            row_scales_K=None if scales_K is None else scales_K[by_row_K],
            num_hot_lookups=counts_U[:num_hot].sum(),
        )

    def _rows(self, distinct_U: torch.Tensor, num_hot: int) -> KeyedJaggedTensor:
        """The distinct rows, hot ones first, as features of the hot and of the cold tables."""
        hot, cold = distinct_U[:num_hot], distinct_U[num_hot:] - self._total_rows
        # Keys are sorted, so a table's rows are where its first key and the next table's first are.
        hot_ends = torch.searchsorted(hot, self._table_ends)
        cold_ends = torch.searchsorted(cold, self._table_ends)
        hot_lengths = hot_ends.diff(prepend=hot_ends.new_zeros(1))
        cold_lengths = cold_ends.diff(prepend=cold_ends.new_zeros(1))
        begin_of_cold = torch.repeat_interleave(
            self._table_ends - self._num_rows_T, cold_lengths, output_size=cold.numel()
        )
        return KeyedJaggedTensor(
            keys=self.keys,
            values=torch.cat([self._slots[hot].long(), cold - begin_of_cold]),
            lengths=torch.cat([hot_lengths[self._is_hot_T], cold_lengths[self._is_cold_T]]).int(),
            stride=1,
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
        elif weights_K.requires_grad:
            raise ValueError(
                "features weights: expected per-sample weights without a gradient, got "
                "requires_grad=True. Detach them, or keep such features in an "
                "EmbeddingBagCollection."
            )
        else:
            scales_K = weights_K.float()
        if self._has_mean:
            divisor_bag = torch.where(self._is_mean_F, lengths_FB.t(), 1).reshape(-1)
            scales_K = scales_K / divisor_bag[bag_K]
        return scales_K

    def _raise_outside(
        self, rows_K: torch.Tensor, lengths_F: torch.Tensor, is_outside: torch.Tensor
    ) -> None:
        first = int(is_outside.nonzero()[0])
        position = int(torch.searchsorted(lengths_F.cumsum(0), first, right=True))
        column = self.columns[position]
        raise ValueError(
            f"table {column.table} feature {column.feature}: expected rows in "
            f"0..{int(self._num_rows_F[position]) - 1}, got {int(rows_K[first])}. "
            "Prepare the data again, or raise the table's num_rows."
        )


class Router:
    """Routes the features of a batch; picklable, so that loader workers can hold it.

    Args:
        columns_by_dim: the columns of each embedding dimension, see ``GroupRouter``.
        partition: which rows are hot.
        is_weighted: whether per-sample weights are required (True) or unused (False); None uses
            them if the features have them.
    """

    def __init__(
        self,
        columns_by_dim: Mapping[int, Sequence[Column]],
        partition: Partition,
        is_weighted: bool | None = None,
    ) -> None:
        self.groups = {
            dim: GroupRouter(columns, partition) for dim, columns in columns_by_dim.items()
        }
        self.is_weighted = is_weighted
        self.fingerprint = zlib.crc32(repr((dict(columns_by_dim), is_weighted)).encode())
        for group in self.groups.values():
            for table in group.tables:
                rows = hot_rows(partition, table).numpy().tobytes()
                self.fingerprint = zlib.crc32(rows, self.fingerprint)

    def to(self, device: torch.device) -> Router:
        for group in self.groups.values():
            group.to(device)
        return self

    def __call__(self, features: KeyedJaggedTensor) -> RoutedFeatures:
        """Route a batch.

        Raises:
            ValueError: if a feature or the weights are missing, lengths do not add up, or an id
                lies outside its table.
        """
        _check_lengths(features)
        features = self._with_the_weights_it_needs(features)
        groups = []
        for group in self.groups.values():
            wanted = [column.feature for column in group.columns]
            groups.append(group.route(select_features(features, wanted)))
        return RoutedFeatures(groups, features.stride(), self.fingerprint)

    def _with_the_weights_it_needs(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        has_weights = features.weights_or_none() is not None
        if self.is_weighted and not has_weights:
            raise ValueError(
                "features weights: expected per-sample weights since is_weighted=True, got none. "
                "Give the KeyedJaggedTensor weights, or build the collection with "
                "is_weighted=False."
            )
        if has_weights and self.is_weighted is False:
            return KeyedJaggedTensor(
                keys=features.keys(),
                values=features.values(),
                lengths=features.lengths(),
                stride=features.stride(),
            )
        return features


def _check_lengths(features: KeyedJaggedTensor) -> None:
    keys, lengths = features.keys(), features.lengths()
    num_values, num_expected = features.values().numel(), int(lengths.sum())
    is_whole = lengths.numel() == len(keys) * features.stride() and num_values == num_expected
    if not is_whole or (lengths.numel() and int(lengths.min()) < 0):
        raise ValueError(
            f"features lengths: expected {len(keys)} x {features.stride()} lengths >= 0 that add "
            f"up to {num_values} ids, got {lengths.numel()} lengths that add up to {num_expected}, "
            f"the least {int(lengths.min()) if lengths.numel() else None}. "
            "Check the code that builds the batch."
        )


def select_features(features: KeyedJaggedTensor, wanted: Sequence[str]) -> KeyedJaggedTensor:
    """The named features in the given order, with repetition if asked for.

    Raises:
        ValueError: if a feature is not among the keys.
    """
    keys = features.keys()
    if list(keys) == list(wanted):
        return features
    index = {key: position for position, key in enumerate(keys)}
    missing = [feature for feature in wanted if feature not in index]
    if missing:
        raise ValueError(
            f"features: expected {missing[0]!r} among the batch's features, got {list(keys)}. "
            "Pass the features the collection was built for."
        )
    return features.permute([index[feature] for feature in wanted])
