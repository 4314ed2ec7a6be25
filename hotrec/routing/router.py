"""Routes the features of a batch for one collection."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.routing.checks import (
    check_ids,
    check_lengths,
    declared_weights,
    scale_ids,
    select_features,
)
from hotrec.routing.features import Column, RoutedFeatures, copy_to, find_means, hot_rows
from hotrec.routing.group import GroupRouter, SequenceRouter
from hotrec.runtime.traffic import number_rows
from hotrec.types import Partition


class Router:
    """Routes the features of a batch; picklable for loader workers.

    Per-sample weights are required if ``is_weighted`` is True, ignored if False, and None uses them
    if present; ``pooled_by_dim`` are the columns that are pooled on their tables' owners. If
    ``need_indices`` is not None, no column is pooled, and the output contains the ids or not.
    """

    def __init__(
        self,
        columns_by_dim: Mapping[int, Sequence[Column]],
        partition: Partition,
        is_weighted: bool | None = None,
        pooled_by_dim: Mapping[int, Sequence[Column]] | None = None,
        *,
        need_indices: bool | None = None,
    ) -> None:
        make: Any = GroupRouter
        if need_indices is not None:
            make = partial(SequenceRouter, need_indices=need_indices)
        self.groups: dict[int, GroupRouter] = {
            dim: make(columns, partition) for dim, columns in columns_by_dim.items()
        }
        self.pooled = PooledRouter(pooled_by_dim, partition) if pooled_by_dim else None
        self.is_weighted = is_weighted
        all_columns: tuple[Any, ...] = (
            dict(columns_by_dim),
            dict(pooled_by_dim or {}),
            is_weighted,
        )
        if need_indices is not None:
            all_columns += (need_indices,)
        self._columns_fingerprint = zlib.crc32(repr(all_columns).encode())
        self.fingerprint = self._fingerprint_of(partition)

    def _fingerprint_of(self, partition: Partition) -> int:
        fingerprint = self._columns_fingerprint
        for group in self.groups.values():
            for table in group.tables:
                rows = hot_rows(partition, table).numpy().tobytes()
                fingerprint = zlib.crc32(rows, fingerprint)
        return fingerprint

    def follow(self, partition: Partition) -> None:
        """Route by new hot rows, the same number of each table, only in this process."""
        for group in self.groups.values():
            group.follow(partition)
        self.fingerprint = self._fingerprint_of(partition)

    def to(self, device: torch.device) -> Router:
        """Copy the router with its maps on the device that routes."""
        moved = copy.copy(self)
        moved.groups = {dim: copy_to(group, device) for dim, group in self.groups.items()}
        moved.pooled = None if self.pooled is None else copy_to(self.pooled, device)
        return moved

    def __call__(self, features: KeyedJaggedTensor) -> RoutedFeatures:
        """Check and route a batch.

        Raises:
            TypeError: if it is not a ``KeyedJaggedTensor``.
            ValueError: if it cannot be looked up.
        """
        if not isinstance(features, KeyedJaggedTensor):
            raise TypeError(
                f"features: expected a KeyedJaggedTensor, got {type(features).__name__}. Convert "
                "it before the collection is called."
            )
        known = check_lengths(features)
        features = KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            lengths=features.lengths(),
            weights=declared_weights(features, self.is_weighted),
            stride=features.stride(),
            length_per_key=[key.num_ids for key in known],
        )
        of_feature = dict(zip(features.keys(), known, strict=True))
        groups = []
        for group in self.groups.values():
            wanted = [column.feature for column in group.columns]
            chosen = select_features(features, wanted)
            groups.append(group.route(chosen, [of_feature[name] for name in wanted]))
        pooled = None
        if self.pooled is not None:
            wanted = [column.feature for column in self.pooled.columns]
            pooled = self.pooled.route(select_features(features, wanted))
        return RoutedFeatures(groups, features.stride(), self.fingerprint, pooled)

    def find_distinct(self, routed: RoutedFeatures) -> dict[int, torch.Tensor]:
        """The batch's distinct rows by embedding dimension; it sorts the pooled ones.

        Returns:
            int64 (U,) by dimension, numbered over the tables of the dimension; see ``number_rows``.
        """
        rows: dict[int, list[torch.Tensor]] = {}
        for dim, group in zip(self.groups, routed.groups, strict=True):
            rows[dim] = list(group.rows.values().split(group.rows.length_per_key()))
        if self.pooled is not None and routed.pooled is not None:
            for dim, of_tables in self.pooled.find_distinct(routed.pooled).items():
                rows.setdefault(dim, []).extend(of_tables)
        return {dim: number_rows(of_tables) for dim, of_tables in rows.items()}


class PooledRouter:
    """Makes the features for TorchRec's pooled exchange, with one key per column."""

    def __init__(
        self, columns_by_dim: Mapping[int, Sequence[Column]], partition: Partition
    ) -> None:
        self.columns = tuple(c for columns in columns_by_dim.values() for c in columns)
        self.tables = tuple(dict.fromkeys(column.table for column in self.columns))
        self._dims = {
            column.table: dim for dim, columns in columns_by_dim.items() for column in columns
        }
        self._num_rows_F = torch.tensor([partition.num_rows[c.table] for c in self.columns])
        self._is_mean_F = find_means(self.columns)

    @torch.no_grad()
    def route(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The ids of the columns, in the types that every rank sends.

        Returns:
            Jagged (F, B) with the columns' names as keys, values int64, lengths int32; weights
            float32 if the features have them, divided by the length of the bag for mean pooling,
            so that all weighted bags are summed.
        """
        rows_K, weights_K = features.values().long(), features.weights_or_none()
        lengths_FB = features.lengths().view(len(self.columns), -1).long()
        check_ids(self.columns, self._num_rows_F, rows_K, lengths_FB.sum(1))
        if weights_K is not None:
            # FBGEMM's CPU kernel ignores the mean in backward if there are weights.
            weights_K = scale_ids(weights_K, self._is_mean_F, lengths_FB, rows_K.numel())
        return KeyedJaggedTensor(
            keys=[column.name for column in self.columns],
            values=rows_K,
            lengths=features.lengths().int(),
            weights=weights_K,
            stride=features.stride(),
            length_per_key=features.length_per_key(),
        )

    def find_distinct(self, pooled: KeyedJaggedTensor) -> dict[int, list[torch.Tensor]]:
        """The distinct rows of each table by embedding dimension, rows of shared tables once."""
        of_table: dict[str, list[torch.Tensor]] = {}
        parts = pooled.values().split(pooled.length_per_key())
        for column, rows in zip(self.columns, parts, strict=True):
            of_table.setdefault(column.table, []).append(rows)
        found: dict[int, list[torch.Tensor]] = {}
        for table, table_rows in of_table.items():
            found.setdefault(self._dims[table], []).append(torch.cat(table_rows).unique())
        return found
