"""Replayed slots against the best that is possible, and against the rows that a sample leaves."""

from __future__ import annotations

import numpy as np
import pytest

from hotrec.assemble.replay import Stream, draw_stream, number_popular, replay, sample_rows
from hotrec.bench.samples import ZipfTables
from hotrec.types import POPULAR_ROW, PopularRows


def make_popular(rows: np.ndarray, counts: np.ndarray) -> PopularRows:
    popular = np.empty(rows.size, POPULAR_ROW)
    popular["row"], popular["prob"] = rows, counts[rows] / counts.sum()
    return popular


@pytest.mark.parametrize("exponent", [0.8, 1.2])
def test_a_sample_of_the_rows_predicts_the_misses_of_all(exponent: float) -> None:
    num_rows, num_batches, batch = 20_000, 60, 512
    samples = ZipfTables([num_rows] * 4, exponent=exponent, num_dense=0, seed=1)
    counts = np.concatenate(list(samples.count(20_000_000).values()))
    rows = []
    for read in samples.stream(num_batches, batch_size=batch, rank=0, world_size=1):
        ids = read.sparse.values().numpy() + np.repeat(np.arange(4) * num_rows, batch)
        rows.append(np.unique(ids))
    stream = Stream(rows, counts)
    numbers = sample_rows(counts, 4)
    assert abs(counts[numbers >= 0].sum() / counts.sum() - 1 / 4) < 0.02
    drawn = draw_stream(counts, numbers, 4, num_ids=4 * batch, num_batches=num_batches)
    for frac in (0.1, 0.3):
        size = int(frac * counts.size)
        popular = make_popular(np.argsort(-counts)[:size], batch * counts)
        by_table = {"all": popular}
        of_sample = number_popular(by_table, {"all": counts}, numbers)
        whole, sampled = (
            replay(of, size, 20, depth=1, window=8, popular=first)
            for of, first in ((stream, popular), (drawn, of_sample))
        )
        assert whole is not None
        assert sampled is not None
        assert sampled.row_hit_frac == pytest.approx(whole.row_hit_frac, abs=0.01)
        assert sampled.num_in == pytest.approx(whole.num_in, rel=0.05)
        assert sampled.num_out == pytest.approx(whole.num_out, rel=0.05)
