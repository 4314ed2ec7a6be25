import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import hotrec.cost_model.histogram as histogram_module
from hotrec.cost_model.histogram import TALLIED_COUNTS, build_histogram, merge_histograms, top_rows

# Counts on both sides of the tallied range, with many ties.
COUNTS = arrays(
    np.int64,
    st.integers(1, 60),
    elements=st.sampled_from([0, 0, 1, 1, 2, 3, TALLIED_COUNTS - 1, TALLIED_COUNTS, 10**12]),
)


@pytest.fixture(autouse=True, scope="module")
def _small_slices():
    """Several slices for the small arrays of these tests."""
    whole = histogram_module.SLICE_ROWS
    histogram_module.SLICE_ROWS = 7
    yield
    histogram_module.SLICE_ROWS = whole


def by_oracle(counts):
    return sorted(range(counts.size), key=lambda row: (-counts[row], row))


@given(counts=COUNTS)
def test_groups_are_those_of_unique(counts):
    heldout = np.arange(counts.size, dtype=np.int64)
    histogram = build_histogram(counts, heldout)
    values, num_rows = np.unique(counts[counts > 0], return_counts=True)
    assert histogram.values.tolist() == values[::-1].tolist()
    assert histogram.num_rows.tolist() == num_rows[::-1].tolist()
    assert histogram.heldout.tolist() == [heldout[counts == v].sum() for v in values[::-1]]
    assert histogram.num_unseen == (counts == 0).sum()
    assert histogram.heldout_unseen == heldout[counts == 0].sum()
    assert histogram.num_lookups == counts.sum()
    assert histogram.num_heldout_lookups == heldout.sum()
    assert histogram.num_distinct == (counts > 0).sum()
    assert histogram.total_rows == counts.size


@given(counts=st.lists(COUNTS, min_size=1, max_size=4))
def test_merged_is_the_histogram_of_all_rows(counts):
    merged = merge_histograms(build_histogram(c, c) for c in counts)
    together = np.concatenate(counts)
    expected = build_histogram(together, together)
    for name, value in vars(expected).items():
        assert np.array_equal(getattr(merged, name), value), name


@given(counts=COUNTS, data=st.data())
def test_top_rows_are_the_sorted_prefix(counts, data):
    histogram = build_histogram(counts)
    num_hot = data.draw(st.integers(0, histogram.num_distinct))
    rows = top_rows(counts, num_hot, histogram)
    assert rows.dtype == np.int64
    assert rows.tolist() == by_oracle(counts)[:num_hot]
