import gzip
import json

import numpy as np
import pyarrow as pa
import pytest

from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    NumberForm,
    OnBadLine,
    SourceFormat,
    SourceSpec,
    SplitSpec,
)
from hotrec.data import json_lines
from hotrec.data.chunks import Dataset
from hotrec.data.prepare import prepare
from hotrec.data.readers import LogFormat, Wanted, column_names, count_samples, read_blocks
from tests.unit.data.test_columns import plain

WANTED = Wanted(("user", "tags"), ("click", "price"), labels=("click",), single=("user",))
ROW = {"click": 1, "price": 1.5, "user": 7, "tags": ["a", "b"], "more": {"deep": [1]}}


def read(tmp_path, lines, wanted=WANTED, block_bytes=8 << 20, **settings):
    """The blocks of a file of these objects, or lines."""
    path = tmp_path / "log.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    log_format = LogFormat(SourceFormat.json, block_bytes=block_bytes, **settings)
    return list(read_blocks(path, log_format, wanted))


def values(blocks, name):
    if name in blocks[0].ids:
        return [value for block in blocks for value in plain(block.ids[name])]
    return [None if np.isnan(x) else x for block in blocks for x in block.numbers[name].tolist()]


@pytest.mark.parametrize("block_bytes", [60, 8 << 20])
def test_objects_are_samples(tmp_path, block_bytes):
    rows = [
        ROW,
        {"user": 9_007_199_254_740_993, "click": 0, "tags": None},
        {"click": 0.0, "price": None, "user": None, "tags": []},
        {"click": 1, "price": 3, "user": 2**63, "tags": ["\u00e9\n", None]},
        {"click": 1, "price": -2.5e-3, "user": 10**25, "tags": ["7"]},
        {"click": 1, "price": 1, "user": 12.0, "tags": ["7"]},
    ]
    blocks = read(tmp_path, rows, block_bytes=block_bytes)
    assert [line for block in blocks for line in block.lines] == [1, 2, 3, 4, 5, 6]
    users = ["7", "9007199254740993", None, str(2**63), str(10**25), "12"]
    assert values(blocks, "user") == users
    assert values(blocks, "tags") == [["a", "b"], None, [], ["\u00e9\n", None], ["7"], ["7"]]
    assert values(blocks, "click") == [1, 0, 0, 1, 1, 1]
    assert values(blocks, "price") == [1.5, None, None, 3, -0.0025, 1]
    path = tmp_path / "log.jsonl"
    assert column_names(path, LogFormat(SourceFormat.json)) == (*ROW,)
    assert count_samples(path, LogFormat(SourceFormat.json)) == 6


def test_compressed_marked_and_with_returns(tmp_path):
    text = '\ufeff{"click": 1, "user": "a"}\r\n{"user": "b", "click": false}'
    path = tmp_path / "log.ndjson.gz"
    path.write_bytes(gzip.compress(text.replace("1", "true").encode()))
    wanted = Wanted(("user",), ("click",), labels=("click",))
    blocks = list(read_blocks(path, LogFormat(SourceFormat.json), wanted))
    assert values(blocks, "user") == ["a", "b"]
    assert values(blocks, "click") == [1, 0]


