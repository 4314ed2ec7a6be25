"""Yambda's files as samples with histories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrec.artifact import ArtifactError
from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    Encoding,
    HistorySpec,
    SourceFormat,
    SourceSpec,
    SplitKind,
    SplitSpec,
    TableSpec,
)
from hotrec.data import yambda
from hotrec.data.chunks import Dataset, Jagged
from hotrec.data.encode import check_encoding
from hotrec.data.prepare import prepare
from hotrec.data.readers import LogFormat, count_samples, open_parquet
from hotrec.data.yambda import (
    FLAT_SCHEMA,
    SAMPLE_COLUMNS,
    SEQUENTIAL_SCHEMA,
    HistoryRule,
    find_histories,
    pool_bits,
    read_samples,
)

ALBUMS, ARTISTS = {1: 11, 2: 11, 3: 13}, {1: 21, 2: 22, 4: 24}
# uid, timestamp, item, event type, percentage played.
EVENTS = [
    (10, 0, 1, "listen", 100),
    (10, 5, 1, "like", None),
    (10, 5, 2, "listen", 3),
    (10, 20, 3, "listen", 50),
    (10, 25, 3, "dislike", None),
    (10, 90_000, 4, "listen", 0),
    (20, 5, 9, "like", None),
    (20, 10, 1, "listen", 70),
    (30, 0, 2, "listen", 80),
]


def flat_table(events: list[tuple[Any, ...]] = EVENTS) -> pa.Table:
    uid, time, item, kind, played = (list(values) for values in zip(*events, strict=True))
    ones = [1] * len(events)
    length = [None if p is None else 200 for p in played]
    columns = [uid, time, item, ones, played, length, kind]
    return pa.table(
        [pa.array(c, f.type) for c, f in zip(columns, FLAT_SCHEMA, strict=True)],
        schema=FLAT_SCHEMA,
    )


def sequential_table(flat: pa.Table) -> pa.Table:
    uid = flat["uid"].to_numpy()
    begins = np.append(np.unique(uid, return_index=True)[1], uid.size).astype(np.int32)
    lists = [
        pa.ListArray.from_arrays(pa.array(begins), flat[name].combine_chunks())
        for name in FLAT_SCHEMA.names[1:]
    ]
    return pa.table([flat["uid"].take(pa.array(begins[:-1])), *lists], schema=SEQUENTIAL_SCHEMA)


def write_log(root: Path, form: str = "flat", table: pa.Table | None = None) -> Path:
    path = root / form / "50m/multi_event.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    if table is None:
        table = flat_table() if form == "flat" else sequential_table(flat_table())
    pq.write_table(table, path)
    for name, ids in (("album", ALBUMS), ("artist", ARTISTS)):
        columns = {f"{name}_id": list(ids.values()), "item_id": list(ids)}
        pq.write_table(pa.table(columns), root / f"{name}_item_mapping.parquet")
    return path


def samples_of(path: Path, **rule: int) -> pa.Table:
    parts = read_samples(path, open_parquet(path), list(SAMPLE_COLUMNS), HistoryRule(**rule))
    tables = [table.append_column("event", pa.array(rows)) for table, rows in parts]
    return pa.concat_tables(tables)


def test_pools() -> None:
    types = np.array([0, 0, 1, 2, 3, 4, 0], np.uint8)
    played = np.array([50, 49, 0, 100, 100, 0, 0], np.uint16)
    assert pool_bits(types, played).tolist() == [1, 4, 2, 0, 0, 0, 4]


@pytest.mark.parametrize(
    "rule", [HistoryRule(), HistoryRule(per_pool=3), HistoryRule(per_pool=5, max_events=12)]
)
def test_histories_are_the_last_events_of_each_pool(
    rule: HistoryRule,
) -> None:
    pools = np.random.default_rng(0).choice([0, 1, 2, 4], 200, p=[0.1, 0.5, 0.1, 0.3])
    samples = np.array([0, 1, 5, 5, 60, 199])
    positions, begins = find_histories(pools, samples, rule)
    for number, sample in enumerate(samples.tolist()):
        near = [e for e in range(sample) if e >= sample - rule.max_events]
        kept = [
            e for bit in (1, 2, 4) for e in [e for e in near if pools[e] == bit][-rule.per_pool :]
        ]
        assert positions[begins[number] : begins[number + 1]].tolist() == sorted(kept)


@pytest.mark.parametrize("form", ["flat", "sequential"])
def test_a_listen_is_a_sample_with_its_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    # A user's events lie in several batches, and a part has fewer samples than a user.
    monkeypatch.setattr(yambda, "_ROWS_PER_BATCH", 2)
    monkeypatch.setattr(yambda, "_USERS_PER_BATCH", 1)
    monkeypatch.setattr(yambda, "_SAMPLES_PER_PART", 2)
    monkeypatch.setattr(yambda, "_IDS_PER_BLOCK", 3)
    path = write_log(tmp_path, form)
    found = samples_of(path).to_pydict()
    assert found["event"] == [3, 4, 6, 8]  # the first event of a user has no history
    assert found["uid"] == [10, 10, 10, 20]
    assert found["item_id"] == [2, 3, 4, 1]
    assert found["listen_plus"] == [0, 1, 0, 1]
    assert found["album_id"] == [11, 13, 0, 11]
    assert found["artist_id"] == [22, 0, 24, 21]
    assert found["timestamp"] == [5, 20, 90_000, 10]
    assert found["history_item_id"] == [[1, 1], [1, 1, 2], [1, 1, 2, 3], [9]]
    assert found["history_album_id"] == [[11, 11], [11, 11, 11], [11, 11, 11, 13], [0]]
    assert found["history_artist_id"] == [[21, 21], [21, 21, 22], [21, 21, 22, 0], [0]]
    assert found["history_action"] == [[1, 2], [1, 2, 4], [1, 2, 4, 1], [2]]
    assert found["history_timestamp"][2] == [0, 5, 5, 20]
    assert found["history_played_ratio_pct"][2] == [100, 0, 3, 50]
    assert count_samples(path, LogFormat(SourceFormat.yambda)) == len(EVENTS)
    fewer = samples_of(path, per_pool=1, every=2).to_pydict()
    assert fewer["event"] == [3, 6, 8]
    assert fewer["history_item_id"] == [[1, 1], [1, 2, 3], [9]]


def test_prepare_writes_histories_in_order(tmp_path: Path) -> None:
    history = ColumnSpec(ColumnKind.categorical_list, source="history_item_id", table="item")
    source = SourceSpec(
        SourceFormat.yambda,
        [str(write_log(tmp_path))],
        {
            "label": ColumnSpec(ColumnKind.label, source="listen_plus"),
            "item": ColumnSpec(ColumnKind.categorical, source="item_id"),
            "history": history,
            "action": ColumnSpec(ColumnKind.categorical_list, source="history_action"),
        },
        table_defaults=TableSpec(Encoding.rows),
        times={"timestamp": "s"},
        history=HistorySpec(per_pool=2),
        split=SplitSpec(SplitKind.time, column="timestamp", valid_from=8.64e7, test_from=8.64e7),
    )
    prepare(source, tmp_path / "dataset")
    dataset = Dataset.open(tmp_path / "dataset")
    train, test = dataset.block("train", 0), dataset.block("test", 0)
    assert train.label.tolist() == [0, 1, 1]
    assert train.features["item"].tolist() == [2, 3, 1]
    assert test.features["item"].tolist() == [4]
    of_test = [test.features[name] for name in ("history", "action")]
    assert all(isinstance(bags, Jagged) for bags in of_test)
    assert [bags.values.tolist() for bags in of_test] == [[1, 1, 2, 3], [1, 2, 4, 1]]
    assert [train.features[n].offsets.tolist() for n in ("history", "action")] == [[0, 2, 5, 6]] * 2


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=r"expected .* got ") as caught:
        samples_of(path)
    return str(caught.value)


def test_refusals(tmp_path: Path) -> None:
    flat = flat_table()
    swapped = [*EVENTS[:2], EVENTS[3], EVENTS[2], *EVENTS[4:]]
    error = refusal(write_log(tmp_path, table=flat_table(swapped)))
    assert "event 4: expected events sorted by uid and timestamp, got uid 10 at 5" in error
    error = refusal(write_log(tmp_path, table=flat_table([*EVENTS[6:8], *EVENTS[:6]])))
    assert "event 3: expected events sorted by uid" in error
    error = refusal(write_log(tmp_path, table=flat.drop_columns(["event_type"])))
    assert "expected the columns ['uid', 'timestamp'," in error
    texts = flat.set_column(2, "item_id", flat["item_id"].cast(pa.string()))
    assert "column item_id: expected integers, got type string" in refusal(
        write_log(tmp_path, table=texts)
    )
    other = [*EVENTS[:8], (30, 0, 2, "skip", 80)]
    assert "column event_type: expected one of" in refusal(
        write_log(tmp_path, table=flat_table(other))
    )
    lists = sequential_table(flat)
    mixed = lists.set_column(1, "timestamp", lists["uid"])
    assert "column timestamp: expected lists of integers" in refusal(
        write_log(tmp_path, "sequential", mixed)
    )
    short = pa.array([[0, 5], [5, 10], [0]], SEQUENTIAL_SCHEMA.field("timestamp").type)
    error = refusal(write_log(tmp_path, "sequential", lists.set_column(1, "timestamp", short)))
    assert "uid 10: expected 6 values in column timestamp, as in item_id, got 2" in error
    path = write_log(tmp_path)
    (tmp_path / "album_item_mapping.parquet").unlink()
    assert "column album_id: expected the mapping of items at" in refusal(path)


def test_another_rule_of_histories_is_another_encoding(tmp_path: Path) -> None:
    columns = {
        "label": ColumnSpec(ColumnKind.label, source="listen_plus"),
        "history": ColumnSpec(ColumnKind.categorical_list, source="history_item_id"),
    }
    none = SplitSpec(valid_frac=0.0, test_frac=0.0)
    path = str(write_log(tmp_path))
    source = SourceSpec(SourceFormat.yambda, [path], columns, split=none)
    prepare(source, tmp_path / "dataset")
    dataset = Dataset.open(tmp_path / "dataset")
    check_encoding(dataset, replace(source, history=HistorySpec(every=2)), of="asked", advice="")
    other = replace(source, history=HistorySpec(per_pool=7))
    with pytest.raises(ArtifactError, match=r"data.source.history.per_pool as asked, 7, got 1362"):
        check_encoding(dataset, other, of="asked", advice="")
