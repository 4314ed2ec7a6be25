"""Reads tables as of one moment while training updates them.

Code that updates rows in place must call ``keep`` first: rows that have not been read yet are
copied, and a reader gets the copies. Besides the tables this needs memory only for the rows that
were updated since, until their tensor has been read, and a byte for each row. Unwatched memory must
be copied immediately.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)

# Bytes that are copied while updates wait.
_PIECE_BYTES = 4 << 20
_TAKEN: list[Snapshot] = []


def keep(value: torch.Tensor, rows: torch.Tensor) -> None:
    """Mark rows int64 (K,) of a tensor, in any order, before they are updated."""
    for snapshot in _TAKEN:
        snapshot.keep(value, rows)


class Snapshot:
    """The values of host tensors at construction, until ``close``.

    Args:
        watched: Tensors (R, ...) or (R,), each contiguous, whose updates are marked with ``keep``.
        modules: FBGEMM's modules on CPU whose tables and states are also watched. Their updates
            follow a lookup of the same rows, at which they are kept.
    """

    def __init__(
        self,
        watched: Iterable[torch.Tensor],
        modules: Iterable[SplitTableBatchedEmbeddingBagsCodegen] = (),
    ) -> None:
        self._lock = threading.Lock()
        self._tables = [_Watched(value) for value in watched]
        self._hooks = []
        for module in modules:
            of_tables = [
                [_Watched(weights), *map(_Watched, states)]
                for weights, states in zip(
                    module.split_embedding_weights(),
                    module.split_optimizer_states() or [()] * len(module.embedding_specs),
                    strict=True,
                )
            ]
            self._tables += [one for of_table in of_tables for one in of_table]
            self._hooks.append(
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, of_tables=of_tables: self._keep_looked_up(
                        module, of_tables, *args, **kwargs
                    ),
                    with_kwargs=True,
                )
            )
        _TAKEN.append(self)

    def close(self) -> None:
        """Stop watching; reads are no longer possible."""
        if self in _TAKEN:
            _TAKEN.remove(self)
        for hook in self._hooks:
            hook.remove()
        self._tables = []

    def watches(self, value: torch.Tensor) -> bool:
        """Whether a tensor, or the tensor of which it is a range of rows, is watched."""
        return self._find(value) is not None

    def read(self, value: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Copy rows ``begin`` to ``end`` of a watched tensor as they were; by any thread."""
        found = self._find(value)
        assert found is not None, "a tensor that is not watched"
        table, first = found
        out = torch.empty_like(value[begin:end])
        step = max(1, _PIECE_BYTES // max(1, table.row_bytes))
        for low in range(begin, end, step):
            high = min(low + step, end)
            self._read_piece(table, first + low, out[low - begin : high - begin])
        return out

    def _read_piece(self, table: _Watched, begin: int, out: torch.Tensor) -> None:
        """Copy rows from ``begin`` into ``out``."""
        end = begin + len(out)
        with self._lock:
            out[:] = table.value[begin:end]
            kept = table.mark_read(begin, end)
        for rows, values in kept:
            out[rows - begin] = values

    def read_rows(self, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Copy rows int64 (K,) of a watched tensor, each once, as they were; by any thread."""
        found = self._find(value)
        assert found is not None, "a tensor that is not watched"
        table, first = found
        out = value.new_empty((len(rows), *value.shape[1:]))
        step = max(1, _PIECE_BYTES // max(1, table.row_bytes))
        for some, to in zip((rows + first).split(step), out.split(step), strict=True):
            self._read_rows(table, some, to)
        return out

    def _read_rows(self, table: _Watched, rows: torch.Tensor, out: torch.Tensor) -> None:
        with self._lock:
            out[:] = table.value[rows]
            kept = table.mark_rows_read(rows)
        for places, values in kept:
            out[places] = values

    def keep(self, value: torch.Tensor, rows: torch.Tensor) -> None:
        """See the function ``keep``."""
        found = self._find(value)
        if found is not None:
            self._keep(found[0], rows + found[1])

    def _keep(self, table: _Watched, rows: torch.Tensor) -> None:
        with self._lock:
            table.keep(rows)

    def _find(self, value: torch.Tensor) -> tuple[_Watched, int] | None:
        """What is watched of a tensor's memory, and the row at which the tensor begins in it."""
        for table in self._tables:
            at = value.data_ptr() - table.begin
            is_inside = at >= 0 and at + value.nbytes <= table.num_bytes and value.numel() > 0
            if is_inside and value.is_contiguous() and value[:1].nbytes == table.row_bytes:
                return table, at // table.row_bytes
        return None

    def _keep_looked_up(
        self,
        module: SplitTableBatchedEmbeddingBagsCodegen,
        of_tables: list[list[_Watched]],
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        feature_requires_grad: torch.Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        **_: object,
    ) -> None:
        if not torch.is_grad_enabled():
            return
        features = module.feature_table_map
        num_bags = [(offsets.numel() - 1) // len(features)] * len(features)
        if batch_size_per_feature_per_rank is not None:
            num_bags = [sum(sizes) for sizes in batch_size_per_feature_per_rank]
        cuts = offsets[torch.tensor([0, *num_bags]).cumsum(0)].tolist()
        for at, low, high in zip(features, cuts, cuts[1:], strict=False):
            rows = indices[low:high].long().unique()
            num_rows = of_tables[at][0].value.shape[0]
            # FBGEMM reads row 0 for ids that do not exist.
            rows = torch.where((rows >= 0) & (rows < num_rows), rows, 0)
            for table in of_tables[at]:
                self._keep(table, rows)


class _Watched:
    """A tensor whose rows are read once, each before or after it is updated."""

    def __init__(self, value: torch.Tensor) -> None:
        assert value.is_contiguous()
        assert not value.is_cuda
        self.value = value.detach()
        self.begin, self.num_bytes = value.data_ptr(), value.nbytes
        self.row_bytes = value[:1].nbytes
        # For each row, whether it was read or kept.
        self._is_done = torch.zeros(len(value), dtype=torch.bool)
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_unread = len(value)

    def keep(self, rows: torch.Tensor) -> None:
        rows = rows[~self._is_done[rows]]
        if rows.numel():
            rows = rows.sort().values
            self._kept.append((rows, self.value[rows]))
            self._is_done[rows] = True

    def mark_read(self, begin: int, end: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Mark rows as read; those of them that were kept, with their values."""
        self._is_done[begin:end] = True
        bounds, found = torch.tensor([begin, end]), []
        for rows, values in self._kept:
            low, high = torch.searchsorted(rows, bounds).tolist()
            if low < high:
                found.append((rows[low:high], values[low:high]))
        self._count_read(end - begin)
        return found

    def mark_rows_read(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Mark rows as read; the places among them of those that were kept, with their values."""
        places = self._is_done[rows].nonzero()[:, 0]
        self._is_done[rows] = True
        found = []
        for kept_rows, values in self._kept if places.numel() else ():
            at = torch.searchsorted(kept_rows, rows[places]).clamp_(max=len(kept_rows) - 1)
            is_here = kept_rows[at] == rows[places]
            found.append((places[is_here], values[at[is_here]]))
        self._count_read(len(rows))
        return found

    def _count_read(self, num_rows: int) -> None:
        self._num_unread -= num_rows
        if self._num_unread == 0:
            self._kept.clear()
