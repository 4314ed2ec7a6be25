"""Ids without a row: what counts as one, by column and by split, and what is said of it."""

from __future__ import annotations

from pathlib import Path

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
from hotrec.data.prepare import prepare
from hotrec.data.unknown import unknown_ids_of
from tests.helpers.ranks import run_ranks
from tests.unit.data.logs import HEADER, delimited_spec


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
