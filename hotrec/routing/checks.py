"""Checks of a batch's features before routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.routing.features import Column


class KeyLengths(NamedTuple):
    """The lengths of one key's bags on the host: their sum, minimum and maximum."""

    num_ids: int
    shortest: int
    longest: int


def check_lengths(features: KeyedJaggedTensor) -> list[KeyLengths]:
    """Return the lengths of each key, with one read from the device.

    Raises:
        ValueError: if there is not one per key and sample, one is negative, their sum is wrong,
            samples share bags, or a type is not an integer's.
    """
    check_types(features)
    check_own_bags(features)
    num_keys, stride, lengths = len(features.keys()), features.stride(), features.lengths()
    fits = lengths.numel() == num_keys * stride
    known = [KeyLengths(0, 0, 0)] * num_keys
    if fits and lengths.numel():
        lengths_FB = lengths.view(num_keys, stride)
        shortest_F, longest_F = torch.aminmax(lengths_FB, dim=1)
        found = torch.stack([lengths_FB.sum(1), shortest_F, longest_F], dim=1).tolist()
        known = [KeyLengths(*of_key) for of_key in found]
    num_values = features.values().numel()
    num_expected = sum(key.num_ids for key in known) if fits else int(lengths.sum())
    if not fits or num_values != num_expected or any(key.shortest < 0 for key in known):
        raise ValueError(
            f"features lengths: expected {num_keys} x {stride} lengths >= 0 that add up to "
            f"{num_values} ids, got {lengths.numel()} lengths that add up to {num_expected}, the "
            f"least {int(lengths.min()) if lengths.numel() else None}. "
            "Check the code that builds the batch."
        )
    return known


def select_features(features: KeyedJaggedTensor, wanted: Sequence[str]) -> KeyedJaggedTensor:
    """Select features in the given order, which may repeat some."""
    keys = features.keys()
    if list(keys) == list(wanted):
        return features
    check_names(features, wanted)
    index = {key: position for position, key in enumerate(keys)}
    return features.permute([index[feature] for feature in wanted])


def check_names(features: KeyedJaggedTensor, wanted: Sequence[str]) -> None:
    """Raise ValueError if a feature is missing."""
    keys = features.keys()
    missing = [feature for feature in wanted if feature not in keys]
    if missing:
        raise ValueError(
            f"features: expected {missing[0]!r} among the batch's features, got {list(keys)}. "
            "Pass the features the collection was built for."
        )


def check_types(features: KeyedJaggedTensor) -> None:
    """Raise ValueError if ids or lengths are of another type than int32 and int64."""
    for what, found in (("ids", features.values()), ("lengths", features.lengths())):
        if found.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"features {list(features.keys())[:8]} {what}: expected int64 or int32, got "
                f"{str(found.dtype).removeprefix('torch.')}. Convert them with .long() where the "
                "batch is built, if they are whole numbers."
            )


def check_own_bags(features: KeyedJaggedTensor) -> None:
    """Raise ValueError if samples share bags, which lookups here do not support."""
    if features.variable_stride_per_key():
        sizes = zip(features.keys(), features.stride_per_key(), strict=True)
        found = f"bags by feature: {dict(list(sizes)[:4])}"
    elif features.inverse_indices_or_none() is not None:
        found = "bags shared by samples (inverse_indices)"
    else:
        return
    raise ValueError(
        f"features: expected a bag of each feature for every sample, got {found}. Repeat shared "
        "bags for every sample."
    )


def declared_weights(features: KeyedJaggedTensor, is_weighted: bool | None) -> torch.Tensor | None:
    """The per-sample weights that a collection reads; see ``Router``.

    Raises:
        ValueError: if there are none and it declares some.
    """
    weights = features.weights_or_none()
    if is_weighted and weights is None:
        raise ValueError(
            "features weights: expected per-sample weights since is_weighted=True, got none. Add "
            "weights to the KeyedJaggedTensor, or build the collection with is_weighted=False."
        )
    return None if is_weighted is False else weights


def check_features(
    features: KeyedJaggedTensor, columns: Sequence[Column], num_rows: Mapping[str, int]
) -> None:
    """Check that features can be looked up, without routing them.

    Args:
        features: The features of a batch.
        columns: The columns to look up.
        num_rows: Rows by table.

    Raises:
        ValueError: if a feature is missing, lengths are wrong, or an id is outside its table.
    """
    of_feature = dict(zip(features.keys(), check_lengths(features), strict=True))
    chosen = select_features(features, [column.feature for column in columns])
    lengths_F = torch.tensor([of_feature[column.feature].num_ids for column in columns])
    num_rows_F = torch.tensor([num_rows[column.table] for column in columns])
    device = chosen.values().device
    check_ids(columns, num_rows_F.to(device), chosen.values(), lengths_F.to(device))


def check_ids(
    columns: Sequence[Column],
    num_rows_F: torch.Tensor,
    rows_K: torch.Tensor,
    lengths_F: torch.Tensor,
) -> None:
    """Raise a ValueError if an id is outside its table."""
    limit_K = torch.repeat_interleave(num_rows_F, lengths_F, output_size=rows_K.numel())
    if ((rows_K < 0) | (rows_K >= limit_K)).any():
        refuse_ids(columns, num_rows_F, rows_K, lengths_F)


def refuse_ids(
    columns: Sequence[Column],
    num_rows_F: torch.Tensor,
    rows_K: torch.Tensor,
    lengths_F: torch.Tensor,
) -> NoReturn:
    """Raise a ValueError that names the first id outside its table; there must be one."""
    is_outside_K = (rows_K < 0) | (rows_K >= torch.repeat_interleave(num_rows_F, lengths_F))
    first = int(is_outside_K.nonzero()[0])
    position = int(torch.searchsorted(lengths_F.cumsum(0), first, right=True))
    column = columns[position]
    raise ValueError(
        f"table {column.table} feature {column.feature}: expected rows in "
        f"0..{int(num_rows_F[position]) - 1}, got {int(rows_K[first])}. "
        "Prepare the data again, or raise the table's num_rows."
    )


def scale_ids(
    weights_K: torch.Tensor | None,
    is_mean_F: torch.Tensor | None,
    lengths_FB: torch.Tensor,
    num_ids: int,
) -> torch.Tensor | None:
    """The factor of each id, float32 (K,) in the features' order; None if all are 1.

    Per-sample weights, whose gradient no exchange computes, and ``find_means`` may be None.
    """
    if weights_K is None:
        if is_mean_F is None:
            return None
        weights_K = torch.ones(num_ids, device=lengths_FB.device)
    elif weights_K.requires_grad:
        raise ValueError(
            "features weights: expected per-sample weights without a gradient, got "
            "requires_grad=True. Detach them, or keep such features in an EmbeddingBagCollection."
        )
    if is_mean_F is None:
        return weights_K.float()
    divisor_FB = torch.where(is_mean_F[:, None], lengths_FB, 1)
    return weights_K.float() / torch.repeat_interleave(
        divisor_FB.view(-1), lengths_FB.reshape(-1), output_size=num_ids
    )
