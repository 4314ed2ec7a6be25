"""What a log is taken for, from a sample of it; and what is not read is said."""

from __future__ import annotations

import bz2
import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import yaml
from omegaconf import OmegaConf

from hotrec.cli import main
from hotrec.config.data import CRITEO_COLUMNS, DataSpec, SourceFormat
from hotrec.config.validate import validate
from hotrec.data import sample as sampling
from hotrec.data.infer import Inferred, infer, to_yaml
from hotrec.data.prepare import prepare
from hotrec.data.sample import Sample, read_sample

NUM = 6000
RNG = np.random.default_rng(7)
USERS, ITEMS = ((RNG.random(NUM) ** 2 * size).astype(np.int64) for size in (400, 150))
PRICES = np.round(np.exp(RNG.normal(2, 1, NUM)), 2)
TASTE, CHARM = (RNG.normal(0, 1.2, size) for size in (400, 150))
CLICKS = RNG.random(NUM) < 1 / (1 + np.exp(1.2 - TASTE[USERS] - CHARM[ITEMS]))
BOUGHT = CLICKS & (RNG.random(NUM) < 0.1)
AMOUNTS = RNG.exponential(40, NUM).astype(np.int64)
TOLD = RNG.random(NUM) < 0.1 + 0.6 * (AMOUNTS > 40)  # clicks that know an amount
EVEN = RNG.integers(0, 500, NUM)  # knows nothing, and lies everywhere alike
DAYS = np.arange(NUM) // 200  # 30 days of May 2024
SECONDS = 1_714_521_600 + DAYS * 86_400 + np.arange(NUM) % 200 * 60
TIMES = pa.array(SECONDS, pa.timestamp("s"))
ID, LIST, NUMBER = ({"kind": kind} for kind in ("categorical", "categorical_list", "dense"))
SCALES = ("transform", "standardize", "fill")


def sample_of(columns: dict[str, Any], *, is_text: bool = False) -> Sample:
    """The columns as those of a Parquet file, or of a text file where all are texts."""
    if is_text:
        columns = {name: [f"{v}" for v in values] for name, values in columns.items()}
    table = sampling._frame(pa.table(columns))
    kind = SourceFormat.delimited if is_text else SourceFormat.parquet
    return Sample(["log"], kind, ",", table, len(table))


def inferred(
    labels: list[str] | None = None, *, is_text: bool = False, clicks: Any = CLICKS, **more: Any
) -> Inferred:
    columns = {"clicked": clicks.astype(int), "user_id": USERS, "item_id": ITEMS}
    return infer(sample_of(columns | more, is_text=is_text), labels or ["clicked"])


def prepared(text: str, directory: Path) -> dict[str, Any]:
    """What ``prepare`` records of the log that a file of ``init`` describes."""
    merged = OmegaConf.merge(OmegaConf.structured(DataSpec), OmegaConf.create(text))
    spec: Any = OmegaConf.to_object(merged)
    validate(spec, "data")
    source: dict[str, Any] = prepare(spec.source, directory).content["source"]
    return source


def used(found: Inferred) -> dict[str, dict[str, Any]]:
    return {
        entry.name: {key: value for key, value in entry.spec.items() if key not in SCALES}
        for entry in found.entries
        if entry.is_used
    }


@pytest.mark.parametrize(
    ("values", "spec"),
    [
        (USERS.astype(np.float64), ID),
        (pa.array([float(user) if user % 9 else None for user in USERS]), ID),
        (pa.array([Decimal(int(user)) for user in USERS], pa.decimal128(20, 0)), ID),
        (pa.array(USERS).dictionary_encode(), ID),
        (pa.array(USERS.astype(str)).cast(pa.string_view()), ID),
        (pa.array(PRICES.astype(np.float16)), NUMBER),
        (pa.array([Decimal(f"{price:.2f}") for price in PRICES]), NUMBER),
        # As numbers some of these ids would be the same.
        (USERS + 6_700_000_000_000_000_000, ID),
        (pa.array([f"{user:04d}e{user % 7:03d}" for user in USERS]), ID),
        (USERS % 2 == 0, ID),
        (pa.array([list(range(user % 3)) for user in USERS]), LIST),
        (pa.array([[float(user % 3), 2.0] for user in USERS]), LIST),
        (pa.array([[user / 7, 0.5] for user in USERS]), {**NUMBER, "width": 2}),
    ],
)
def test_values_of_any_type(values: Any, spec: dict[str, Any]) -> None:
    assert used(inferred(x=values))["x"].items() >= spec.items()


