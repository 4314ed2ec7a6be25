"""How evenly the owners of rows are loaded if ids follow popularity."""

from __future__ import annotations

import numpy as np
import pytest

from hotrec.types import RowOrder

BATCH_SIZE = 2048
# A prime, a round number, and one that is a multiple of every number of ranks.
NUM_ROWS = {"a": 1_000_003, "b": 500_000, "c": 1 << 18}


def most_over_mean(num_ranks: int, skew: float, num_hot: int, *, is_spread: bool) -> float:
    """Distinct rows that the busiest owner serves in a step, over those of the mean owner.

    TorchRec's shards are blocks; id r is read in proportion to 1 / (r + 1) ** skew.
    """
    rng, served = np.random.default_rng(num_ranks), np.zeros(num_ranks)
    for table, num_rows in NUM_ROWS.items():
        cumulated = np.cumsum(np.arange(1, num_rows + 1) ** -skew)
        order = RowOrder(num_rows, is_spread, table)
        for _ in range(num_ranks):
            drawn = rng.random(BATCH_SIZE) * cumulated[-1]
            rows = np.unique(np.searchsorted(cumulated, drawn))
            owners = order.stored(rows[rows >= num_hot]) // -(-num_rows // num_ranks)
            served += np.bincount(owners, minlength=num_ranks)
    return float(served.max() / served.mean())


@pytest.mark.parametrize("skew", [1.05, 1.2])
@pytest.mark.parametrize("num_hot", [0, 1000])
@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_owners_of_spread_rows_are_evenly_loaded(num_ranks: int, num_hot: int, skew: float) -> None:
    assert most_over_mean(num_ranks, skew, num_hot, is_spread=True) <= 1.1
    # A third of the rows that are read, or more, are in the first of the blocks.
    assert most_over_mean(num_ranks, skew, num_hot, is_spread=False) > num_ranks / 3
