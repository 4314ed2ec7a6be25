"""Owners and positions of cold rows."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.prefetch.owned_rows import RowOwners, Shard

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


def test_rows_go_to_their_owners() -> None:
    owners = RowOwners(["a", "b"], NUM_ROWS, SHARDS, CPU)
    requested = owners.find(_rows([1, 0], [0, 5, 6, 9], [0, 3]), num_hot_keys=1)
    assert requested.num_to_W.tolist() == [2, 4]
    # Of the cold rows a0 a5 a6 a9 b0 b3: rank 0 owns the first two.
    assert requested.order_U.tolist() == [0, 1, 2, 3, 4, 5]
    assert requested.positions_U.tolist() == [0, 5, 4, 7, 0, 3]


def test_order_is_by_owner() -> None:
    shards = [SHARDS[1], SHARDS[0]]
    requested = RowOwners(["a", "b"], NUM_ROWS, shards, CPU).find(_rows([], [2, 7], [1]), 1)
    assert requested.num_to_W.tolist() == [2, 1]
    assert requested.order_U.tolist() == [1, 2, 0]
    assert requested.positions_U.tolist() == [5, 1, 2]


def test_no_rows() -> None:
    requested = RowOwners(["a", "b"], NUM_ROWS, SHARDS, CPU).find(_rows([3], [], []), 1)
    assert requested.num_to_W.tolist() == [0, 0]
    assert requested.order_U.numel() == requested.positions_U.numel() == 0


@pytest.mark.parametrize("missing", [0, 1])
def test_rows_without_an_owner_are_refused(missing: int) -> None:
    shards = [[] if rank == missing else of_rank for rank, of_rank in enumerate(SHARDS)]
    with pytest.raises(RuntimeError, match="expected each of 14 rows on one rank"):
        RowOwners(["a", "b"], NUM_ROWS, shards, CPU)


def test_rows_with_two_owners_are_refused() -> None:
    with pytest.raises(RuntimeError, match="overlap"):
        RowOwners(["a", "b"], NUM_ROWS, [*SHARDS, [Shard("b", 2, 2, 0)]], CPU)
