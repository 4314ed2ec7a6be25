from collections import Counter

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.data import vocabulary as module
from hotrec.data.hashing import hash_text
from hotrec.data.vocabulary import (
    EMPTY,
    Counted,
    RowEncoder,
    ValueCounter,
    build_vocabulary,
)

VALUES = st.lists(st.one_of(st.none(), st.sampled_from("abcdefgh")), max_size=30)


def counted(values: list[str | None]) -> Counted:
    counts = Counter(value for value in values if value is not None)
    return Counted.of(pa.array([*counts], pa.string()), np.array([*counts.values()], np.int64))


@settings(deadline=None)
@given(st.lists(VALUES, max_size=8), st.booleans())
def test_counts_are_exact_however_they_come(blocks, merges_often):
    counter = ValueCounter()
    pending = module._MIN_PENDING
    module._MIN_PENDING = 0 if merges_often else pending
    try:
        for block in blocks:
            counter.add(counted(block))
    finally:
        module._MIN_PENDING = pending
    expected = Counter(value for block in blocks for value in block if value is not None)
    found = counter.counts()
    assert dict(zip(found.values.to_pylist(), found.counts.tolist(), strict=True)) == expected


@given(st.lists(st.text(max_size=10), max_size=30), st.integers(2, 1000))
def test_hashed_rows_stay_inside_the_table(values, num_rows):
    rows = RowEncoder(num_rows).rows(pa.array([*values, None], pa.string()))
    assert rows[-1] == 0
    assert all(1 <= row < num_rows for row in rows[:-1])
    assert len({(v, r) for v, r in zip(values, rows, strict=False)}) == len(set(values))


class Simulator:
    """The rule of ``docs/your_own_data.md``, value by value."""

    def __init__(self, min_count: int) -> None:
        self.min_count = min_count
        self.rows: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.last_seen: dict[str, int] = {}

    def grow(self, values: list[str], max_rows: int, generation: int) -> None:
        self.counts.update(values)
        self.last_seen.update(dict.fromkeys(values, generation))
        due = {v for v in values if v not in self.rows and self.counts[v] >= self.min_count}
        # The most frequent first; values with as many are told apart by their hash.
        waiting = sorted(due, key=lambda value: (-self.counts[value], hash_of(value)))
        room = max_rows - 1 - len(self.rows) if max_rows else len(waiting)
        given = waiting[: max(room, 0)]
        idle = sorted(
            (value for value in self.rows if self.last_seen[value] < generation),
            key=lambda value: (self.last_seen[value], self.counts[value], self.rows[value]),
        )
        for value, old in zip(waiting[len(given) :], idle, strict=False):
            given.append(value)
            self.rows.pop(old)
        free = set(range(1, len(self.rows) + len(given) + 1)) - set(self.rows.values())
        # Rows do not follow popularity.
        self.rows |= dict(zip(sorted(given, key=hash_of), sorted(free), strict=True))


def hash_of(value: str) -> int:
    return int(hash_text(pa.array([value]))[0])


DAYS = st.lists(st.lists(st.sampled_from("abcdefghijkl"), max_size=12), min_size=1, max_size=7)


@settings(deadline=None, max_examples=300)
@given(DAYS, st.integers(1, 3), st.integers(0, 6), st.integers(0, 3))
def test_rows_are_given_and_taken_by_the_rule(days, min_count, max_rows, more_rows):
    """Over generations, the table perhaps larger from the third on."""
    vocabulary, simulator = EMPTY, Simulator(min_count)
    for generation, values in enumerate(days):
        allowed = max_rows + (more_rows if max_rows and generation > 1 else 0)
        counter = ValueCounter()
        counter.add(counted(values))
        vocabulary = build_vocabulary(
            counter.counts(), min_count, allowed, earlier=vocabulary, generation=generation
        )
        simulator.grow(values, allowed, generation)
        found = vocabulary.table.to_pydict()
        assert {v: row for row, v in enumerate(found["value"], 1)} == simulator.rows
        rare = dict(zip(*vocabulary.rare.to_pydict().values(), strict=True))
        # Nothing is forgotten.
        assert dict(zip(found["value"], found["count"], strict=True)) | rare == simulator.counts
        assert not rare.keys() & set(found["value"])
