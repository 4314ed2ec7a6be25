"""Rows of several tables as rows of one: FBGEMM lays the tables of a module one after the other.

And writing some of them: on CPU numpy does it in less than half the time of torch's ``index_copy_``
(``benchmarks/cpu_rows.py`` measures both).
"""

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
    if not features.keys():  # on a rank without tables
        return rows_K
    lengths_T = features.lengths().view(len(features.keys()), -1).sum(1)
    return rows_K + torch.repeat_interleave(begins_T, lengths_T, output_size=rows_K.numel())


# FBGEMM gives a bag to one warp in forward and to one thread in the row-wise exchange of ids, so
# that the bag of a whole table would be walked serially.
MOST_BAG_IDS = 256


def cut_lengths(lengths_T: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Spread the ids of each table evenly over bags of at most ``MOST_BAG_IDS``.

    Nothing waits for the device: every table gets as many bags as the longest could need.

    Args:
        lengths_T: int (T,), ids of each table.
        num_ids: of all tables.

    Returns:
        int (T, S), lengths of the bags.
    """
    num_bags = max(1, -(-num_ids // MOST_BAG_IDS))
    # The first bags of a table hold one id more than the last ones.
    spare = torch.arange(num_bags - 1, -1, -1, device=lengths_T.device)
    return (lengths_T[:, None] + spare) // num_bags


def cut_bags(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same ids in bags of at most ``MOST_BAG_IDS``, for kernels that do not pool them.

    Args:
        features: jagged (T, S), without weights; a key's ids may be cut anywhere.

    Returns:
        Jagged (T, S'), the same values in the same order.
    """
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
    """Where each of the tables begins when they are laid one after the other; int64 (T,)."""
    rows_T = torch.tensor(num_rows)
    return rows_T.cumsum(0) - rows_T


def put_rows(target_RD: torch.Tensor, rows_U: torch.Tensor, values_UD: torch.Tensor) -> None:
    """target[rows] = values, in place.

    Args:
        target_RD: (R, D), contiguous.
        rows_U: int64 (U,), distinct.
        values_UD: (U, D), of the same type.
    """
    if target_RD.is_cuda:
        target_RD.index_copy_(0, rows_U, values_UD)
    else:
        target_RD.numpy()[rows_U.numpy()] = values_UD.numpy()
