"""What a batch's features have to be, checked before they are routed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.routing.features import Column


def check_lengths(features: KeyedJaggedTensor) -> None:
    """Refuse lengths that do not describe the values.

    Raises:
        ValueError: if they are not one per key and sample, negative, or add up otherwise.
    """
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


def check_ids(
    columns: Sequence[Column],
    num_rows_F: torch.Tensor,
    rows_K: torch.Tensor,
    limit_K: torch.Tensor,
    lengths_F: torch.Tensor,
) -> None:
    """Refuse ids outside their tables.

    Args:
        columns: F columns.
        num_rows_F: int64 (F,), rows of the table of each column.
        rows_K: int64 (K,), ids, column by column.
        limit_K: int64 (K,), the value of ``num_rows_F`` for each id.
        lengths_F: int64 (F,), ids of each column.

    Raises:
        ValueError: naming the first such id.
    """
    is_outside = (rows_K < 0) | (rows_K >= limit_K)
    if not is_outside.any():
        return
    first = int(is_outside.nonzero()[0])
    position = int(torch.searchsorted(lengths_F.cumsum(0), first, right=True))
    column = columns[position]
    raise ValueError(
        f"table {column.table} feature {column.feature}: expected rows in "
        f"0..{int(num_rows_F[position]) - 1}, got {int(rows_K[first])}. "
        "Prepare the data again, or raise the table's num_rows."
    )


def check_weights(weights_K: torch.Tensor) -> torch.Tensor:
    """Per-sample weights as float32.

    Raises:
        ValueError: if they want a gradient, which neither exchange gives.
    """
    if weights_K.requires_grad:
        raise ValueError(
            "features weights: expected per-sample weights without a gradient, got "
            "requires_grad=True. Detach them, or keep such features in an "
            "EmbeddingBagCollection."
        )
    return weights_K.float()
