"""Replayed caches against plain loops over single rows."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from hotrec.assemble.replay import (
    LOOK_AHEAD,
    POLICIES,
    RANKINGS,
    Replayed,
    Stream,
    draw_stream,
    number_popular,
    replay,
    sample_rows,
    sampling_step,
)
from hotrec.bench.samples import ZipfTables
from hotrec.types import POPULAR_ROW, PopularRows

NUM_ROWS, NUM_BATCHES = 60, 40


def make_stream(seed: int = 0) -> Stream:
    rng = np.random.default_rng(seed)
    rows, lookups, counts = [], [], np.zeros(NUM_ROWS, np.int64)
    for _ in range(NUM_BATCHES):
        ids = (rng.random(rng.integers(3, 12)) ** 3 * NUM_ROWS).astype(np.int64)
        distinct, times = np.unique(ids, return_counts=True)
        counts[distinct] += times
        rows.append(distinct)
        lookups.append(times)
    return Stream(rows, lookups, counts)


def make_popular(rows: np.ndarray, counts: np.ndarray) -> PopularRows:
    popular = np.empty(rows.size, POPULAR_ROW)
    popular["row"], popular["prob"] = rows, counts[rows] / counts.sum()
    return popular


NOTHING = make_popular(np.empty(0, np.int64), np.ones(1))


def run(
    stream: Stream, policy: str, num_slots: int, num_skipped: int = 0, depth: int = 1
) -> Replayed | None:
    popular = make_popular(np.argsort(-stream.counts)[: num_slots // 4], stream.counts)
    return replay(stream, policy, num_slots, num_skipped, depth=depth, window=0, popular=popular)


@pytest.mark.parametrize("num_slots", [12, 20, 60])
@pytest.mark.parametrize("num_skipped", [0, 10])
def test_lru_is_a_queue_of_rows(num_slots: int, num_skipped: int) -> None:
    stream = make_stream()
    queue: OrderedDict[int, None] = OrderedDict()
    num_missing = num_hits = num_lookups = num_rows = 0
    for number, (rows, lookups) in enumerate(zip(stream.rows, stream.lookups, strict=True)):
        is_counted = number >= num_skipped
        for row, times in zip(rows.tolist(), lookups.tolist(), strict=True):
            num_rows += is_counted
            num_lookups += times * is_counted
            num_hits += times * (row in queue and is_counted)
            num_missing += row not in queue and is_counted
        for row in rows.tolist():
            queue[row] = None
            queue.move_to_end(row)
        while len(queue) > num_slots:
            queue.popitem(last=False)
    found = run(stream, "lru", num_slots, num_skipped)
    assert found is not None
    assert found.num_in == pytest.approx(num_missing / (NUM_BATCHES - num_skipped))
    assert found.lookup_hit_frac == pytest.approx(num_hits / num_lookups)
    assert found.row_hit_frac == pytest.approx(1 - num_missing / num_rows)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_slots", [22, 30, 45])
def test_no_policy_moves_fewer_rows_than_belady(seed: int, num_slots: int) -> None:
    stream = make_stream(seed)
    found = {policy: run(stream, policy, num_slots) for policy in RANKINGS}
    least = found["belady"]
    assert least is not None
    assert all(one is not None and one.num_in >= least.num_in for one in found.values())
    # Rows that came in and did not leave are still there.
    for one in found.values():
        assert one is not None
        assert 0 <= NUM_BATCHES * (one.num_in - one.num_out) <= num_slots + 1e-9


@pytest.mark.parametrize("num_slots", [22, 30, 45])
def test_look_ahead_that_knows_all_batches_moves_as_few_rows_as_belady(
    num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotrec.embedding.slots.EXAMINED", NUM_ROWS)  # all slots
    stream = make_stream()
    least = run(stream, "belady", num_slots)
    assert least is not None
    moved = []
    for window in (0, 1, 4, NUM_BATCHES):
        found = replay(stream, LOOK_AHEAD, num_slots, 0, depth=0, window=window, popular=NOTHING)
        assert found is not None
        moved.append(found.num_in)
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == pytest.approx(least.num_in)


def test_with_slots_for_all_rows_each_is_fetched_once() -> None:
    stream = make_stream()
    num_read = np.unique(np.concatenate(stream.rows)).size
    for policy in POLICIES:
        found = run(stream, policy, NUM_ROWS)
        assert found is not None
        num_first = 0 if policy in RANKINGS else NUM_ROWS // 4  # there from the start
        assert found.num_in * NUM_BATCHES == pytest.approx(num_read - num_first)
        assert found.num_out == 0


def test_fewer_slots_than_a_batch_reads_are_no_cache() -> None:
    stream = make_stream()
    most = max(rows.size for rows in stream.rows)
    assert all(run(stream, policy, most - 1) is None for policy in POLICIES)


def test_rows_of_batches_in_flight_stay_also_where_the_window_is_known() -> None:
    """Four batches of two rows each: with two in flight each needs all slots but one."""
    rows = [np.array(pair) for pair in ((0, 1), (2, 3), (0, 4), (2, 3))]
    stream = Stream(rows, [np.ones(2, np.int64)] * 4, np.array([9, 1, 5, 5, 1]))
    assert replay(stream, LOOK_AHEAD, 3, 0, depth=1, window=2, popular=NOTHING) is None
    found = replay(stream, LOOK_AHEAD, 4, 0, depth=1, window=2, popular=NOTHING)
    assert found is not None
    # Only row 1, of the first batch, may leave for row 4.
    assert (4 * found.num_in, 4 * found.num_out) == (5, 1)


@pytest.mark.parametrize("exponent", [0.8, 1.2])
def test_a_sample_of_the_rows_predicts_the_misses_of_all(exponent: float) -> None:
    num_rows, num_batches, batch = 20_000, 60, 512
    samples = ZipfTables([num_rows] * 4, exponent=exponent, num_dense=0, seed=1)
    counts = np.concatenate(list(samples.count(20_000_000).values()))
    rows, lookups = [], []
    for read in samples.stream(num_batches, batch_size=batch, rank=0, world_size=1):
        ids = read.sparse.values().numpy() + np.repeat(np.arange(4) * num_rows, batch)
        distinct, times = np.unique(ids, return_counts=True)
        rows.append(distinct)
        lookups.append(times)
    stream = Stream(rows, lookups, counts)
    numbers = sample_rows(counts, 4)
    sampled = stream.sample(numbers, 4)
    assert abs(sampled.counts.sum() / counts.sum() - 1 / 4) < 0.02
    drawn = draw_stream(counts, numbers, 4, num_ids=4 * batch, num_batches=num_batches)
    for frac in (0.1, 0.3):
        size = int(frac * counts.size)
        popular = make_popular(np.argsort(-counts)[:size], batch * counts)
        by_table = {"all": popular}
        of_sample = number_popular(by_table, {"all": counts}, numbers)
        found = [
            replay(of, LOOK_AHEAD, size, 20, depth=1, window=8, popular=first)
            for of, first in ((stream, popular), (sampled, of_sample), (drawn, of_sample))
        ]
        whole = found[0]
        assert whole is not None
        for one in found[1:]:
            assert one is not None
            assert one.row_hit_frac == pytest.approx(whole.row_hit_frac, abs=0.01)
            assert one.lookup_hit_frac == pytest.approx(whole.lookup_hit_frac, abs=0.01)
            assert one.num_in == pytest.approx(whole.num_in, rel=0.05)
            assert one.num_out == pytest.approx(whole.num_out, rel=0.05)


def test_rows_of_each_popularity_are_in_the_sample() -> None:
    counts = np.random.default_rng(0).zipf(1.3, 10_000).clip(0, 1000)
    numbers = sample_rows(counts, 16)
    taken = np.flatnonzero(numbers >= 0)
    assert np.array_equal(numbers[taken], np.arange(625))
    for least in (1, 2, 10, 100):
        share = np.count_nonzero(counts[taken] >= least) / np.count_nonzero(counts >= least)
        assert share == pytest.approx(1 / 16, abs=1 / np.count_nonzero(counts >= least))
    assert np.array_equal(sample_rows(counts, 1), np.arange(10_000))
    assert [sampling_step(1e9, slots) for slots in (100, 12_000, 1e9)] == [1, 2, 477]
