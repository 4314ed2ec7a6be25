"""Selects and checks the ids of the columns that are pooled where their tables live."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.routing.checks import check_weights, refuse_ids
from hotrec.routing.features import Column
from hotrec.types import Partition


class PooledRouter:
    """Makes the features for TorchRec's pooled exchange, with one key per column.

    Args:
        columns_by_dim: The columns of each embedding dimension.
        partition: The partition of the columns' tables.
    """

    def __init__(
        self, columns_by_dim: Mapping[int, Sequence[Column]], partition: Partition
    ) -> None:
        self.columns = tuple(c for columns in columns_by_dim.values() for c in columns)
        self.tables = tuple(dict.fromkeys(column.table for column in self.columns))
        self._dims = {
            column.table: dim for dim, columns in columns_by_dim.items() for column in columns
        }
        self._num_rows_F = torch.tensor([partition.num_rows[c.table] for c in self.columns])
        self._is_mean_F = torch.tensor([c.is_mean for c in self.columns])
        self._has_mean = bool(self._is_mean_F.any())

    def to(self, device: torch.device) -> PooledRouter:
        """Copy the router to the device that routes."""
        moved = copy.copy(self)
        moved._num_rows_F = self._num_rows_F.to(device)
        moved._is_mean_F = self._is_mean_F.to(device)
        return moved

    @torch.no_grad()
    def route(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The ids of the columns, in the types that every rank sends.

        Args:
            features: The columns' features, in order, whose values are rows.

        Returns:
            Jagged (F, B) with the columns' names as keys, values int64, lengths int32; weights
            float32 if the features have them, divided by the length of the bag for mean pooling,
            so that all weighted bags are summed.

        Raises:
            ValueError: if an id lies outside its table, or the weights require a gradient.
        """
        rows_K, weights_K = features.values().long(), features.weights_or_none()
        lengths_FB = features.lengths().view(len(self.columns), -1).long()
        lengths_F = lengths_FB.sum(1)
        limit_K = torch.repeat_interleave(self._num_rows_F, lengths_F, output_size=rows_K.numel())
        is_outside_K = (rows_K < 0) | (rows_K >= limit_K)
        if is_outside_K.any():
            refuse_ids(self.columns, self._num_rows_F, rows_K, is_outside_K, lengths_F)
        return KeyedJaggedTensor(
            keys=[column.name for column in self.columns],
            values=rows_K,
            lengths=features.lengths().int(),
            weights=None if weights_K is None else self._scales(weights_K, lengths_FB),
            stride=features.stride(),
            length_per_key=features.length_per_key(),
        )

    def _scales(self, weights_K: torch.Tensor, lengths_FB: torch.Tensor) -> torch.Tensor:
        # FBGEMM's CPU kernel ignores the mean in backward if there are weights.
        scales_K = check_weights(weights_K)
        if not self._has_mean:
            return scales_K
        divisor_FB = torch.where(self._is_mean_F[:, None], lengths_FB, 1)
        return scales_K / torch.repeat_interleave(
            divisor_FB.view(-1), lengths_FB.reshape(-1), output_size=scales_K.numel()
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
