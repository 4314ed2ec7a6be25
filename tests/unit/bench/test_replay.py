"""Replayed caches against plain loops over single rows."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from hotrec.bench.replay import LOOK_AHEAD, POLICIES, RANKINGS, Replayed, Stream, replay

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


def run(stream: Stream, policy: str, num_slots: int, num_skipped: int = 0) -> Replayed | None:
    resident = np.argsort(-stream.counts)[: num_slots // 4]
    return replay(stream, policy, num_slots, num_skipped, depth=1, window=0, resident=resident)


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
    monkeypatch.setattr("hotrec.embedding.slots.QUEUE_FRAC", 0)  # ranked for every batch
    stream = make_stream()
    least = run(stream, "belady", num_slots)
    assert least is not None
    nothing, moved = np.empty(0, np.int64), []
    for window in (0, 1, 4, NUM_BATCHES):
        found = replay(stream, LOOK_AHEAD, num_slots, 0, depth=0, window=window, resident=nothing)
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
        num_resident = NUM_ROWS // 4 if policy == LOOK_AHEAD else 0  # there from the start
        assert found.num_in * NUM_BATCHES == pytest.approx(num_read - num_resident)
        assert found.num_out == 0


def test_fewer_slots_than_a_batch_reads_are_no_cache() -> None:
    stream = make_stream()
    most = max(rows.size for rows in stream.rows)
    assert all(run(stream, policy, most - 1) is None for policy in POLICIES)
