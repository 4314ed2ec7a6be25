import os
import random
import re
import socket
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrec.config.data import (
    CRITEO_COLUMNS,
    CRITEO_DENSE,
    CRITEO_FEATURES,
    ColumnKind,
    ColumnSpec,
    OnBadLine,
    SourceFormat,
    TimeUnit,
)
from hotrec.data import text
from hotrec.data.columns import Lists, RawBlock, Texts
from hotrec.data.readers import (
    LogFormat,
    Wanted,
    column_names,
    count_samples,
    find_files,
    partition_of,
    read_blocks,
)
from tests.unit.data.logs import criteo_line
from tests.unit.data.test_columns import plain

CRITEO = Wanted(ids=CRITEO_FEATURES, numbers=("label", *CRITEO_DENSE), labels=("label",))
CSV = Wanted(ids=("user",), numbers=("click", "price"), labels=("click",))
SKIP = {"on_bad_line": OnBadLine.skip}


def values(blocks: list[RawBlock], name: str) -> list:
    found = []
    for block in blocks:
        found += plain(block.ids[name]) if name in block.ids else block.numbers[name].tolist()
    return found


def write_criteo(path: Path, lines: list[str]) -> Path:
    with pa.output_stream(str(path), compression="detect") as stream:
        stream.write("".join(lines).encode())
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_criteo_lines(tmp_path, suffix):
    rows = [criteo_line(str(number % 2), number) for number in range(1000)]
    rows[3] = "0" + "\t" * 39 + "\n"  # everything missing
    path = write_criteo(tmp_path / f"day_0{suffix}", rows)
    log_format = LogFormat(SourceFormat.criteo, block_bytes=20_000)
    blocks = list(read_blocks(path, log_format, CRITEO))
    assert len(blocks) > 5
    assert count_samples(path, log_format) == 1000
    assert np.concatenate([block.lines for block in blocks]).tolist() == list(range(1, 1001))
    labels = values(blocks, "label")
    assert labels[:6] == [0, 1, 0, 0, 0, 1]
    assert values(blocks, "I2")[999] == 1000.0
    assert np.isnan(values(blocks, "I2")[3])
    assert values(blocks, "C26")[999] == f"{999 + 25:08x}"
    assert values(blocks, "C26")[3] is None


A_LABEL = "a label of 0 or 1 in column label"


@pytest.mark.parametrize(
    ("line", "expected", "got"),
    [
        ("1\t2\t3\n", "40 columns", r"3\. Fix the line, or set on_bad"),
        (
            criteo_line().replace("\t5\t", "\tfive\t"),
            "a finite number or a missing value in column I6",
            "'five'",
        ),
        (criteo_line("2"), A_LABEL, "'2'"),
        (criteo_line("-1"), A_LABEL, "'-1'"),
        (criteo_line("nan"), A_LABEL, "'nan'"),
        (
            criteo_line().replace("\t5\t", "\tNaN\t"),
            "a finite number or a missing value in column I6",
            "'NaN'",
        ),
        ("\n", "40 columns", "an empty line"),
        (
            criteo_line().replace("\t5\t", "\t1e999\t"),
            *("a finite number or a missing value in column I6", "inf"),
        ),
    ],
)
def test_a_bad_criteo_line_is_named_or_skipped(tmp_path, line, expected, got):
    rows = [criteo_line("1", number) for number in range(20)]
    rows[7] = line
    path = write_criteo(tmp_path / "day_0", rows)
    with pytest.raises(ValueError, match=f"day_0 line 8: expected {expected}, got {got}"):
        list(read_blocks(path, LogFormat(SourceFormat.criteo), CRITEO))
    [block] = read_blocks(path, LogFormat(SourceFormat.criteo, **SKIP), CRITEO)
    assert block.num_skipped == 1
    assert block.lines.tolist() == [n for n in range(1, 21) if n != 8]
    assert values([block], "I1") == [float(n) for n in range(20) if n != 7]


