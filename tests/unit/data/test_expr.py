"""Columns computed by expressions: their values, and rows and expressions that have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    Derive,
    OnBadLine,
    SourceFormat,
    SourceSpec,
    SplitKind,
    SplitSpec,
)
from hotrec.data.chunks import Dataset
from hotrec.data.prepare import prepare
from tests.unit.data.logs import delimited_spec

ROWS: dict[str, list[Any]] = {
    "clicked": ["-1", "1", "1", "-1"],
    "actions": ["0", "4", "5", "3"],
    "paid": ["1.234,50 EUR", "7", "", "0,5"],
    "day": ["20240501", "20240502", "20240503", "20240504"],
    "user": ["a", "b", "a", "b"],
}
EXPR = {
    "label": "(CAST(clicked AS DOUBLE) + 1) / 2",
    "followed": "CAST(actions AS INT) & 4 > 0",
    "amount": "CAST(REPLACE(REPLACE(REPLACE(paid, '.', ''), ',', '.'), ' EUR', '') AS DOUBLE)",
    "at": "STRPTIME(day, '%Y%m%d')",
}
COLUMNS = {
    "label": ColumnSpec(ColumnKind.label),
    "followed": ColumnSpec(ColumnKind.label),
    "amount": ColumnSpec(ColumnKind.dense, fill=-1),
    "weekday": ColumnSpec(ColumnKind.dense, source="at", derive=Derive.day_of_week),
    "user": ColumnSpec(ColumnKind.categorical),
}
BY_TIME = SplitSpec(SplitKind.time, column="at", valid_from="2024-05-04")


def write(path: Path, rows: dict[str, list[Any]]) -> SourceSpec:
    lines = zip(*rows.values(), strict=True)
    match path.suffix:
        case ".csv":
            quoted = (",".join(f'"{value}"' for value in line) for line in lines)
            path.write_text("\n".join([",".join(rows), *quoted, ""]))
        case ".jsonl":
            path.write_text(
                "".join(json.dumps(dict(zip(rows, line, strict=True))) + "\n" for line in lines)
            )
        case _:
            pq.write_table(pa.table({n: [v or None for v in of] for n, of in rows.items()}), path)
    forms = {".csv": SourceFormat.delimited, ".jsonl": SourceFormat.json}
    spec = delimited_spec([path], columns=COLUMNS, expr=EXPR, split=BY_TIME)
    spec.format = forms.get(path.suffix, SourceFormat.parquet)
    return spec


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_values_are_computed(tmp_path: Path, suffix: str) -> None:
    prepare(write(tmp_path / f"log.{suffix}", ROWS), tmp_path / "d")
    dataset = Dataset.open(tmp_path / "d")
    [train, valid] = (dataset.block(split, 0) for split in ("train", "valid"))
    assert train.label.tolist() == [[0, 0], [1, 1], [1, 1]]
    assert train.dense.tolist() == [[1234.5, 2], [7, 3], [-1, 4]]
    assert (valid.label.tolist(), valid.dense.tolist()) == ([[0, 0]], [[0.5, 5]])


def test_a_row_without_a_value_is_named_or_skipped(tmp_path: Path) -> None:
    rows = {**ROWS, "day": [*ROWS["day"][:3], "20240231"]}
    spec = write(tmp_path / "log.csv", rows)
    with pytest.raises(ValueError, match=r"log\.csv line 5: expected .*expr\.at .*'20240231'"):
        prepare(spec, tmp_path / "d")
    spec.on_bad_line = OnBadLine.skip
    source = prepare(spec, tmp_path / "d").content["source"]
    assert (source["num_samples"]["train"], source["num_skipped"]) == (3, 1)


@pytest.mark.parametrize(
    ("name", "sql", "got"),
    [
        ("at", "STRPTIME(day", "got "),
        ("at", "1", "no column"),
        ("at", "LAG(day) OVER (ORDER BY day)", "one of other rows"),
        ("at", "MAX(day)", "got 1 for 4 rows"),
        ("at", "CAST(dey AS INT)", "got 'dey'"),
        ("user", "day", "got 'user'"),
    ],
)
def test_what_is_no_expression_of_a_row(tmp_path: Path, name: str, sql: str, got: str) -> None:
    spec = write(tmp_path / "log.csv", ROWS)
    spec.expr = {**EXPR, name: sql}
    with pytest.raises(ValueError, match=rf"^data\.source\.expr\.{name}: expected ") as caught:
        prepare(spec, tmp_path / "d")
    assert got in str(caught.value)
    assert "\n" not in str(caught.value)
