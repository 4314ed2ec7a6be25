"""Counts of sequences against brute force, on a log of a few users."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks import sequence_counts, sequence_counts_page
from benchmarks.sequence_counts import (
    COLUMNS,
    DIM,
    DISTINCT,
    EVERY_ID,
    HOT_COLD,
    ROW_BYTES,
    TWO_LEVELS,
    Counts,
    KeptLog,
    Lags,
    RankRows,
    count,
    features_of,
    hot_sent_bytes,
    rows_of,
    shuffled,
)
from benchmarks.yambda_like import Catalogue, Share
from hotrec.routing.router import Router
from hotrec.runtime.hosts import Hosts
from hotrec.types import Partition, RowOrder

NUM_ROWS = {"item": 37, "album": 11, "artist": 5, "uid": 23}
LOCAL, WORLD = 2, 6
HOT = {"item": np.array([3, 0, 8]), "artist": np.array([1])}
Row = tuple[str, int]


def draw(rng: np.random.Generator) -> tuple[RankRows, list[Row]]:
    """What a rank reads, and its ids one by one."""
    lengths = rng.integers(0, 6, (len(COLUMNS), 3)).astype(np.int32)
    ids = [
        (column.table, int(row))
        for column, of_column in zip(COLUMNS, lengths, strict=True)
        for row in rng.integers(0, NUM_ROWS[column.table], of_column.sum())
    ]
    features = KeyedJaggedTensor(
        [column.feature for column in COLUMNS],
        torch.tensor([row for _, row in ids]),
        lengths=torch.from_numpy(lengths.reshape(-1)),
    )
    router = Router({DIM: COLUMNS}, Partition(NUM_ROWS), need_indices=False)
    return rows_of(router, features), ids


def owner(row: Row, *, is_spread: bool) -> int:
    table, number = row
    stored = RowOrder(NUM_ROWS[table], is_spread, table).stored(number)
    return int(stored) // -(-NUM_ROWS[table] // WORLD)


def sent(
    pairs: Sequence[tuple[int, int]], request_bytes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Requests, rows with gradients, and all to other hosts, of (rank, owner), by rank."""
    requests, rows, between = np.zeros((3, WORLD))
    for rank, of in pairs:
        if rank != of:
            requests[rank] += request_bytes
            rows[of] += ROW_BYTES
            rows[rank] += ROW_BYTES
        if rank // LOCAL != of // LOCAL:
            between[rank] += request_bytes + ROW_BYTES
            between[of] += ROW_BYTES
    return requests, rows, between


def check(found: Counts, pairs: Sequence[tuple[int, int]], request_bytes: int) -> None:
    requests, rows, between = sent(pairs, request_bytes)
    assert found.request_bytes == pytest.approx(requests.mean())
    assert found.rows_bytes == pytest.approx(rows.mean() / 2)
    assert found.sent_bytes == pytest.approx((requests + rows).mean() + found.hot_bytes)
    assert found.most_sent_bytes == pytest.approx((requests + rows).max() + found.hot_bytes)
    if not found.hot_bytes:
        assert found.between_hosts_bytes == pytest.approx(between.mean())


def busiest(pairs: Sequence[tuple[int, int]]) -> float:
    served = Counter(of for _, of in pairs)
    return max(served.values()) * WORLD / len(pairs)


@pytest.mark.parametrize("seed", range(3))
def test_placements_exchange_what_brute_force_counts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, ids = zip(*(draw(rng) for _ in range(WORLD)), strict=True)
    counts = count(ranks, Partition(NUM_ROWS, HOT), 3, LOCAL)
    found = {of.placement: of for of in counts}
    every = [(rank, owner(row, is_spread=False)) for rank in range(WORLD) for row in ids[rank]]
    check(found[EVERY_ID], every, 8)
    assert found[EVERY_ID].busiest == pytest.approx(busiest(every))
    assert found[EVERY_ID].num_ids == pytest.approx(len(every) / WORLD)

    distinct = [(rank, row) for rank in range(WORLD) for row in set(ids[rank])]
    spread = [(rank, owner(row, is_spread=True)) for rank, row in distinct]
    in_order = [(rank, owner(row, is_spread=False)) for rank, row in distinct]
    check(found[DISTINCT], spread, 4)
    assert found[DISTINCT].busiest == pytest.approx(busiest(in_order))
    assert found[DISTINCT].busiest_spread == pytest.approx(busiest(spread))
    assert found[DISTINCT].num_distinct == pytest.approx(len(distinct) / WORLD)
    assert found[DISTINCT].num_served == max(Counter(of for _, of in spread).values())
    rows = 2 * sum(map(len, ids)) / WORLD + 2 * len(distinct) / WORLD
    assert found[DISTINCT].peak_bytes == pytest.approx(
        ROW_BYTES * (rows + found[DISTINCT].num_served)
    )

    hot = {(table, int(row)) for table, rows in HOT.items() for row in rows}
    cold = [(rank, owner(row, is_spread=True)) for rank, row in distinct if row not in hot]
    check(found[HOT_COLD], cold, 4)

    # A rank asks the relay on its owner's rail, the relay asks for each row once.
    hops, unions = [], set()
    for rank, row in distinct:
        of = owner(row, is_spread=True)
        relay = rank // LOCAL * LOCAL + of % LOCAL
        hops.append((rank, relay))
        unions.add((relay, of, row))
    rails = [(relay, of) for relay, of, _ in unions]
    check(found[TWO_LEVELS], [*hops, *rails], 4)
    assert found[TWO_LEVELS].busiest_spread == pytest.approx(busiest(rails))

    # A rank sends all ids, and gets and sends an equal part of each row.
    nums = [len(of_rank) for of_rank in ids]
    columns = found["column_wise"]
    others = (WORLD - 1) / WORLD
    assert columns.request_bytes == pytest.approx(8 * (WORLD - 1) * np.mean(nums))
    assert columns.rows_bytes == pytest.approx(others * ROW_BYTES * np.mean(nums))