@pytest.mark.parametrize(
    ("line", "expected", "got"),
    [
        ("", "a JSON object", "an empty line"),
        ("[1]", "a JSON object", r"'\[1\]'"),
        ('{"click": 1', "a JSON object", "'{\"click"),
        ('{"click": 1, "user": 3} {}', "a JSON object", "'{"),
        ({**ROW, "user": "u"}, "a number, as before, in field user", "'u'"),
        ({**ROW, "user": [1]}, "a number, as before, in field user", r"\[1\]"),
        ({**ROW, "user": {"id": 1}}, "a number, as before, in field user", "{'id"),
        ({**ROW, "user": True}, "a number, as before, in field user", "True"),
        ({**ROW, "user": 1.5}, "an id that is an integer or a text in field user", r"1\.5"),
        ({**ROW, "user": 1e18}, "an id that is an integer or a text in field user", r"1e\+18"),
        ({**ROW, "tags": ["a", 1]}, "a list of text, as before, in field tags", r"\['a', 1\]"),
        ({**ROW, "tags": [["a"]]}, "a list of text, as before, in field tags", r"\[\['a'\]\]"),
        ({**ROW, "click": 2}, "a label of 0 or 1 in column click", "'2'"),
        ({**ROW, "click": None}, "a label of 0 or 1 in column click", "nothing"),
        (
            {**ROW, "price": float("nan")},
            "a finite number or a missing value in column price",
            "inf or",
        ),
        ('{"click": 1, "user": 1, "user": 2}', "field user once", "it twice"),
        ('{"click": 1, "user": "\\ud83d"}', "whole characters", "half of one"),
        ("[" * 3000, "a JSON object", r"'\[\["),
    ],
)
def test_what_is_no_sample_is_named_or_skipped(tmp_path, line, expected, got):
    rows = [ROW, ROW, line, ROW]
    with pytest.raises(ValueError, match=rf"log\.jsonl line 3: expected {expected}.*, got {got}"):
        read(tmp_path, rows)
    for block_bytes in (1, 8 << 20):
        blocks = read(tmp_path, rows, block_bytes=block_bytes, on_bad_line=OnBadLine.skip)
        assert [n for block in blocks for n in block.lines] == [1, 2, 4]
        assert sum(block.num_skipped for block in blocks) == 1


def test_a_block_is_read_as_fast_as_exactly(tmp_path, monkeypatch):
    slowly = []
    parse_slowly = json_lines._Reader._parse_slowly
    monkeypatch.setattr(
        *(json_lines._Reader, "_parse_slowly"),
        lambda self, lines: slowly.append(lines.first_line) or parse_slowly(self, lines),
    )
    rows = [{**ROW, "user": 2**62 + n, "note": "2024-05-01"} for n in range(60)]
    blocks = read(tmp_path, rows, block_bytes=500)
    assert values(blocks, "user") == [str(2**62 + n) for n in range(60)]
    assert slowly == [1]


def test_files_without_objects_or_fields_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"log\.jsonl line 1: expected one JSON object per line, such"
    ):
        column_names_of(tmp_path, "[\n{\n")
    with pytest.raises(ValueError, match="expected lines, got none"):
        column_names_of(tmp_path, "")
    with pytest.raises(ValueError, match=r"expected objects with the fields \['price'\], got non"):
        read(tmp_path, [{"click": 1, "user": 1, "tags": []}] * 3)


def column_names_of(tmp_path, text):
    (tmp_path / "log.jsonl").write_text(text)
    return column_names(tmp_path / "log.jsonl", LogFormat(SourceFormat.json))


def test_numbers_in_text_and_vectors(tmp_path):
    columns = {
        "price": ColumnSpec(ColumnKind.dense, decimal=",", thousands="."),
        "emb": ColumnSpec(ColumnKind.dense, width=2),
    }
    wanted = Wanted((), ("price", "emb"), columns=columns)
    assert columns["price"].number_form == NumberForm(",", ".")
    rows = [{"price": "1.234,5", "emb": [1, 0.5]}, {"price": None, "emb": None}]
    blocks = read(tmp_path, rows, wanted)
    assert values(blocks, "price") == [1234.5, None]
    np.testing.assert_array_equal(blocks[0].numbers["emb"], [[1, 0.5], [np.nan, np.nan]])
    expected = r"line 3: expected 2 finite numbers or a missing value in column emb, got"
    with pytest.raises(ValueError, match=expected):
        read(tmp_path, [*rows, {"price": "1", "emb": [1, 2, 3]}], wanted)


def test_a_log_is_prepared(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps({**ROW, 'user': n % 3})}\n" for n in range(30)))
    columns = {
        "label": ColumnSpec(ColumnKind.label, source="click"),
        "user": ColumnSpec(ColumnKind.categorical),
        "tags": ColumnSpec(ColumnKind.categorical_list),
    }
    spec = SourceSpec(SourceFormat.json, [str(path)], columns, split=SplitSpec(test_frac=0))
    prepare(spec, tmp_path / "dataset")
    dataset = Dataset.open(tmp_path / "dataset")
    assert {table.name: table.num_rows for table in dataset.schema.tables} == {"user": 4, "tags": 3}
    assert (
        pa.concat_arrays([dataset.chunk("train", 0)["label"].combine_chunks()]).to_pylist()[0] == 1
    )
