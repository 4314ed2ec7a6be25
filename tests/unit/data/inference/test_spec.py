"""What a log is taken for, from a sample of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import yaml
from omegaconf import OmegaConf

from hotrec.cli import main
from hotrec.config.data import DataSpec
from hotrec.config.validate import validate
from hotrec.data import sample as sampling
from hotrec.data.inference.spec import Inferred, infer
from hotrec.data.inference.written import to_yaml
from hotrec.data.prepare import prepare
from hotrec.data.sample import read_sample
from tests.unit.data.inference import logs

NUM = 2000
RNG = np.random.default_rng(0)
HOURS = np.arange(NUM) * 1200  # 28 days
USERS = RNG.integers(0, 300, NUM)
ITEMS = RNG.integers(0, 100, NUM)
LISTS = [
    [f"i{item}" for item in RNG.integers(0, 100, length)] for length in RNG.integers(1, 5, NUM)
]
START_S = 1_714_521_600


def log(**columns: Any) -> pa.Table:
    return pa.table(
        {
            "is_member": RNG.integers(0, 2, NUM),
            "clicked": RNG.integers(0, 2, NUM),
            "user_id": USERS,
            "item": [f"i{item}" for item in ITEMS],
            "price": pa.array(np.exp(RNG.normal(3, 2, NUM)), mask=ITEMS < 5),
            "age": RNG.integers(18, 90, NUM),
            "recent_items": LISTS,
            "event": [f"e{number}" for number in range(NUM)],
            "shop": ["only"] * NUM,
            **columns,
        }
    )


def write(table: pa.Table, path: Path) -> str:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=300)
        return str(path)
    lists = [None if bag is None else "|".join(bag) for bag in table["recent_items"].to_pylist()]
    where = table.column_names.index("recent_items")
    table = table.set_column(where, "recent_items", pa.array(lists))
    with pa.output_stream(str(path), compression="detect") as stream:
        pacsv.write_csv(table, stream, pacsv.WriteOptions(quoting_style="needed"))
    return str(path)


def used(found: Inferred) -> dict[str, dict[str, Any]]:
    return {entry.name: dict(entry.spec) for entry in found.entries if entry.is_used}


@pytest.mark.parametrize("name", ["log.parquet", "log.csv", "log.csv.gz"])
def test_columns_of_a_log(tmp_path: Path, name: str) -> None:
    at = pa.array(START_S + HOURS, pa.timestamp("s"))
    sample = read_sample(write(log(at=at), tmp_path / name))
    found = infer(sample)
    assert (sample.num_rows, sample.is_whole) == (NUM, True)
    specs = used(found)
    assert (
        specs.pop("recent_items").items() >= {"kind": "categorical_list", "table": "item"}.items()
    )
    assert specs.pop("price").items() >= {"kind": "dense", "transform": "log1p"}.items()
    assert specs == {
        "label": {"kind": "label", "source": "clicked"},
        "is_member": {"kind": "categorical"},
        "user_id": {"kind": "categorical"},
        "item": {"kind": "categorical"},
        "age": {"kind": "dense", "standardize": True},
        "hour": {"kind": "categorical", "source": "at", "derive": "hour_of_day"},
        "weekday": {"kind": "categorical", "source": "at", "derive": "day_of_week"},
    }
    assert found.split == {
        **{"kind": "time", "column": "at"},
        **{"valid_from": "2024-05-23", "test_from": "2024-05-25"},
    }
    assert found.times == ({} if name == "log.parquet" else {"at": "iso"})


def test_texts_that_mean_missing(tmp_path: Path) -> None:
    score = np.where(ITEMS < 20, "NA", RNG.integers(0, 1000, NUM).astype(str))
    country = np.where(ITEMS < 50, "NA", "de")  # Namibia
    found = infer(read_sample(write(log(score=score), tmp_path / "a.csv")))
    assert "NA" in found.null_values
    assert used(found)["score"]["kind"] == "dense"
    found = infer(read_sample(write(log(country=country), tmp_path / "b.csv")))
    assert "NA" not in found.null_values


@pytest.mark.parametrize(
    ("columns", "asked", "message"),
    [
        ({"clicked": [3] * NUM}, {}, r"^label: .* got \['is_member', 'second'\]"),
        ({}, {"labels": ["age"]}, r"^label: .* got 'age'"),
        ({}, {"time": "age"}, r"^time: .* got 'age'"),
    ],
)
def test_what_cannot_be_guessed(
    tmp_path: Path, columns: dict[str, Any], asked: dict[str, str], message: str
) -> None:
    table = log(second=RNG.integers(0, 2, NUM), **columns)
    with pytest.raises(ValueError, match=message):
        infer(read_sample(write(table, tmp_path / "log.parquet")), **asked)


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz", "log.parquet"])
def test_a_large_log_is_sampled(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_TEXT_BYTES", 20_000)
    monkeypatch.setattr(sampling, "MAX_ROWS", 700)
    monkeypatch.setattr(sampling, "_PIECE_BYTES", 2000)
    monkeypatch.setattr(sampling, "_BLOCK_BYTES", 4000)
    sample = read_sample(write(log(many=np.arange(NUM) // 2), tmp_path / name))
    assert not sample.is_whole
    assert 100 < sample.table.num_rows < 1000
    factor = 4 if name == "log.csv.gz" else 1.2  # of compressed text the length is a guess
    assert NUM / factor < sample.num_rows < NUM * factor


def test_the_file_says_what_prepare_reads(tmp_path: Path) -> None:
    odd = {"on": ["a b", "c: d"] * (NUM // 2), "x.y": ["1 'q\"", "#"] * (NUM // 2)}
    sample = read_sample(write(log(**odd, keys=ITEMS), tmp_path / "log.csv"))
    text = to_yaml(sample, infer(sample), ["by a test"])
    assert yaml.safe_load(text)["source"]["columns"]["x_y"]["source"] == "x.y"
    merged = OmegaConf.merge(OmegaConf.structured(DataSpec), OmegaConf.create(text))
    spec = OmegaConf.to_object(merged)
    validate(spec, "data")
    artifact = prepare(spec.source, tmp_path / "dataset")
    assert sum(artifact.content["source"]["num_samples"].values()) == NUM


def test_a_directory_of_one_format(tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / "log" / f"day={day}").mkdir(parents=True)
        write(log(), tmp_path / "log" / f"day={day}" / "part.parquet")
    sample = read_sample(str(tmp_path / "log"))
    assert (sample.files, sample.num_rows) == ([f"{tmp_path}/log/**/*.parquet"], 2 * NUM)
    (tmp_path / "log" / "more.csv.gz").write_bytes(gzip.compress(b"a,b\n1,2\n"))
    with pytest.raises(ValueError, match=r"got \['.csv.gz', '.parquet'\] among 3 files"):
        read_sample(str(tmp_path / "log"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{},u{},5{}\n", r"^path: .* got values: \['0', 'u0', '50'\]"),
        ("click,user,item\n{},K\xf6ln {},{}\n", "UTF-8 .* got byte 0xf6"),
        ('click,user,item\n{},"a,{},{}\n', r"a\.csv line 2: "),
        ("click,user,item\nyes{},u{},i{}\n", r"^label: .* none among"),
    ],
)
def test_text_that_is_no_log_is_refused(tmp_path: Path, text: str, message: str) -> None:
    header, _, line = text.rpartition("\n")[0].partition("\n")
    lines = [(line or header).format(n % 2, n % 7, n % 5) for n in range(100)]
    content = "\n".join([*([header] if line else []), *lines, ""])
    (tmp_path / "a.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        infer(read_sample(str(tmp_path / "a.csv")))


def test_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(log(), tmp_path / "my log,1.csv")
    assert main(["init", path]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["name"] == "my_log_1"
    assert figures["next"].startswith("hotrec run data=my_log_1")
    written = Path("conf/data/my_log_1.yaml").read_bytes()
    assert main(["init", path]) == 1
    assert "expected a new file" in capsys.readouterr().err
    assert Path("conf/data/my_log_1.yaml").read_bytes() == written
    # What it wrote is found without --config-dir.
    assert main(["prepare", "data=my_log_1", "paths.dataset=dataset"]) == 0
    assert json.loads(capsys.readouterr().out)["num_samples"]["train"] > 1000


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([None, 0, 1, 1], ["'0' in 25", "'1' in 50", "no value in 25 rows"]),
        ([0, 1, 2, 1], ["'1' in 50", "'2' in 25"]),
        (["yes", "no", "maybe", "no"], ["'no' in 50", "'maybe' in 25"]),
        ([0.0, 0.5, 1.0, 0.5], ["'0.5' in 50"]),
        ([0, 0, 0, 0], ["'0' in 100 rows"]),
    ],
)
def test_a_label_that_is_none_is_refused_with_its_values(
    tmp_path: Path, labels: list[Any], said: list[str]
) -> None:
    table = pa.table({"clicked": labels * 25, "user": [f"u{n % 7}" for n in range(100)]})
    pacsv.write_csv(table, tmp_path / "a.csv")
    pq.write_table(table, tmp_path / "a.parquet")
    for suffix, asked in (("csv", ["clicked"]), ("csv", None), ("parquet", ["clicked"])):
        with pytest.raises(ValueError, match=r"^label: expected .* got .*clicked: ") as caught:
            infer(read_sample(str(tmp_path / f"a.{suffix}")), asked)
        assert [part for part in said if part not in str(caught.value)] == []


@pytest.mark.timeout(60)
def test_init_renames_columns_whose_names_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As pandas and PyTorch have them, and such as the new names could be."""
    monkeypatch.chdir(tmp_path)
    names = ["__index_level_0__", "__a__", "____", "__", "_", "_a__", "_a___", "to", "to_"]
    names += ["label", "('item', '')", "('item', 'x')", "\u65e5\u5fd7", "a.b", "a/b", "x" * 300]
    names += ["user \U0001f600", "a\u2028b"]
    write(log(**dict.fromkeys(names, ITEMS)), tmp_path / "log.parquet")
    assert main(["init", "log.parquet", "label=clicked"]) == 0
    assert main(["prepare", "data=log", "paths.dataset=dataset"]) == 0
    written = yaml.safe_load(Path("conf/data/log.yaml").read_text())
    columns = written["data"]["source"]["columns"]
    assert {*names} <= {column.get("source", name) for name, column in columns.items()}
    capsys.readouterr()


