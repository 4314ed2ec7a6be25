"""The encoder that goes with an exported model makes of records what ``prepare`` makes of a log."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    DenseTransform,
    Derive,
    Encoding,
    SourceFormat,
    SourceSpec,
    SplitKind,
    SplitSpec,
    TableSpec,
    TimeUnit,
)
from hotrec.data.chunks import SPLITS, Dataset, Jagged
from hotrec.data.encode import encode_inputs
from hotrec.data.log import open_log
from hotrec.data.prepare import prepare
from hotrec.data.vocabulary import RowEncoder
from hotrec.models.encoder import Encoder, _Hashed, load_encoder
from hotrec.runs import export
from hotrec.runs.export import Trained

NUM_RECORDS = 4_000
Record = dict[str, Any]

CATEGORICAL, DENSE = ColumnKind.categorical, ColumnKind.dense
LIST, LOG = ColumnKind.categorical_list, DenseTransform.log1p
COLUMNS = {
    "label": ColumnSpec(ColumnKind.label, source="clicked"),
    "price": ColumnSpec(DENSE, transform=LOG, standardize=True, fill=2.5, source="odd price"),
    "amount": ColumnSpec(DENSE, standardize=True),
    "flag": ColumnSpec(DENSE, fill=0.25),
    "big": ColumnSpec(DENSE, transform=LOG),
    "user": ColumnSpec(CATEGORICAL),
    "item": ColumnSpec(CATEGORICAL),
    "hashed": ColumnSpec(CATEGORICAL, source="user"),
    "bucket": ColumnSpec(CATEGORICAL, source="amount", derive=Derive.log_bucket),
    "hour": ColumnSpec(CATEGORICAL, source="when", derive=Derive.hour_of_day, utc_offset_h=5.5),
    "weekday": ColumnSpec(CATEGORICAL, source="when", derive=Derive.day_of_week),
    "hour_of": ColumnSpec(DENSE, source="at", derive=Derive.hour_of_day),
    "slot": ColumnSpec(CATEGORICAL),
    "tags": ColumnSpec(LIST, separator="|", max_length=3),
    "seen": ColumnSpec(ColumnKind.sequence, separator="|", max_length=2, table="item"),
    "gaps": ColumnSpec(LIST, separator="|", max_length=3, derive=Derive.log_bucket),
    "emb": ColumnSpec(DENSE, width=3, standardize=True, fill=0.5),
    "paid": ColumnSpec(DENSE, source="paid amount", transform=LOG),
    "code": ColumnSpec(CATEGORICAL),
    "hour_of_day": ColumnSpec(CATEGORICAL, source="hour of log", derive=Derive.hour_of_day),
    "both": ColumnSpec(CATEGORICAL, source="user and slot"),
}
EXPR = {
    "paid amount": "CAST(REPLACE(REPLACE(REPLACE(paid, '.', ''), ',', '.'), '\u20ac', '') "
    "AS DOUBLE)",
    "hour of log": "STRPTIME(CAST(yymmddhh AS VARCHAR) || '00', '%y%m%d%H%M')",
    "user and slot": "\"user\" || ' in ' || CAST(slot AS VARCHAR)",
}
TABLES = {
    "hashed": TableSpec(Encoding.hashing, num_rows=1000),
    "slot": TableSpec(Encoding.rows, num_rows=100),
    "item": TableSpec(min_count=2),
}
WORDS = (
    *("a", "A", "\u00e9", "e\u0301", "\u65e5\u5fd7", "\U0001f642", "\u03a9\u200b", "x y", " x"),
    *("x ", "\t", "'", 'a, "b"'),
    *("NULL", "null", "None", "nan", "NaN", "-0", "007", "7", "7.0", "1e3", "true", "True"),
    *("x" * 7, "x" * 8, "x" * 9, "\u00df" * 40, "\x7f", "0", "-1", "|", "||", "\\N", "#", "\ufeff"),
)  # fmt: skip


def odd_text(rng: random.Random) -> str | None:
    kind = rng.random()
    if kind < 0.1:
        return rng.choice([None, "", "NULL"])
    if kind < 0.5:
        return rng.choice(WORDS)
    if kind < 0.6:
        return "".join(rng.choices("A\u00e9\u65e5\U0001f642\t ", k=rng.randrange(1, 20)))
    return str(rng.choice([rng.randrange(300), rng.getrandbits(63), -rng.getrandbits(40)]))


def odd_moment(rng: random.Random) -> datetime | None:
    if rng.random() < 0.1:
        return None
    zone = rng.choice([None, UTC, timezone(timedelta(hours=-9.5)), timezone(timedelta(hours=2))])
    seconds = rng.choice([rng.uniform(-2e9, 4e9), rng.randrange(2_000_000_000), 0])
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    return moment.replace(tzinfo=None) if zone is None else moment.astimezone(zone)


def odd_number(rng: random.Random) -> float | None:
    return rng.choice(
        [None, 0.0, -0.0, 1e-320, 5e-324, 3e38, -3e38, 0.1, 1 / 3, rng.gauss(0, 1e6), rng.random()]
    )


def odd_list(rng: random.Random) -> list[str | None] | None:
    if rng.random() < 0.1:
        return None
    items = (odd_text(rng) for _ in range(rng.randrange(6)))
    return [None if item is None else item.replace("|", "/") for item in items]


def typed_records() -> Iterator[Record]:
    """As a Parquet file holds them."""
    rng = random.Random(7)
    for _ in range(NUM_RECORDS):
        yield {
            "clicked": rng.randrange(2),
            "odd price": odd_number(rng),
            "amount": rng.choice([None, Decimal(rng.randrange(-(10**9), 10**9)).scaleb(-2)]),
            "flag": rng.choice([None, True, False]),
            "big": rng.choice([None, 0, 2**63 - 1, -(2**63), 2**53 + 1, rng.getrandbits(62)]),
            "user": odd_text(rng),
            "item": rng.choice([None, rng.randrange(50), 2**63 - 1, -5]),
            "when": odd_moment(rng),
            "at": rng.choice([None, rng.randrange(630_000_000_000, 4_000_000_000_000), -1]),
            "slot": rng.randrange(100),
            "tags": odd_list(rng),
            "seen": rng.choice([None, [], [rng.randrange(60), None, 3], [1] * rng.randrange(5)]),
            "gaps": rng.choice([None, [], [-1.5, None, 1e30], [rng.expovariate(1e-4)] * 4]),
            "emb": rng.choice([None, [0.5, None, -1e9], [rng.gauss(0, 1) for _ in range(3)]]),
            "paid": rng.choice([None, "7", "1.234.567,5\u20ac", f"\u20ac-{rng.randrange(999)},5"]),
            "code": rng.choice([None, 3.0, -0.0, float(rng.randrange(40)), 2.0**53 - 1]),
            "yymmddhh": rng.choice([None, 14102100 + rng.randrange(24)]),
        }


TYPES = {"when": pa.timestamp("us", "UTC"), "amount": pa.decimal128(20, 2), "big": pa.int64()}


def as_utc(record: Record) -> Record:
    """A column of times has one zone."""
    when = record["when"]
    utc = when if when is None or when.tzinfo else when.replace(tzinfo=UTC)
    return {**record, "when": utc}


def vector_text(rng: random.Random, numbers: list[float]) -> str:
    of_blanks = " ".join(map(repr, numbers))
    return "" if None in numbers else rng.choice([of_blanks, f"[{of_blanks}]", str(numbers)])


def text_records() -> Iterator[Record]:
    """As a text file holds them."""
    rng = random.Random(11)
    forms: dict[str, Callable[[Any], str]] = {
        "odd price": lambda number: rng.choice([f"{number!r}", f" {number:.17g}\t", f"{number:e}"]),
        "when": lambda moment: rng.choice([moment.isoformat(), moment.isoformat(" ")]),
        "flag": lambda flag: str(int(flag)),
        "emb": lambda numbers: vector_text(rng, numbers),
        **dict.fromkeys(
            ("tags", "seen", "gaps"), lambda items: "|".join(map(str, filter(None, items)))
        ),
    }  # fmt: skip
    for record in typed_records():
        made = {}
        for name, value in record.items():
            nothing = "0" if name in ("clicked", "slot") else rng.choice(["", "NULL"])
            made[name] = nothing if value is None else forms.get(name, str)(value)
        yield made


def write_table(path: Path, records: list[Record]) -> None:
    columns = {
        name: pa.array([record[name] for record in records], TYPES.get(name)) for name in records[0]
    }
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def write_text(path: Path, records: list[Record]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(records[0])
        writer.writerows(record.values() for record in records)


def spec_of(path: Path, *, format: SourceFormat, **more: Any) -> SourceSpec:
    return SourceSpec(
        **{
            "format": format,
            "files": [str(path)],
            "separator": ",",
            "columns": COLUMNS,
            "tables": TABLES,
            "null_values": ["", "NULL"],
            "expr": EXPR,
            "split": SplitSpec(SplitKind.last, valid_frac=0.1, test_frac=0.2),
            "rows_per_chunk": 3000,
            **more,
        }
    )


def encoder_of(dataset: Dataset, spec: SourceSpec, directory: Path) -> Encoder:
    """The encoder of what ``hotrec export`` writes for a model on the dataset."""
    trained = Trained(cast("Any", None), dataset, Path(), 0, spec)
    directory.mkdir()
    export._write_vocabularies(directory, trained)
    tables = [{"name": t.name, "num_rows": t.num_rows} for t in dataset.schema.tables]
    document = {
        "format_version": 2,
        "architecture": {"dense": dataset.schema.dense},
        "encoding": export._encoding(trained),
        "tables": tables,
    }
    (directory / "model.json").write_text(json.dumps(document))
    return load_encoder(directory)


def bits(dense: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(dense).view(np.uint32)


def check_equal(dataset: Dataset, made: Encoder, records: list[Record]) -> None:
    """Bit for bit, in batches of odd sizes."""
    begin = 0
    for split in SPLITS:
        for chunk in range(len(dataset.chunks(split))):
            block = dataset.block(split, chunk)
            parts = np.array_split(np.arange(begin, begin + len(block)), 3)
            begin += len(block)
            dense, ids = zip(
                *(made.arrays(records[i] for i in part) for part in parts), strict=True
            )
            np.testing.assert_array_equal(bits(np.concatenate(dense)), bits(block.dense))
            assert ids[0].keys() == block.features.keys()
            for name, expected in block.features.items():
                found = [of[name] for of in ids]
                if isinstance(expected, Jagged):
                    lengths = [np.diff(offsets) for _, offsets in found]
                    np.testing.assert_array_equal(
                        np.concatenate(lengths), np.diff(expected.offsets)
                    )
                    found, expected = [values for values, _ in found], expected.values
                np.testing.assert_array_equal(np.concatenate(found), expected, err_msg=name)
    assert begin == len(records)  # fmt: skip


def json_records() -> Iterator[Record]:
    """As JSON Lines hold them: a field of numbers has only these, and keys may be missing."""
    for record in typed_records():
        amount, when = record["amount"], record["when"]
        made = record | {"amount": amount and float(amount), "when": when and when.isoformat()}
        yield {name: value for name, value in made.items() if value is not None}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv", "jsonl"])
def test_records_are_encoded_as_files_are(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log.{suffix}"
    more: dict[str, Any] = {"times": {"when": TimeUnit.iso}}
    if suffix == "csv":
        format, records = SourceFormat.delimited, list(text_records())
        write_text(path, records)
    elif suffix == "jsonl":
        format, records = SourceFormat.json, list(json_records())
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        format, records, more = SourceFormat[suffix], [*map(as_utc, typed_records())], {}
        write_table(path, records)
    spec = spec_of(path, format=format, **more)
    prepare(spec, tmp_path / "dataset")
    dataset = Dataset.open(tmp_path / "dataset")
    made = encoder_of(dataset, spec, tmp_path / "exported")
    check_equal(dataset, made, records)
    assert 0 < made.num_unknown["user"] < made.num_ids["user"]


# One value at a time: what is refused there is refused here, and all else is read alike.

NUMBERS = (
    *("", "NULL", "null", "nan", "NaN", "inf", "-Infinity", "1e38", "1e39", "1_000", "\u0663"),
    *("+5", " 5 ", "\t5", "5.", ".5", ".", "-", "1e400", "1e-400", "--5", "5 5", "1e5.0", "1,5"),
    *("\u22125", "1E+2", "true", "\uff11", "5\xa0", "0.1", "-0", "1234.0", "9007199254740993"),
)  # fmt: skip
TIMES = (
    *("2024-05-01", "2024-05-01T12:30", "2024-05-01 12:30:00.123456789", "2024-05-01T23:30:00+02"),
    *("2024-05-01 12:30:00 UTC", "2024-05-01T12:30:00+0200", "2024-05-01T12:30:00 -05:30"),
    *("2024-W18-3", "2024-02-30", "", "NULL", "yesterday", " 2024-05-01 ", "2024-05-01T24:00:00"),
    *("0001-01-01", "9999-12-31T23:59:59.999999", "1969-12-31T23:59:59.9", "12:30", "20240501"),
    *("2024-05-01T12:30:60", "2024-05-01T12:30:00Z", "2024-05-01t12:30:00z", "1714566600"),
    *("2024-5-1", "2024-05-01T12"),
)
IDS = (
    *("", "NULL", "1234.0", "1234.50", "-0.0", "1e3", "0001", "1.", ".0", "7\t", "[7]", "7,8"),
    "\u00e9",
)
LISTS = (
    *("", "NULL", "[1, 2]", "[1 2]", " ['a', \"b\"] ", "a b", "a  b ", "[]", "[ ]", "[1"),
    "1.0 2.00",
)
TYPED: tuple[Any, ...] = (
    *(None, True, 7, -1, 2**63 - 1, 2**64 - 1, 0.5, 1234.0, float("nan"), float("inf"), 1e39),
    *(2.0**60, Decimal("1.10"), Decimal("7"), Decimal("1E-9"), "7", "", "NULL", "1234.0", " 7"),
    *(b"7", b"\xff", date(2024, 5, 1), datetime(2024, 5, 1, 23, 30), np.bool_(True)),
    *(datetime(2024, 5, 1, 23, 30, 1, 5, tzinfo=UTC), np.datetime64("2024-05-01T12:30:00.500000")),
    *(["7", None, ""], [1, 2], [1.0, 2.5], [1.0, 2.0], [], [["a"]], {"a": 1}),
    *(np.float32(0.1), np.int8(3)),
)
ODD_COLUMNS = {
    "number": ColumnSpec(DENSE, source="x", fill=0.75),
    "hour": ColumnSpec(DENSE, source="x", derive=Derive.hour_of_day, utc_offset_h=1.5, fill=-1),
    "id": ColumnSpec(CATEGORICAL, source="x"),
    "bag": ColumnSpec(ColumnKind.categorical_list, source="x", max_length=2),
}


def check_alike(path: Path, value: Any, name: str, **more: Any) -> None:
    """Check that a file's only value is encoded, or refused, as the encoder does."""
    columns = {"label": ColumnSpec(ColumnKind.label, source="y"), name: ODD_COLUMNS[name]}
    is_dense = columns[name].kind is DENSE
    table, dense = ("z", [name]) if is_dense else (name, [])
    columns |= {"z": ColumnSpec(CATEGORICAL)} if is_dense else {}
    spec = spec_of(path, **{"columns": columns, "tables": {}, "expr": {}, **more})
    scaling = np.array([[0.0] * len(dense), [1.0] * len(dense)])
    expected: Any = None
    with suppress(ValueError):
        log = open_log(spec)
        (block,) = log.blocks(0)
        expected = encode_inputs(block, log.columns, {table: RowEncoder(97)}, scaling)
    document = {
        "null_values": spec.null_values if path.suffix == ".csv" else [],
        "names": ["x", "y", "z"],
        "value_types": {},
        "expr": {},
        "are_texts": path.suffix == ".csv",
        "columns": {
            key: {**asdict(column), "source": column.source or key, "table": column.table or key}
            for key, column in spec.columns.items()
        },
        "times": {"x": spec.times.get("x", "ms")} if name == "hour" else {},
        "means": dict.fromkeys(dense, 0.0),
        "deviations": dict.fromkeys(dense, 1.0),
    }
    made = Encoder(json.loads(json.dumps(document)), dense, {table: _Hashed(97)})
    record = {"x": value, "z": "7"}
    if expected is None:
        with pytest.raises(ValueError, match=r"^record 0 column x: expected .*, got ") as refused:
            pytest.fail(f"{value!r} as {name} is {made.arrays([record])}")
        assert "\n" not in str(refused.value)
        return
    try:
        found = made.arrays([record])
    except ValueError as error:
        raise AssertionError(f"{value!r} as {name} is {expected}") from error
    np.testing.assert_array_equal(bits(found[0]), bits(expected[0]), err_msg=repr(value))
    rows, own = found[1][table], expected[1][table]
    if isinstance(own, Jagged):
        np.testing.assert_array_equal(rows[1], own.offsets, err_msg=repr(value))
        rows, own = rows[0], own.values
    np.testing.assert_array_equal(rows, own, err_msg=repr(value))


@pytest.mark.parametrize(
    ("name", "values", "time"),
    [
        ("number", NUMBERS, ""),
        ("hour", TIMES, "iso"),
        ("hour", NUMBERS, "s"),
        ("id", (*IDS, *NUMBERS, *TIMES), ""),
        ("bag", (*LISTS, *IDS), ""),
    ],
)
def test_odd_texts(tmp_path: Path, name: str, values: tuple[str, ...], time: str) -> None:
    path, times = tmp_path / "odd.csv", {"x": time} if time else {}
    for value in values:
        write_text(path, [{"y": "1", "x": value, "z": "7"}])
        check_alike(path, value, name, format=SourceFormat.delimited, times=times)


@pytest.mark.parametrize("name", ["number", "hour", "id", "bag"])
def test_odd_types(tmp_path: Path, name: str) -> None:
    path = tmp_path / "odd.parquet"
    for value in TYPED:
        is_large = isinstance(value, int) and value >= 2**63
        column = pa.array([value], pa.uint64() if is_large else None)
        pq.write_table(pa.table({"y": [1], "x": column, "z": ["7"]}), path)
        check_alike(path, value, name, format=SourceFormat.parquet)
