from collections import Counter

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.data import vocabulary as module
from hotrec.data.columns import lists_from_arrow, texts_from_arrow
from hotrec.data.hashing import hash_text
from hotrec.data.vocabulary import (
    EMPTY,
    Counted,
    RowEncoder,
    ValueCounter,
    Vocabulary,
    build_vocabulary,
    count_ids,
    read_vocabulary,
    write_vocabulary,
)

VALUES = st.lists(st.one_of(st.none(), st.sampled_from("abcdefgh")), max_size=30)


def counts_of(counter: ValueCounter) -> dict:
    counted = counter.counts()
    return dict(zip(counted.values.to_pylist(), counted.counts.tolist(), strict=True))


@settings(deadline=None)
@given(st.lists(VALUES, max_size=8), st.booleans())
def test_counts_are_exact_however_they_come(blocks, merges_often):
    counter = ValueCounter()
    pending = module._MIN_PENDING
    module._MIN_PENDING = 0 if merges_often else pending
    try:
        for block in blocks:
            count_ids(texts_from_arrow(pa.array(block, pa.string())), counter)
    finally:
        module._MIN_PENDING = pending
    expected = Counter(value for block in blocks for value in block if value is not None)
    assert counts_of(counter) == expected


def test_items_of_lists_count_once_per_sample():
    lists = lists_from_arrow(pa.array([["a", "b", "a"], None, [], ["b", None]]))
    # The same list may stand for several samples.
    lists = type(lists)(lists.items, lists.offsets, np.array([0, 0, 3, -1]))
    counter = ValueCounter()
    count_ids(lists, counter)
    assert counts_of(counter) == {"a": 4, "b": 3}


def vocabulary_of(counts: dict[str, int], min_count: int) -> pa.Table:
    counter = ValueCounter()
    counter.add(pa.array(list(counts)), np.array(list(counts.values()), np.int64))
    return build_vocabulary(counter.counts(), min_count).table


def test_rare_values_and_nulls_are_row_0():
    counts = {f"v{number}": number for number in range(1, 10)}
    vocabulary = vocabulary_of(counts, min_count=4)
    assert sorted(vocabulary["value"].to_pylist()) == [f"v{number}" for number in range(4, 10)]
    encoder = RowEncoder(vocabulary=vocabulary)
    assert encoder.num_rows == 7
    rows = encoder.rows(pa.array([*counts, None, "never seen"]))
    assert rows[:3].tolist() == [0, 0, 0]
    assert rows[-2:].tolist() == [0, 0]
    assert sorted(rows[3:9].tolist()) == [1, 2, 3, 4, 5, 6]
    values = vocabulary["value"].to_pylist()
    assert [values[row - 1] for row in rows[3:9]] == [f"v{number}" for number in range(4, 10)]


def test_rows_do_not_follow_frequency_or_order_of_counting():
    counts = {f"v{number}": 1000 - number for number in range(1000)}
    one = vocabulary_of(counts, 1)
    other = vocabulary_of(dict(reversed(counts.items())), 1)
    assert one.equals(other)
    correlation = np.corrcoef(one["count"].to_numpy(), np.arange(1000))[0, 1]
    assert abs(correlation) < 0.1


def test_a_vocabulary_may_be_empty_and_survives_the_disk(tmp_path):
    empty = vocabulary_of({"a": 1}, min_count=2)
    assert RowEncoder(vocabulary=empty).num_rows == 1
    assert RowEncoder(vocabulary=empty).rows(pa.array(["a"])).tolist() == [0]
    written = vocabulary_of({"a": 1, "b": 2}, min_count=1)
    write_vocabulary(tmp_path, "t", Vocabulary(written, EMPTY.rare))
    assert read_vocabulary(tmp_path, "t").equals(written)
    assert Counted.from_table(written).counts.sum() == 3


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
        count_ids(texts_from_arrow(pa.array(values, pa.string())), counter)
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


def test_a_value_that_lost_its_row_is_given_one_when_it_comes_again():
    vocabulary = EMPTY
    for generation, values in enumerate(["aabb", "xx", "yyyyy", "a"]):
        counter = ValueCounter()
        count_ids(texts_from_arrow(pa.array([*values])), counter)
        vocabulary = build_vocabulary(
            counter.counts(), 2, 3, earlier=vocabulary, generation=generation
        )
    found = vocabulary.table.to_pydict()
    counts = dict(zip(found["value"], found["count"], strict=True))
    assert counts == {"a": 3, "y": 5}, "which twice in all generations is enough for"
