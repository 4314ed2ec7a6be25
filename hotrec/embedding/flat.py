"""Rows of concatenated tables, as FBGEMM stores the tables of a module."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def flat_rows(features: KeyedJaggedTensor, begins_T: torch.Tensor) -> torch.Tensor:
    """Rows int64 (K,) of the concatenated tables, given one feature (T, S) per table."""
    rows_K = features.values().long()
    if not features.keys():  # on a rank without tables
        return rows_K
    lengths_T = features.lengths().view(len(features.keys()), -1).sum(1)
    return rows_K + torch.repeat_interleave(begins_T, lengths_T, output_size=rows_K.numel())


def table_begins(num_rows: list[int]) -> torch.Tensor:
    """The first row of each of the concatenated tables, int64 (T,)."""
    rows_T = torch.tensor(num_rows)
    return rows_T.cumsum(0) - rows_T


# Number of values above which several cores are faster than one with numpy.
MANY_VALUES = 1 << 18


def put_rows(target_RD: torch.Tensor, rows_U: torch.Tensor | None, values_UD: torch.Tensor) -> None:
    """target[rows] = values, in place, for distinct rows, or None for all in order.

    On one core numpy takes 50% to 90% of the time of ``index_copy_``, which uses several cores
    (cpu_rows.py of benchmarks, commit f7bfb0d5).
    """
    is_shared = torch.get_num_threads() > 1 and values_UD.numel() >= MANY_VALUES
    if rows_U is None:
        target_RD.copy_(values_UD)
    elif target_RD.is_cuda or is_shared:
        target_RD.index_copy_(0, rows_U, values_UD)
    else:
        target_RD.numpy()[rows_U.numpy()] = values_UD.numpy()
