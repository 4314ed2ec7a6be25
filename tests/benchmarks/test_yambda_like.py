"""The generator of logs like Yambda: its marginals, its files, and the shares of distinct rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import yambda_like
from benchmarks.yambda_like import Catalogue, Log, count_distinct, read, user_major_step
from hotrec.data.yambda import FLAT_SCHEMA, SEQUENTIAL_SCHEMA, HistoryRule


@pytest.fixture(scope="module")
def small() -> Catalogue:
    return Catalogue(frac=0.01)


@pytest.mark.slow
def test_a_step_reads_the_published_shares_of_distinct_rows() -> None:
    log = Log(Catalogue())
    step = user_major_step(log, day=250, first_user=600_000, batch_size=1024, num_ranks=8)
    found = count_distinct(log.catalogue, read(log, next(step), HistoryRule()))
    assert found["num_ids"] == pytest.approx(2.69e6, rel=0.05)
    # Steps differ from each other by about a tenth.
    assert found["item"] == pytest.approx(0.024, rel=0.15)
    assert found["album"] == pytest.approx(0.015, rel=0.15)
    assert found["artist"] == pytest.approx(0.006, rel=0.15)


def test_marginals(small: Catalogue) -> None:
    log = Log(small)
    users = [log.user(number) for number in range(1500)]
    num_events = np.array([events.timestamp.size for events in users])
    assert np.median(num_events) == pytest.approx(2695, rel=0.1)
    assert num_events.mean() == pytest.approx(4763, rel=0.1)
    assert num_events.min() >= 1
    assert num_events.max() <= 27_738
    types = np.concatenate([events.event_type for events in users])
    played = np.concatenate([events.played_pct for events in users])
    assert np.mean((types == 0) & (played >= 50)) == pytest.approx(0.613, abs=0.002)
    assert np.mean((types == 0) & (played < 50)) == pytest.approx(0.359, abs=0.002)
    assert np.mean(types == 1) == pytest.approx(0.019, abs=0.001)
    times = np.concatenate([events.timestamp for events in users])
    assert not np.any(times % 5)
    assert 0 <= times.min() < times.max() <= 26_000_000


def test_sizes_of_the_catalogue(small: Catalogue) -> None:
    assert small.item_ids.size == np.unique(small.item_ids).size == 93_906
    assert 0 <= small.album_id_of.min() < small.album_id_of.max() <= 33_677
    assert 0 <= small.artist_id_of.min() < small.artist_id_of.max() <= 12_934


def test_a_user_depends_on_seed_and_number_only(small: Catalogue) -> None:
    first, again = Log(small).user(7), Log(small).user(7)
    other = Log(small, seed=1).user(7)
    assert np.array_equal(first.item_id, again.item_id)
    assert np.array_equal(first.timestamp, again.timestamp)
    assert first.item_id.size != other.item_id.size


def test_ranks_take_the_listens_of_a_day_in_turn(small: Catalogue) -> None:
    log = Log(small, num_users=300)
    shares = list(user_major_step(log, day=200, first_user=3, batch_size=20, num_ranks=2))
    joined = np.stack(shares, axis=1).reshape(-1, 2)
    assert np.array_equal(joined, joined[np.lexsort((joined[:, 1], joined[:, 0]))])
    for user, at in joined.tolist():
        events = log.user(user)
        assert events.event_type[at] == 0
        assert events.timestamp[at] // 86_400 == 200
    share = read(log, shares[0], HistoryRule(per_pool=4, max_events=50))
    assert share.lengths.max() <= 3 * 4 + 1
    user, at = shares[0][0].tolist()
    assert share.item_ids[share.lengths[0] - 1] == log.user(user).item_id[at]
    with pytest.raises(ValueError, match="expected 1000000 listens on day 200, got"):
        list(user_major_step(log, day=200, first_user=3, batch_size=500_000, num_ranks=2))


def test_files_have_the_published_schema(tmp_path: Path) -> None:
    arguments = ["write", str(tmp_path), "--users", "40", "--catalogue-frac", "0.001"]
    yambda_like.main(arguments)
    flat = pq.read_table(tmp_path / "flat/50m/multi_event.parquet")
    sequential = pq.read_table(tmp_path / "sequential/50m/multi_event.parquet")
    assert flat.schema.equals(FLAT_SCHEMA)
    assert sequential.schema.equals(SEQUENTIAL_SCHEMA)
    uid, times = flat["uid"].to_numpy(), flat["timestamp"].to_numpy()
    assert np.array_equal(np.unique(uid), 25_000 * np.arange(1, 41))
    assert np.array_equal(np.lexsort((times, uid)), np.arange(uid.size))
    for name in ("item_id", "event_type", "played_ratio_pct"):
        lists = sequential[name].combine_chunks()
        assert lists.flatten().to_pylist() == flat[name].to_pylist()
    is_listen = np.array(flat["event_type"].to_pylist()) == "listen"
    assert np.array_equal(flat["played_ratio_pct"].is_valid().to_numpy(), is_listen)
    for name in ("album", "artist"):
        mapping = pq.read_table(tmp_path / f"{name}_item_mapping.parquet")
        assert mapping.column_names == [f"{name}_id", "item_id"]
        assert 0 < len(mapping) < 9_391
