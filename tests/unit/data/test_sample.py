"""A sample of a log: what is read of files of any format, and what is not."""

from __future__ import annotations

import bz2
import gzip
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrec.config.data import CRITEO_COLUMNS, SourceFormat
from hotrec.data.sample import Sample, read_sample

HEADER = "clicked,user_id,price\n"
LINES = [f"{row % 2},u{row % 7},{row / 3:.2f}\n" for row in range(1000)]


def read(path: Path, content: str | bytes) -> Sample:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_sample(str(path))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (HEADER + "".join(LINES) + "1,u5", "line 1002: expected 3 columns, got 2"),
        (HEADER + "".join(LINES[:500]) + "\n" + "".join(LINES[500:]), "line 502: expected 3 col"),
        (HEADER + "".join(LINES[:2]) + "1,u1,2,3\n" + "".join(LINES[2:]), "line 4: expected 3 col"),
    ],
)
def test_lines_that_cannot_be_read_are_counted(tmp_path: Path, content: str, fault: str) -> None:
    sample = read(tmp_path / "a.csv", content)
    assert (sample.table.num_rows, sample.num_bad, sample.num_rows) == (1000, 1, 1001)
    assert sample.is_whole
    assert fault in sample.fault


def test_values_over_several_lines_are_read(tmp_path: Path) -> None:
    lines = [f'{row % 2},"a ""b"",\r\nc",{row}\r\n' for row in range(1000)]
    sample = read(tmp_path / "a.csv", "\ufeff" + HEADER + "".join(lines))
    assert (sample.table.num_rows, sample.num_bad) == (1000, 0)
    assert set(sample.table["user_id"].unique().to_pylist()) == {'a "b",\r\nc'}


def test_json_lines(tmp_path: Path) -> None:
    rows = [
        {
            **{"clicked": bool(row % 2), "user": 6 * 10**18 + row % 7, "price": row / 3},
            **({"tags": [10**19 + row % 3]} if row % 5 else {}),
            **{"odd": [row, "x"][row % 2], "meta": {"a": row}, "when": None, "v": [0.5, 1]},
        }
        for row in range(100)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows) + '{"clicked": tr'
    for name, data in (
        ("a.jsonl", content.encode()),
        ("b.json.gz", gzip.compress(content.encode())),
    ):
        sample = read(tmp_path / name, data)
        assert sample.format is SourceFormat.json
        assert (sample.table.num_rows, sample.num_bad) == (100, 1)
        assert sample.table["user"][3].as_py() == "6000000000000000003"
        assert sample.table["tags"][:2].to_pylist() == [None, ["10000000000000000001"]]
        assert sample.table["v"].type == pa.list_(pa.float64())
        assert sample.unread == {"odd": "values of several kinds", "meta": "objects"}
    assert "line 101: expected a JSON object" in read_sample(str(tmp_path / "a.jsonl")).fault


def test_the_beginning_of_a_file_tells_its_format(tmp_path: Path) -> None:
    table = pa.table({"clicked": [0, 1], "user": ["a", "b"]})
    pq.write_table(table, tmp_path / "part-0")
    assert read_sample(str(tmp_path / "part-0")).format is SourceFormat.parquet
    assert read(tmp_path / "a.txt", '{"clicked": 1, "user": "b"}\n').format is SourceFormat.json
    line = "\t".join(["1", *map(str, range(13)), *(f"{n:08x}" for n in range(25)), ""])
    sample = read(tmp_path / "day_0.csv", f"{line}\n" * 3)
    assert (sample.format, sample.num_rows) == (SourceFormat.criteo, 3)
    assert tuple(sample.table.column_names) == CRITEO_COLUMNS


CSV = (HEADER + "".join(LINES)).encode()


def parquet() -> bytes:
    pq.write_table(
        pa.table({"clicked": [0, 1], "user": ["a", "b"]}), sink := pa.BufferOutputStream()
    )
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv.gz", CSV, "b'clicked,user_id,'"),
        ("a.csv.gz", gzip.compress(CSV)[:900], "as in gzip"),
        ("a.csv.gz", bz2.compress(CSV), "as in bzip2"),
        ("a.csv", gzip.compress(CSV, mtime=10), "as in gzip"),  # the byte of a new line
        ("a.csv", CSV.decode().encode("utf-16"), "as in UTF-16"),
        ("a.csv", b"", "no bytes"),
        ("a.parquet", b"", "no bytes"),
        ("a.parquet", CSV, "b'clicked,user_id,'"),
        ("a.parquet", parquet()[:200], "as in Parquet"),
        ("a.arrow", parquet(), "as in Parquet"),
    ],
)
def test_a_name_that_lies_is_told_with_the_first_bytes(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*: expected .* got ") as caught:
        read(tmp_path / name, content)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parts_may_differ_in_type_and_columns(tmp_path: Path) -> None:
    ids = [pa.array([1, 2]), pa.array(["1", None]), pa.array([3.0, 4.0])]
    ids.append(pa.array([Decimal(10**18)] * 2, pa.decimal128(20, 0)))
    ids.append(pa.array(["x", "x"]).dictionary_encode())
    for part, values in enumerate(ids):
        folder = tmp_path / "log" / f"dt=2024-05-0{part + 1}"
        folder.mkdir(parents=True)
        more = {"extra": np.arange(2)} if part else {}
        pq.write_table(pa.table({"user": values, **more}), folder / "part.parquet")
    sample = read_sample(str(tmp_path / "log"))
    texts = ["1", "2", "1", None, "3", "4", str(10**18), str(10**18), "x", "x"]
    assert sample.table["user"].to_pylist() == texts
    assert sample.table["extra"].null_count == 2
    assert sample.partitions == ("dt",)
    assert sample.table["dt"].unique().to_pylist()[-1] == "2024-05-05"


@pytest.mark.parametrize(
    "name", ["dt=2024-05-01", "a[1]", "it's", "two words", "\u65e5\u5fd7", ".hidden"]
)
def test_directories_of_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.csv").write_text(HEADER + "".join(LINES))
    (tmp_path / name / "_SUCCESS").touch()
    assert read_sample(str(tmp_path / name)).num_rows == 1000
