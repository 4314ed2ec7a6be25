"""Each sample is taken once, in whatever file it comes again; and one that only looks the same."""

from __future__ import annotations

import gzip
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
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
    SourceFormat,
    SourceSpec,
    SplitKind,
    SplitSpec,
    TimeUnit,
)
from hotrec.data import repeats
from hotrec.data.chunks import Dataset
from hotrec.data.prepare import prepare
from hotrec.data.vocabulary import read_vocabulary
from tests.unit.data.logs import delimited_spec

COLUMNS = {
    "label": ColumnSpec(ColumnKind.label),
    "price": ColumnSpec(ColumnKind.dense),
    "user": ColumnSpec(ColumnKind.categorical),
    "tags": ColumnSpec(ColumnKind.categorical_list, separator="|"),
}
HEADER = "at,label,price,user,tags"
RANDOM = SplitSpec(valid_frac=0.2, test_frac=0.2)
LAST = SplitSpec(SplitKind.last, valid_frac=0.2, test_frac=0.2)
BY_TIME = SplitSpec(SplitKind.time, column="at", valid_from=1e15, test_from=1e15)


def lines_of(day: int, num: int = 100) -> list[str]:
    rng = np.random.default_rng(day)
    return [
        f"{86_400_000 * day + 1000 * n},{rng.integers(2)},{rng.random():.3f},u{rng.integers(30)},"
        f"{rng.integers(5)}|{rng.integers(5)}"
        for n in range(num)
    ]


def write(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join([HEADER, *lines, ""]))
    return str(path)


def spec_of(*files: str | Path, split: SplitSpec = RANDOM, **settings: Any) -> SourceSpec:
    times = {"at": TimeUnit.ms} if split.kind is SplitKind.time else {}
    defaults = {"columns": COLUMNS, "split": split, "times": times}
    return delimited_spec([*map(Path, files)], **{**defaults, **settings})


# How the lines of a file come again, under another name or by another path.
FORMS: dict[str, Callable[[str], str]] = {
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "more-columns": lambda text: "".join(f"{line},x\n" for line in text.splitlines()),
    "reordered": lambda text: "\n".join([HEADER, *text.splitlines()[:0:-1], ""]),
    "most-of-it": lambda text: "\n".join([*text.splitlines()[:71], ""]),
    "and-more": lambda text: text + "\n".join([*lines_of(7, 50), ""]),
}


def write_again(form: str, source: Path) -> SourceSpec:
    again = source.parent / "again.csv"
    match form:
        case "symlink":
            again.symlink_to(source)
        case "compressed":
            again = again.with_suffix(".csv.gz")
            again.write_bytes(gzip.compress(source.read_bytes()))
        case "parquet":
            table = pacsv.read_csv(source)
            tags = [[int(tag) for tag in text.split("|")] for text in table["tags"].to_pylist()]
            table = table.drop_columns(["tags", "price"]).append_column("tags", pa.array(tags))
            prices = pacsv.read_csv(source)["price"].cast(pa.float32())
            pq.write_table(table.append_column("price", prices), again.with_suffix(".parquet"))
            return replace(spec_of(again.with_suffix(".parquet")), format=SourceFormat.parquet)
        case _:
            again.write_text(FORMS[form](source.read_text()))
    return spec_of(again)


@pytest.mark.parametrize("form", [*FORMS, "symlink", "compressed", "parquet"])
def test_samples_that_come_again_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """In one list, and appended, with a split that knows no times, of files too large to keep."""
    monkeypatch.setattr(repeats, "_MOST_OF_FILE", 64)
    first = Path(write(tmp_path / "day.csv", lines_of(1)))
    again = write_again(form, first)
    if form != "parquet":
        for files in ([first, *again.files], [tmp_path, first]):
            with pytest.raises(ValueError, match=r"data\.source\.files: .*each sample once, got"):
                prepare(spec_of(*files), tmp_path / "d")
        assert not (tmp_path / "d").exists()
    for number, split in enumerate((RANDOM, LAST)):
        path = tmp_path / f"d{number}"
        prepare(spec_of(first, split=split), path)
        manifest = (path / "manifest.json").read_bytes()
        with pytest.raises(ValueError, match="append: .*each sample once, got"):
            prepare(replace(again, split=split), path, append=again.files)
        assert (path / "manifest.json").read_bytes() == manifest
        prepare(replace(again, split=split), path, append=again.files, allow_repeats=True)


