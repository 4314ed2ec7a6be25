"""Selects and checks the ids of the columns that are pooled where their tables live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.routing.checks import refuse_ids, scale_ids
from hotrec.routing.features import Column, find_means
from hotrec.types import Partition


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
        lengths_F = lengths_FB.sum(1)
        limit_K = torch.repeat_interleave(self._num_rows_F, lengths_F, output_size=rows_K.numel())
        is_outside_K = (rows_K < 0) | (rows_K >= limit_K)
        if is_outside_K.any():
            refuse_ids(self.columns, self._num_rows_F, rows_K, is_outside_K, lengths_F)
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

    def count_distinct(self, pooled: KeyedJaggedTensor) -> dict[int, int]:
        """Count the distinct rows by embedding dimension, rows of shared tables once."""
        of_table: dict[str, list[torch.Tensor]] = {}
        parts = pooled.values().split(pooled.length_per_key())
        for column, rows in zip(self.columns, parts, strict=True):
            of_table.setdefault(column.table, []).append(rows)
        counts: dict[int, int] = {}
        for table, rows in of_table.items():
            dim = self._dims[table]
            counts[dim] = counts.get(dim, 0) + torch.cat(rows).unique().numel()
        return counts
