"""Rows of several tables as rows of one: FBGEMM lays the tables of a module one after the other."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def flat_rows(features: KeyedJaggedTensor, begins_T: torch.Tensor) -> torch.Tensor:
    """Rows of tables laid one after the other.

    Args:
        features: (T, S) one feature per table, values are rows of the table.
        begins_T: int64 (T,), where each table begins.

    Returns:
        int64 (K,), rows of the concatenated tables.
    """
    rows_K = features.values().long()
    lengths_T = features.lengths().view(len(features.keys()), -1).sum(1)
    return rows_K + torch.repeat_interleave(begins_T, lengths_T, output_size=rows_K.numel())


def table_begins(num_rows: list[int]) -> torch.Tensor:
    """Where each of the tables begins when they are laid one after the other; int64 (T,)."""
    rows_T = torch.tensor(num_rows)
    return rows_T.cumsum(0) - rows_T
