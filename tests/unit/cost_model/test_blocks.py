import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.cost_model.blocks import Block, check_block, sample_mask
from tests.unit.cost_model.samples import SCHEMA, as_lists, make_samples


@given(num_first=st.integers(0, 30), seed=st.integers(0, 20))
def test_split_keeps_every_sample_in_order(num_first, seed):
    block = make_samples(30, seed=seed)
    first, other = block.split(num_first)
    assert (first.num_samples, other.num_samples) == (num_first, 30 - num_first)
    assert as_lists(first) + as_lists(other) == as_lists(block)


def changed(tag_lengths=None, **columns):
    block = make_samples(10)
    lengths = block.lengths if tag_lengths is None else {"tags": np.array(tag_lengths)}
    return Block(10, {**block.rows, **columns}, lengths)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (changed(user=np.zeros(10)), "float64"),
        (changed(user=np.where(np.arange(10) == 7, 50, 0)), r"user at sample 107: .*49, got 50"),
        (changed([2, 0, 1, *[0] * 7], tags=np.array([0, 1, 9])), "tags at sample 102: .*got 9"),
        (changed(user=np.zeros(9, np.int32)), r"user at sample 100: .*\(9,\)"),
        (changed(other=np.zeros(10, np.int32)), "'other'"),
        (changed([-1] * 10), "-1 -1"),
    ],
)
def test_check_refuses(block, message):
    with pytest.raises(ValueError, match=message):
        check_block(block, SCHEMA, position=100)


def test_sample_does_not_depend_on_blocks():
    whole = sample_mask(0, 1000, frac=0.3, seed=5)
    parts = [sample_mask(start, 77, frac=0.3, seed=5) for start in range(0, 924, 77)]
    assert (np.concatenate(parts) == whole[:924]).all()


@pytest.mark.parametrize("frac", [0.01, 0.5])
def test_sample_has_the_rate_and_seeds_are_independent(frac):
    size = 200_000
    first = sample_mask(0, size, frac=frac, seed=1)
    second = sample_mask(0, size, frac=frac, seed=2)
    tolerance = 5 * np.sqrt(frac * (1 - frac) / size)
    assert abs(first.mean() - frac) < tolerance
    assert abs((first & second).mean() - frac * frac) < tolerance
    # Neighbours are independent as well, so a sample of sessions is not a sample of stripes.
    assert abs((first[1:] & first[:-1]).mean() - frac * frac) < tolerance
    # Nor is one seed's draw another's, shifted.
    assert abs((first[1:] & second[:-1]).mean() - frac * frac) < tolerance