@pytest.mark.parametrize(
    ("texts", "spec"),
    [
        ([f"{p:.3f}|{p / 3:.3f}" for p in PRICES], {"width": 2, "separator": "|"}),
        ([f"[{p:.3f}, {p / 3:.3f}]" for p in PRICES], {"width": 2, "separator": ","}),
        ([",".join(str(101 + u * k % 99) for k in range(u % 4 + 1)) for u in USERS], LIST),
        ([str([int(item), int(item) % 7]) for item in ITEMS], {**LIST, "separator": ","}),
        (np.where(ITEMS < 20, "NaN", PRICES.astype(str)), NUMBER),
        ([f"{user:04d}" for user in USERS], ID),
    ],
)
def test_texts(texts: Any, spec: dict[str, Any]) -> None:
    assert used(inferred(x=texts, is_text=True))["x"].items() >= spec.items()


@pytest.mark.parametrize(
    ("name", "texts", "number"),
    [
        ("paid", [f"{price * 400:,.2f}" for price in PRICES], np.round(PRICES * 400, 2)),
        ("paid", [f"{price:.2f}".replace(".", ",") for price in PRICES], PRICES),
        ("paid", [f"${price:.2f}" for price in PRICES], PRICES),
        ("hour", [f"2405{1 + n // 200:02d}{n % 24:02d}" for n in range(NUM)], None),
        ("x", [f"{1 + day:02d}.05.2024 10:30" for day in DAYS], None),
    ],
)
def test_what_is_not_read_has_an_expression(name: str, texts: Any, number: Any) -> None:
    found = inferred(**{name: texts}, is_text=True)
    assert name not in used(found)
    [(made, (sql, is_used))] = found.exprs.items()
    assert not is_used
    if number is not None:
        values = pl.DataFrame({name: texts}).select(pl.sql_expr(sql)).to_series()
        assert values.to_list() == number.tolist()
    assert [f"{name}: skipped" in remark for remark in found.remarks] == [True]


@pytest.mark.parametrize(
    ("values", "remark"),
    [
        (np.where(USERS % 5 == 0, np.nan, PRICES), "NaN"),
        (pa.array([{"a": 1}] * NUM), "Struct"),
        (pa.array([b"\xff"] * NUM), "Binary"),
        (pa.array([[0.5] * (1 + user % 3) for user in USERS]), "lists of numbers"),
    ],
)
def test_what_is_not_read_is_said(values: Any, remark: str) -> None:
    found = inferred(x=values)
    assert "x" not in used(found)
    [said] = found.remarks
    assert said.startswith("x: skipped: ")
    assert remark in said


@pytest.mark.parametrize(
    ("name", "values", "form"),
    [
        ("x", [f"2024-05-{1 + day:02d} 10:30:00 UTC" for day in DAYS], "iso"),
        ("x", [f"2024-05-{1 + day:02d}T10:30:00+0200" for day in DAYS], "iso"),
        ("dt", [f"202405{1 + day:02d}" for day in DAYS], "iso"),
        ("ts", SECONDS, "s"),
        ("ts", [f"{1_714_521_600_000 + 86_400_000 * day}.0" for day in DAYS], "ms"),
    ],
)
def test_times(name: str, values: Any, form: str) -> None:
    found = inferred(**{name: values}, is_text=True)
    assert found.times == {name: form}
    assert found.split == {
        **{"kind": "time", "column": name, "valid_from": "2024-05-24", "test_from": "2024-05-27"}
    }
    assert used(found)["weekday"] == {**ID, "derive": "day_of_week", "source": name}


