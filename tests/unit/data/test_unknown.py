"""Ids without a row: what counts as one, by column and by split, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    Derive,
    Encoding,
    SplitKind,
    SplitSpec,
    TableSpec,
)
from hotrec.data.chunks import Dataset
from hotrec.data.columns import Lists, Texts, lists_from_arrow, lists_from_texts, texts_from_arrow
from hotrec.data.encode import encode_feature
from hotrec.data.prepare import prepare
from hotrec.data.unknown import UnknownIds, count_unknown, unknown_ids_of
from hotrec.data.vocabulary import RowEncoder
from tests.helpers.ranks import run_ranks
from tests.unit.data.logs import HEADER, delimited_spec

KNOWN = RowEncoder(vocabulary=pa.table({"value": pa.array(["a", "b"], pa.large_string())}))
# What is in the column, and the number of its ids and of those that are unknown.
COLUMNS = [
    (texts_from_arrow(pa.array(["a", "x", None, "x", "b", ""])), (5, 3)),
    (Texts(pa.array(["a", None, "x"]), np.array([0, 1, 2, 2, -1])), (3, 2)),
    (lists_from_texts(texts_from_arrow(pa.array(["a x", None, "", "x x b", "a x"])), " "), (7, 4)),
    (lists_from_arrow(pa.array([["a", None, "x"], None, [], [None], ["b"]])), (3, 1)),
    (texts_from_arrow(pa.array([None, None], pa.string())), (0, 0)),
]


@pytest.mark.parametrize(("column", "expected"), COLUMNS)
def test_missing_values_are_not_unknown(column: Texts | Lists, expected: tuple[int, int]) -> None:
    rows = encode_feature(column, KNOWN)
    assert count_unknown(column, rows).tolist() == list(expected)
    for is_counted in np.random.default_rng(0).random((20, len(column.codes))) < 0.5:
        parts = [count_unknown(column, rows, mask) for mask in (is_counted, ~is_counted)]
        assert sum(parts).tolist() == list(expected)


def test_notable_columns_are_named_the_largest_share_first() -> None:
    found = UnknownIds({"user": np.array([1000, 60]), "item": np.array([10, 9])})
    found += UnknownIds({"hour": np.array([1000, 49]), "none": np.array([0, 0])})
    text = found.text("valid")
    assert text == "valid: unknown ids (unseen or rare in training): item 90.0%, user 6.0%"
    assert found.text("valid", least=0.95) is None
    assert UnknownIds().text("valid") is None
    assert UnknownIds.from_json(found.to_json()).to_json() == found.to_json()


def prepare_held_out(folder: str) -> dict[str, dict[str, tuple[int, int]]]:
    """Three of four columns read vocabularies; what was counted, by split and column."""
    columns = {
        **delimited_spec([Path("none")]).columns,
        "hour": ColumnSpec(ColumnKind.categorical, source="price", derive=Derive.log_bucket),
        "hashed": ColumnSpec(ColumnKind.categorical, source="user"),
    }
    spec = delimited_spec(
        [Path(folder) / "one.csv", Path(folder) / "two.csv"],
        columns=columns,
        split=SplitSpec(SplitKind.time, column="price", valid_from=10, test_from=20),
        tables={"hashed": TableSpec(Encoding.hashing, num_rows=9)},
    )
    prepare(spec, Path(folder) / "d")
    return {
        split: {name: tuple(map(int, counts)) for name, counts in found.counts.items()}
        for split, found in unknown_ids_of(Dataset.open(Path(folder) / "d")).items()
    }


@pytest.mark.slow
def test_prepare_counts_them_by_column_and_split(tmp_path: Path) -> None:
    """On any number of ranks the same."""
    one = ["1,1,a,i,i j", "1,2,b,j,", "1,10,new,i,i k k", "1,11,,k,j"]
    two = ["1,3,a,i,j", "1,12,a,i,i", "1,25,new,,k"]
    expected = {
        "valid": {"user": (2, 1), "item": (3, 1), "history": (5, 2), "hour": (3, 3)},
        "test": {"user": (1, 1), "item": (0, 0), "history": (1, 1), "hour": (1, 1)},
    }
    for number, world_size in enumerate((1, 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, lines in (("one", one), ("two", two)):
            (folder / f"{name}.csv").write_text(HEADER + "\n".join(lines) + "\n")
        if world_size == 1:
            assert prepare_held_out(str(folder)) == expected
        else:
            assert run_ranks(prepare_held_out, 2, folder=str(folder)) == [expected] * 2
