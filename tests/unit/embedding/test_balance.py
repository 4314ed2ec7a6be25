"""How evenly the owners of rows are loaded if ids follow popularity."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.owned_rows import RowOwners, Shard
from hotrec.routing.features import Column
from hotrec.routing.router import Router
from hotrec.types import Partition, RowOrder

BATCH_SIZE = 2048
# A prime, a round number, and one that is a multiple of every number of ranks.
NUM_ROWS = {"a": 1_000_003, "b": 500_000, "c": 1 << 18}
CPU = torch.device("cpu")


def most_over_mean(num_ranks: int, skew: float, num_hot: int) -> list[float]:
    """The rows that the busiest owner serves in a step, over those of the mean owner.

    Without and with spread rows.
    """
    rng = np.random.default_rng(num_ranks)
    hot = {table: np.arange(num_hot) for table in NUM_ROWS}
    columns = [Column(table, table, table, is_mean=False) for table in NUM_ROWS]
    router = Router({8: columns}, Partition(NUM_ROWS, hot if num_hot else {}))
    group = router.groups[8]
    both = [
        RowOwners(
            list(group.cold_tables),
            NUM_ROWS,
            shards_of(num_ranks),
            CPU,
            orders={name: RowOrder(rows, is_spread, name) for name, rows in NUM_ROWS.items()},
        )
        for is_spread in (False, True)
    ]
    served = torch.zeros(2, num_ranks)
    for _ in range(num_ranks):  # the batch of each
        ids = [draw_by_popularity(rng, rows, skew) for rows in NUM_ROWS.values()]
        lengths = torch.ones(len(ids) * BATCH_SIZE, dtype=torch.int32)
        routed = router(KeyedJaggedTensor(list(NUM_ROWS), torch.cat(ids), lengths=lengths))
        for at, owners in enumerate(both):
            num_to_W = owners.find(routed.groups[0].rows, len(group.hot_tables)).num_to_W
            assert num_to_W is not None
            served[at] += num_to_W
    most: list[float] = (served.amax(1) / served.mean(1)).tolist()
    return most


def shards_of(num_ranks: int) -> list[list[Shard]]:
    """TorchRec's row-wise shards: blocks of consecutive rows."""
    shards: list[list[Shard]] = []
    for rank in range(num_ranks):
        held, position = [], 0
        for table, rows in NUM_ROWS.items():
            size = -(-rows // num_ranks)
            first = min(rank * size, rows)
            held.append(Shard(table, first, min(size, rows - first), position))
            position += held[-1].num_rows
        shards.append(held)
    return shards


@cache
def cumulated(num_rows: int, skew: float) -> npt.NDArray[np.float64]:
    total: npt.NDArray[np.float64] = np.cumsum(np.arange(1, num_rows + 1) ** -skew)
    return total / total[-1]


def draw_by_popularity(rng: np.random.Generator, num_rows: int, skew: float) -> torch.Tensor:
    """Ids of a batch; id r is read in proportion to 1 / (r + 1) ** skew."""
    return torch.from_numpy(np.searchsorted(cumulated(num_rows, skew), rng.random(BATCH_SIZE)))


@pytest.mark.parametrize("skew", [1.05, 1.2])
@pytest.mark.parametrize("num_hot", [0, 1000])
@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_owners_of_spread_rows_are_evenly_loaded(num_ranks: int, num_hot: int, skew: float) -> None:
    ordered, spread = most_over_mean(num_ranks, skew, num_hot)
    assert spread <= 1.1
    # A third of the rows that are read, or more, are in the first of the blocks.
    assert ordered > num_ranks / 3