def test_a_truncated_last_line_is_named_and_a_whole_one_without_its_end_is_read(tmp_path):
    whole = criteo_line().rstrip("\n")
    path = write_criteo(tmp_path / "day_0", [criteo_line(), whole])
    assert sum(len(b) for b in read_blocks(path, LogFormat(SourceFormat.criteo), CRITEO)) == 2
    path = write_criteo(tmp_path / "day_1", [criteo_line(), whole[:150]])
    with pytest.raises(ValueError, match="day_1 line 2: expected 40 columns"):
        list(read_blocks(path, LogFormat(SourceFormat.criteo), CRITEO))


def test_all_lines_bad(tmp_path):
    path = write_criteo(tmp_path / "day_0", ["x\n"] * 5)
    [block] = read_blocks(path, LogFormat(SourceFormat.criteo, **SKIP), CRITEO)
    assert len(block) == 0
    assert block.num_skipped == 5


def read_csv(tmp_path, content: str, wanted: Wanted = CSV, **settings) -> RawBlock:
    path = tmp_path / "log.csv"
    path.write_text(content)
    log_format = LogFormat(SourceFormat.delimited, ",", **settings)
    [block] = read_blocks(path, log_format, wanted)
    assert count_samples(path, log_format) == content.count("\n") - 1
    return block


def test_delimited_columns_may_come_in_any_order_and_be_more(tmp_path):
    block = read_csv(tmp_path, 'other,user,click,price\n"x,y",u1,1,2.5\n,u2,0,\n')
    assert block.lines.tolist() == [2, 3]
    assert values([block], "user") == ["u1", "u2"]
    assert values([block], "click") == [1.0, 0.0]
    assert values([block], "price")[0] == 2.5
    assert {*block.ids, *block.numbers} == {"user", "click", "price"}


def test_null_values_can_be_named(tmp_path):
    block = read_csv(tmp_path, "click,price,user\n1,NA,NA\n", null_values=("", "NA"))
    assert np.isnan(values([block], "price")[0])
    assert values([block], "user") == [None]


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path):
    with pytest.raises(ValueError, match=r"expected the columns \['price'\], got \['click', 'user"):
        read_csv(tmp_path, "click,user\n1,u\n")


def test_a_column_may_be_read_as_text_and_as_numbers(tmp_path):
    log = "click,date\n1,20220425\n0,20220426\n1,soon\n"
    wanted = Wanted(
        ids=("date",),
        numbers=("click", "date"),
        labels=("click",),
        required=("date",),
        times={"date": "ms"},
    )
    with pytest.raises(ValueError, match="line 4: expected a time in ms in column date, got 'soon"):
        read_csv(tmp_path, log, wanted)
    block = read_csv(tmp_path, log, wanted, **SKIP)
    assert values([block], "date") == ["20220425", "20220426"]
    assert block.numbers["date"].tolist() == [20220425.0, 20220426.0]


@pytest.fixture(params=["parquet", "arrow_file", "arrow_stream"])
def table_log(request, tmp_path):
    """The same table in three formats, several row groups each."""
    table = pa.table(
        {
            "click": pa.array([1, 0, 1, 0], pa.int8()),
            "price": pa.array([1.5, None, 3.0, None]),
            "user": pa.array([7, None, 9, 7], pa.int64()),
            "tags": pa.array([["a", "b"], [], None, ["c"]], pa.large_list(pa.string())),
        }
    )
    path = tmp_path / f"log.{request.param.partition('_')[0]}"
    if request.param == "parquet":
        pq.write_table(table, path, row_group_size=3)
        return path, LogFormat(SourceFormat.parquet)
    new = pa.ipc.new_file if request.param == "arrow_file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path, LogFormat(SourceFormat.arrow)


TABLE = Wanted(ids=("user", "tags"), numbers=("click", "price"), labels=("click",))


def test_parquet_and_arrow_with_list_columns(table_log):
    path, log_format = table_log
    blocks = list(read_blocks(path, log_format, TABLE))
    assert column_names(path, log_format) == ("click", "price", "user", "tags")
    assert count_samples(path, log_format) == 4
    assert np.concatenate([block.lines for block in blocks]).tolist() == [1, 2, 3, 4]
    assert values(blocks, "user") == ["7", None, "9", "7"]
    assert isinstance(blocks[0].ids["user"], Texts)
    assert isinstance(blocks[0].ids["tags"], Lists)
    assert values(blocks, "tags") == [["a", "b"], [], None, ["c"]]
    assert values(blocks, "price")[::2] == [1.5, 3.0]
    assert np.isnan(values(blocks, "price")[1::2]).all()


