"""Histories are the earlier rows of a user: against a search through the whole log, row by row."""

from __future__ import annotations

import math
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
    Derive,
    Encoding,
    JoinSpec,
    OnBadLine,
    SourceFormat,
    SourceSpec,
    SplitKind,
    SplitSpec,
    TableSpec,
)
from hotrec.config.histories import UserHistorySpec
from hotrec.config.roots import PredictConfig
from hotrec.config.validate import validate
from hotrec.data import histories as module
from hotrec.data import readers
from hotrec.data.chunks import Dataset
from hotrec.data.encode import encode_inputs
from hotrec.data.encoding import check_encoding, read_encoding
from hotrec.data.prepare import prepare
from hotrec.data.vocabulary import read_vocabulary
from hotrec.runs.predict import _open_input
from tests.helpers.ranks import run_ranks
from tests.unit.data.logs import bag, delimited_spec
from tests.unit.runs.test_encoder import encoder_of

LIST, CATEGORICAL = ColumnKind.categorical_list, ColumnKind.categorical
HISTORY = UserHistorySpec(
    by="user",
    time="time",
    max_length=4,
    columns={
        **{"past_item": "item", "past_action": "action"},
        **{"past_play": "play", "past_maker": "maker"},
    },
    age="past_age",
    before={"past_item": "watched"},
    fill={"past_action": "0", "past_age": "-1"},
)
COLUMNS = {
    "click": ColumnSpec(ColumnKind.label),
    "like": ColumnSpec(ColumnKind.label),
    "user": ColumnSpec(CATEGORICAL),
    "item": ColumnSpec(CATEGORICAL),
    "past_item": ColumnSpec(LIST, table="item"),
    "past_maker": ColumnSpec(LIST, table="maker"),
    "past_action": ColumnSpec(LIST, table="action"),
    "past_play": ColumnSpec(LIST, derive=Derive.log_bucket),
    "past_age": ColumnSpec(LIST, derive=Derive.log_bucket),
    # Another history, of the click's page: no joined list, another user.
    "seen": ColumnSpec(LIST, source="on_page", table="item"),
}
PAGE = UserHistorySpec(by="page", time="time", max_length=2, columns={"on_page": "item"})
NAMES = ("past_item", "past_maker", "past_action", "past_play", "past_age", "seen")
TABLES = {name: COLUMNS[name].table or name for name in NAMES}
CHUNK = 25
Row = dict[str, Any]