TIMES = {
    "equal": lambda n: "5",
    "in-days": lambda n: str(86_400_000 * (n // 50)),
    "unordered": lambda n: str((n * 37) % 100),
    "numbers": lambda n: f"{n / 7:.2f}",
}


@pytest.mark.parametrize("times", TIMES)
def test_times_do_not_hide_what_comes_again(tmp_path: Path, times: str) -> None:
    rest = [line.partition(",")[2] for line in lines_of(1)]
    lines = [f"{TIMES[times](n)},{line}" for n, line in enumerate(rest)]
    first = write(tmp_path / "day.csv", lines)
    prepare(spec_of(first, split=BY_TIME), tmp_path / "d")
    again = write(tmp_path / "again.csv", lines[::-1])
    with pytest.raises(ValueError, match="append: expected new training samples, got only"):
        prepare(spec_of(first, split=BY_TIME), tmp_path / "d", append=[again])
    half = write(tmp_path / "half.csv", [*lines_of(3), *lines[50:]])
    with pytest.raises(ValueError, match="append: expected"):
        prepare(spec_of(first, split=BY_TIME), tmp_path / "d", append=[half])


def test_samples_that_look_the_same_by_chance_are_taken(tmp_path: Path) -> None:
    """Where few columns tell samples apart, days have many in common, and no two have all."""
    columns = {"label": ColumnSpec(ColumnKind.label), "user": ColumnSpec(ColumnKind.categorical)}
    days = [write(tmp_path / f"{day}.csv", lines_of(day, 300)) for day in range(4)]
    spec = spec_of(*days[:2], columns=columns)
    prepare(spec, tmp_path / "d")
    prepare(spec, tmp_path / "d", append=days[2:])
    with pytest.raises(ValueError, match="append: expected each sample once, got all 300"):
        prepare(spec, tmp_path / "d", append=[str(shutil.copy(days[1], tmp_path / "again.csv"))])


def test_a_few_that_come_again_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = write(tmp_path / "first.csv", lines_of(1, 1000))
    second = write(tmp_path / "second.csv", [*lines_of(1, 1000)[-30:], *lines_of(2, 970)])
    prepare(spec_of(first, split=replace(RANDOM, valid_frac=0, test_frac=0)), tmp_path / "d")
    with caplog.at_level(logging.WARNING):
        prepare(spec_of(first), tmp_path / "d", append=[second])
    assert "append: about 3.0% of the samples of the files are also in" in caplog.text


# One file that grows.


def test_one_growing_file_is_appended_daily(tmp_path: Path) -> None:
    """Each day becomes training data once, with its ids, as if all had been prepared at once."""
    days = [lines_of(day) for day in range(1, 7)]
    for day, lines in enumerate(days, start=1):
        lines.append(f"{86_400_000 * (day + 1) - 1},1,0.5,only_{day},1|2")
    log = tmp_path / "events.csv"
    path = tmp_path / "d"
    for newest in range(3, 7):
        write(log, [line for lines in days[:newest] for line in lines])
        split = replace(
            BY_TIME, valid_from=86_400_000 * (newest - 1), test_from=86_400_000 * newest
        )
        spec = spec_of(log, split=split)
        prepare(spec, path, append=[] if newest == 3 else [str(log)])
        dataset = Dataset.open(path)
        sizes = {name: dataset.num_samples(name) for name in ("train", "valid", "test")}
        assert sizes == {"train": 101 * (newest - 2), "valid": 101, "test": 101}
        prices = np.concatenate(
            [dataset.block("train", n).dense[:, 0] for n in range(len(dataset.chunks("train")))]
        )
        expected = [float(line.split(",")[2]) for lines in days[: newest - 2] for line in lines]
        assert prices.tolist() == np.array(expected, np.float32).tolist()
        users = read_vocabulary(path, "user").select(["value", "count"]).to_pydict()
        found = dict(zip(*users.values(), strict=True))
        assert [found.get(f"only_{day}") for day in range(1, newest)] == [1] * (newest - 2) + [None]
        assert sum(found.values()) == 101 * (newest - 2)
        del dataset
    with pytest.raises(
        ValueError, match=r"got only 404 that .* already has.* set later .*valid_from"
    ):
        prepare(spec, path, append=[str(log)])


def test_late_samples_are_not_taken_for_those_that_are_there(tmp_path: Path) -> None:
    log = tmp_path / "events.csv"
    write(log, [*lines_of(1), *lines_of(2), *lines_of(3)])
    split = replace(BY_TIME, valid_from=86_400_000 * 2, test_from=86_400_000 * 3)
    prepare(spec_of(log, split=split), tmp_path / "d")
    late = lines_of(1)
    late.insert(50, f"{86_400_000 + 49_500},1,0.5,late,1")
    write(log, [*late, *lines_of(2), *lines_of(3)])
    moved = replace(split, valid_from=86_400_000 * 3, test_from=86_400_000 * 4)
    message = r"or exactly the earlier ones, .* in events\.csv line 2, and 101 others"
    with pytest.raises(ValueError, match=message):
        prepare(spec_of(log, split=moved), tmp_path / "d", append=[str(log)])


# Splits of another kind.


@pytest.mark.parametrize(
    ("split", "key", "times"),
    [
        (RANDOM, r"split\.kind: .* got fraction", TimeUnit.ms),
        (LAST, r"split\.kind: .* got last", TimeUnit.ms),
        (replace(BY_TIME, column="price"), r"split\.column: .* got price", TimeUnit.ms),
        (BY_TIME, r"times\.at: .* got s", TimeUnit.s),
        (replace(BY_TIME, valid_from=86_400_000), r"split\.valid_from: ", TimeUnit.ms),
    ],
)
def test_the_split_stays(tmp_path: Path, split: SplitSpec, key: str, times: TimeUnit) -> None:
    first, second = (write(tmp_path / f"{day}.csv", lines_of(day)) for day in (1, 2))
    prepare(spec_of(first, split=BY_TIME), tmp_path / "d")
    spec = replace(spec_of(first, split=split), times={"at": times})
    with pytest.raises(ValueError, match=rf"data\.source\.{key}"):
        prepare(spec, tmp_path / "d", append=[second])


def test_a_label_that_came_later_does_not_hide_a_sample(tmp_path: Path) -> None:
    """Exported again, with other labels for one in ten samples, and in files cut otherwise."""
    first = write(tmp_path / "first.csv", lines_of(1, 2000))
    lines = [line.split(",") for line in lines_of(1, 2000)]
    for line in lines[::10]:
        line[1] = str(1 - int(line[1]))
    parts = [
        write(tmp_path / f"part{n}.csv", [",".join(line) for line in lines[n::8]]) for n in range(8)
    ]
    prepare(spec_of(first), tmp_path / "d")
    with pytest.raises(
        ValueError, match=r"append: expected each sample once, got about \d+ \(\d\d%"
    ):
        prepare(spec_of(first), tmp_path / "d", append=parts)
