"""How evenly the owners of rows are loaded if ids follow popularity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.owned_rows import RowOwners, Shard
from hotrec.routing.features import Column
from hotrec.routing.router import Router
from hotrec.row_order import RowOrder
from hotrec.types import Partition

BATCH_SIZE = 2048
# A prime, a round number, and one that is a multiple of every number of ranks.
NUM_ROWS = {"a": 1_000_003, "b": 500_000, "c": 1 << 18}
CPU = torch.device("cpu")


def most_over_mean(num_ranks: int, skew: float, num_hot: int, *, is_spread: bool) -> float:
    """The rows that the busiest owner serves in a step, over those of the mean owner."""
    rng = np.random.default_rng(num_ranks)
    hot = {table: np.arange(num_hot) for table in NUM_ROWS}
    partition = Partition(NUM_ROWS, hot if num_hot else {})
    columns = [Column(table, table, table, is_mean=False) for table in NUM_ROWS]
    [group] = (router := Router({8: columns}, partition)).groups.values()
    orders = {table: RowOrder(rows, is_spread, table) for table, rows in NUM_ROWS.items()}
    shards: list[list[Shard]] = []
    for rank in range(num_ranks):
        held, position = [], 0
        for table, rows in NUM_ROWS.items():
            size = -(-rows // num_ranks)
            first = min(rank * size, rows)
            held.append(Shard(table, first, min(size, rows - first), position))
            position += held[-1].num_rows
        shards.append(held)
    owners = RowOwners(list(group.cold_tables), NUM_ROWS, shards, CPU, orders=orders)
    served_W = torch.zeros(num_ranks, dtype=torch.int64)
    for _ in range(num_ranks):  # the batch of each
        ids = [draw_by_popularity(rng, rows, skew) for rows in NUM_ROWS.values()]
        lengths = torch.ones(len(ids) * BATCH_SIZE, dtype=torch.int32)
        routed = router(KeyedJaggedTensor(list(NUM_ROWS), torch.cat(ids), lengths=lengths))
        rows = routed.groups[0].rows
        num_to_W = owners.find(rows, len(group.hot_tables)).num_to_W
        assert num_to_W is not None
        served_W += num_to_W
    return float(served_W.max() / served_W.float().mean())


def draw_by_popularity(rng: np.random.Generator, num_rows: int, skew: float) -> torch.Tensor:
    """Ids of a batch; id r is read in proportion to 1 / (r + 1) ** skew."""
    cumulated = np.cumsum(np.arange(1, num_rows + 1) ** -skew)
    drawn = np.searchsorted(cumulated, rng.random(BATCH_SIZE) * cumulated[-1])
    return torch.from_numpy(drawn)


@pytest.mark.parametrize("skew", [1.05, 1.2])
@pytest.mark.parametrize("num_hot", [0, 1000])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16, 32, 64])
def test_owners_of_spread_rows_are_evenly_loaded(num_ranks: int, num_hot: int, skew: float) -> None:
    spread = most_over_mean(num_ranks, skew, num_hot, is_spread=True)
    ordered = most_over_mean(num_ranks, skew, num_hot, is_spread=False)
    print(f"{num_ranks} ranks, {num_hot} hot, skew {skew}: {ordered:.2f} -> {spread:.3f}")
    assert spread <= 1.1
    assert ordered > 1.2