def test_gradients_of_hot_rows_are_added_up_inside_hosts() -> None:
    size = ROW_BYTES + 4
    slots = [torch.tensor(of) for of in ([0, 1], [0], [0, 3], [2])]
    # Union of the hosts: 0, 1 and 0, 2, 3; rails 0 and 1 have the even and the odd slots.
    to_owners = [1, 1, 1, 1]
    gathered = 4 / 2  # of 4 slots, half are each rank's own
    # Rail 0: {0} and {0, 2}; rail 1: {1} and {3}. Gathered is the cheapest way between two hosts.
    rails = [2 * size, 1 * size]
    between = np.mean(rails)
    found = hot_sent_bytes(slots, 40, Hosts(2, 2))
    assert found == pytest.approx(((np.mean(to_owners) + gathered) * size + between, between))
    # One host: min of gathering (3 * 2), owners (3/4 (2 + 4)), and all 40 rows.
    sent_bytes, between = hot_sent_bytes(slots, 40, Hosts(1, 4))
    assert sent_bytes == pytest.approx(0.75 * (2 + 4) * size)
    assert between == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_lags_are_steps_since_any_rank_read_the_row(depth: int) -> None:
    rng = np.random.default_rng(depth)
    lags = Lags(NUM_ROWS, depth)
    last: dict[Row, int] = {}
    for step in range(8):
        ranks, ids = zip(*(draw(rng) for _ in range(3)), strict=True)
        expected = np.zeros((len(NUM_ROWS), depth + 1), np.int64)
        for of_rank in ids:
            for row in set(of_rank):
                lag = step - last.get(row, -1000)
                expected[list(NUM_ROWS).index(row[0]), min(lag, depth + 1) - 1] += 1
        last |= {row: step for of_rank in ids for row in of_rank}
        found = lags.add([rank.distinct for rank in ranks])
        assert np.array_equal(found, expected), step


def test_features_are_histories_and_candidates() -> None:
    catalogue = Catalogue(frac=0.001)
    items = np.array([5, 9, 2, 7], np.int32)
    share = Share(np.array([10, 20]), items, np.array([3, 1]))
    of_feature = features_of(catalogue, share).to_dict()
    assert of_feature["history_item"].values().tolist() == [5, 9]
    assert of_feature["history_item"].lengths().tolist() == [2, 0]
    assert of_feature["item"].values().tolist() == [2, 7]
    assert of_feature["album"].values().tolist() == catalogue.album_id_of[[2, 7]].tolist()
    artists = of_feature["history_artist"].values().tolist()
    assert artists == catalogue.artist_id_of[[5, 9]].tolist()
    assert of_feature["uid"].values().tolist() == [10, 20]


def test_shuffled_batches_draw_users_by_their_events() -> None:
    log = KeptLog(Catalogue(frac=0.001), num_users=60)
    batches = shuffled(log, 200, 400, seed=2)
    drawn = np.concatenate([next(batches) for _ in range(4)])
    for user, at in drawn[:50].tolist():
        events = log.user(user)
        assert events.event_type[at] == 0
        assert events.timestamp[at] >= 200 * 86_400
    expected = np.array([log.num_events(user) for user in range(60)], float)
    assert np.array_equal(expected, [log.user(user).timestamp.size for user in range(60)])
    nums = np.bincount(drawn[:, 0], minlength=60)
    # 1,600 draws: three standard deviations of the largest share.
    shares = expected / expected.sum()
    assert np.abs(nums / nums.sum() - shares).max() < 3 * np.sqrt(shares.max() / nums.sum())


def test_the_page_has_all_placements_and_orders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    options = ["--ranks", "2", "4", "--ranks-per-host", "2", "--batch-size", "4"]
    options += ["--also-batch-size", "6", "--users", "200", "--first-user", "0"]
    options += ["--catalogue-frac", "0.001", "--page", str(page)]
    sequence_counts.main(options)
    document: Any = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(page.with_suffix(".json").read_text()) == document
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for order in ("user_major", "shuffled"):
        of = document["orders"][order]
        placements = [(c["num_ranks"], c["batch_size"], c["placement"]) for c in of["counts"]]
        assert len(placements) == 4 + 5 + 4
        assert len(set(placements)) == len(placements)
        assert of["lags"]["all"] == sorted(of["lags"]["all"])
        assert 0 < of["lags"]["all"][0] <= of["lags"]["all"][-1] <= 1
    text = page.read_text()
    page.unlink()
    sequence_counts_page.main([str(page)])
    assert page.read_text() == text
    assert "| distinct ids, two levels |" in text
    assert "* **shuffled**, B = 4: the busiest owner" in text
    with pytest.raises(SystemExit):
        sequence_counts.main(["--steps", "16"])
    assert "--steps: expected more than 16, got 16" in capsys.readouterr().err
