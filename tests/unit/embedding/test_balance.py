"""The shares of the ranks: every row once, and evenly loaded if ids follow popularity."""

from __future__ import annotations

import numpy as np
import pytest

from hotrec.types import RowShares

BATCH_SIZE = 2048
# A prime, a round number, and one that is a multiple of every number of ranks.
NUM_ROWS = {"a": 1_000_003, "b": 500_000, "c": 1 << 18}


@pytest.mark.parametrize("skew", [1.05, 1.2])
@pytest.mark.parametrize("num_hot", [0, 1000])
@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_owners_are_evenly_loaded(num_ranks: int, num_hot: int, skew: float) -> None:
    """Id r is read in proportion to 1 / (r + 1) ** skew."""
    rng, served = np.random.default_rng(num_ranks), np.zeros(num_ranks)
    for table, num_rows in NUM_ROWS.items():
        cumulated = np.cumsum(np.arange(1, num_rows + 1) ** -skew)
        for _ in range(num_ranks):
            drawn = rng.random(BATCH_SIZE) * cumulated[-1]
            rows = np.unique(np.searchsorted(cumulated, drawn))
            owners = RowShares(table, num_ranks).owners(rows[rows >= num_hot])
            served += np.bincount(owners, minlength=num_ranks)
    assert served.max() <= 1.1 * served.mean()


@pytest.mark.parametrize("num_rows", [1, 2, 7, 40])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_row_has_one_place(num_ranks: int, num_rows: int) -> None:
    for table in "abcdefg":
        share, found = RowShares(table, num_ranks), []
        for rank in range(num_ranks):
            rows = np.array(share.rows_of(rank, num_rows), np.int64)
            assert (share.owners(rows) == rank).all()
            places = share.places(rows)
            assert (np.diff(places) == 1).all()
            assert ((places >= 0) & (places < share.num_places(num_rows))).all()
            found += rows.tolist()
        assert sorted(found) == [*range(num_rows)]


def test_the_first_rows_of_tables_have_many_owners() -> None:
    assert {RowShares(f"C{at}", 4).shift for at in range(26)} == {0, 1, 2, 3}
    assert RowShares("C1", 1).shift == 0
