"""A log with lines that are skipped is prepared as the log without them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    Derive,
    OnBadLine,
    SourceFormat,
    SourceSpec,
    SplitKind,
    SplitSpec,
    TimeUnit,
)
from hotrec.config.histories import UserHistorySpec
from hotrec.data import readers, text
from hotrec.data.chunks import Dataset
from hotrec.data.prepare import prepare

START_MS = 1_700_000_000_000
GOOD = {
    "label": "1",
    "price": "1.5",
    "vector": "1 2",
    "user": "u1",
    "weight": "1",
    "at": f"{START_MS}",
    "plays": "3 4",
}
BAD = [
    {"label": "x"},
    {"price": "x"},
    {"price": "1e300"},
    {"vector": "1"},
    {"weight": "-1"},
    {"at": "soon"},
    {"at": "1e300"},
    {"plays": "1 x"},
    {"plays": "1e999"},
]
NO_LINES = ["", "x", "1,2,3", "{", "[]", "null"]
LIST = ColumnKind.categorical_list
COLUMNS = {
    "label": ColumnSpec(ColumnKind.label),
    "user": ColumnSpec(ColumnKind.categorical),
    "price": ColumnSpec(ColumnKind.dense),
    "vector": ColumnSpec(ColumnKind.dense, width=2, separator=" "),
    "weight": ColumnSpec(ColumnKind.weight),
    "hour": ColumnSpec(ColumnKind.categorical, source="at", derive=Derive.hour_of_day),
    "plays": ColumnSpec(LIST, separator=" ", derive=Derive.log_bucket),
    "past": ColumnSpec(LIST, table="user"),
}
HISTORY = UserHistorySpec(by="user", time="at", max_length=2, columns={"past": "user"})
FORMATS = {
    "csv": SourceFormat.delimited,
    "jsonl": SourceFormat.json,
    "parquet": SourceFormat.parquet,
}
Row = dict[str, str] | str


def write(path: Path, rows: list[Row]) -> Path:
    match path.suffix:
        case ".csv":
            lines = [",".join(row.values()) if isinstance(row, dict) else row for row in rows]
            path.write_text("\n".join([",".join(GOOD), *lines, ""]))
        case ".jsonl":
            lines = [json.dumps(row) if isinstance(row, dict) else row for row in rows]
            path.write_text("\n".join([*lines, ""]))
        case ".parquet":
            table = [row for row in rows if isinstance(row, dict)]
            pq.write_table(pa.table({name: [row[name] for row in table] for name in GOOD}), path)
    return path


def spec_of(files: list[Path]) -> SourceSpec:
    return SourceSpec(
        FORMATS[files[0].suffix[1:]],
        [str(file) for file in files],
        COLUMNS,
        separator=",",
        split=SplitSpec(SplitKind.time, column="at", valid_from=START_MS + 6, test_from=1e15),
        times={"at": TimeUnit.ms},
        histories={"of_user": HISTORY},
        on_bad_line=OnBadLine.skip,
        rows_per_chunk=3,
    )


def content(path: Path) -> list[Any]:
    """What is learned from a dataset."""
    dataset = Dataset.open(path, verify="full")
    blocks = [
        dataset.block(split, n)
        for split in ("train", "valid", "test")
        for n in range(len(dataset.chunks(split)))
    ]
    vocabularies = [file.read_bytes() for file in sorted((path / "vocab").glob("*"))]
    return [repr(blocks), vocabularies, dataset.artifact.content["source"]["num_samples"]]


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[list[Row]], list[list[Row]]]:
    """The rows of files, and those of them that are read."""
    files: list[list[Row]] = [[{**GOOD}]]  # something to train on
    read: list[list[Row]] = [[{**GOOD}]]
    for _ in range(draw(st.integers(1, 3))):
        rows: list[Row] = []
        good: list[Row] = []
        runs = st.tuples(st.sampled_from(["good", "value", "line"]), st.integers(1, 6))
        for kind, num in draw(st.lists(runs, min_size=1, max_size=4)):
            for _ in range(num):
                time = START_MS + sum(map(len, read)) + len(good)
                user = draw(st.sampled_from(["u1", "u2", ""]))
                row = {**GOOD, "at": f"{time}", "user": user}
                if kind == "good":
                    good.append(row)
                elif kind == "value":
                    row |= draw(st.sampled_from(BAD))
                rows.append(draw(st.sampled_from(NO_LINES)) if kind == "line" else row)
        files.append(rows)
        read.append(good)
    return files, read


@pytest.mark.slow
@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # to shrink takes minutes
@given(suffix=st.sampled_from([*FORMATS]), case=logs(), block_rows=st.sampled_from([1, 3, 100]))
def test_skipped_lines_leave_no_trace(
    tmp_path_factory: pytest.TempPathFactory,
    suffix: str,
    case: tuple[list[list[Row]], list[list[Row]]],
    block_rows: int,
) -> None:
    """Neither in the dataset nor as a warning, even whole blocks and files of them."""
    folder = tmp_path_factory.mktemp("logs")
    files, read = case
    for rows in files:
        if suffix == "parquet":
            rows[:] = [row for row in rows if isinstance(row, dict)] or [{**GOOD, **BAD[0]}]
        if suffix == "jsonl" and isinstance(rows[0], str):
            rows[0] = {**GOOD, **BAD[0]}  # the first line tells that a file has an object a line
    written = [write(folder / f"{n}.{suffix}", rows) for n, rows in enumerate(files)]
    left = [write(folder / f"left_{n}.{suffix}", rows) for n, rows in enumerate(read) if rows]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(readers, "_ROWS_PER_BLOCK", block_rows)
        read_lines = text.read_lines
        patch.setattr(
            text, "read_lines", lambda path, _, **how: read_lines(path, 90 * block_rows, **how)
        )
        artifact = prepare(spec_of(written), folder / "skipped")
        prepare(spec_of(left), folder / "without")
    num_bad = sum(map(len, files)) - sum(map(len, read))
    assert artifact.content["source"]["num_skipped"] == num_bad
    assert content(folder / "skipped") == content(folder / "without")
