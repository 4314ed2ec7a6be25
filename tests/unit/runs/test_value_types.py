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
    JoinSpec,
    SourceFormat,
    SourceSpec,
    SplitKind,
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
    "Berlin": MOMENTS.cast(pa.timestamp("ms", "Europe/Berlin")),
    "date": MOMENTS.cast(pa.date32()),
    "date64": MOMENTS.cast(pa.date32()).cast(pa.date64()),
    "int s": pa.array(SECONDS),
    "float s": pa.array(SECONDS.astype(float)),
    "int ms": pa.array(SECONDS * 1000),
    "decimal ms": pa.array(SECONDS * 1000).cast(pa.decimal128(19, 0)),
    "int ns": pa.array(SECONDS * 10**9),
    "int days": pa.array(SECONDS // 86400),
    "int hours": pa.array(SECONDS // 3600),
    "int minutes": pa.array(SECONDS // 60),
    "negative s": pa.array(-SECONDS),
    "digits of days": pa.array([int(f"{of.as_py():%Y%m%d}") for of in MOMENTS]),
    "digits of minutes": pa.array([int(f"{of.as_py():%Y%m%d%H%M}") for of in MOMENTS]),
    "digits of seconds": pa.array([int(f"{of.as_py():%Y%m%d%H%M%S}") for of in MOMENTS]),
    "of Windows": pa.array((SECONDS + 11_644_473_600) * 10**7),
    "bool": pa.array(SECONDS % 2 == 0),
    "minutes since the first": pa.array((SECONDS - SECONDS[0]) // 60),
    "iso": texts("{}", [f"{moment.as_py()}" for moment in MOMENTS]),
    "iso UTC": texts("{}Z", [f"{moment.as_py()}" for moment in MOMENTS]),
    "iso date": texts("{}", [f"{moment.as_py():%Y-%m-%d}" for moment in MOMENTS]),
    "nothing": pa.nulls(NUM),
}
AS_IDS: dict[str, pa.Array] = {
    "int": pa.array(IDS),
    "int8": pa.array(IDS.astype(np.int8)),
    "float": pa.array(IDS.astype(float)),
    "decimal": pa.array(IDS).cast(pa.decimal128(20, 1)),
    "digits": texts("{}"),
    "zeros": texts("{:03}"),
    "text": texts("u{}"),
    "large": texts("u{}").cast(pa.large_string()),
    "view": texts("u{}").cast(pa.string_view()),
    "dictionary": texts("u{}").dictionary_encode(),
    "binary": texts("u{}").cast(pa.binary()),
    "bool": pa.array(IDS < 3),
    "true": texts("{}", ["true" if of else "false" for of in IDS < 3]),
    "True": texts("{}", IDS < 3),
    "0 and 1": pa.array((IDS < 3).astype(int)),
    "us": MOMENTS,
    "ns": TIMES["ns"],
    "date": TIMES["date"],
    "clock": pa.array(IDS.astype(np.int32), pa.time32("s")),
    "iso date": TIMES["iso date"],
    "ints": pa.array([[of, 9] for of in IDS]),
    "small ints": pa.array([[of, 9] for of in IDS], pa.large_list(pa.int32())),
    "texts": pa.array([[f"u{of}"] for of in IDS]),
    "nothing": pa.nulls(NUM),
}
HOUR = ColumnSpec(ColumnKind.categorical, source="x", derive=Derive.hour_of_day)
ID = ColumnSpec(ColumnKind.categorical, source="x")
BAG = ColumnSpec(ColumnKind.categorical_list, source="x")


def write(path: Path, x: pa.Array) -> Path:
    table = pa.table({"y": pa.array(IDS % 2), "x": x, "z": pa.array(IDS), "unread": texts("{}")})
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
    dataset = Dataset.open(path)
    found = []
    for chunk in range(len(dataset.chunks("train"))):
        ids: Any = dataset.block("train", chunk).features["x_"]
        if isinstance(ids, np.ndarray):
            found += [[row] for row in ids.tolist()]
        else:
            found += [part.tolist() for part in np.split(ids.values, ids.offsets[1:-1])]
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
            prepare(of, path, allow_repeats=True, **more)
            rows = rows_of(path)
            assert rows[:NUM] == rows[NUM:] or other.null_count == NUM
            continue
        with pytest.raises(ValueError, match=rf"{file.name}.* column x[:, ].* got") as caught:
            prepare(of, path, allow_repeats=True, **more)
        assert "\n" not in str(caught.value)


# What a log is trained on, in which unit, what is the same, and what is refused.
LOGS: list[tuple[ColumnSpec, str, str, str, str]] = [
    (HOUR, "us", "", "ns, int ms, decimal ms, nothing",
     "int s, float s, int ns, int days, minutes since the first, date, UTC, bool, negative s"),
    (HOUR, "UTC", "", "Berlin, int ms", "us, int s, int ns, date"),
    (HOUR, "date", "", "date64, nothing", "us, int ms, int days"),
    (HOUR, "int s", "s", "float s, us, UTC",
     "int ms, int ns, int days, date, int hours, int minutes, digits of days, digits of minutes, "
     "digits of seconds, of Windows, negative s, bool"),
    (HOUR, "minutes since the first", "s", "nothing", "int s, us"),
    (HOUR, "iso", "iso", "us, ns, nothing", "iso date, iso UTC, UTC, date"),
    (ID, "int", "", "int8, float, decimal, digits, nothing", "bool, date, text"),
    (ID, "digits", "", "int, float", ""),
    (ID, "zeros", "", "", "int, bool"),
    (ID, "text", "", "large, view, dictionary, binary", "int, float, bool, us, clock"),
    (ID, "bool", "", "true, nothing", "0 and 1, True, date"),
    (ID, "us", "", "", "ns, date, int"),
    (BAG, "ints", "", "small ints", "texts, bool, date"),
]  # fmt: skip
# Text has the types that its values show.
TEXT_LOGS: list[tuple[ColumnSpec, str, str, str, str]] = [
    (HOUR, "int s", "s", "float s", "int ms, int ns, int days, iso, digits of days, int minutes"),
    (HOUR, "iso", "iso", "ns", "iso date, UTC, int s"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "column", "trained", "form", "same", "others"),
    [*(("parquet", *log) for log in LOGS), *(("csv", *log) for log in TEXT_LOGS)],
)
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


@pytest.mark.parametrize("years", [(1975, 1986, 1997, 2008), (1955, 1975, 1985), (2008, 1960)])
def test_times_before_1990_are_of_any_file(tmp_path: Path, years: tuple[int, ...]) -> None:
    """A sorted log has files of times before 1990, and one file has all of them, also of 1970."""
    path = tmp_path / "dataset"
    files = [tmp_path / f"{year}.parquet" for year in years]
    for year, file in zip(years, files, strict=True):
        write(file, pa.array(SECONDS + (year - 2024) * 31_556_952))
    spec = spec_of(files[0], HOUR, "s")
    prepare(replace(spec, files=[*map(str, files)]), path, allow_repeats=True)
    prepare(spec, path, overwrite=True)
    prepare(spec, path, append=[*map(str, files[1:])], allow_repeats=True)
    many = [SECONDS[n] + (year - 2024) * 31_556_952 for n, year in enumerate([*years, 1970])]
    write(files[0], pa.array(np.resize(many, NUM)))
    prepare(spec, path, overwrite=True)
    assert Dataset.open(path).num_samples("train") == NUM


def test_times_of_another_unit_than_the_bounds_are_refused(tmp_path: Path) -> None:
    for name in ("int s", "int ns", "int ms"):
        spec = spec_of(write(tmp_path / "log.parquet", TIMES[name]), ID)
        columns = {"label": spec.columns["label"], "z": spec.columns["z"]}
        bounds = SplitSpec(SplitKind.time, column="x", valid_from="2024-05-02")
        spec = replace(spec, columns=columns, tables={}, split=bounds)
        if name != "int ms":
            with pytest.raises(ValueError, match=r"log\.parquet column x: expected .*got"):
                prepare(spec, tmp_path / "dataset")
    prepare(spec, tmp_path / "dataset")
    assert Dataset.open(tmp_path / "dataset").num_samples("train") == 13


@pytest.mark.parametrize(
    ("log", "same", "others"),
    [
        ("int", ["int8", "float", "digits"], ["text", "bool", "us"]),
        ("text", ["dictionary", "binary"], ["int", "date"]),
        ("zeros", ["zeros"], ["int"]),
    ],
)
def test_the_keys_of_a_side_table_have_the_type_of_the_log(
    tmp_path: Path, log: str, same: list[str], others: list[str]
) -> None:
    spec = spec_of(write(tmp_path / "log.parquet", AS_IDS[log]), ID)
    side = tmp_path / "side.parquet"
    spec = replace(
        spec,
        columns={**spec.columns, "of_side": ColumnSpec(ColumnKind.dense)},
        joins={"side": JoinSpec([str(side)], on="x", format=SourceFormat.parquet, key="key")},
    )
    for other in (*same, *others):
        keys = AS_IDS[other].unique()
        pq.write_table(pa.table({"key": keys, "of_side": np.arange(len(keys)) + 1}), side)
        if other in same:
            prepare(spec, tmp_path / "ds", overwrite=True)
            dataset = Dataset.open(tmp_path / "ds", stay_open=False)
            assert (dataset.block("train", 0).dense > 0).all()
            continue
        with pytest.raises(ValueError, match=r"side\.parquet column key: expected .*log\.parquet"):
            prepare(spec, tmp_path / "ds", overwrite=True)


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
    spec = spec_of(write(tmp_path / "log.csv", AS_IDS["text"]), ID)
    prepare(spec, tmp_path / "dataset")
    encoder = encoder_of(Dataset.open(tmp_path / "dataset"), spec, tmp_path / "exported")
    encoder.arrays([{"z": 1, "x": "u3", "y": 1, "unread": "any"}, {"z": 1}])
    for key in ("X", "x ", "label", "x_", 3):
        with pytest.raises(ValueError, match=rf"^record 1: .*'x'.*, got \['{key}'\]"):
            encoder.arrays([{"z": 1, "x": "u3"}, {"z": 1, key: "u3"}])
