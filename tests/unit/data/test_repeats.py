"""Each file is taken once, and each sample that has a time."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    SourceSpec,
    SplitKind,
    SplitSpec,
    TimeUnit,
)
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


@pytest.mark.parametrize("split", [RANDOM, LAST, BY_TIME])
def test_a_file_that_comes_again_is_refused(tmp_path: Path, split: SplitSpec) -> None:
    """In one list, and appended, under its own and another name."""
    first = write(tmp_path / "day.csv", lines_of(1))
    again = str(shutil.copy(first, tmp_path / "again.csv"))
    for files in ([first, again], [tmp_path, first]):
        with pytest.raises(ValueError, match=r"data\.source\.files: expected each file once, got"):
            prepare(spec_of(*files, split=split), tmp_path / "d")
    assert not (tmp_path / "d").exists()
    spec = spec_of(first, split=split)
    prepare(spec, tmp_path / "d")
    manifest = (tmp_path / "d/manifest.json").read_bytes()
    for file in (first, again):
        with pytest.raises(ValueError, match="append: expected new "):
            prepare(spec, tmp_path / "d", append=[file])
    assert (tmp_path / "d/manifest.json").read_bytes() == manifest
    write(tmp_path / "day.csv", [*lines_of(1), *lines_of(2)])
    if split is not BY_TIME:
        with pytest.raises(ValueError, match=r"append: expected new files, got day\.csv, which is"):
            prepare(spec, tmp_path / "d", append=[first])


TIMES = {
    "equal": lambda n: "5",
    "in-days": lambda n: str(86_400_000 * (n // 50)),
    "unordered": lambda n: str((n * 37) % 100),
    "numbers": lambda n: f"{n / 7:.2f}",
}


@pytest.mark.parametrize("times", TIMES)
def test_times_do_not_hide_what_comes_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, times: str
) -> None:
    rest = [line.partition(",")[2] for line in lines_of(1)]
    lines = [f"{TIMES[times](n)},{line}" for n, line in enumerate(rest)]
    first = write(tmp_path / "day.csv", lines)
    prepare(spec_of(first, split=BY_TIME), tmp_path / "d")
    again = write(tmp_path / "again.csv", lines[::-1])
    with pytest.raises(ValueError, match="append: expected new training samples, got only"):
        prepare(spec_of(first, split=BY_TIME), tmp_path / "d", append=[again])
    half = write(tmp_path / "half.csv", [*lines_of(3), *lines[50:]])
    if times == "numbers":
        with pytest.raises(ValueError, match="append: expected training samples from"):
            prepare(spec_of(first, split=BY_TIME), tmp_path / "d", append=[half])
    elif times != "unordered":  # a sample at the last time may be new
        prepare(spec_of(first, split=BY_TIME), tmp_path / "d", append=[half])
        assert "50 samples of half.csv are at the last time" in caplog.text


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
