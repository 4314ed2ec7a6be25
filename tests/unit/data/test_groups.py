"""The groups of samples: which column may name them, and which samples have none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    Encoding,
    TableSpec,
)
from hotrec.data.chunks import Dataset
from hotrec.data.groups import GroupBy, group_by_of
from hotrec.data.prepare import prepare
from tests.unit.data.logs import delimited_spec, loader, write_dataset


def prepared(folder: Path, encoding: Encoding) -> Dataset:
    """Users 0 to 9, of whom 9 is too rare for a vocabulary; one sample has none."""
    users = [number % 9 for number in range(90)] + [9, ""]
    lines = [f"{number % 2},{user},1" for number, user in enumerate(users)]
    if encoding is Encoding.rows:
        lines.pop()  # a row number cannot be missing
    (folder / "log.csv").write_text("\n".join(["label,user,price", *lines, ""]))
    columns = {
        "label": ColumnSpec(ColumnKind.label),
        "user": ColumnSpec(ColumnKind.categorical),
        "price": ColumnSpec(ColumnKind.dense),
    }
    sizes = {"min_count": 2} if encoding is Encoding.vocabulary else {"num_rows": 1000}
    tables = {"user": TableSpec(encoding=encoding, **sizes)}
    spec = delimited_spec([folder / "log.csv"], columns=columns, tables=tables)
    prepare(spec, folder / "dataset")
    return Dataset.open(folder / "dataset")


@pytest.mark.parametrize(
    ("encoding", "num_without"), [("vocabulary", 2), ("hashing", 1), ("rows", 0)]
)
def test_missing_and_unknown_values_are_no_group(
    tmp_path: Path, encoding: str, num_without: int
) -> None:
    dataset = prepared(tmp_path, Encoding[encoding])
    batches = loader(dataset.artifact.path, batch_size=50, shuffle=False)
    batches.add_groups(group_by_of(dataset, "user"))
    groups = np.concatenate([batch.groups.numpy() for batch in batches])
    num_users = 10 if encoding != "vocabulary" else 9
    assert np.count_nonzero(groups == -1) == num_without
    assert len(np.unique(groups[groups != -1])) == num_users
    assert groups[:90].reshape(10, 9).std(0).max() == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_every_rank_have_them_and_padding_has_none(
    tmp_path: Path, num_workers: int
) -> None:
    """Three ranks share 13 samples in batches of 4: in the second step, rank 1 and 2 have none."""
    block = write_dataset(tmp_path / "dataset", {"train": 13})["train"]
    found: list[int] = []
    for rank in range(3):
        transform = lengths_of if num_workers else None
        given = {"rank": rank, "world_size": 3, "shuffle": False, "num_workers": num_workers}
        batches = loader(tmp_path / "dataset", transform=transform, **given)
        batches.add_groups(GroupBy("a", skips_first_row=False))
        for batch in batches:
            found += batch.groups[batch.weights > 0].tolist()
            assert (batch.groups[batch.weights == 0] == -1).all()
    assert sorted(found) == sorted(block.features["a"].tolist())


def lengths_of(sparse):  # type: ignore[no-untyped-def]
    """Stands for a router: the batch has no ids any more."""
    return sparse.lengths()


def test_a_column_must_be_categorical_with_one_id(tmp_path: Path) -> None:
    write_dataset(tmp_path / "dataset", {"train": 3})
    dataset = Dataset.open(tmp_path / "dataset")
    assert group_by_of(dataset, None) is None
    assert group_by_of(dataset, "b") == GroupBy("b", skips_first_row=False)
    for name in ("bag", "d0", "absent"):
        with pytest.raises(ValueError, match=rf"one of \['a', 'b'\], got '{name}'. Correct"):
            group_by_of(dataset, name)
