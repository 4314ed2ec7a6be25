import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.artifact import ArtifactError
from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    DenseTransform,
    Derive,
    Encoding,
    JoinSpec,
    SourceFormat,
    SourceSpec,
    SplitKind,
    SplitSpec,
    TableSpec,
    TimeUnit,
)
from hotrec.data.chunks import Dataset
from hotrec.data.days import check_time_order
from hotrec.data.prepare import prepare
from hotrec.data.vocabulary import read_vocabulary
from tests.helpers.ranks import run_ranks
from tests.unit.data.logs import HEADER, bag, criteo_line, delimited_spec, loader

ID = ColumnKind.categorical
WHOLE = SplitSpec(valid_frac=0, test_frac=0)


def run(spec: SourceSpec, path: Path, **settings: bool) -> Dataset:
    prepare(spec, path, **settings)
    return Dataset.open(path, verify="full")


def decoded(dataset: Dataset, split: str) -> list[dict]:
    """The samples with rows turned back into values by the vocabulary; row 0 is None."""
    schema = dataset.schema
    values = {
        table.name: [None, *read_vocabulary(dataset.artifact.path, table.name)["value"].to_pylist()]
        for table in schema.tables
    }
    samples = []
    for index in range(len(dataset.chunks(split))):
        block = dataset.block(split, index)
        for position in range(len(block)):
            sample = {"label": float(block.label[position])}
            sample.update(zip(schema.dense, block.dense[position].tolist(), strict=True))
            for feature in schema.features:
                names = values[feature.table]
                rows = [names[row] for row in bag(block.features[feature.name], position)]
                sample[feature.name] = rows if feature.is_multi_hot else rows[0]
            samples.append(sample)
    return samples