def test_bad_rows_of_parquet_are_named_or_skipped(tmp_path):
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"click": [1.0, 0.5, 0.0], "user": ["a", "b", "c"]}), path)
    wanted = Wanted(ids=("user",), numbers=("click",), labels=("click",))
    with pytest.raises(ValueError, match=r"log\.parquet line 2: expected a label of 0 or 1"):
        list(read_blocks(path, LogFormat(SourceFormat.parquet), wanted))
    [block] = read_blocks(path, LogFormat(SourceFormat.parquet, **SKIP), wanted)
    assert values([block], "user") == ["a", "c"]
    assert block.num_skipped == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_number_that_is_none_is_named_or_skipped(tmp_path, value):
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"click": [1, 0, 1], "price": [1.5, value, None]}), path)
    wanted = Wanted(ids=(), numbers=("click", "price"), labels=("click",))
    expected = "line 2: expected a finite number or a missing value in column price, got"
    with pytest.raises(ValueError, match=expected):
        list(read_blocks(path, LogFormat(SourceFormat.parquet), wanted))
    [block] = read_blocks(path, LogFormat(SourceFormat.parquet, **SKIP), wanted)
    assert block.lines.tolist() == [1, 3]


FLOATS, TIMES = pa.array([1.0, 1.5]), pa.array([0, 1], pa.date32())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (FLOATS, "'1.5'"),
        (FLOATS.cast(pa.float32()).dictionary_encode(), "'1.5'"),
        (pa.array([[1.0], [2.0, 1.5]]), r"2 values: \['2', '1.5'\]"),
        (pa.array([1.0, float("nan")]), "'nan'"),
        (pa.array([1.0, 2.0**53]), r"'9\.007199254740992e\+15'"),
        (pa.array([1, Decimal("1.50")]), r"'1\.50'"),
    ],
)
def test_ids_that_are_no_integers_are_named_or_skipped(tmp_path, values, expected):
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"click": [1, 0], "user": values}), path)
    wanted = Wanted(ids=("user",), numbers=("click",), labels=("click",))
    expected = rf"log\.parquet line 2: expected an id that .* in column user, got {expected}\."
    with pytest.raises(ValueError, match=expected):
        list(read_blocks(path, LogFormat(SourceFormat.parquet), wanted))
    [block] = read_blocks(path, LogFormat(SourceFormat.parquet, **SKIP), wanted)
    assert block.lines.tolist() == [1]
    assert block.num_skipped == 1


def test_times_are_numbers_only_where_times_are_wanted(tmp_path):
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"click": [1, 0], "day": TIMES}), path)
    wanted = Wanted(ids=(), numbers=("click", "day"), labels=("click",))
    with pytest.raises(ValueError, match=r"column day: expected numbers, got type date32\[day\]"):
        list(read_blocks(path, LogFormat(SourceFormat.parquet), wanted))
    wanted = replace(wanted, times={"day": TimeUnit.ms})
    [block] = read_blocks(path, LogFormat(SourceFormat.parquet), wanted)
    assert block.numbers["day"].tolist() == [0.0, 86_400_000.0]


def test_text_that_is_no_time_is_named_or_skipped(tmp_path):
    content = "click,day\n1,2024-05-01\n0,1 May\n1,2024-05-02T00:00Z\n"
    wanted = Wanted((), ("click", "day"), labels=("click",), times={"day": TimeUnit.iso})
    with pytest.raises(ValueError, match="line 3: expected a time such as .* got '1 May'"):
        read_csv(tmp_path, content, wanted)
    block = read_csv(tmp_path, content, wanted, **SKIP)
    assert np.diff(block.numbers["day"]).tolist() == [86_400_000.0]
    assert block.num_skipped == 1


def test_numbers_that_are_declared_as_text_are_refused(tmp_path):
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"click": [1, 0], "at": [1, 2]}), path)
    wanted = Wanted(("at",), ("click", "at"), times={"at": TimeUnit.iso})
    with pytest.raises(ValueError, match=r"column at: .* Set data\.source\.times\.at to s, ms"):
        list(read_blocks(path, LogFormat(SourceFormat.parquet), wanted))