def test_the_log_is_split_by_the_times_that_it_is_in_order_of() -> None:
    births = pa.array(USERS * 40 * 86_400 + 86_400, pa.timestamp("s"))
    found = inferred(birthday=births, at=TIMES)
    assert found.split["column"] == "at"
    assert found.remarks == ["birthday: also times: use time=birthday to split by them"]
    some = pa.array(SECONDS, pa.timestamp("s"), mask=DAYS == 3)
    [said] = inferred(at=some).remarks
    assert said == "at: times, but missing in 200 rows; the split is at random"
    [said] = inferred(event_time=[f"day {number}" for number in SECONDS // 600]).remarks
    assert said.startswith("event_time: skipped: ")


@pytest.mark.parametrize(
    ("name", "values", "clicks", "are_ids"),
    [
        *((name, EVEN, CLICKS, True) for name in ["zip", "adgroup_id", "age_group", "f3"]),
        *((name, ITEMS, CLICKS, False) for name in ["price", "watchtime", "num_items"]),
        # Only names make numbers times.
        *((name, 1_714_521_600 + DAYS * 86_400, CLICKS, True) for name in ("candidate_id", "C14")),
        # Of names that say nothing, what the click knows.
        ("f3", USERS, CLICKS, True),
        ("f3", AMOUNTS, TOLD, False),
        # What it does not know: as many numbers as there are, or counts.
        ("f3", AMOUNTS**2, CLICKS, False),
        ("f3", AMOUNTS - 20, CLICKS, False),
        ("f3", AMOUNTS / 7, CLICKS, False),
    ],
)
def test_ids_or_a_quantity(name: str, values: Any, clicks: Any, are_ids: bool) -> None:
    found = inferred(clicks=clicks, **{name: values})
    assert used(found)[name] == (ID if are_ids else NUMBER)
    assert found.times == {}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.where(CLICKS, RNG.exponential(30, NUM), 0), "alone: AUC 1.00"),
        (1 - CLICKS.astype(np.int64), "alone: AUC 1.00"),
        (pa.array(EVEN, mask=~CLICKS), "alone: AUC 1.00"),
        (pa.array([[1, 2] if hit else [] for hit in CLICKS]), "alone: AUC 1.00"),
        (BOUGHT.astype(np.int64), f"alone: all of {BOUGHT.sum()} rows with '1' are 1"),
        (np.where(BOUGHT, PRICES, 0), f"alone: all of {BOUGHT.sum()} rows above 0 are 1"),
        (USERS, ""),
        (PRICES, ""),
    ],
)
def test_leaks(values: Any, said: str) -> None:
    remarks = [remark for remark in inferred(x=values).remarks if "before the click" in remark]
    assert [remark.startswith(f"x: {said}") for remark in remarks] == ([True] if said else [])


