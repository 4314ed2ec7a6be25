"""Owners and positions of cold rows."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.owned_rows import RowOwners, Shard
from hotrec.types import RowOrder

CPU = torch.device("cpu")
NUM_ROWS = {"a": 10, "b": 4}
# Table a row-wise over two ranks, table b whole on rank 1, before its piece of a.
SHARDS = [
    [Shard("a", 0, 6, 0)],
    [Shard("b", 0, 4, 0), Shard("a", 6, 4, 4)],
]


def _rows(hot: list[int], a: list[int], b: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a_hot", "a", "b"],
        values=torch.tensor([*hot, *a, *b], dtype=torch.int64),
        lengths=torch.tensor([len(hot), len(a), len(b)], dtype=torch.int32),
        stride=1,
    )


def test_spread_rows_go_to_the_owners_of_their_stored_rows() -> None:
    orders = {"a": RowOrder(10), "b": RowOrder(4, is_spread=False)}
    owners = RowOwners(["a", "b"], NUM_ROWS, SHARDS, CPU, orders=orders)
    # Rows 0 1 5 9 of a are stored as 0 7 5 3: those below 6 are on rank 0.
    requested = owners.find(_rows([1, 0], [0, 1, 5, 9], [0, 3]), num_hot_keys=1)
    assert requested.num_to_W is not None
    assert requested.order_U is not None
    assert requested.num_to_W.tolist() == [3, 3]
    assert requested.order_U.tolist() == [0, 2, 3, 1, 4, 5]
    assert requested.positions_U.tolist() == [0, 5, 3, 5, 0, 3]
    nothing = owners.find(_rows([3], [], []), num_hot_keys=1)
    assert nothing.num_to_W is not None
    assert nothing.num_to_W.tolist() == [0, 0]
    assert nothing.positions_U.numel() == 0


@pytest.mark.parametrize(
    "shards",
    [SHARDS[:1], SHARDS[1:], [*SHARDS, [Shard("b", 2, 2, 0)]]],
)
def test_rows_without_one_owner_are_refused(shards: list[list[Shard]]) -> None:
    with pytest.raises(RuntimeError, match="expected each of 14 rows on exactly one rank"):
        RowOwners(["a", "b"], NUM_ROWS, shards, CPU)