@pytest.mark.parametrize("at", [40, 74])
def test_damage_at_the_head_of_an_arrow_file_is_found(tmp_path, at):
    path = tmp_path / "log.arrow"
    table = pa.table({"click": [1, 0], "price": [1.5, 2.5], "user": [7, 8]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"log\.arrow: expected an Arrow IPC file or stream, got"):
        column_names(path, LogFormat(SourceFormat.arrow))


@pytest.mark.parametrize("log_format", [SourceFormat.parquet, SourceFormat.arrow])
def test_damaged_and_empty_table_files_are_refused(tmp_path, log_format):
    path = tmp_path / "log"
    path.write_bytes(b"not a table" * 10)
    with pytest.raises(ValueError, match="log: expected a[n]? (Parquet|Arrow IPC) file"):
        list(read_blocks(path, LogFormat(log_format), TABLE))
    empty = pa.table({"click": pa.array([], pa.int8())})
    if log_format is SourceFormat.parquet:
        pq.write_table(empty, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, empty.schema) as writer:
            writer.write_table(empty)
    wanted = Wanted(ids=(), numbers=("click",), labels=("click",))
    with pytest.raises(ValueError, match="log: expected rows, got none"):
        list(read_blocks(path, LogFormat(log_format), wanted))


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


SAMPLE = Path(__file__).parents[2] / "data" / "criteo_1tb_day0" / "criteo1tb_day0_first10k.tsv.gz"


@pytest.mark.skipif(not SAMPLE.exists(), reason=f"{SAMPLE} is not there (non-commercial licence)")
def test_ten_thousand_real_criteo_lines():
    blocks = list(read_blocks(SAMPLE, LogFormat(SourceFormat.criteo, block_bytes=1 << 20), CRITEO))
    assert sum(len(block) for block in blocks) == 10_000
    assert column_names(SAMPLE, LogFormat(SourceFormat.criteo)) == CRITEO_COLUMNS
    assert values(blocks, "I1")[:2] == [5.0, 32.0]
    assert values(blocks, "C1")[:2] == ["62770d79", "e5f3fd8d"]
    assert sum(values(blocks, "label")) == 265
    for name in CRITEO_FEATURES:
        for value in {value for value in values(blocks, name) if value is not None}:
            assert len(value) == 8
            int(value, 16)


IDS = ["7", None, "12"]
ID_TYPES = [
    *(pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.decimal128(9, 2), pa.decimal256(50)),
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.binary_view()),
]


@pytest.mark.parametrize("as_file", [SourceFormat.parquet, SourceFormat.arrow])
def test_an_id_is_one_text_whatever_keeps_it(tmp_path, as_file):
    numbers = pa.array([7, None, 12], pa.int64())
    columns = {str(kind): numbers.cast(pa.string()).cast(kind) for kind in ID_TYPES[6:]}
    columns |= {str(kind): numbers.cast(pa.float64()).cast(kind) for kind in ID_TYPES[2:4]}
    columns |= {str(k): numbers.cast(pa.decimal128(19)).cast(k) for k in ID_TYPES[4:6]}
    columns |= {str(kind): numbers.cast(kind) for kind in ID_TYPES[:2]}
    columns["dictionary"] = numbers.dictionary_encode()
    columns["dictionary of floats"] = numbers.cast(pa.float64()).dictionary_encode()
    path = write_table(tmp_path / "log", pa.table(columns), as_file)
    wanted = Wanted(tuple(columns), (), single=tuple(columns))
    [block] = read_blocks(path, LogFormat(as_file), wanted)
    assert {name: plain(ids) for name, ids in block.ids.items()} == dict.fromkeys(columns, IDS)
    lists = {"list": [[7], None, [12]], "texts": [["7"], None, ["12"]]}
    as_lists = pa.table({**lists, "floats": pa.array(lists["list"], pa.list_(pa.float64(), 1))})
    path = write_table(tmp_path / "lists", as_lists, as_file)
    [block] = read_blocks(path, LogFormat(as_file), Wanted((*lists, "floats"), ()))
    for ids in block.ids.values():
        assert plain(ids) == [["7"], None, ["12"]]


