import os
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
    OnBadLine,
    SourceFormat,
    TimeUnit,
)
from hotrec.data.columns import Lists, RawBlock, Texts
from hotrec.data.readers import (
    LogFormat,
    Wanted,
    column_names,
    count_samples,
    find_files,
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
            "a finite number or nothing in column I6",
            "'five'",
        ),
        (criteo_line("2"), A_LABEL, "'2'"),
        (criteo_line("-1"), A_LABEL, "'-1'"),
        (criteo_line("nan"), A_LABEL, "'nan'"),
        (
            criteo_line().replace("\t5\t", "\tNaN\t"),
            "a finite number or nothing in column I6",
            "'NaN'",
        ),
        ("\n", "40 columns", "an empty line"),
        (
            criteo_line().replace("\t5\t", "\t1e999\t"),
            *("a finite number or nothing in column I6", "inf"),
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
    wanted = Wanted(ids=("date",), numbers=("click", "date"), labels=("click",), required=("date",))
    with pytest.raises(ValueError, match="line 4: expected a finite number in column date, got 's"):
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
    expected = "line 2: expected a finite number or nothing in column price, got"
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
