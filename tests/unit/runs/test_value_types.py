"""A column keeps its type and unit: in the files of a log, in what is appended, and in records."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    Derive,
    SourceFormat,
    SourceSpec,
    SplitSpec,
    TableSpec,
)
from hotrec.data.chunks import Dataset
from hotrec.data.prepare import prepare
from tests.unit.runs.test_encoder import encoder_of

NUM = 40
SECONDS = np.array([1_714_521_600 + 7_000 * n for n in range(NUM)])
MOMENTS = pa.array(SECONDS * 10**6, pa.timestamp("us"))
IDS = np.arange(NUM) % 7


def texts(pattern: str, values: Any = IDS) -> pa.Array:
    return pa.array([pattern.format(value) for value in values])


# The same moments, otherwise.
TIMES: dict[str, pa.Array] = {
    "us": MOMENTS,
    "ns": MOMENTS.cast(pa.timestamp("ns")),
    "UTC": MOMENTS.cast(pa.timestamp("us", "UTC")),
    "date": MOMENTS.cast(pa.date32()),
    "int s": pa.array(SECONDS),
    "float s": pa.array(SECONDS.astype(float)),
    "int ms": pa.array(SECONDS * 1000),
    "int ns": pa.array(SECONDS * 10**9),
    "int days": pa.array(SECONDS // 86400),
    "int minutes": pa.array(SECONDS // 60),
    "negative s": pa.array(-SECONDS),
    "digits of days": pa.array([int(f"{of.as_py():%Y%m%d}") for of in MOMENTS]),
    "bool": pa.array(SECONDS % 2 == 0),
    "minutes since the first": pa.array((SECONDS - SECONDS[0]) // 60),
    "iso": texts("{}", [f"{moment.as_py()}" for moment in MOMENTS]),
    "iso date": texts("{}", [f"{moment.as_py():%Y-%m-%d}" for moment in MOMENTS]),
    "nothing": pa.nulls(NUM),
}
AS_IDS: dict[str, pa.Array] = {
    "int": pa.array(IDS),
    "float": pa.array(IDS.astype(float)),
    "digits": texts("{}"),
    "zeros": texts("{:03}"),
    "text": texts("u{}"),
    "bool": pa.array(IDS < 3),
    "true": texts("{}", ["true" if of else "false" for of in IDS < 3]),
    "True": texts("{}", IDS < 3),
    "0 and 1": pa.array((IDS < 3).astype(int)),
    "us": MOMENTS,
    "date": TIMES["date"],
    "ints": pa.array([[of, 9] for of in IDS]),
    "texts": pa.array([[f"u{of}"] for of in IDS]),
    "nothing": pa.nulls(NUM),
}
HOUR = ColumnSpec(ColumnKind.categorical, source="x", derive=Derive.hour_of_day)
ID = ColumnSpec(ColumnKind.categorical, source="x")
BAG = ColumnSpec(ColumnKind.categorical_list, source="x")


def write(path: Path, x: pa.Array) -> Path:
    unread = texts(f"{path.stem} {{}}")  # no two files are equal
    table = pa.table({"y": pa.array(IDS % 2), "x": x, "z": pa.array(IDS), "unread": unread})
    pacsv.write_csv(table, path) if path.suffix == ".csv" else pq.write_table(table, path)
    return path


def spec_of(file: Path, column: ColumnSpec, form: str = "") -> SourceSpec:
    columns = {"label": ColumnSpec(ColumnKind.label, source="y"), "x_": column}
    return SourceSpec(
        SourceFormat.delimited if file.suffix == ".csv" else SourceFormat.parquet,
        [str(file)],
        columns={**columns, "z": ColumnSpec(ColumnKind.categorical)},
        tables={"x_": TableSpec(min_count=1)},
        times={"x": form} if form else {},
        separator=",",
        split=SplitSpec(valid_frac=0.0, test_frac=0.0),
    )


def rows_of(path: Path) -> list[list[int]]:
    """The rows of each sample's ids."""
    ids: Any = Dataset.open(path, stay_open=False)
    blocks = [ids.block("train", chunk) for chunk in range(len(ids.chunks("train")))]
    found: list[list[int]] = []
    for values in (block.features["x_"] for block in blocks):
        if isinstance(values, np.ndarray):
            found += values[:, None].tolist()
        else:
            found += [of.tolist() for of in np.split(values.values, values.offsets[1:-1])]
    return found


def check(
    folder: Path, spec: SourceSpec, trained: pa.Array, other: pa.Array, as_same: bool
) -> None:
    """Prepare files of both, and append one of the other."""
    path, file = folder / "dataset", folder / f"other{Path(spec.files[0]).suffix}"
    write(Path(spec.files[0]), trained)
    write(file, other)
    both = replace(spec, files=[*spec.files, str(file)])
    for is_appended in (False, True):
        if is_appended:
            prepare(spec, path, overwrite=True)
        more: dict[str, Any] = {"append": [str(file)]} if is_appended else {"overwrite": True}
        of = spec if is_appended else both
        if as_same:
            prepare(of, path, **more)
            rows = rows_of(path)
            assert rows[:NUM] == rows[NUM:] or other.null_count == NUM
            continue
        with pytest.raises(ValueError, match=rf"{file.name}.* column x[:, ].* got") as caught:
            prepare(of, path, **more)
        assert "\n" not in str(caught.value)


