"""Each row has one owner."""

from __future__ import annotations

import pytest
import torch

from hotrec.embedding.owned_rows import RowOwners, Shard

CPU = torch.device("cpu")
NUM_ROWS = {"a": 10, "b": 4}
# Table a row-wise over two ranks, table b whole on rank 1, before its piece of a.
SHARDS = [
    [Shard("a", 0, 6, 0)],
    [Shard("b", 0, 4, 0), Shard("a", 6, 4, 4)],
]


@pytest.mark.parametrize(
    "shards",
    [SHARDS[:1], SHARDS[1:], [*SHARDS, [Shard("b", 2, 2, 0)]]],
)
def test_rows_without_one_owner_are_refused(shards: list[list[Shard]]) -> None:
    with pytest.raises(RuntimeError, match="14 rows"):
        RowOwners(["a", "b"], NUM_ROWS, shards, CPU)
