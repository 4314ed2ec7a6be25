"""What a log holds is what is read of it, whatever its format; and what cannot be read is named."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import socket
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.config.data import (
    CRITEO_DENSE,
    CRITEO_FEATURES,
    ColumnKind,
    ColumnSpec,
    OnBadLine,
    SourceFormat,
)
from hotrec.data import text
from hotrec.data.columns import RawBlock
from hotrec.data.files import find_files
from hotrec.data.readers import (
    LogFormat,
    Wanted,
    column_names,
    count_samples,
    partition_of,
    read_blocks,
)
from tests.unit.data.logs import criteo_line

CRITEO = Wanted(ids=CRITEO_FEATURES, numbers=("label", *CRITEO_DENSE), labels=("label",))
SKIP = {"on_bad_line": OnBadLine.skip}


def values(blocks: list[RawBlock], name: str) -> list:
    found = []
    for block in blocks:
        are_ids = f"id:{name}" in block.frame.columns
        found += block.ids(name).values().to_list() if are_ids else block.numbers(name).tolist()
    return found


def write_table(path: Path, table: pa.Table, as_file: SourceFormat) -> Path:
    if as_file is SourceFormat.parquet:
        pq.write_table(table, path)
        return path
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def read(path: Path, log_format: LogFormat, wanted: Wanted) -> list[RawBlock]:
    return list(read_blocks(path, log_format, wanted))


# A table, written by others and read back.

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=6)
TAG = st.text("abc1\u00e9", min_size=1, max_size=3)
# With a letter, since texts that look like numbers are read as such from other formats.
NAME = TEXTS.map(lambda value: f"u{value}")
ROW = st.fixed_dictionaries(
    {
        "click": st.integers(0, 1),
        "price": st.none() | st.floats(-1e6, 1e6, allow_nan=False),
        "user": st.none() | NAME,
        "item": st.none() | st.integers(-(2**63), 2**63 - 1),
        "tags": st.none() | st.lists(TAG, min_size=1, max_size=3),
        "other": st.integers(0, 9),
    }
)
TAGS = ColumnSpec(ColumnKind.categorical_list, separator="|")
TABLE = Wanted(
    ("user", "item", "tags"),
    ("click", "price"),
    labels=("click",),
    single=("user", "item"),
    columns={"tags": TAGS},
)
TYPES = pa.schema(
    {
        "click": pa.int8(),
        "price": pa.float64(),
        "user": pa.string(),
        "item": pa.int64(),
        "tags": pa.large_list(pa.string()),
        "other": pa.int32(),
    }
)


def write_csv(rows: list[dict[str, Any]], null: str, **dialect: Any) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, rows[0], **dialect)
    writer.writeheader()
    for row in rows:
        tags = None if row["tags"] is None else "|".join(row["tags"])
        of = {**row, "tags": tags}
        writer.writerow({name: null if value is None else value for name, value in of.items()})
    return file.getvalue().encode()


def write_arrow(path: Path, table: pa.Table, *, is_stream: bool) -> None:
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


@pytest.mark.slow
@given(
    rows=st.lists(ROW, min_size=1, max_size=12),
    kind=st.sampled_from(["csv", "tsv", "json", "parquet", "arrow", "stream"]),
    order=st.permutations(TYPES.names),
    suffix=st.sampled_from(["", ".gz", ".zst", ".bz2"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    end=st.sampled_from(["\n", "\r\n"]),
    is_marked=st.booleans(),
    is_ended=st.booleans(),
    null=st.sampled_from(["", "NA"]),
    block_bytes=st.sampled_from([1, 30, 8 << 20]),
)
def test_what_is_written_is_read(  # noqa: PLR0913
    tmp_path_factory,
    rows,
    kind,
    order,
    suffix,
    quoting,
    end,
    is_marked,
    is_ended,
    null,
    block_bytes,
):
    folder = tmp_path_factory.mktemp("log")
    rows = [{name: row[name] for name in order} for row in rows]
    path = folder / f"log.{kind}"
    if kind in ("csv", "tsv", "json"):
        separator = "\t" if kind == "tsv" else ","
        if kind == "json":
            data = "".join(f"{json.dumps(row)}{end}" for row in rows).encode()
            log_format = LogFormat(SourceFormat.json, block_bytes=block_bytes)
        else:
            dialect = {"quoting": quoting, "lineterminator": end, "delimiter": separator}
            data = write_csv(rows, null, **dialect)
            log_format = LogFormat(
                SourceFormat.delimited, separator, ("", null), block_bytes=block_bytes
            )
        data = data if is_ended else data.removesuffix(end.encode())
        path = folder / f"log.{kind}{suffix}"
        with pa.output_stream(str(path), compression="detect") as stream:
            stream.write(b"\xef\xbb\xbf" * is_marked + data)
    else:
        table = pa.Table.from_pylist(rows, TYPES).select(order)
        log_format = LogFormat(SourceFormat.arrow)
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=3)
            log_format = LogFormat(SourceFormat.parquet)
        else:
            write_arrow(path, table, is_stream=kind == "stream")
    assert column_names(path, log_format) == tuple(order)
    blocks = read(path, log_format, TABLE)
    found = {name: values(blocks, name) for name in (*TABLE.ids, *TABLE.numbers)}
    if kind in ("csv", "tsv"):
        found["tags"] = [None if tags is None else tags.split("|") for tags in found["tags"]]
    assert found["click"] == [row["click"] for row in rows]
    assert found["user"] == [row["user"] for row in rows]
    items = [row["item"] for row in rows]
    assert found["item"] == [None if item is None else str(item) for item in items]
    assert found["tags"] == [row["tags"] for row in rows]
    prices = [np.nan if row["price"] is None else row["price"] for row in rows]
    np.testing.assert_array_equal(found["price"], prices)
    if not any("\n" in (row["user"] or "") for row in rows):
        first = 2 if kind in ("csv", "tsv") else 1
        lines = np.concatenate([block.lines for block in blocks])
        assert lines.tolist() == [*range(first, first + len(rows))]
        assert count_samples(path, log_format) == len(rows)


def test_a_criteo_log_has_no_header_and_no_quotes(tmp_path):
    lines = [criteo_line("1", 7), "0" + "\t" * 39 + "\n", criteo_line("0").replace("00000000", '"')]
    (tmp_path / "day_0").write_text("".join(lines))
    [block] = read(tmp_path / "day_0", LogFormat(SourceFormat.criteo), CRITEO)
    assert values([block], "label") == [1, 0, 0]
    assert values([block], "C1") == ["00000007", None, '"']
    np.testing.assert_array_equal(values([block], "I2"), [8, np.nan, 1])


# Text, in blocks of lines.


@pytest.mark.parametrize(("content", "number"), [("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2)])
def test_a_last_line_needs_no_end(content, number, tmp_path):
    (tmp_path / "log").write_text(content)
    assert text.count_lines(tmp_path / "log") == number


@pytest.mark.parametrize("block_bytes", [1, 9, 1 << 20])
@pytest.mark.parametrize(
    ("line", "got"),
    [
        (b"1", "1"),
        (b"1,x,y", "3"),
        (b"", "an empty line"),
        (b"1,\xff", "byte 0xff at position 2"),
        (b"1,x\r2", "one at position 3"),
        (b'0,"b', "none"),
    ],
)
def test_a_bad_line_among_good_ones_is_named_or_skipped(tmp_path, line, got, block_bytes):
    """As is an open quote at the end."""
    path = tmp_path / "log.csv"
    path.write_bytes(b"click,user\n1,a\n" + line + b'\n1,c\n0,5" d\n1,"e"\n0,"f')
    log_format = LogFormat(SourceFormat.delimited, ",", block_bytes=block_bytes)
    wanted = Wanted(("user",), ("click",), labels=("click",))
    with pytest.raises(ValueError, match=f"line 3: expected .*, got {got}"):
        read(path, log_format, wanted)
    blocks = read(path, replace(log_format, **SKIP), wanted)
    assert values(blocks, "user") == ["a", "c", '5" d', "e"]
    assert sum(block.num_skipped for block in blocks) == 2


# What a value may be.


ID = Wanted(("x",), ())


def label_wanted() -> Wanted:
    return Wanted((), ("x",), labels=("x",), columns={"x": ColumnSpec(ColumnKind.label)})


def number_wanted(**settings: Any) -> Wanted:
    return Wanted((), ("x",), columns={"x": ColumnSpec(ColumnKind.dense, **settings)})


def time_wanted(form: str) -> Wanted:
    return Wanted((), ("x",), required=("x",), times={"x": form})


MAY_1_MS = 1_714_521_600_000
HALF_PAST_12_MS = MAY_1_MS + 45_000_000


@pytest.mark.parametrize(
    ("texts", "wanted", "expected"),
    [
        (("0.0", " 1\t"), label_wanted(), (0, 1)),
        (("-0", "+1.00"), label_wanted(), (0, 1)),
        (("False", "TRUE"), label_wanted(), (0, 1)),
        (("no", "Yes"), label_wanted(), (0, 1)),
        (("f", "t"), label_wanted(), (0, 1)),
        (("1 2.5", ""), number_wanted(width=2), ((1, 2.5), (np.nan, np.nan))),
        (("[1, 2.5]", " [1 2.5]"), number_wanted(width=2), ((1, 2.5), (1, 2.5))),
        (("[1.\n 2.5]", "1  2.5"), number_wanted(width=2), ((1, 2.5), (1, 2.5))),
        *(
            ((text, "2024-05-01T00:00:00"), time_wanted("iso"), (expected, MAY_1_MS))
            for text, expected in (
                ("2024-05-01 12:30:00 UTC", HALF_PAST_12_MS),
                ("2024-05-01 12:30", HALF_PAST_12_MS),
                ("2024-05-01T12:30:00Z", HALF_PAST_12_MS),
                ("2024-05-01T12:30:00+02:00", HALF_PAST_12_MS - 7_200_000),
                ("2024-05-01 12:30:00-0130", HALF_PAST_12_MS + 5_400_000),
                ("2024-05-01T12:30:00.250000999", HALF_PAST_12_MS + 250),
                ("1969-12-31T23:59:59.5", -500),
            )
        ),
    ],
)
def test_texts_in_any_form(tmp_path, texts, wanted, expected):
    tables = [pa.table({"x": [text or None for text in texts]})]
    if all(text.isdigit() for text in texts):  # as numbers, too
        tables.append(pa.table({"x": [*map(int, texts)]}))
        tables.append(pa.table({"x": [*map(float, texts)]}))
    for table in tables:
        path = write_table(tmp_path / "log", table, SourceFormat.arrow)
        [block] = read(path, LogFormat(SourceFormat.arrow), wanted)
        np.testing.assert_array_equal(block.numbers("x"), expected)
    with (tmp_path / "log.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("x", "u"), *((text, "u") for text in texts)])
    [block] = read(tmp_path / "log.csv", LogFormat(SourceFormat.delimited, ","), wanted)
    np.testing.assert_array_equal(block.numbers("x"), expected)


IDS = pa.array([7, None, 12], pa.int64())
LISTS = pa.array([[7], None, [12]], pa.list_(pa.int64()))
NUMBERS = pa.array([[1, 2.5], None, [3, None]], pa.list_(pa.float64()))
VECTORS = [[1.0, 2.5], [np.nan, np.nan], [3.0, np.nan]]
TEXT_TYPES = (pa.large_string(), pa.string_view(), pa.binary(), pa.binary_view())


@pytest.mark.parametrize("as_file", [SourceFormat.parquet, SourceFormat.arrow])
@pytest.mark.parametrize(
    ("array", "wanted", "expected"),
    [
        *((IDS.cast(kind), ID, ["7", None, "12"]) for kind in (pa.int8(), pa.uint64())),
        (IDS.cast(pa.float64()), ID, ["7", None, "12"]),
        (IDS.cast(pa.float64()).cast(pa.float16()), ID, ["7", None, "12"]),
        (IDS.cast(pa.decimal128(19)).cast(pa.decimal128(21, 2)), ID, ["7", None, "12"]),
        (IDS.dictionary_encode(), ID, ["7", None, "12"]),
        *((IDS.cast(pa.string()).cast(kind), ID, ["7", None, "12"]) for kind in TEXT_TYPES),
        (LISTS, ID, [["7"], None, ["12"]]),
        (LISTS.cast(pa.list_(pa.string())), ID, [["7"], None, ["12"]]),
        (pa.array([[7.0], None], pa.list_(pa.float64(), 1)), ID, [["7"], None]),
        (pa.array([True, None]), ID, ["true", None]),
        *(
            (NUMBERS.cast(kind), number_wanted(width=2), VECTORS)
            for kind in (pa.list_(pa.float32()), pa.large_list(pa.float64()))
        ),
        (pa.array(NUMBERS.to_pylist()[:2], pa.list_(pa.float32(), 2)), number_wanted(width=2),
         VECTORS[:2]),
        (pa.array([["1", "2.5"], None], pa.list_(pa.string())), number_wanted(width=2),
         VECTORS[:2]),
    ],
)  # fmt: skip
def test_values_of_any_type(tmp_path, as_file, array, wanted, expected):
    path = write_table(tmp_path / "log", pa.table({"x": array}), as_file)
    [block] = read_blocks(path, LogFormat(as_file), wanted)
    if wanted is ID:
        assert block.ids("x").values().to_list() == expected
    else:
        np.testing.assert_array_equal(block.numbers("x"), expected)


# What cannot be read is named by its line, or skipped.


@pytest.mark.parametrize(
    ("values", "wanted", "got"),
    [
        *(
            (pa.array(["1", odd]), label_wanted(), "nothing" if odd is None else f"'{odd}'")
            for odd in ("-1", "2", "0.5", "nan", "maybe", None, "1e9")
        ),
        (pa.array([1.0, float("nan")]), number_wanted(), "inf or nan"),
        (pa.array([1.0, -1e300]), number_wanted(), "-1e"),
        (pa.array(["1", "1,23"]), number_wanted(), "'1,23'"),
        (pa.array(["1", "1e999"]), number_wanted(), ""),
        (pa.array([[1.0, 2.0], [1.0]]), number_wanted(width=2), ""),
        (pa.array([[1.0, 2.0], [1.0, float("nan")]]), number_wanted(width=2), ""),
        (pa.array([1.0, 1.5]), ID, "'1.5'"),
        (pa.array([1.0, 1.5], pa.float32()).dictionary_encode(), ID, "'1.5'"),
        (pa.array([[1.0], [2.0, 1.5]]), ID, "2 values: ['2', '1.5']"),
        (pa.array([1.0, 2.0**53]), ID, "'9.007199254740992e+15'"),
        (pa.array([1, Decimal("1.50")]), ID, "'1.50'"),
        (pa.array(["2024-05-01", "2024-02-30"]), time_wanted("iso"), "'2024-02-30'"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_or_skipped(tmp_path, values, wanted, got):
    path = write_table(tmp_path / "log", pa.table({"x": values}), SourceFormat.parquet)
    expected = rf"log line 2: expected .* in column x, got .*{re.escape(got)}"
    with pytest.raises(ValueError, match=expected):
        read(path, LogFormat(SourceFormat.parquet), wanted)
    [block] = read(path, LogFormat(SourceFormat.parquet, **SKIP), wanted)
    assert (block.lines.tolist(), block.num_skipped) == ([1], 1)


OBJECT = {"click": 1, "price": 1.5, "user": 7, "tags": ["a", "b"]}
JSON = Wanted(("user", "tags"), ("click", "price"), labels=("click",), single=("user",))


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ("", "an empty line"),
        ("[1]", "'[1]'"),
        ('{"click": 1', "'{\"click"),
        ('{"click": 1, "user": 3} {}', "'{"),
        ({**OBJECT, "user": "u"}, "'u'"),
        ({**OBJECT, "user": {"id": 1}}, "{'id"),
        ({**OBJECT, "user": True}, "True"),
        ({**OBJECT, "user": 1e18}, "1e+18"),
        ({**OBJECT, "tags": ["a", 1]}, "['a', 1]"),
        ({**OBJECT, "click": None}, "nothing"),
        ('{"click": 1, "user": 1, "user": 2}', "it twice"),
        ('{"click": 1, "user": "\\ud83d"}', "half of one"),
        ("[" * 3000, "'[["),
    ],
)
def test_a_line_that_is_no_sample_is_named_or_skipped(tmp_path, line, got):
    path, rows = tmp_path / "log.jsonl", [OBJECT, OBJECT, line, OBJECT]
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
    expected = rf"log\.jsonl line 3: expected .*, got {re.escape(got)}"
    with pytest.raises(ValueError, match=expected):
        read(path, LogFormat(SourceFormat.json), JSON)
    for block_bytes in (1, 8 << 20):
        blocks = read(path, LogFormat(SourceFormat.json, block_bytes=block_bytes, **SKIP), JSON)
        assert [n for block in blocks for n in block.lines] == [1, 2, 4]
        assert sum(block.num_skipped for block in blocks) == 1


def test_json_has_integers_of_any_length_and_whole_floats_are_ids(tmp_path):
    users = [2**63, 10**25, 12.0, 9_007_199_254_740_993]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps({**OBJECT, 'user': user})}\n" for user in users))
    [block] = read(path, LogFormat(SourceFormat.json), JSON)
    assert values([block], "user") == [str(int(user)) for user in users]


# Files and columns that are refused.


BROKEN_TEXT = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff"))  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("values", "wanted", "expected"),
    [
        (pa.array([{"a": 1}] * 2), ID, "got type struct"),
        (pa.array([[[1]]] * 2), ID, "got type list"),
        (pa.array([[1], [2]]), replace(ID, single=("x",)), "got lists of type list"),
        (pa.array([[1], [2]]), number_wanted(), "got lists of type list.*Set width"),
        (pa.array([b"\xff\xfe", b"a"]), ID, "UTF8"),
        (BROKEN_TEXT, ID, "UTF8"),
        (pa.array([0, 1], pa.date32()), number_wanted(), "got type date32"),
        (pa.array([1, 2]), time_wanted("iso"), r"data\.source\.times\.x"),
    ],
)
def test_a_column_of_another_type_is_refused(tmp_path, values, wanted, expected):
    path = write_table(tmp_path / "log", pa.table({"x": values}), SourceFormat.arrow)
    with pytest.raises(ValueError, match=rf"log.* column x.*{expected}"):
        read(path, LogFormat(SourceFormat.arrow), wanted)


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        ("delimited", b"", "header"),
        ("delimited", b"x,u\n", "after the header, got none"),
        ("delimited", b"u,y\n1,2\n", r"\['x'\], got \['u', 'y'\]"),
        ("delimited", b"x,u,x\n1,2,3\n", r"got \['x'\]"),
        ("delimited", b"\xff\xfe\n", "line 1: expected UTF-8"),
        ("delimited", b"x" * (2 << 20), "line 1: expected .* 1048576 bytes"),
        ("delimited", b"x,u\r1,2\r3,4", "line 1: expected .* carriage"),
        ("delimited", b"x\n" + b"1" * 5000, "line 2: expected .* 1000 bytes"),
        ("criteo", criteo_line().encode()[:150], "line 1: expected 40 columns"),
        ("json", b"", "got none"),
        ("json", b"[\n{\n", "line 1: expected one JSON object"),
        ("json", b'{"u": 1}\n' * 3, r"\['x'\], got non"),
        ("parquet", b"not a table" * 10, "Parquet"),
        ("arrow", b"not a table" * 10, "Arrow"),
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path, monkeypatch, kind, data, expected):
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 1000)
    (tmp_path / "log").write_bytes(data)
    wanted = CRITEO if kind == "criteo" else number_wanted()
    with pytest.raises(ValueError, match=f"log.*{expected}"):
        read(tmp_path / "log", LogFormat(SourceFormat(kind), ",", block_bytes=500), wanted)


@pytest.mark.parametrize("as_file", [SourceFormat.parquet, SourceFormat.arrow])
def test_a_table_without_rows_or_with_two_columns_of_one_name_is_refused(tmp_path, as_file):
    path = write_table(tmp_path / "log", pa.table({"x": pa.array([], pa.int8())}), as_file)
    with pytest.raises(ValueError, match="log: expected rows, got none"):
        read(path, LogFormat(as_file), number_wanted())
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(ValueError, match=r"log: expected .* got \['x'\]"):
        column_names(write_table(path, table, as_file), LogFormat(as_file))


def test_files_are_found_by_path_pattern_and_directory(tmp_path):
    for name in ("b.parquet", "a.parquet", "_SUCCESS", ".hidden.parquet", "notes.txt"):
        (tmp_path / name).write_text("x")

    def names(pattern: str, log_format: SourceFormat = SourceFormat.parquet) -> list[str]:
        return [path.name for path in find_files([pattern], log_format)]

    assert names(str(tmp_path)) == ["a.parquet", "b.parquet"]
    assert names(str(tmp_path / "b.*")) == ["b.parquet"]
    assert names(str(tmp_path / "notes.txt"), SourceFormat.delimited) == ["notes.txt"]
    with pytest.raises(ValueError, match="files: expected files of format arrow at .*got none"):
        names(str(tmp_path), SourceFormat.arrow)


@pytest.mark.parametrize(
    ("kind", "path"),
    [("a pipe", "pipe"), ("a socket", "socket"), ("a character device", "/dev/zero")],
)
def test_only_regular_files_are_logs(tmp_path, monkeypatch, kind, path):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        expected = f"data.source.files: expected regular files, got {kind} at '{path}'"
        with pytest.raises(ValueError, match=expected):
            find_files([path], SourceFormat.delimited, key="data.source.files")


def test_columns_of_paths(tmp_path):
    folder = tmp_path / "dt=2024-05-01" / "country=d%20e" / "clicked=1"
    folder.mkdir(parents=True)
    (folder / "part.csv").write_text("user,country\na,it\nb,fr\n")
    null = tmp_path / "dt=2024-05-02" / "country=__HIVE_DEFAULT_PARTITION__" / "clicked=0"
    null.mkdir(parents=True)
    pq.write_table(pa.table({"user": ["c"]}), null / "part.parquet")
    for hidden in ("_SUCCESS", "_temporary/0/part.csv", ".part.csv.crc"):
        (tmp_path / hidden).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / hidden).write_text("")
    (csv_file,) = find_files([str(tmp_path / "dt=2024-05-01")], SourceFormat.delimited)
    assert find_files([str(tmp_path / "**" / "*.csv")], SourceFormat.delimited) == [csv_file]
    assert find_files([str(tmp_path)], SourceFormat.parquet) == [null / "part.parquet"]
    wanted = Wanted(("user", "country"), ("dt", "clicked"), ("clicked",), times={"dt": "iso"})
    [block] = read_blocks(csv_file, LogFormat(SourceFormat.delimited, ","), wanted)
    assert values([block], "country") == ["it", "fr"]  # the file's own
    assert values([block], "dt") == [1714521600000.0] * 2
    assert values([block], "clicked") == [1, 1]
    assert partition_of(csv_file)["country"] == "d e"
    [block] = read_blocks(null / "part.parquet", LogFormat(SourceFormat.parquet), wanted)
    assert values([block], "country") == [None]
    assert values([block], "clicked") == [0]
