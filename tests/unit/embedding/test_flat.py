"""Bags that are cut for kernels that take a bag one id after the other."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.flat import MAX_BAG_IDS, cut_bags


@pytest.mark.parametrize(
    ("stride", "lengths"),
    [
        (1, [0, 0]),
        (1, [3, 1]),
        (1, [5 * MAX_BAG_IDS + 1, 0]),
        (1, [0, 1, 40 * MAX_BAG_IDS - 1, 2]),
        (3, [700, 0, 2, 1, 1, 900]),
    ],
)
def test_bags_are_short_and_keys_keep_their_ids(stride: int, lengths: list[int]) -> None:
    num_keys = len(lengths) // stride
    ids = KeyedJaggedTensor(
        keys=[f"t{key}" for key in range(num_keys)],
        values=torch.arange(sum(lengths)),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        stride=stride,
    )
    cut = cut_bags(ids)
    assert int(cut.lengths().max()) <= MAX_BAG_IDS
    assert int(cut.lengths().min()) >= 0
    assert cut.lengths().dtype == torch.int32
    assert cut.values() is ids.values()
    assert cut.keys() == ids.keys()
    assert cut.length_per_key() == ids.length_per_key()
    of_keys = cut.lengths().view(num_keys, cut.stride()).sum(1).tolist()
    assert of_keys == ids.length_per_key()