@pytest.mark.parametrize(
    ("name", "values", "table"),
    [
        ("history", pa.array([[i, (i * 7) % 150] for i in ITEMS.tolist()]), "item_id"),
        ("recent_items", pa.array([[i, i, 10**6 + i] for i in ITEMS.tolist()]), "item_id"),
        ("last_item_id", ITEMS // 2, "item_id"),
        ("friend", pa.array([[f"u{u}", "u0"] for u in USERS]), "member"),
        ("shop_position", ITEMS % 30, None),
        ("item_tags", pa.array([[i % 20, i % 7] for i in ITEMS.tolist()]), None),
    ],
)
def test_tables_are_shared(name: str, values: Any, table: str | None) -> None:
    found = inferred(member=[f"u{user}" for user in USERS], **{name: values})
    assert used(found)[name].get("table") == table


@pytest.mark.parametrize(
    "values",
    [
        CLICKS,
        np.where(CLICKS, "True", "False"),
        np.where(CLICKS, "y", "n"),
        np.where(CLICKS, "1.0", "-1.0"),
        np.where(CLICKS, "1", ""),
    ],
)
def test_labels_in_other_forms_are_prepared(tmp_path: Path, values: Any) -> None:
    rows = zip(values.tolist(), USERS, ITEMS, strict=True)
    lines = "".join(f"{label},{user},{item}\n" for label, user, item in rows)
    (tmp_path / "log.csv").write_text("clicked,user,item\n" + lines)
    sample = read_sample(str(tmp_path / "log.csv"))
    source = prepared(to_yaml(sample, infer(sample, ["clicked"]), []), tmp_path / "dataset")
    assert sum(source["num_clicks"].values()) == CLICKS.sum()
    assert sum(source["num_samples"].values()) == NUM


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([None, 0, 1, 1], ["'0' in 25", "'1' in 50", "no value in 25 rows"]),
        (["yes", "no", "maybe", "no"], ["'no' in 50", "'maybe' in 25"]),
        ([0, 0, 0, 0], ["'0' in 100 rows"]),
    ],
)
def test_a_label_that_is_none_is_refused_with_its_values(
    tmp_path: Path, labels: list[Any], said: list[str]
) -> None:
    table = pa.table({"clicked": labels * 25, "user": [f"u{n % 7}" for n in range(100)]})
    pacsv.write_csv(table, tmp_path / "a.csv")
    for asked in (["clicked"], None):
        with pytest.raises(ValueError, match=r"^label: expected .* got .*clicked: ") as caught:
            infer(read_sample(str(tmp_path / "a.csv")), asked)
        assert [part for part in said if part not in str(caught.value)] == []


