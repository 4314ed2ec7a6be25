"""Generations of a dataset: what stays, what grows, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotrec.artifact import ArtifactError, LockedError
from hotrec.config.data import Encoding, SourceSpec, TableSpec
from hotrec.data.chunks import Dataset
from hotrec.data.days import check_time_order, days_of
from hotrec.data.generation import growth_of
from hotrec.data.prepare import prepare
from hotrec.data.vocabulary import read_vocabulary
from tests.helpers.ranks import run_ranks
from tests.unit.data.logs import bag, spec_by_day, write_day


def users_of(dataset: Dataset, split: str) -> list[str | None]:
    values = [None, *read_vocabulary(dataset.artifact.path, "user")["value"].to_pylist()]
    blocks = [dataset.block(split, index) for index in range(len(dataset.chunks(split)))]
    return [values[bag(b.features["user"], n)[0]] for b in blocks for n in range(len(b))]


def row_of(dataset: Dataset, user: str) -> int:
    return read_vocabulary(dataset.artifact.path, "user")["value"].to_pylist().index(user) + 1


def grow(folder: Path, spec: SourceSpec, *files: str) -> Dataset:
    prepare(spec, folder / "d", append=files)
    return Dataset.open(folder / "d", verify="full")


def test_training_grows_and_ids_keep_their_rows(tmp_path: Path) -> None:
    days = [["a", "b", "c", "a"], ["c", "new"], ["b", "late"]]
    files = [write_day(tmp_path, day, users) for day, users in enumerate(days)]
    spec = spec_by_day(files[0], valid_day=1)
    spec.files.append(files[1])
    prepare(spec, tmp_path / "d")
    before = Dataset.open(tmp_path / "d")
    rows = {user: row_of(before, user) for user in "abc"}
    old_hash = before.artifact.content_hash
    assert users_of(before, "valid") == ["c", None]
    del before
    after = grow(tmp_path, spec_by_day(files[0], valid_day=2), *files[1:])
    assert users_of(after, "train") == [*days[0], *days[1]]
    assert users_of(after, "valid") == ["b", None]
    assert {user: row_of(after, user) for user in "abc"} == rows
    assert row_of(after, "new") == 4
    source = after.artifact.content["source"]
    assert [g["content_hash"] for g in source["generations"]] == [old_hash]
    assert source["generations"][0]["num_train"] == 4
    assert source["num_samples"] == {"train": 6, "valid": 2, "test": 0}
    assert check_time_order(after)
    assert [(day.name, day.num_samples) for day in days_of(after, "train")] == [
        ("1970-01-01", 4), ("1970-01-02", 2),
    ]  # fmt: skip


def test_the_longest_unseen_makes_room(tmp_path: Path) -> None:
    """Of four rows one is for the unknown; the most frequent new value gets the oldest row."""
    days = [["a", "b", "c", "b", "c"], ["c"], ["x", "y", "x", "c"]]
    files = [write_day(tmp_path, day, users, history="i j") for day, users in enumerate(days)]
    spec = spec_by_day(files[0], user=TableSpec(num_rows=4))
    prepare(spec, tmp_path / "d")
    before = Dataset.open(tmp_path / "d")
    rows = {user: row_of(before, user) for user in "abc"}
    del before
    second = grow(tmp_path, spec, files[1])
    assert growth_of(second)["user"] == {"new_rows": 0, "evicted": 0, "without_row": 0}
    del second
    after = grow(tmp_path, spec, files[2])
    assert growth_of(after)["user"] == {"new_rows": 0, "evicted": 2, "without_row": 2}
    assert {row_of(after, "x"), row_of(after, "y")} == {rows["a"], rows["b"]}
    assert row_of(after, "c") == rows["c"]
    # Samples of the values that lost their rows read row 0, and nothing else of them changes.
    assert users_of(after, "train") == [None, None, "c", None, "c", "c", *days[2]]
    vocabulary = read_vocabulary(tmp_path / "d", "user").to_pydict()
    columns = [vocabulary[name] for name in ("count", "since", "last_seen")]
    facts = dict(zip(vocabulary["value"], zip(*columns, strict=True), strict=True))
    assert facts == {"x": (2, 2, 2), "y": (1, 2, 2), "c": (4, 0, 2)}
    lists = [after.block("train", n).features["history"] for n in range(len(after.chunks("train")))]
    assert np.unique(np.concatenate([ids.values for ids in lists])).tolist() == [1, 2]


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    first, second = (write_day(tmp_path, day, ["a", "b", "c"]) for day in (1, 2))
    early = write_day(tmp_path, 0, ["a"])
    spec = spec_by_day(first)
    prepare(spec, tmp_path / "d")
    manifest = (tmp_path / "d" / "manifest.json").read_bytes()
    hashed = spec_by_day(first, user=TableSpec(Encoding.hashing, num_rows=9))
    cases = [
        (spec, early, "append: .* from 1970-01-02T00:00:00.002"),
        (spec, first, "append: .* got only 3 "),
        (spec, str(tmp_path / "none.csv"), "append: .*none.csv"),
        (spec_by_day(first, user=TableSpec(num_rows=3)), second, "num_rows: .* 4"),
        (hashed, second, "data.source.tables.user"),
        (spec_by_day(first, valid_day=2), second, "training split"),
    ]
    for changed, file, message in cases:
        with pytest.raises(ValueError, match=message):
            prepare(changed, tmp_path / "d", append=[file])
    with pytest.raises(ArtifactError, match="nowhere"):
        prepare(spec, tmp_path / "nowhere", append=[second])
    in_use = Dataset.open(tmp_path / "d")
    with pytest.raises(LockedError):
        prepare(spec, tmp_path / "d", append=[second])
    assert (tmp_path / "d" / "manifest.json").read_bytes() == manifest
    assert in_use.num_samples("train") == 3


@pytest.mark.parametrize("skips", [True, False])
def test_days_that_were_held_out_are_not_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, skips: bool
) -> None:
    files = [write_day(tmp_path, day, ["a", "b"]) for day in range(4)]
    spec = spec_by_day(files[0], valid_day=1)
    spec.files[:] = files[:2]
    prepare(spec, tmp_path / "d")
    grow(tmp_path, spec_by_day(files[0], valid_day=3), *files[2 if skips else 1 :])
    assert ("held-out days 1970-01-02 are not in the new files" in caplog.text) == skips


def grow_on_ranks(folder: str) -> str:
    spec = spec_by_day(f"{folder}/day_0.csv", user=TableSpec(num_rows=6))
    return prepare(
        spec, Path(folder) / "d", append=[f"{folder}/day_1.csv", f"{folder}/day_2.csv"]
    ).content_hash


@pytest.mark.slow
def test_ranks_make_the_same_generation(tmp_path: Path) -> None:
    hashes = []
    for name, world_size in (("one", 1), ("two", 2)):
        folder = tmp_path / name
        folder.mkdir()
        days = [["a", "b", "c", "d", "e", "a", "b"], ["x", "y", "x"], ["z", "e", "z", "z"]]
        for day, users in enumerate(days):
            write_day(folder, day, users)
        prepare(spec_by_day(f"{folder}/day_0.csv", user=TableSpec(num_rows=6)), folder / "d")
        if world_size == 1:
            hashes.append(grow_on_ranks(str(folder)))
        else:
            hashes += run_ranks(grow_on_ranks, world_size, folder=str(folder))
    assert len(set(hashes)) == 1