def write_table(path: Path, table: pa.Table, as_file: SourceFormat) -> Path:
    if as_file is SourceFormat.parquet:
        pq.write_table(table, path)
        return path
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def test_ids_that_are_stored_in_other_ways(tmp_path):
    raw = bytes(range(16))
    columns = {
        "uuid": pa.array([raw, None], pa.uuid()),
        "all null": pa.nulls(2),
        "runs": pa.RunEndEncodedArray.from_arrays([2], ["a"]),
        "tensor": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
        "view": pa.array([["a"], None], pa.list_view(pa.string())),
        "truth": pa.array([True, None]),
    }
    path = write_table(tmp_path / "log", pa.table(columns), SourceFormat.arrow)
    [block] = read_blocks(path, LogFormat(SourceFormat.arrow), Wanted(tuple(columns), ()))
    assert {name: plain(ids) for name, ids in block.ids.items()} == {
        "uuid": ["00010203-0405-0607-0809-0a0b0c0d0e0f", None],
        "all null": [None, None],
        "runs": ["a", "a"],
        "tensor": [["1", "2"], ["3", "4"]],
        "view": [["a"], None],
        "truth": ["true", None],
    }


BROKEN_TEXT = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff"))  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([{"a": 1}] * 2), r"log column x: expected ids, got type struct<a: int64>"),
        (pa.array([[[1]]] * 2), r"log column x: expected ids, got type list<.*list<"),
        (
            pa.array([[(1, 2)]] * 2, pa.map_(pa.int8(), pa.int8())),
            "log column x: expected ids, got",
        ),
        (pa.array([[1], [2]]), "log column x: expected one id per sample, got lists of type list<"),
        (pa.array([b"\xff\xfe", b"a"]), "log.*expected ids in column x, got Invalid UTF8"),
        (BROKEN_TEXT, "log.*Invalid.*UTF8"),
    ],
)
def test_ids_that_cannot_be_read_are_refused_by_file_and_column(tmp_path, values, expected):
    path = write_table(tmp_path / "log", pa.table({"x": values}), SourceFormat.arrow)
    with pytest.raises(ValueError, match=expected):
        list(read_blocks(path, LogFormat(SourceFormat.arrow), Wanted(("x",), (), single=("x",))))


@pytest.mark.parametrize("as_file", [SourceFormat.parquet, SourceFormat.arrow])
def test_two_columns_of_one_name_are_refused(tmp_path, as_file):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    path = write_table(tmp_path / "log", table, as_file)
    with pytest.raises(ValueError, match=r"log: expected unique column names, got \['x'\]"):
        column_names(path, LogFormat(as_file))