def make_rows(num: int, seed: int = 0) -> list[Row]:
    """Rows in order of time, with ties, duplicates, and users, items and times of play missing."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    time = 1_000
    for _ in range(num):
        time += int(rng.choice([0, 0, 1, 700]))
        user = rng.choice(["", "u1", "u2", "u3", "7", "9", "9.0"])
        item = rng.choice(["", "1", "2", "3.0", "new", str(rng.integers(100))])
        play = rng.choice(["", "0", "12.5", str(rng.integers(10**6))])
        row = {"click": rng.integers(2), "like": rng.integers(2), "user": user, "time": time}
        rows.append({**row, "item": item, "play": play, "page": f"p{rng.integers(2)}"})
        if rng.random() < 0.1:
            rows.append(dict(rows[-1]))
    return rows


def write_files(directory: Path, rows: list[Row], num_files: int = 1) -> SourceSpec:
    """A log in several files, with makers of items, and what users watched before."""
    files = []
    for number, part in enumerate(np.array_split(np.arange(len(rows)), num_files)):
        files.append(directory / f"log_{number}.csv")
        lines = [",".join(str(value) for value in rows[row].values()) for row in part]
        files[-1].write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    (directory / "makers.tsv").write_text("item\tmaker\n1\tm1\n2\tm2\n3\tm1\n")
    watched = "user\twatched\nu1\t1 2 new 2 1 3\nu2\t\n7\t5\n9\t2 2\n"
    (directory / "watched.tsv").write_text(watched)
    joins = {
        "makers": JoinSpec([str(directory / "makers.tsv")], on="item"),
        "watched": JoinSpec([str(directory / "watched.tsv")], on="user"),
    }
    last = rows[-1]["time"]
    split = SplitSpec(SplitKind.time, column="time", valid_from=last * 0.6, test_from=last * 0.8)
    return delimited_spec(
        files,
        columns=COLUMNS,
        tables={"action": TableSpec(Encoding.rows, num_rows=8)},
        joins=joins,
        expr={"action": 'CAST(click AS INT) + 4 * CAST("like" AS INT)'},
        histories=history(),
        split=split,
        rows_per_chunk=CHUNK,
    )


def bucket(number: float) -> str:
    return str(int(math.copysign(math.floor(4 * math.log2(1 + abs(number))), number)))


WATCHED = {"u1": ["1", "2", "new", "2", "1", "3"], "7": ["5"], "9": ["2", "2"]}
MAKERS = {"1": "m1", "2": "m2", "3": "m1"}


def expected(rows: list[Row]) -> list[dict[str, list[str | None]]]:
    """The lists of each row, None for missing values, by a search through all rows."""

    def whole(text: str) -> str | None:
        return text.removesuffix(".0") or None

    found = []
    for row in rows:
        user = whole(row["user"])
        events = [r for r in rows if whole(r["user"]) == user and r["time"] < row["time"]]
        events = [] if user is None else events
        lists: list[tuple[str | None, ...]] = [
            (item, None, "0", None, bucket(-1)) for item in WATCHED.get(user or "", ())
        ]
        for event in events:
            item = whole(event["item"])
            action = event["click"] + 4 * event["like"]
            play = bucket(float(event["play"])) if event["play"] else None
            age = bucket(row["time"] - event["time"])
            lists.append((item, MAKERS.get(item or ""), str(action), play, age))
        on_page = [r for r in rows if r["page"] == row["page"] and r["time"] < row["time"]]
        values = [list(column) for column in zip(*lists[-4:], strict=True)] or [[]] * 5
        values.append([whole(r["item"]) for r in on_page[-2:]])
        found.append(dict(zip(NAMES, values, strict=True)))
    return found


def split_of(rows: list[Row]) -> dict[str, list[int]]:
    last = rows[-1]["time"]
    return {
        "train": [n for n, row in enumerate(rows) if row["time"] < last * 0.6],
        "valid": [n for n, row in enumerate(rows) if last * 0.6 <= row["time"] < last * 0.8],
        "test": [n for n, row in enumerate(rows) if row["time"] >= last * 0.8],
    }


def check(dataset: Dataset, rows: list[Row]) -> int:
    """Compare all lists; the number of histories that are cut or joined."""
    lists, num_full = expected(rows), 0
    row_of: dict[str, dict[str | None, int]] = {"action": {str(n): n for n in range(8)}}
    for name in {*TABLES.values()} - {"action"}:
        texts = read_vocabulary(dataset.artifact.path, name)["value"].to_pylist()
        row_of[name] = {text: number for number, text in enumerate(texts, start=1)}
    for split, numbers in split_of(rows).items():
        blocks = [dataset.block(split, n) for n in range(len(dataset.chunks(split)))]
        samples = [(block, place) for block in blocks for place in range(len(block))]
        for (block, place), number in zip(samples, numbers, strict=True):
            found = {name: bag(block.features[name], place) for name in NAMES}
            wanted = {
                name: [row_of[TABLES[name]].get(text, 0) for text in lists[number][name]]
                for name in NAMES
            }
            assert found == wanted, (split, number)
            assert len({len(found[name]) for name in NAMES[:-1]}) == 1
            num_full += len(found["past_item"]) == 4
            assert block.label[place].tolist() == [rows[number]["click"], rows[number]["like"]]
    return num_full


@pytest.mark.slow
@pytest.mark.parametrize("num_files", [1, 3])
def test_histories_are_those_of_a_search(tmp_path, monkeypatch, num_files):
    monkeypatch.setattr(module, "_PLACES_PER_PART", 20)  # blocks of five samples
    monkeypatch.setattr(readers, "_ROWS_PER_BLOCK", 11)
    rows = make_rows(160)
    times = [(row["user"], row["time"]) for row in rows]
    assert len(set(times)) < len(times) - 10
    spec = write_files(tmp_path, rows, num_files)
    columns: dict[str, Any] = {name: [row[name] or None for row in rows] for name in rows[0]}
    columns["play"] = [float(play) if play else None for play in columns["play"]]
    columns |= {name: [int(row[name]) for row in rows] for name in ("click", "like")}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    # A row of the log that is skipped is no event either.
    (tmp_path / "log_0.csv").write_text((tmp_path / "log_0.csv").read_text() + "x,0,u1,2,1,1,p0\n")
    typed = replace(spec, format=SourceFormat.parquet, files=[str(tmp_path / "log.parquet")])
    for asked, num_skipped in ((replace(spec, on_bad_line=OnBadLine.skip), 1), (typed, 0)):
        prepare(asked, tmp_path / "dataset")
        dataset = Dataset.open(tmp_path / "dataset", verify="full")
        assert 40 < check(dataset, rows) < 160
        assert dataset.artifact.content["source"]["num_skipped"] == num_skipped
        del dataset


def prepare_on_ranks(directory: str) -> list[str]:
    place, answers = Path(directory), []
    for num_files in (1, 2, 5):
        folder = place / str(num_files)
        spec = write_files(folder, make_rows(150, seed=1), num_files)
        answers.append(prepare(spec, folder / "dataset").content_hash)
        assert not (folder / "dataset" / module.TAILS).exists()
    lines = (place / "5" / "log_1.csv").read_text().splitlines(keepends=True)
    (place / "5" / "log_3.csv").write_text("".join(lines[:-1]))
    try:
        prepare(replace(spec, split=SplitSpec()), place / "none")
    except (ValueError, RuntimeError) as error:
        answers.append(str(error))
    return answers


@pytest.mark.slow
def test_any_number_of_ranks_makes_the_same_histories(tmp_path):
    alone = []
    for num_files in (1, 2, 5):
        (tmp_path / str(num_files)).mkdir()
        spec = write_files(tmp_path / str(num_files), make_rows(150, seed=1), num_files)
        alone.append(prepare(spec, tmp_path / "alone").content_hash)
    for *hashes, refusal in run_ranks(prepare_on_ranks, world_size=3, directory=str(tmp_path)):
        assert hashes == alone
        assert "log_3.csv line" in refusal


def test_requests_and_files_to_score_bring_their_lists(tmp_path):
    rows = make_rows(140, seed=2)
    spec = write_files(tmp_path, rows)
    prepare(spec, tmp_path / "dataset")
    dataset = Dataset.open(tmp_path / "dataset")
    records = [
        {"user": row["user"] or None, "item": row["item"] or None, **of}
        for row, of in zip(rows, raw_lists(rows), strict=True)
    ]
    _, ids = encoder_of(dataset, spec, tmp_path / "exported").arrays(records)
    # No times and no side tables of histories, but their lists.
    table = pa.table({name: [record[name] for record in records] for name in records[0]})
    pq.write_table(table, tmp_path / "score.parquet")
    config = PredictConfig([str(tmp_path / "score.parquet")], "scores")
    encoders, scaling = read_encoding(dataset, spec)
    log = _open_input(config, replace(spec, format=SourceFormat.parquet, times={"time": "s"}))
    [block] = log.blocks(0)
    of_features = {feature.name: encoders[feature.table] for feature in dataset.schema.features}
    _, features = encode_inputs(block, log.columns, of_features, scaling)
    for split, numbers in split_of(rows).items():
        for at, number in enumerate(numbers):
            prepared = dataset.block(split, at // CHUNK).features
            for name in NAMES:
                rows_of, offsets = ids[name]
                wanted = bag(prepared[name], at % CHUNK)
                assert rows_of[offsets[number] : offsets[number + 1]].tolist() == wanted, name
                assert bag(features[name], number) == wanted, name
    with pytest.raises(ValueError, match=r"log_0\.csv: expected .*'past_item'"):
        _open_input(PredictConfig(spec.files, "scores"), spec)


def raw_lists(rows: list[Row]) -> list[dict[str, list[Any]]]:
    """The lists as a request brings them: numbers before their buckets."""
    lists: list[dict[str, list[Any]]] = []
    for row, of in zip(rows, expected(rows), strict=True):
        user = row["user"].removesuffix(".0")
        events = [
            r for r in rows if r["user"].removesuffix(".0") == user and r["time"] < row["time"]
        ]
        size = len(of["past_item"])
        ages = [float(row["time"] - r["time"]) for r in events] if user else []
        plays = [float(r["play"]) if r["play"] else None for r in events] if user else []
        made = {"past_age": [-1.0] * 6 + ages, "past_play": [None] * 6 + plays}
        cut: dict[str, list[Any]] = {
            name: values[len(values) - size :] for name, values in made.items()
        }
        lists.append({**of, **cut, "on_page": of["seen"]})
        del lists[-1]["seen"]
    return lists


# Refusals.


def test_a_log_out_of_order_is_refused(tmp_path):
    rows = make_rows(60)
    rows[30]["user"] = rows[50]["user"] = "u1"
    rows[50]["time"] = rows[30]["time"] - 1
    with pytest.raises(ValueError, match=rf"log_0\.csv line 52: .* got {rows[50]['time']} after"):
        prepare(write_files(tmp_path, rows), tmp_path / "dataset")
    # Order is only needed inside the rows of a user.
    rows[50] |= {"user": "u of one row", "page": "page of one row"}
    prepare(write_files(tmp_path, rows), tmp_path / "dataset")


def test_lists_have_one_length_and_new_names(tmp_path):
    spec = write_files(tmp_path, make_rows(20))
    (tmp_path / "longer.tsv").write_text("user\twatched_makers\nu1\tm1\n")
    longer = {**spec.joins, "longer": JoinSpec([str(tmp_path / "longer.tsv")], on="user")}
    before = {"past_item": "watched", "past_maker": "watched_makers"}
    with pytest.raises(ValueError, match=r"line \d+: .*got \d values in watched and \d"):
        prepare(replace(spec, joins=longer, histories=history(before=before)), tmp_path / "dataset")
    spec.histories["page"] = replace(PAGE, columns={"maker": "item"})
    spec.columns = {**COLUMNS, "seen": ColumnSpec(LIST, source="maker", table="item")}
    with pytest.raises(ValueError, match=r"histories\.page: .*\['maker'\]"):
        prepare(spec, tmp_path / "dataset")


def test_a_dataset_with_histories_knows_them_and_does_not_grow(tmp_path):
    spec = write_files(tmp_path, make_rows(60))
    prepare(spec, tmp_path / "dataset")
    dataset = Dataset.open(tmp_path / "dataset")
    check_encoding(dataset, spec, of="this", advice="")
    other = replace(spec, histories=history(max_length=3))
    with pytest.raises(ArtifactError, match=r"data\.source\.histories\.past .*'max_length': 3"):
        check_encoding(dataset, other, of="this", advice="")
    with pytest.raises(ValueError, match=r"append: .*data\.source\.histories"):
        prepare(spec, tmp_path / "dataset", append=spec.files)


def history(**changes: Any) -> dict[str, UserHistorySpec]:
    return {"past": replace(HISTORY, **changes), "page": PAGE}


@pytest.mark.parametrize(
    ("changes", "columns", "message"),
    [
        ({"max_length": 0}, {}, r"past\.max_length: .*0"),
        ({"columns": {}, "age": "", "before": {}}, {}, r"past\.columns: .*\[\]"),
        ({"before": {"past_page": "watched"}}, {}, r"past\.before\.past_page"),
        ({"fill": {"past_age": "old"}}, {}, r"past\.fill\.past_age: .*'old'"),
        ({}, {"past_item": ColumnSpec(CATEGORICAL)}, r"got \['past_item'\]"),
    ],
)
def test_settings_that_cannot_be_carried_out(changes, columns, message):
    columns = {**COLUMNS, **columns}
    spec = SourceSpec(SourceFormat.delimited, ["log"], columns, histories=history(**changes))
    with pytest.raises(ValueError, match=message):
        validate(spec, "data.source")
