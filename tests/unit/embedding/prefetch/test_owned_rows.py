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


@pytest.mark.parametrize(
    ("shards", "rows", "num_to_W", "order_U", "positions_U"),
    [
        # Of the cold rows a0 a5 a6 a9 b0 b3: rank 0 owns the first two.
        (SHARDS, ([1, 0], [0, 5, 6, 9], [0, 3]), [2, 4], [0, 1, 2, 3, 4, 5], [0, 5, 4, 7, 0, 3]),
        (SHARDS[::-1], ([], [2, 7], [1]), [2, 1], [1, 2, 0], [5, 1, 2]),
        (SHARDS, ([3], [], []), [0, 0], [], []),
    ],
)
def test_rows_go_to_their_owners(
    shards: list[list[Shard]],
    rows: tuple[list[int], list[int], list[int]],
    num_to_W: list[int],
    order_U: list[int],
    positions_U: list[int],
) -> None:
    requested = RowOwners(["a", "b"], NUM_ROWS, shards, CPU).find(_rows(*rows), num_hot_keys=1)
    assert requested.num_to_W is not None
    assert requested.order_U is not None
    assert requested.num_to_W.tolist() == num_to_W
    assert requested.order_U.tolist() == order_U
    assert requested.positions_U.tolist() == positions_U


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


@pytest.mark.parametrize(("num_more", "sent_type"), [(0, torch.int32), (1, torch.int64)])
def test_positions_are_sent_as_int32_where_all_ranks_rows_fit(
    num_more: int, sent_type: torch.dtype
) -> None:
    num_rows = {"a": (1 << 31) - 10 + num_more, "b": 10}
    shards = [[Shard("a", 0, num_rows["a"], 0), Shard("b", 0, 10, num_rows["a"])], []]
    last = KeyedJaggedTensor(["a", "b"], torch.tensor([9]), lengths=torch.tensor([0, 1]))
    requested = RowOwners(["a", "b"], num_rows, shards, CPU).find(last, 0)
    assert requested.positions_U.dtype is sent_type
    assert requested.positions_U.tolist() == [(1 << 31) - 1 + num_more]