ITEM = st.sampled_from(["", "i1", "i2", "i3"])
ROWS = st.lists(
    st.tuples(st.sampled_from("01"), st.sampled_from(["", "0", "2.5", "-3"]), ITEM, ITEM,
              st.lists(ITEM.filter(bool), max_size=4)),
    min_size=1, max_size=40,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(ROWS, st.integers(1, 3), st.integers(1, 9))
def test_what_is_prepared_is_what_was_read(tmp_path_factory, rows, min_count, rows_per_chunk):
    directory = tmp_path_factory.mktemp("prepare")
    files = []
    for index, part in enumerate((rows[: len(rows) // 2], rows[len(rows) // 2 :])):
        if part:
            files.append(directory / f"log_{index}.csv")
            lines = [",".join([*row[:4], " ".join(row[4])]) + "\n" for row in part]
            files[-1].write_text(HEADER + "".join(lines))
    spec = delimited_spec(
        files, rows_per_chunk=rows_per_chunk, table_defaults=TableSpec(min_count=min_count)
    )
    found = decoded(run(spec, directory / "dataset"), "train")
    users = [row[2] for row in rows]
    items = [item for row in rows for item in (row[3], *row[4])]
    expected = [
        {
            "label": float(label),
            "price": float(price or 0),
            "user": user if user and users.count(user) >= min_count else None,
            "item": item if item and items.count(item) >= min_count else None,
            "history": [i if items.count(i) >= min_count else None for i in history],
        }
        for label, price, user, item, history in rows
    ]
    assert found == expected


def write_criteo(path: Path, num_lines: int, start: int = 0) -> Path:
    lines = [criteo_line(str(n % 2), n % 50) for n in range(start, start + num_lines)]
    with pa.output_stream(str(path), compression="detect") as stream:
        stream.write("".join(lines).encode())
    return path


def criteo_spec(files: list[Path], **settings: object) -> SourceSpec:
    defaults = {"split": SplitSpec(SplitKind.last, 0.2, 0.1), "rows_per_chunk": 100}
    return SourceSpec(SourceFormat.criteo, [str(f) for f in files], **{**defaults, **settings})


def test_criteo_from_several_compressed_files(tmp_path):
    files = [
        write_criteo(tmp_path / "day_0.gz", 300),
        write_criteo(tmp_path / "day_1.zst", 450, start=300),
        write_criteo(tmp_path / "day_2", 250, start=750),
    ]
    tables = {"C2": TableSpec(Encoding.hashing, num_rows=7)}
    dataset = run(criteo_spec(files, tables=tables), tmp_path / "d")
    source = dataset.artifact.content["source"]
    assert source["num_samples"] == {"train": 700, "valid": 200, "test": 100}
    assert source["num_clicks"] == {"train": 350, "valid": 100, "test": 50}
    assert dataset.schema.dense == tuple(f"I{n}" for n in range(1, 14))
    assert [table.num_rows for table in dataset.schema.tables] == [51, 7, *[51] * 24]
    test = dataset.block("test", 0)
    texts = read_vocabulary(tmp_path / "d", "C1")["value"].to_pylist()
    ids = [texts[row - 1] for row in test.features["C1"]]
    assert ids == [f"{n % 50:08x}" for n in range(900, 1000)]
    assert set(test.features["C2"].tolist()) <= set(range(1, 7))
    assert test.dense[7][2] == pytest.approx(np.log1p(7 + 2))


@pytest.fixture
def log(tmp_path):
    """Writes a delimited log of lines "click,price,user"; its file."""

    def write(*lines: str) -> list[Path]:
        path = tmp_path / "log.csv"
        path.write_text(HEADER + "".join(f"{line},i,\n" for line in lines))
        return [path]

    return write


def test_the_vocabulary_is_that_of_the_training_split(tmp_path, log):
    split = SplitSpec(SplitKind.last, valid_frac=0.2, test_frac=0.0)
    files = log(*["1,0,old"] * 8, *["1,0,new"] * 2)
    dataset = run(delimited_spec(files, split=split), tmp_path / "d")
    assert dataset.schema.table("user").num_rows == 2
    assert {sample["user"] for sample in decoded(dataset, "valid")} == {None}
    assert read_vocabulary(tmp_path / "d", "user").to_pydict() == {"value": ["old"], "count": [8]}


def test_dense_values_are_filled_transformed_and_standardised(tmp_path, log):
    split = SplitSpec(SplitKind.last, valid_frac=0.25, test_frac=0)
    spec = delimited_spec(log("1,3,u", "0,,u", "1,-8,u", "0,100,u"), split=split)
    spec.columns["price"] = ColumnSpec(
        ColumnKind.dense, fill=1.0, transform=DenseTransform.log1p, standardize=True
    )
    spec.columns["plain"] = ColumnSpec(ColumnKind.dense, source="price")
    dataset = run(spec, tmp_path / "d")
    raw = np.array([np.log(4), np.log(2), -np.log(9), np.log(101)])
    train = raw[:3]  # the validation sample has no say in the scale
    expected = (raw - train.mean()) / train.std()
    found = np.concatenate([dataset.block("train", 0).dense, dataset.block("valid", 0).dense])
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-5)
    assert found[:, 1].tolist() == [3.0, 0.0, -8.0, 100.0]


def test_split_by_time(tmp_path, log):
    split = SplitSpec(SplitKind.time, column="price", valid_from=6, test_from=9)
    files = log(*(f"{n % 2},{n},u" for n in (5, 1, 9, 7, 3, 6)))
    dataset = run(delimited_spec(files, split=split), tmp_path / "d")
    prices = {s: [x["price"] for x in decoded(dataset, s)] for s in ("train", "valid", "test")}
    assert prices == {"train": [5, 1, 3], "valid": [7, 6], "test": [9]}


SECONDS = [1_714_521_600 + 3600 * hours for hours in (0, 5, 30, 60)]


@pytest.mark.parametrize(
    ("times", "unit"),
    [
        (pa.array(SECONDS, pa.timestamp("s")), None),
        (pa.array([second * 10**9 for second in SECONDS], pa.timestamp("ns", "UTC")), None),
        (pa.array(SECONDS), TimeUnit.s),
        (pa.array([second * 10**6 for second in SECONDS]), TimeUnit.us),
        (pa.array(SECONDS, pa.timestamp("s")).cast(pa.string()), TimeUnit.iso),
    ],
)
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_split_and_derive_by_times_of_any_form(tmp_path, times, unit, suffix):
    if suffix == "csv" and pa.types.is_timestamp(times.type):
        times, unit = times.cast(pa.string()), TimeUnit.iso
    table = pa.table({"click": [0, 1, 0, 1], "at": times})
    path = tmp_path / f"log.{suffix}"
    (pq.write_table if suffix == "parquet" else pacsv.write_csv)(table, path)
    spec = SourceSpec(
        SourceFormat.parquet if suffix == "parquet" else SourceFormat.delimited,
        [str(path)],
        separator=",",
        columns={
            "label": ColumnSpec(ColumnKind.label, source="click"),
            "hour": ColumnSpec(ID, source="at", derive=Derive.hour_of_day),
            "weekday": ColumnSpec(ID, source="at", derive=Derive.day_of_week),
        },
        times={} if unit is None else {"at": unit},
        # A number is of milliseconds, whatever the unit of the column.
        split=SplitSpec(
            SplitKind.time, column="at", valid_from="2024-05-02", test_from=1_714_694_400_000
        ),
    )
    dataset = run(spec, tmp_path / "d")
    found = {split: decoded(dataset, split) for split in ("train", "valid", "test")}
    assert [(s["hour"], s["weekday"]) for s in found["train"]] == [("0", "2"), ("5", "2")]
    assert [s["label"] for s in found["valid"]] == [0]
    assert [s["label"] for s in found["test"]] == [1]


def test_split_by_fraction_is_random_but_always_the_same(tmp_path, log):
    files = log(*(f"1,{n},u" for n in range(4000)))
    spec = delimited_spec(files, split=SplitSpec(valid_frac=0.2, test_frac=0.1))
    first = run(spec, tmp_path / "a")
    spec.block_mib, spec.rows_per_chunk = 1, 900
    second = run(spec, tmp_path / "b")
    for split, fraction in (("train", 0.7), ("valid", 0.2), ("test", 0.1)):
        prices = [sample["price"] for sample in decoded(first, split)]
        assert prices == [sample["price"] for sample in decoded(second, split)]
        assert len(prices) / 4000 == pytest.approx(fraction, abs=0.03)
        assert np.mean(prices) == pytest.approx(2000, rel=0.15)
    spec.split.seed = 1
    assert run(spec, tmp_path / "c").num_samples("test") != first.num_samples("test")


def test_joins_derivations_and_shared_tables(tmp_path):
    files = {
        "users_1": "age\tuser\tseen\n20\tu1\tv2 v1 v2\n",
        "users_2": "age\tuser\tseen\n40\tu2\t\n",
        "videos": "id\tauthor\nv1\ta1\nv2\ta1\n",
        "authors": "author\tcountry\na1\tit\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    # A missing user, however it is stored, is not the empty one.
    users = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 3]), ["u1", "u2", "u9", None])
    times, videos = [0, 7_200_000, None, 317_100_000], ["v1", "v2", "v9", "v1"]
    log = pa.table({"click": [1, 0, 1, 0], "user": users, "video": videos, "time_ms": times})
    with pa.ipc.new_file(tmp_path / "log", log.schema) as writer:
        writer.write_table(log)
    pq.write_table(pa.table({"user": ["", "u2"], "city": ["Rome", "Oslo"]}), tmp_path / "cities")
    hour = {"source": "time_ms", "derive": Derive.hour_of_day, "utc_offset_h": 8}
    spec = SourceSpec(
        SourceFormat.arrow,
        [str(tmp_path / "log")],
        columns={
            "label": ColumnSpec(ColumnKind.label, source="click"),
            "age": ColumnSpec(ColumnKind.dense, fill=-1),
            "video": ColumnSpec(ID, table="videos"),
            "author": ColumnSpec(ID),
            "country": ColumnSpec(ID),
            "city": ColumnSpec(ID),
            "hour": ColumnSpec(ID, **hour),
            "weekday": ColumnSpec(ID, **{**hour, "derive": Derive.day_of_week}),
            "years": ColumnSpec(ID, source="age", derive=Derive.log_bucket),
            "seen": ColumnSpec(ColumnKind.categorical_list, table="videos", max_length=2),
            "at": ColumnSpec(ColumnKind.sequence, source="seen", table="videos", max_length=4),
        },
        joins={
            "users": JoinSpec([str(tmp_path / "users_*")], on="user"),
            "videos": JoinSpec([str(tmp_path / "videos")], on="video", key="id"),
            "authors": JoinSpec([str(tmp_path / "authors")], on="author"),
            "cities": JoinSpec([str(tmp_path / "cities")], on="user", format=SourceFormat.parquet),
        },
        split=WHOLE,
    )
    dataset = run(spec, tmp_path / "d")
    found = decoded(dataset, "train")
    places = [f"at_{place}" for place in range(1, 5)]
    by_place = [[sample.pop(place) for place in places] for sample in found]
    assert by_place == [[["v2"], ["v1"], ["v2"], []], *[[[]] * 4] * 3]
    names = ("label", "age", "video", "author", "city", "hour", "weekday", "years", "seen")
    assert [tuple(sample[name] for name in names) for sample in found] == [
        (1, 20, "v1", "a1", None, "8", "3", "17", ["v1", "v2"]),
        (0, 40, "v2", "a1", "Oslo", "10", "3", "21", []),
        (1, -1, "v9", None, None, None, None, None, []),
        (0, -1, "v1", "a1", None, "0", "0", None, []),  # a Monday in Beijing
    ]
    assert [sample["country"] for sample in found] == ["it", "it", None, "it"]
    assert {f.table for f in dataset.schema.features if f.name in places} == {"videos"}
    (tmp_path / "users_2").write_text(files["users_1"])
    with pytest.raises(ValueError, match=r"joins\.users .*'u1'"):
        run(spec, tmp_path / "d")


USER, AGE = ColumnSpec(ID), ColumnSpec(ColumnKind.dense)


def labelled(source: str, **columns: ColumnSpec) -> dict[str, ColumnSpec]:
    return {"label": ColumnSpec(ColumnKind.label, source=source), "user": USER, **columns}


def side(on: str = "user", key: str = "") -> JoinSpec:
    return JoinSpec(["side.csv"], on=on, key=key, separator=",")


def by_price(**bounds: float) -> SplitSpec:
    return SplitSpec(SplitKind.time, column="price", **bounds)


@pytest.mark.parametrize(
    ("change", "key", "got"),
    [
        ({"files": ["nowhere.csv"]}, "files", "nowhere"),
        ({"columns": labelled("klick")}, "columns.label.source", "'klick'"),
        ({"columns": labelled("age"), "joins": {"a": side()}}, "columns.label", "'age'"),
        (
            {"columns": labelled("click", age=AGE), "joins": {"a": side(), "b": side()}},
            "columns.age.source",
            r"\['a', 'b'\]",
        ),
        ({"split": SplitSpec(SplitKind.time, column="when")}, "split.column", "'when'"),
        ({"split": by_price(valid_from=-5, test_from=9)}, "split", "{'train': 0"),
        ({"times": {"when": TimeUnit.s}}, "times.when", "'when'"),
        ({"joins": {"a": side(on="usr")}}, "joins.a.on", "'usr'"),
        ({"joins": {"a": side(key="id")}}, "joins.a.key", "'id'"),
    ],
)
def test_mistakes_are_found_before_reading(tmp_path, log, monkeypatch, change, key, got):
    monkeypatch.chdir(tmp_path)
    Path("side.csv").write_text("user,age\nu,1\n")
    with pytest.raises(ValueError, match=rf"^data\.source\.{key}: expected .*{got}"):
        run(replace(delimited_spec(log("1,0,u")), **change), tmp_path / "d")
    assert sorted(os.listdir(tmp_path)) == ["log.csv", "side.csv"]


def prepare_on_ranks(directory: str) -> dict[str, str]:
    """All the cases that need ranks, in one spawn."""
    place = Path(directory)
    files = sorted(place.glob("day_*"))
    answers = {"three files": prepare(criteo_spec(files), place / "two_ranks").content_hash}
    answers["one file"] = prepare(criteo_spec(files[:1]), place / "one_file").content_hash
    numbered = sorted(place.glob("rows_*"))
    answers["rows"] = prepare(rows_spec(numbered), place / "two_ranks").content_hash
    for name, spec in (
        ("bad", criteo_spec([files[0], place / "bad"])),
        ("absent", criteo_spec([place / "absent"])),
        ("outside", rows_spec(numbered, num_rows=9)),
    ):
        try:
            prepare(spec, place / "none")
        except (ValueError, RuntimeError) as error:
            answers[name] = str(error)
    return answers


@pytest.mark.slow
def test_ranks_make_the_same_dataset_and_reach_the_same_verdict(tmp_path):
    for index in range(3):
        write_criteo(tmp_path / f"day_{index}", 100 + index, start=1000 * index)
    (tmp_path / "bad").write_text(criteo_line() + "1\t2\n")
    # The first rank has the largest row.
    numbered = [
        write_rows(tmp_path / f"rows_{index}", *lines)
        for index, lines in enumerate((["9,1,2"], ["3,2,"]))
    ]
    first, second = run_ranks(prepare_on_ranks, directory=str(tmp_path))
    files = sorted(tmp_path.glob("day_*"))
    one = run(criteo_spec(files), tmp_path / "one_rank").artifact.content_hash
    assert first["three files"] == second["three files"] == one
    alone = run(criteo_spec(files[:1]), tmp_path / "alone").artifact.content_hash
    assert first["one file"] == second["one file"] == alone
    rows = run(rows_spec(numbered), tmp_path / "alone").artifact.content_hash
    assert first["rows"] == second["rows"] == rows
    for answers in (first, second):
        assert "rows_0 line 2: expected a row number below 9" in answers["outside"]
        assert "bad line 2: expected 40 columns, got 2" in answers["bad"]
        assert "expected files of format criteo" in answers["absent"]
    logs = {path.name for path in (*files, *numbered)}
    left = {path.name for path in tmp_path.iterdir()} - logs
    assert left == {"bad", "two_ranks", "one_file", "one_rank", "alone"}


def rows_spec(files: list[Path], num_rows: int = 0, **settings: object) -> SourceSpec:
    tables = {name: TableSpec(Encoding.rows, num_rows=num_rows) for name in ("user", "videos")}
    return delimited_spec(files, tables=tables, **settings)


def write_rows(path: Path, *lines: str) -> Path:
    """A log of lines "user,item,history"."""
    path.write_text(HEADER + "".join(f"1,0,{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(("num_rows", "expected"), [(0, (8, 10)), (20, (20, 20))])
def test_row_numbers_are_taken_as_they_are(tmp_path, num_rows, expected):
    # The largest of each table are in the second file and in the test split.
    files = [
        write_rows(tmp_path / "0.csv", *["3,1,2 0 2", "0,5,"] * 4),
        write_rows(tmp_path / "1.csv", "7,002,9"),
    ]
    split = SplitSpec(SplitKind.last, valid_frac=0.0, test_frac=0.1)
    dataset = run(rows_spec(files, num_rows, split=split), tmp_path / "d")
    assert [dataset.schema.table(name).num_rows for name in ("user", "videos")] == [*expected]
    train, test = (dataset.block(name, 0).features for name in ("train", "test"))
    assert train["user"].tolist() == [3, 0] * 4
    assert train["item"].tolist() == [1, 5] * 4
    assert [bag(train["history"], n) for n in range(2)] == [[2, 0, 2], []]
    assert (test["user"].tolist(), test["item"].tolist()) == ([7], [2])
    assert not (tmp_path / "d/vocab").exists()


@pytest.mark.parametrize(
    ("line", "got", "column"),
    [
        ("10,0,0", "'10'", "user"),
        ("-1,0,0", "'-1'", "user"),
        ("0x3,0,0", "'0x3'", "user"),
        (",0,0", "nothing", "user"),
        ("0,99999999999999999999,0", "'9{20}'", "item"),
        ("0,0,1 12 2", "'12'", "history"),
    ],
)
def test_an_id_that_is_no_row_is_refused(tmp_path, line, got, column):
    path = write_rows(tmp_path / "log.csv", "9,1,2", "1,0,", line, line)
    with pytest.raises(ValueError, match=f"log.csv line 4: .* 10 .* {column}, got {got}"):
        run(rows_spec([path], 10), tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_days_are_recorded_for_a_log_in_order_of_time(tmp_path):
    files = [tmp_path / f"part_{n}.csv" for n in (1, 2)]
    hours = ([0, 23, 23], [25, 49])  # since 1970
    for file, of_file in zip(files, hours, strict=True):
        file.write_text(HEADER + "".join(f"1,{3_600_000 * h},u,i,\n" for h in of_file))
    split = SplitSpec(SplitKind.time, column="price", valid_from=40 * 3_600_000, utc_offset_h=1)
    source = run(delimited_spec(files, split=split), tmp_path / "d").artifact.content["source"]
    assert source["days"] == [
        {"day": "1970-01-01", "train": 1, "valid": 0, "test": 0},
        {"day": "1970-01-02", "train": 3, "valid": 0, "test": 0},
        {"day": "1970-01-03", "train": 0, "valid": 1, "test": 0},
    ]
    check_time_order(Dataset.open(tmp_path / "d"))
    dataset = run(delimited_spec(files), tmp_path / "e")  # by fraction: a file is a day
    days = dataset.artifact.content["source"]["days"]
    sizes = {day["day"]: day["train"] + day["valid"] + day["test"] for day in days}
    assert sizes == {"part_1.csv": 3, "part_2.csv": 2}


@pytest.mark.parametrize(
    ("order", "where"), [([0, 1], "part_0.csv line 4"), ([2, 1], "part_1.csv line 2")]
)
def test_a_log_out_of_order_is_told_where_it_goes_back(tmp_path, order, where):
    prices = {0: [1, 3, 2], 1: [4, 5], 2: [6, 7]}
    for number, of_file in prices.items():
        lines = [f"1,{price},u,i,\n" for price in of_file]
        (tmp_path / f"part_{number}.csv").write_text(HEADER + "".join(lines))
    spec = delimited_spec(
        [tmp_path / f"part_{number}.csv" for number in order],
        split=SplitSpec(SplitKind.time, column="price"),
    )
    dataset = run(spec, tmp_path / "d")
    assert "days" not in dataset.artifact.content["source"]
    with pytest.raises(ArtifactError, match=f"order of price, got an earlier one at {where}"):
        check_time_order(dataset)


WEIGHTED = {
    "like": ColumnSpec(ColumnKind.label),
    "bought": ColumnSpec(ColumnKind.label, source="buy"),
    "weight": ColumnSpec(ColumnKind.weight, source="importance"),
    "user": ColumnSpec(ColumnKind.categorical),
}


def weighted(tmp_path: Path, lines: list[str]) -> SourceSpec:
    path = tmp_path / "weighted.csv"
    path.write_text("\n".join(["like,buy,importance,user", *lines, ""]))
    split = SplitSpec(SplitKind.last, 0.25, 0)
    return delimited_spec([path], columns=WEIGHTED, split=split)


LINES = ["1,0,0.5,u1", "1,1,2,u2", "0,0,0,u1", "0,1,1,u2"]


def test_several_labels_and_weights(tmp_path):
    dataset = run(weighted(tmp_path, LINES), tmp_path / "d")
    assert dataset.schema.labels == ("like", "bought")
    assert dataset.artifact.content["source"]["num_clicks"] == {
        "like": {"train": 2, "valid": 0, "test": 0},
        "bought": {"train": 1, "valid": 1, "test": 0},
    }
    [batch] = loader(tmp_path / "d", shuffle=False)
    assert batch.labels.tolist() == [[1, 0], [1, 1], [0, 0]]
    assert batch.weights.tolist() == [0.5, 2, 0]


@pytest.mark.parametrize(
    ("line", "column", "got"),
    [
        ("1,2,1,u1", "buy", "'2'"),
        ("1,0,-1,u1", "importance", "-1"),
        ("1,0,,u1", "importance", "nothing"),
    ],
)
def test_labels_and_weights_that_cannot_be_used(tmp_path, line, column, got):
    with pytest.raises(ValueError, match=f"line 2: expected .* {column}, got {got}"):
        prepare(weighted(tmp_path, [line]), tmp_path / "d")
