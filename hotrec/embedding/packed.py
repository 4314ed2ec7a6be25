"""Packed output of sequences: distinct rows, which the model copies to the ids when it needs to.

Expanded, the output is float (K, D) for each feature, and so is its gradient. The distinct rows
(U, D) are few where users repeat themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from hotrec.embedding.collection import SequenceLayout
from hotrec.embedding.pooling import CopyRows, sum_segments
from hotrec.routing.features import Column, RoutedRows, RoutedSequences, hot_name
from hotrec.routing.sorting import sort_keys
from hotrec.runtime.stages import mark


class PackedJaggedTensor(JaggedTensor):
    """A jagged tensor of distinct rows, with the row of each id.

    ``packed_values``, ``materialize`` and ``values`` are as described for TorchRec's packed
    ``JaggedTensor``, which its ``EmbeddingCollectionSharder`` makes with
    ``use_packed_jagged_tensor``. It never changes into an expanded one: ``values`` raises, and what
    needs values is called on ``materialize()``.

    Args:
        packed_values: The distinct rows of a table, float (U, D); all features of the table have
            the same.
        reverse_indices: The row of each id, int64 (K,).
        lengths: Of each sample, (B,).
        weights: Of each id, (K,), or None.
    """

    def __init__(
        self,
        packed_values: torch.Tensor,
        reverse_indices: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> None:
        super().__init__(packed_values, weights, lengths)
        self._rows, self._reverse_indices = packed_values, reverse_indices

    def packed_values(self) -> torch.Tensor:
        """The distinct rows, float (U, D)."""
        return self._rows

    def reverse_indices(self) -> torch.Tensor:
        """The row of each id, int64 (K,)."""
        return self._reverse_indices

    def values(self) -> torch.Tensor:
        """Raise ValueError: there are no expanded values."""
        raise ValueError(
            f"values of a packed jagged tensor: expected materialize() first, got "
            f"{self._rows.shape[0]} distinct rows for {self._reverse_indices.numel()} ids. Call "
            "materialize().values(), or packed_values()."
        )

    def expand(self, of_rows: torch.Tensor) -> torch.Tensor:
        """Copy what was computed from each distinct row, (U, N), to the ids that read it, (K, N).

        Backward adds up the gradients of a row in the order of its ids, so it is repeatable bit for
        bit.

        Raises:
            ValueError: if there is not one row for each distinct one.
        """
        if of_rows.shape[0] != self._rows.shape[0]:
            raise ValueError(
                f"rows to expand: expected one for each of the {self._rows.shape[0]} distinct "
                f"rows, got {of_rows.shape[0]}. Pass what was computed from packed_values()."
            )
        mark("dense")
        sums = partial(_sum_by_row, self._reverse_indices, of_rows.shape[0])
        copies: torch.Tensor = CopyRows.apply(of_rows, self._reverse_indices, sums)
        mark("pool")
        return copies

    def materialize(self) -> JaggedTensor:
        """The expanded jagged tensor, values float (K, D); this one stays as it is."""
        return JaggedTensor(
            self.expand(self._rows),
            self.weights_or_none(),
            self.lengths_or_none(),
            self.offsets_or_none(),
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> PackedJaggedTensor:
        weights = self.weights_or_none()
        return PackedJaggedTensor(
            self._rows.to(device, non_blocking=non_blocking),
            self._reverse_indices.to(device, non_blocking=non_blocking),
            self.lengths().to(device, non_blocking=non_blocking),
            None if weights is None else weights.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        self._reverse_indices.record_stream(stream)

    def size_in_bytes(self) -> int:
        """With the distinct rows, which other features may share."""
        return int(super().size_in_bytes()) + self._reverse_indices.nbytes

    def __str__(self) -> str:
        num_rows, dim = self._rows.shape
        return (
            f"PackedJaggedTensor({self._reverse_indices.numel()} ids of {num_rows} distinct rows "
            f"of {dim}, {self.lengths().numel()} samples)"
        )


def _sum_by_row(row_of: torch.Tensor, num_rows: int, values_KN: torch.Tensor) -> torch.Tensor:
    """The sum over the ids that read each row, float (U, N), in the order of the ids.

    ``row_of`` is int64 (K,), or (K, n) where an id reads n rows.
    """
    mark("dense")
    sorted_K, by_row_K = sort_keys(row_of.reshape(-1), num_rows)
    begins_U = torch.searchsorted(sorted_K, torch.arange(num_rows, device=row_of.device))
    if row_of.dim() == 2:
        by_row_K //= row_of.shape[1]
    sums = sum_segments(values_KN, by_row_K, begins_U, None, by_row_K.numel())
    mark("pool")
    return sums


class AddRows(torch.autograd.Function):
    """Rows float (U, N) -> the sum of the n rows of each id, (K, N), in the order of int64 (K, n).

    Backward adds up the gradients of a row in the order of its ids.
    """

    @staticmethod
    def forward(ctx: Any, rows_UN: torch.Tensor, row_of_Kn: torch.Tensor) -> torch.Tensor:
        ctx.row_of, ctx.num_rows = row_of_Kn, rows_UN.shape[0]
        mark("dense")
        num = row_of_Kn.shape[1]
        begins_K = torch.arange(0, row_of_Kn.numel(), num, device=row_of_Kn.device)
        sums = sum_segments(rows_UN, row_of_Kn.reshape(-1), begins_K, None, num)
        mark("pool")
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_by_row(ctx.row_of, ctx.num_rows, grads[0].contiguous()), None


class PackedLayout(SequenceLayout):
    """Gives each feature the distinct rows of its table instead of a row for each id.

    The gradient of a row is the sum over the features of the sums over their ids, added up as
    autograd meets them: from the feature that the model used last to the first.
    """

    def of_rows(self, rows_UD: torch.Tensor, routed: RoutedRows, num_columns: int) -> torch.Tensor:
        """The distinct rows, float (U, D); 0 for those that a part of a batch does not read."""
        assert isinstance(routed, RoutedSequences), type(routed)
        if not routed.is_part:
            return rows_UD
        # The memory of rows that have not arrived may hold anything, NaN too, and change until the
        # backward pass. A layer over all rows would multiply them by their gradient, 0.
        is_read_U = torch.zeros(rows_UD.shape[0], dtype=torch.bool, device=rows_UD.device)
        is_read_U.index_fill_(0, routed.positions_K, True)
        return torch.where(is_read_U[:, None], rows_UD, 0.0)

    def of_columns(
        self, values: torch.Tensor, group: RoutedSequences, columns: Sequence[Column]
    ) -> list[Callable[..., JaggedTensor]]:
        # Hot rows of all tables, then cold ones, and a table's own name before one with a suffix.
        names = dict.fromkeys(column.table for column in columns)
        table_of = {hot_name(name): name for name in names} | {name: name for name in names}
        halves: dict[str, list[tuple[int, torch.Tensor]]] = {}
        sizes = group.rows.length_per_key()
        for key, begin, rows in zip(
            group.rows.keys(), accumulate(sizes, initial=0), values.split(sizes), strict=False
        ):
            halves.setdefault(table_of[key], []).append((begin, rows))
        tables = {
            name: found[0][1] if len(found) == 1 else torch.cat([rows for _, rows in found])
            for name, found in halves.items()
        }
        made: list[Callable[..., JaggedTensor]] = []
        positions_F = group.positions_K.split(group.num_ids_F)
        for column, positions_K in zip(columns, positions_F, strict=True):
            (begin, first), *others = halves[column.table]
            row_of_K = positions_K - begin
            for begin_of_cold, _ in others:
                num_hot = first.shape[0]
                is_hot_K = row_of_K < num_hot
                row_of_K = torch.where(is_hot_K, row_of_K, positions_K - (begin_of_cold - num_hot))
            made.append(partial(PackedJaggedTensor, tables[column.table], row_of_K))
        return made


def use_packed_jagged_tensor(collection: EmbeddingCollection) -> EmbeddingCollection:
    """Let ``parallelize`` split this collection into one with packed output.

    Its output then is a ``PackedJaggedTensor`` for each key. The unsharded collection, and one that
    is left to TorchRec (``hot="off"``), still return expanded ones; ``LateLinear`` takes both.

    Returns:
        The collection.

    Raises:
        ValueError: if it is not an ``EmbeddingCollection``.
    """
    if type(collection) is not EmbeddingCollection:
        raise ValueError(
            f"packed output: expected an EmbeddingCollection, got {type(collection).__name__}. "
            "Pass the collection inside the model, before parallelize."
        )
    setattr(collection, _MARK, True)
    return collection


_MARK = "use_packed_jagged_tensor"


def is_packed(collection: nn.Module) -> bool:
    """Whether ``use_packed_jagged_tensor`` was called on a collection."""
    return bool(getattr(collection, _MARK, False))