@pytest.mark.parametrize("as_file", [SourceFormat.parquet, SourceFormat.arrow])
def test_damage_is_told_with_the_file(tmp_path, as_file):
    table = pa.table({"click": pa.array([0, 1] * 5000), "user": [f"u{n}" for n in range(10_000)]})
    path = write_table(tmp_path / "log", table, as_file)
    data, wanted = path.read_bytes(), Wanted(("user",), ("click",), labels=("click",))
    rng = np.random.default_rng(3)
    for _ in range(60):
        broken = bytearray(data)
        for at in rng.integers(0, len(data), 4):
            broken[at] ^= 1 << rng.integers(8)
        path.write_bytes(broken[: rng.choice([len(data), len(data), len(data) // 2])])
        for read in (
            lambda: list(read_blocks(path, LogFormat(as_file), wanted)),
            lambda: count_samples(path, LogFormat(as_file)),
        ):
            try:
                read()
            except ValueError as error:
                assert str(path) in str(error)  # noqa: PT017
                assert "\n" not in str(error)  # noqa: PT017


def label_wanted(*values: str) -> Wanted:
    columns = {"click": ColumnSpec(ColumnKind.label, values=list(values))}
    return Wanted((), ("click",), labels=("click",), columns=columns)


@pytest.mark.parametrize(
    ("written", "values"),
    [
        (("0", "1"), ()),
        (("0.0", " 1\t"), ()),
        (("-0", "+1.00"), ()),
        (("False", "TRUE"), ()),
        (("no", "Yes"), ()),
        (("f", "t"), ()),
        (("-1", "1.0"), ("-1", "1")),
        (("skip", "click"), ("skip", "click")),
        (("", "x"), ("", "x")),
        (("2", "1"), ("2", "1")),
    ],
)
def test_labels(tmp_path, written, values):
    negative, positive = written
    content = f"click,u\n{negative},a\n{positive},b\n"
    block = read_csv(tmp_path, content, label_wanted(*values))
    assert block.numbers["click"].tolist() == [0, 1]
    if negative:
        path = write_table(tmp_path / "l", pa.table({"click": [*written]}), SourceFormat.arrow)
        [block] = read_blocks(path, LogFormat(SourceFormat.arrow), label_wanted(*values))
        assert block.numbers["click"].tolist() == [0, 1]


@pytest.mark.parametrize("odd", ["-1", "2", "0.5", "nan", "maybe", "", "1e9"])
def test_odd_labels_are_named_or_skipped(tmp_path, odd):
    content = f"click,u\n0,a\n{odd},b\n1,c\n"
    got = "nothing" if not odd else f"'{odd}'"
    expected = f"line 3: expected a label of 0 or 1 in column click, got {got}. Fix .*values of"
    with pytest.raises(ValueError, match=expected):
        read_csv(tmp_path, content, label_wanted())
    block = read_csv(tmp_path, content, label_wanted(), **SKIP)
    assert block.numbers["click"].tolist() == [0, 1]
    assert block.num_skipped == 1


@pytest.mark.parametrize("array", [pa.array([True, False]), pa.array([1.0, 0.0]), pa.array([1, 0])])
def test_labels_of_any_type(tmp_path, array):
    path = write_table(tmp_path / "log", pa.table({"click": array}), SourceFormat.parquet)
    [block] = read_blocks(path, LogFormat(SourceFormat.parquet), label_wanted())
    assert block.numbers["click"].tolist() == [1, 0]


def number_wanted(**settings) -> Wanted:
    return Wanted((), ("x",), columns={"x": ColumnSpec(ColumnKind.dense, **settings)})


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("1.234,50", {"decimal": ",", "thousands": "."}, 1234.5),
        ("1,234", {"thousands": ","}, 1234),
        ("12,34,567.5", {"thousands": ","}, 1234567.5),
        ("1234.5", {"thousands": ","}, 1234.5),
        ("-$1,234.50", {"thousands": ",", "ignore": "$"}, -1234.5),
        (
            "1\u202f234,5\u00a0\u20ac",
            {"decimal": ",", "thousands": "\u202f", "ignore": "\u20ac"},
            1234.5,
        ),
        ("12.5 %", {"ignore": "%"}, 12.5),
        ("1'000'000", {"thousands": "'"}, 1e6),
        ("1,5e3", {"decimal": ","}, 1500),
        ("", {"decimal": ","}, None),
    ],
)
def test_numbers_as_people_write_them(tmp_path, text, settings, expected):
    content = f'u,x\na,"{text}"\n'
    [found] = read_csv(tmp_path, content, number_wanted(**settings)).numbers["x"].tolist()
    assert (None if np.isnan(found) else found) == expected


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("1,234.50", {}),
        ("1.234,50", {}),
        ("$5", {}),
        ("1,23", {"thousands": ","}),
        ("1,2345", {"thousands": ","}),
        ("1.5", {"decimal": ","}),
        ("1,234.5", {"decimal": ",", "thousands": "."}),
        ("(5)", {"ignore": "$"}),
        ("1 2", {"ignore": "$"}),
    ],
)
def test_numbers_that_are_written_otherwise_are_refused_with_the_remedy(tmp_path, text, settings):
    expected = (
        rf"line 2: .*or a missing value in column x, got '{re.escape(text)}'.*set decimal, tho"
    )
    with pytest.raises(ValueError, match=expected):
        read_csv(tmp_path, f'u,x\na,"{text}"\n', number_wanted(**settings))
    block = read_csv(tmp_path, f'u,x\na,"{text}"\nb,1\n', number_wanted(**settings), **SKIP)
    assert block.num_skipped == 1


