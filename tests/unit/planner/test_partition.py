from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hotrec.cost_model.profile import Profile
from hotrec.planner.partition import most_accessed, read_placement, write_partition
from hotrec.planner.plan import SplitTables
from hotrec.types import (
    POPULAR_ROW,
    Exchange,
    Partition,
    Placement,
    TablePlacement,
    Tier,
)

# A table may be called "file", which np.savez cannot take as a name.
COUNTS = {"file": np.array([5, 0, 3, 2]), "t/x": np.array([0, 0]), "big": np.arange(10)}
PROFILE = Profile(10, 4, COUNTS)
PARTITION = Partition(
    {"file": 4, "t/x": 2, "big": 10},
    {"file": np.array([0, 2]), "big": np.array([9, 8, 7])},
    policy="by hand",
)


POPULAR = {
    "file": np.array([(1, 0.5), (3, 1)], POPULAR_ROW),
    "t/x": np.array([(0, 0.25)], POPULAR_ROW),
    "big": np.empty(0, POPULAR_ROW),
}
TABLES = {
    "file": TablePlacement(tier=Tier.CACHED, cache_load_frac=0.3),
    "t/x": TablePlacement(Exchange.POOLED),
    "big": TablePlacement(),
}


def write(path):
    return write_partition(
        Placement(PARTITION, TABLES, POPULAR),
        path,
        parameters={"budget_bytes": 5},
        summary={"total": {}},
        dataset_hash="d1",
        profile_hash="p1",
    )


def test_the_most_accessed_rows_are_hot():
    """As many of each table as the split has, rows that were never seen last, ties by number."""
    tables = {**TABLES, "t/x": TablePlacement()}
    split = SplitTables({"file": 2, "t/x": 1, "big": 10}, tables)
    found = most_accessed(split, COUNTS, PROFILE.build_histograms(), "by cost")
    rows = {"file": [0, 2], "t/x": [0], "big": [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]}
    assert {table: found.partition.hot(table).tolist() for table in COUNTS} == rows
    assert found.partition.num_rows == PARTITION.num_rows
    assert found.tables == tables
    assert found.partition.policy == "by cost"


def test_artifact_round_trip(tmp_path):
    artifact = write(tmp_path / "partition")
    placement, again = read_placement(tmp_path / "partition")
    assert again.content_hash == artifact.content_hash == write(tmp_path / "b").content_hash
    assert again.made_from == {"dataset": "d1", "profile": "p1"}
    assert again.content["parameters"] == {"budget_bytes": 5}
    found = placement.partition
    assert (found.policy, found.num_rows) == ("by hand", PARTITION.num_rows)
    assert placement.tables == TABLES
    assert {t: found.hot(t).tolist() for t in found.num_rows} == {
        t: PARTITION.hot(t).tolist() for t in found.num_rows
    }
    assert {t: rows.tolist() for t, rows in placement.popular_rows.items()} == {
        t: rows.tolist() for t, rows in POPULAR.items()
    }


HOT_ROWS = st.dictionaries(
    st.sampled_from(sorted(PARTITION.num_rows)), st.sets(st.integers(0, 1)), max_size=3
)


@given(HOT_ROWS, HOT_ROWS, st.randoms())
def test_partitions_with_the_same_hot_rows_have_one_digest(
    ours: Any, theirs: Any, random: Any
) -> None:
    """In any order and layout of the rows and tables, and with or without a table of no hot row."""

    def digest(rows: Any) -> str:
        shuffled = [(name, random.sample(sorted(of), len(of))) for name, of in rows.items()]
        layout = slice(None, None, random.choice([1, -1]))
        hot = {name: np.array(of, np.int64)[layout] for name, of in shuffled[layout]}
        return Partition(PARTITION.num_rows, hot).digest

    same = {n: of for n, of in ours.items() if of} == {n: of for n, of in theirs.items() if of}
    assert digest(ours) == digest(dict(ours))
    assert (digest(ours) == digest(theirs)) == same
