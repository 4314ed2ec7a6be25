"""Rows of concatenated tables, as FBGEMM stores the tables of a module, and bags of their ids."""

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


# FBGEMM processes a bag with one warp in forward and one thread in the row-wise exchange of ids, so
# a whole table in one bag would be serial.
MAX_BAG_IDS = 256


def cut_lengths(lengths_T: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Spread the ids of each table evenly over bags of at most ``MAX_BAG_IDS``.

    To avoid waiting for the device, every table gets the number of bags for all ``num_ids`` ids.

    Returns:
        The lengths of the bags, int (T, S).
    """
    num_bags = max(1, -(-num_ids // MAX_BAG_IDS))
    # The first bags of a table may have one id more than the last ones.
    spare = torch.arange(num_bags - 1, -1, -1, device=lengths_T.device)
    return (lengths_T[:, None] + spare) // num_bags


def cut_bags(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Split ids, jagged (T, S), into bags of at most ``MAX_BAG_IDS``; without pooling."""
    if not features.keys():  # on a rank without tables
        return features
    lengths_T = features.lengths().view(len(features.keys()), -1).sum(1)
    lengths = cut_lengths(lengths_T, features.values().numel())
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=lengths.view(-1).to(features.lengths().dtype),
        stride=lengths.shape[1],
        length_per_key=features.length_per_key_or_none(),
    )


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