@pytest.mark.timeout(60)
def test_init_renames_columns_whose_names_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As pandas and PyTorch have them, and such as the new names could be."""
    monkeypatch.chdir(tmp_path)
    names = ["__index_level_0__", "__a__", "____", "_a__", "_a___", "to", "to_", "label", "on"]
    names += ["('item', 'x')", "\u65e5\u5fd7", "a.b", "a/b", "x" * 300, "a\u2028b", "c: d#"]
    table = {"clicked": CLICKS.astype(int), "user": USERS} | dict.fromkeys(names, ITEMS)
    pq.write_table(pa.table(table), "log.parquet")
    assert main(["init", "log.parquet", "label=clicked"]) == 0
    assert main(["init", "log.parquet", "label=clicked"]) == 1
    assert "expected a new file" in capsys.readouterr().err
    written = Path("conf/data/log.yaml").read_text()
    prepared(yaml.safe_dump(yaml.safe_load(written)["data"]), tmp_path / "dataset")
    columns = yaml.safe_load(written)["data"]["source"]["columns"]
    assert {*names} <= {column.get("source", name) for name, column in columns.items()}
    capsys.readouterr()


# Files of any format.

LINES = [f"{row % 2},u{row % 7},{row / 3:.2f}\n" for row in range(1000)]
CSV = ("clicked,user_id,price\n" + "".join(LINES)).encode()


def read(path: Path, content: bytes) -> Sample:
    path.write_bytes(content)
    return read_sample(str(path))


def test_lines_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    lines = CSV.splitlines(keepends=True)
    sample = read(tmp_path / "a.csv", b"".join([*lines[:3], b"1,u1,2,3\n", *lines[3:], b"1,u5"]))
    assert (len(sample.table), sample.num_bad, sample.num_rows) == (1000, 2, 1002)
    assert "line 4: expected 3 columns, got 4" in sample.fault
    rows = [
        {"clicked": row % 2, "user": 10**19 + row % 7, "tags": ["a", f"t{row}"], "meta": {"a": 1}}
        for row in range(100)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows) + '{"clicked": tr'
    for name, data in (
        ("a.jsonl", content.encode()),
        ("b.json.gz", gzip.compress(content.encode())),
    ):
        sample = read(tmp_path / name, data)
        assert (sample.format, len(sample.table), sample.num_bad) == (SourceFormat.json, 100, 1)
        assert "line 101: expected a JSON object" in sample.fault
        entries = used(infer(sample))
        assert entries["user"] == ID
        assert entries["tags"]["kind"] == "categorical_list"
        assert "meta" not in entries


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz", "log.parquet"])
def test_a_large_log_is_sampled(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_TEXT_BYTES", 20_000)
    monkeypatch.setattr(sampling, "MAX_ROWS", 700)
    monkeypatch.setattr(sampling, "_PIECE_BYTES", 2000)
    table = pa.table({"clicked": CLICKS.astype(int), "user": USERS, "n": np.arange(NUM)})
    if name.endswith("parquet"):
        pq.write_table(table, tmp_path / name, row_group_size=300)
    else:
        with pa.output_stream(str(tmp_path / name), compression="detect") as stream:
            pacsv.write_csv(table, stream)
    sample = read_sample(str(tmp_path / name))
    assert not sample.is_whole
    assert 100 < len(sample.table) < 5000
    factor = 4 if name == "log.csv.gz" else 1.2  # of compressed text the length is a guess
    assert NUM / factor < sample.num_rows < NUM * factor


def test_a_directory_of_one_format(tmp_path: Path) -> None:
    """Its parts may differ in types and columns, and its name may be any."""
    ids = [pa.array([1, 2]), pa.array(["1", None]), pa.array([3.0, 4.0])]
    for day, values in enumerate(ids):
        folder = tmp_path / "two [words]" / f"dt=2024-05-0{day + 1}"
        folder.mkdir(parents=True)
        more = {"extra": np.arange(2)} if day else {}
        pq.write_table(pa.table({"user": values, **more}), folder / "part.parquet")
        (folder / "_SUCCESS").touch()
    sample = read_sample(str(tmp_path / "two [words]"))
    assert sample.table["user"].str.replace(".0", "", literal=True).to_list() == [
        "1",
        "2",
        "1",
        None,
        "3",
        "4",
    ]
    assert sample.table["extra"].null_count() == 2
    assert sample.partitions == ("dt",)
    (tmp_path / "two [words]" / "more.csv.gz").write_bytes(gzip.compress(b"a,b\n1,2\n"))
    with pytest.raises(ValueError, match=r"got \['.csv.gz', '.parquet'\] among 4 files"):
        read_sample(str(tmp_path / "two [words]"))


def test_the_beginning_of_a_file_tells_its_format(tmp_path: Path) -> None:
    pq.write_table(pa.table({"clicked": [0, 1], "user": ["a", "b"]}), tmp_path / "part-0")
    assert read_sample(str(tmp_path / "part-0")).format is SourceFormat.parquet
    assert read(tmp_path / "a.txt", b'{"clicked": 1, "user": "b"}\n').format is SourceFormat.json
    line = "\t".join(["1", *map(str, range(13)), *(f"{n:08x}" for n in range(25)), ""])
    sample = read(tmp_path / "day_0.csv", f"{line}\n".encode() * 3)
    assert (sample.format, sample.num_rows) == (SourceFormat.criteo, 3)
    assert tuple(sample.table.columns) == CRITEO_COLUMNS


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv.gz", CSV, "b'clicked,user_id,'"),
        ("a.csv.gz", gzip.compress(CSV)[:900], "as in gzip"),
        ("a.csv.gz", bz2.compress(CSV), "as in bzip2"),
        ("a.csv", gzip.compress(CSV, mtime=10), "as in gzip"),  # the byte of a new line
        ("a.csv", CSV.decode().encode("utf-16"), "as in UTF-16"),
        ("a.csv", b"", "no bytes"),
        ("a.parquet", CSV, "b'clicked,user_id,'"),
        ("b.csv", "click,user\n1,K\xf6ln\n".encode("latin-1"), "UTF-8"),
        ("b.csv", b'click,user,item\n1,"a,b,2\n', "line 2"),
        (
            "b.csv",
            b"".join(b"%d,u%d,5%d\n" % (n % 2, n % 7, n % 5) for n in range(99)),
            "got values",
        ),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=r": expected .* got ") as caught:
        infer(read(tmp_path / name, content), ["0"] if "values" in said else None)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