# What a log is trained on, in which unit, what is the same, and what is refused.
LOGS: list[tuple[str, ColumnSpec, str, str, str, str]] = [
    ("parquet", HOUR, "us", "", "ns, int ms, nothing",
     "int s, float s, int ns, int days, minutes since the first, date, UTC, bool, negative s"),
    ("parquet", HOUR, "date", "", "nothing", "us, int ms, int days"),
    ("parquet", HOUR, "int s", "s", "float s, us, UTC",
     "int ms, int ns, int days, date, int minutes, digits of days, negative s, bool"),
    ("parquet", HOUR, "iso", "iso", "us, ns, nothing", "iso date, UTC, date"),
    ("parquet", ID, "int", "", "float, digits, nothing", "bool, date, text"),
    ("parquet", ID, "zeros", "", "", "int, bool"),
    ("parquet", ID, "text", "", "", "int, float, bool, us"),
    ("parquet", ID, "bool", "", "true, nothing", "0 and 1, True, date"),
    ("parquet", BAG, "ints", "", "nothing", "texts, bool, date"),
    # Text has the types that its values show.
    ("csv", HOUR, "int s", "s", "float s", "int ms, int days, iso, digits of days, int minutes"),
    ("csv", HOUR, "iso", "iso", "ns", "iso date, UTC, int s"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "column", "trained", "form", "same", "others"), LOGS)
def test_logs(
    tmp_path: Path, suffix: str, column: ColumnSpec, trained: str, form: str, same: str, others: str
) -> None:
    columns = TIMES if column is HOUR else AS_IDS
    spec = spec_of(tmp_path / f"log.{suffix}", column, form)
    for names, as_same in ((same, True), (others, False)):
        for other in filter(None, names.split(", ")):
            check(tmp_path, spec, columns[trained], columns[other], as_same)


def test_a_few_rows_of_another_unit_are_named(tmp_path: Path) -> None:
    for other in (SECONDS[17] * 1000, SECONDS[17] // 60, 20_240_501):
        times = SECONDS.copy()
        times[17] = other
        file = write(tmp_path / "a.csv", pa.array(times))
        with pytest.raises(ValueError, match=rf"a\.csv line 19: .* column x, got {other}"):
            prepare(spec_of(file, HOUR, "s"), tmp_path / "dataset")


MOMENT = datetime(2024, 5, 1, 13)


@pytest.mark.parametrize(
    ("column", "trained", "form", "same", "others"),
    [
        (HOUR, TIMES["us"], "", [MOMENT, SECONDS[3] * 1000, np.datetime64(MOMENT), None],
         [MOMENT.replace(tzinfo=UTC), MOMENT.date(), int(SECONDS[3]), SECONDS[3] * 10**9, 19_844]),
        (HOUR, TIMES["iso"], "iso", [MOMENT, f"{MOMENT}", ""],
         [f"{MOMENT}Z", "2024-05-01", MOMENT.date(), MOMENT.replace(tzinfo=UTC)]),
        (HOUR, TIMES["int s"], "s", [SECONDS[3], MOMENT, f"{SECONDS[3]}", 486_000_000],
         [SECONDS[3] * 1000, f"{SECONDS[3]}000", MOMENT.date(), 20_240_501, SECONDS[3] // 60,
          -SECONDS[3], True]),
        (HOUR, TIMES["minutes since the first"], "s", [120, 10**6], [SECONDS[3], MOMENT]),
        (ID, AS_IDS["int"], "", [3, "3", 3.0, np.int8(3), "new"], [True, MOMENT.date(), MOMENT]),
        (ID, AS_IDS["text"], "", ["u3", b"u3", "new", "3"], [3, 3.0, True, MOMENT.date(), MOMENT]),
        (ID, AS_IDS["zeros"], "", ["003"], [3]),
        (ID, AS_IDS["bool"], "", [True, "true", np.bool_(False)], [1, 0.0]),
        (ID, AS_IDS["True"], "", ["True"], [True]),
        (ID, AS_IDS["date"], "", [MOMENT.date(), "2024-05-01"], [MOMENT, 19_844]),
        (BAG, AS_IDS["ints"], "", [[3], np.array([3, 4])], [[True], [3, MOMENT.date()]]),
        (BAG, AS_IDS["texts"], "", [["u3"]], [["u3", 3]]),
    ],
)  # fmt: skip
def test_records(
    tmp_path: Path, column: ColumnSpec, trained: pa.Array, form: str, same: list[Any],
    others: list[Any],
) -> None:  # fmt: skip
    suffix = "csv" if form == "iso" else "parquet"
    spec = spec_of(write(tmp_path / f"log.{suffix}", trained), column, form)
    prepare(spec, tmp_path / "dataset")
    encoder = encoder_of(Dataset.open(tmp_path / "dataset"), spec, tmp_path / "exported")
    for value in same:
        encoder.arrays([{"z": 1, "x": value}])
    for value in others:
        with pytest.raises(ValueError, match=r"^record 1 column x: expected .* training, got"):
            encoder.arrays([{"z": 1, "x": same[0]}, {"z": 1, "x": value}])


def test_a_record_has_the_names_of_the_log(tmp_path: Path) -> None:
    """Another name would else be a missing value."""
    spec = spec_of(write(tmp_path / "log.csv", AS_IDS["text"]), ID)
    prepare(spec, tmp_path / "dataset")
    encoder = encoder_of(Dataset.open(tmp_path / "dataset"), spec, tmp_path / "exported")
    encoder.arrays([{"z": 1, "x": "u3", "y": 1, "unread": "any"}, {"z": 1}])
    for record in ({}, "x", *({"z": 1, key: "u3"} for key in ("X", "x ", "label", "x_", 3))):
        with pytest.raises(ValueError, match="^record 1: expected .*'x'.*, got "):
            encoder.arrays([{"z": 1, "x": "u3"}, record])
