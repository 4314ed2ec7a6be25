import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.config.data import Derive
from hotrec.data.columns import (
    Lists,
    Texts,
    cut_lists,
    derive_numbers,
    lists_from_arrow,
    lists_from_texts,
    numbers_from_arrow,
    numbers_from_texts,
    texts_from_arrow,
    texts_from_numbers,
    times_from_arrow,
    times_from_texts,
)


def plain(column: Texts | Lists) -> list:
    """The column as Python values."""
    if isinstance(column, Texts):
        values = column.values.to_pylist()
        return [None if code < 0 else values[code] for code in column.codes]
    items = plain(column.items)
    lists = [
        items[start:end] for start, end in zip(column.offsets[:-1], column.offsets[1:], strict=True)
    ]
    return [None if code < 0 else lists[code] for code in column.codes]


@given(st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), max_size=20))
def test_ids_of_any_type_become_texts(values):
    expected = [None if value is None else str(value) for value in values]
    assert plain(texts_from_arrow(pa.array(values, pa.int64()))) == expected
    chunked = pa.chunked_array([pa.array(expected, pa.string()).dictionary_encode()] * 2)
    assert plain(texts_from_arrow(chunked)) == expected * 2


LISTS = st.lists(st.one_of(st.none(), st.lists(st.integers(0, 50), max_size=5)), max_size=12)


@given(LISTS, st.integers(0, 3))
def test_lists_of_any_kind(values, start):
    array = pa.array(values, pa.list_(pa.int64())).slice(start)
    expected = [None if v is None else [str(i) for i in v] for v in values[start:]]
    assert plain(lists_from_arrow(array)) == expected
    assert plain(lists_from_arrow(array.cast(pa.large_list(pa.int64())))) == expected


@given(LISTS)
def test_texts_are_split_like_python_splits_them(values):
    texts = [None if value is None else " ".join(map(str, value)) for value in values]
    found = plain(lists_from_texts(texts_from_arrow(pa.array(texts, pa.string())), " "))
    assert found == [None if text is None else text.split() for text in texts]


def test_repeated_separators_make_no_items():
    texts = texts_from_arrow(pa.array([",,1,,2,", ",", "3"]))
    assert plain(lists_from_texts(texts, ",")) == [["1", "2"], [], ["3"]]


@given(LISTS, st.integers(0, 4))
def test_the_last_items_are_kept(values, max_length):
    array = pa.array(values, pa.list_(pa.int64()))
    found = plain(cut_lists(lists_from_arrow(array), max_length))
    expected = [None if v is None else [str(i) for i in v] for v in values]
    if max_length:
        expected = [None if v is None else v[-max_length:] for v in expected]
    assert found == expected


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1_700_000_000, pa.timestamp("s")),
        (1_700_000_000_000, pa.timestamp("ms", "Europe/Berlin")),
        (1_700_000_000_000_000, pa.timestamp("us")),
        (1_700_000_000_000_000_999, pa.timestamp("ns")),
    ],
)
def test_times_of_any_unit(value, kind):
    found = times_from_arrow(pa.chunked_array([pa.array([value, None], kind)]))
    assert found[0] == 1.7e12
    assert np.isnan(found[1])


MAY_1_MS = 1_714_521_600_000
HALF_PAST_12_MS = MAY_1_MS + 45_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-05-01", MAY_1_MS),
        ("2024-05-01 12:30", HALF_PAST_12_MS),
        ("2024-05-01T12:30:00Z", HALF_PAST_12_MS),
        ("2024-05-01T12:30:00+02:00", HALF_PAST_12_MS - 7_200_000),
        ("2024-05-01 12:30:00-0130", HALF_PAST_12_MS + 5_400_000),
        ("2024-05-01T12:30:00.250000999", HALF_PAST_12_MS + 250),
        ("1969-12-31T23:59:59.5", -500),
        ("20240501", MAY_1_MS),  # as Arrow does not read it
        ("2024-02-30", np.inf),
        ("yesterday", np.inf),
        (None, np.nan),
    ],
)
@pytest.mark.parametrize("beside", [["2024-05-01"], ["2024-05-01", "2024-05-01T00:00Z"], ["no"]])
def test_texts_of_times(text, expected, beside):
    found = times_from_texts(texts_from_arrow(pa.array([*beside, text, text], pa.string())))
    np.testing.assert_array_equal(found[-2:], [expected, expected])
    assert found[0] == (np.inf if beside == ["no"] else MAY_1_MS)


def test_numbers():
    assert numbers_from_arrow(pa.array([True, False])).tolist() == [1.0, 0.0]
    assert np.isnan(numbers_from_arrow(pa.array([None], pa.int64()))[0])
    large = pa.array([2**60 + 1], pa.int64())
    assert numbers_from_arrow(large).tolist() == [float(2**60)]
    texts = texts_from_arrow(pa.array(["1", None, "x", "1"]))
    found = numbers_from_texts(texts)
    assert found[[0, 3]].tolist() == [1.0, 1.0]
    assert np.isnan(found[1])
    assert np.isinf(found[2])


@pytest.mark.parametrize(
    ("derive", "value", "offset", "expected"),
    [
        # 2022-04-25 00:05 in Beijing, a Monday; still Sunday in UTC.
        (Derive.hour_of_day, 1650816305000, 8, "0"),
        (Derive.hour_of_day, 1650816305000, 0, "16"),
        (Derive.day_of_week, 1650816305000, 8, "0"),
        (Derive.day_of_week, 1650816305000, 0, "6"),
        (Derive.day_of_week, 0, 0, "3"),
        (Derive.log_bucket, 0, 0, "0"),
        (Derive.log_bucket, 1, 0, "4"),
        (Derive.log_bucket, 1000, 0, "39"),
        (Derive.log_bucket, -1000, 0, "-39"),
    ],
)
def test_derivations(derive, value, offset, expected):
    numbers = np.array([value, np.nan])
    found = texts_from_numbers(derive_numbers(derive, numbers, offset))
    assert plain(found) == [expected, None]