VECTOR = number_wanted(width=2)
VECTORS = [[1.0, 2.5], [np.nan, np.nan], [3.0, np.nan]]


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.list_(pa.float32()), pa.large_list(pa.float64()), pa.list_(pa.float32(), 2)),
        *(pa.list_view(pa.float64()), pa.list_(pa.decimal128(9, 2)), pa.list_(pa.string())),
    ],
)
def test_vectors_of_any_type(tmp_path, kind):
    numbers = pa.array([[1, 2.5], None, [3, None]], pa.list_(pa.float64()))
    items = numbers.flatten().cast(kind.value_type)
    array = pa.array([items[:2].to_pylist(), None, items[2:].to_pylist()], kind)
    path = write_table(tmp_path / "log", pa.table({"x": array}), SourceFormat.arrow)
    [block] = read_blocks(path, LogFormat(SourceFormat.arrow), VECTOR)
    np.testing.assert_array_equal(block.numbers["x"], VECTORS)


@pytest.mark.parametrize("text", ["1 2.5", "[1, 2.5]", "[1.\n 2.5]", " [1 2.5]", "1  2.5"])
def test_vectors_in_text(tmp_path, text):
    path = tmp_path / "log.csv"
    path.write_text(f'x\n"{text}"\n""\n')
    [block] = read_blocks(path, LogFormat(SourceFormat.delimited, ","), VECTOR)
    np.testing.assert_array_equal(block.numbers["x"], VECTORS[:2])


@pytest.mark.parametrize("value", [[1.0], [1.0, 2, 3], [], [1.0, float("nan")], [1.0, 1e300]])
def test_vectors_that_do_not_fit_are_named_or_skipped(tmp_path, value):
    path = write_table(tmp_path / "log", pa.table({"x": [[1.0, 2.0], value]}), SourceFormat.parquet)
    expected = "log line 2: expected 2 finite numbers or a missing value in column x, got"
    with pytest.raises(ValueError, match=expected):
        list(read_blocks(path, LogFormat(SourceFormat.parquet), VECTOR))
    [block] = read_blocks(path, LogFormat(SourceFormat.parquet, **SKIP), VECTOR)
    np.testing.assert_array_equal(block.numbers["x"], [[1, 2]])
    with pytest.raises(ValueError, match="column x: expected one number per sample.*Set width"):
        list(read_blocks(path, LogFormat(SourceFormat.parquet), number_wanted()))


QUOTED = 'click,user,note\n1,a,"two\nlines"\n0,"b",one\n1,c,"a ""quote""\r\n\r\nand more"\n0,d,\n'