# What is said of a log, and what its columns share.

DAYS = np.arange(logs.NUM) // 250  # 24 days
TIMES = pa.array(START_S + DAYS * 86_400 + np.arange(logs.NUM) % 250 * 60, pa.timestamp("s"))

SOME_TIMES = pa.array(DAYS, pa.timestamp("s"), mask=DAYS == 3)
NO_TIMES = [f"day {number}" for number in DAYS * 250 + logs.ITEMS]


def inferred(labels: list[str] | None = None, *, is_text: bool = False, **more: Any) -> Inferred:
    columns = {"clicked": logs.CLICKS.astype(int), "user_id": logs.USERS, "item_id": logs.ITEMS}
    return infer(logs.sample_of(columns | more, is_text=is_text), labels)


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        (logs.CLICKS, {}),
        (np.where(logs.CLICKS, "True", "False"), {}),
        (np.where(logs.CLICKS, "y", "n"), {}),
        (np.where(logs.CLICKS, 1, -1), {"values": ["-1", "1"]}),
        (np.where(logs.CLICKS, "1.0", "-1.0"), {"values": ["-1", "1"]}),
        (np.where(logs.CLICKS, "1", ""), {"values": ["", "1"]}),
    ],
)
def test_labels_in_other_forms(values: Any, keys: dict[str, Any]) -> None:
    found = inferred(clicked=values, is_text=True)
    assert used(found)["label"] == {"kind": "label", "source": "clicked", **keys}
    np.testing.assert_array_equal(found.labels[0].is_click, logs.CLICKS)