@pytest.mark.parametrize("block_bytes", [1, 9, 30, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("settings", [{}, SKIP])
def test_values_over_several_lines(tmp_path, block_bytes, end, settings):
    path = tmp_path / "log.csv"
    path.write_bytes(b"\xef\xbb\xbf" + QUOTED.replace("\r\n", "\n").replace("\n", end).encode())
    wanted = Wanted(("user", "note"), ("click",), labels=("click",))
    log_format = LogFormat(SourceFormat.delimited, ",", block_bytes=block_bytes, **settings)
    blocks = list(read_blocks(path, log_format, wanted))
    assert values(blocks, "user") == ["a", "b", "c", "d"]
    notes = [f"two{end}lines", "one", f'a "quote"{end}{end}and more', None]
    assert values(blocks, "note") == notes
    assert np.concatenate([b.lines for b in blocks]).tolist() == [2, 4, 5, 8]
    assert sum(b.num_skipped for b in blocks) == 0


@pytest.mark.parametrize("block_bytes", [1, 9, 1 << 20])
def test_a_stray_quote_costs_its_line(tmp_path, block_bytes):
    path = tmp_path / "log.csv"
    path.write_text('click,user\n1,a\n0,"b\n1,c\n0,5" d\n1,"e"\n0,"f')
    log_format = LogFormat(SourceFormat.delimited, ",", block_bytes=block_bytes)
    wanted = Wanted(("user",), ("click",), labels=("click",))
    with pytest.raises(ValueError, match="line 3: expected a closing quote in the line, got none"):
        list(read_blocks(path, log_format, wanted))
    blocks = list(read_blocks(path, replace(log_format, **SKIP), wanted))
    assert values(blocks, "user") == ["a", "c", '5" d', "e"]
    assert sum(b.num_skipped for b in blocks) == 2


ODD = ("true", " 1", "1.0", "2", "", "\r", "\n", '"', '""', ",", "x", "\0", "\x1c", "\u2028", "nan", "NA", '"a\nb"', "+5")  # fmt: skip  # noqa: E501


@pytest.mark.slow
def test_both_parsers_leave_out_the_same_lines(tmp_path, monkeypatch):
    rng, path = random.Random(5), tmp_path / "log.csv"
    wanted = Wanted(("user",), ("click", "price"), labels=("click",))
    log_format = LogFormat(SourceFormat.delimited, ",", ("", "NA"), OnBadLine.skip)

    def found(block_bytes: int) -> list:
        try:
            blocks = list(read_blocks(path, replace(log_format, block_bytes=block_bytes), wanted))
        except ValueError as error:  # without lines
            return [str(error)]
        lines = [line for block in blocks for line in block.lines]
        num_skipped = sum(block.num_skipped for block in blocks)
        columns = [values(blocks, name) for name in ("user", "click", "price")] if blocks else []
        return [lines, num_skipped, str(columns)]

    for _ in range(150):
        good = (f"{rng.choice('01')},{rng.choice(['', '2.5'])},u" for _ in range(3))
        odd = ("".join(rng.choices((*ODD, ",", ","), k=5)) for _ in range(3))
        path.write_text("click,price,user\n" + "\n".join(rng.sample([*good, *odd], 6)), newline="")
        fast = found(1 << 20)
        assert found(rng.randrange(1, 12)) == fast
        with monkeypatch.context() as patch:
            patch.setattr(text, "parse", lambda lines, layout: None)
            patch.setattr(text, "_parse_records", lambda lines, layout: None)
            assert found(1 << 20) == fast


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
    wanted = Wanted(("user", "country"), ("dt", "clicked"), ("clicked",), times={"dt": "%Y-%m-%d"})
    [block] = read_blocks(csv_file, LogFormat(SourceFormat.delimited, ","), wanted)
    assert values([block], "country") == ["it", "fr"]  # the file's own
    assert values([block], "dt") == [1714521600000.0] * 2
    assert values([block], "clicked") == [1, 1]
    assert partition_of(csv_file)["country"] == "d e"
    [block] = read_blocks(null / "part.parquet", LogFormat(SourceFormat.parquet), wanted)
    assert values([block], "country") == [None]
    assert values([block], "clicked") == [0]


@pytest.mark.parametrize(
    ("form", "written", "expected_ms"),
    [
        ("%y%m%d%H", "14102107", 1413874800000),
        ("%Y%m%d", "20141021", 1413849600000),
        ("%d.%m.%Y %H:%M:%S.%f", "21.10.2014 07:00:00.250", 1413874800250),
        ("%Y-%m-%d %H:%M:%S %z", "2014-10-21 09:00:00 +0200", 1413874800000),
        ("iso", "2014-10-21 07:00:00.123456 UTC", 1413874800123.456),
        ("iso", "2014-10-21 07:00:00 +0000", 1413874800000),
        ("iso", "2014-10-21T07:00:00Z", 1413874800000),
    ],
)
def test_times_of_a_form(tmp_path, form, written, expected_ms):
    wanted = Wanted((), ("at",), required=("at",), times={"at": form})
    block = read_csv(tmp_path, f"at,u\n{written},x\n", wanted)
    assert block.numbers["at"].tolist() == [expected_ms]
    if written.isdigit():  # as a number with missing ones, too
        for numbers in (pa.array([int(written)]), pa.array([float(written)])):
            path = write_table(tmp_path / "l", pa.table({"at": numbers}), SourceFormat.arrow)
            [block] = read_blocks(path, LogFormat(SourceFormat.arrow), wanted)
            assert block.numbers["at"].tolist() == [expected_ms]


@pytest.mark.parametrize(("form", "odd"), [("%y%m%d%H", "9010100"), ("%Y%m%d", "2014-10-21"), ("iso", "21.10.2014")])  # fmt: skip  # noqa: E501
def test_times_of_another_form_are_named(tmp_path, form, odd):
    wanted = Wanted((), ("at",), required=("at",), times={"at": form})
    expected = rf"line 2: expected a time .* in column at, got '{odd}'.*set data\.source\.times\.at"
    with pytest.raises(ValueError, match=expected):
        read_csv(tmp_path, f"at,u\n{odd},x\n", wanted)