@pytest.mark.parametrize(
    ("name", "values", "table"),
    [
        ("history", pa.array([[i, (i * 7) % 150] for i in logs.ITEMS.tolist()]), "item_id"),
        ("recent_items", pa.array([[i, i, 10**6 + i] for i in logs.ITEMS.tolist()]), "item_id"),
        ("last_item_id", logs.ITEMS // 2, "item_id"),
        ("friend", pa.array([[f"u{u}", "u0"] for u in logs.USERS]), "member"),
        ("shop_position", logs.ITEMS % 30, None),
        ("num_items", logs.ITEMS % 60, None),
        ("item_tags", pa.array([[i % 20, i % 7] for i in logs.ITEMS.tolist()]), None),
    ],
)
def test_tables_are_shared(name: str, values: Any, table: str | None) -> None:
    found = inferred(member=[f"u{user}" for user in logs.USERS], **{name: values})
    assert used(found)[name].get("table") == table


@pytest.mark.parametrize(
    ("more", "remark", "is_random"),
    [
        ({"at": SOME_TIMES}, "at: times, but missing in 250 rows", True),
        ({"at": pa.array([5] * logs.NUM, pa.timestamp("s"))}, "at: too few distinct times", True),
        ({"event_time": NO_TIMES}, "event_time: skipped: ", True),
        ({"timestamp": np.arange(logs.NUM) * 1000 + 61}, "timestamp: skipped: ", True),
        ({"at": TIMES, "dt": TIMES}, "dt: also times", False),
        ({"bought": (logs.CLICKS & (logs.ITEMS < 20)).astype(int)}, "bought: alone: all of", False),
    ],
)
def test_what_is_said(more: dict[str, Any], remark: str, is_random: bool) -> None:
    [said] = inferred(["clicked"], **more).remarks
    assert said.startswith(remark)
    assert ("the split is at random" in said) == is_random


def test_the_log_is_split_by_the_times_that_it_is_in_order_of() -> None:
    births = pa.array(logs.USERS * 40 * 86_400 + 86_400, pa.timestamp("s"))
    found = inferred(birthday=births, at=TIMES)
    assert found.split["column"] == "at"
    assert found.remarks == ["birthday: also times: use time=birthday to split by them"]
    assert inferred(birthday=births).split["column"] == "birthday"
