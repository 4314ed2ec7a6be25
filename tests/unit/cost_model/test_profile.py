import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hotrec.cost_model.histogram import build_histogram
from hotrec.cost_model.profile import (
    count_rows,
    cover_lookups,
    coverage_curve,
    read_profile,
    write_profile,
)
from tests.unit.cost_model.samples import SCHEMA, as_lists, count_slowly, make_samples


def lists(counts):
    return {table: values.tolist() for table, values in counts.items()}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10),
    size=st.integers(1, 70),
    dtype=st.sampled_from([np.int32, np.int64]),
    num_heldout=st.sampled_from([0, 6, 30]),
)
def test_counts_are_the_loop_over_samples(seed, size, dtype, num_heldout):
    """With and without a held-out stream, whatever the blocks."""
    block, held = make_samples(60, seed=seed, dtype=dtype), make_samples(num_heldout, seed=seed)
    more = {"heldout_blocks": held.pieces(size), "num_heldout_samples": num_heldout}
    profile = count_rows(
        block.pieces(size), SCHEMA, num_samples=60, **(more if num_heldout else {})
    )
    assert lists(profile.counts) == count_slowly(as_lists(block))
    assert lists(profile.heldout) == (count_slowly(as_lists(held)) if num_heldout else {})
    assert (profile.num_samples, profile.num_heldout_samples) == (60, num_heldout)
    assert all(counts.dtype == np.int64 for counts in profile.counts.values())
    assert profile.num_rows == {"users": 50, "words": 20, "tags": 9}
    with pytest.raises(ValueError, match="expected 61 samples in the stream, got 60"):
        count_rows(block.pieces(size), SCHEMA, num_samples=61)


@pytest.mark.parametrize("num_samples", [200, 1200])
def test_what_is_counted_is_written_and_read_back(tmp_path, num_samples):
    """With the locality of drawn batches, where blocks are large enough for some."""
    blocks = list(make_samples(num_samples).pieces(num_samples // 4))
    held = list(make_samples(num_samples // 4, seed=1).pieces(num_samples // 16))
    options = {"num_samples": num_samples, "heldout_blocks": held}
    written, artifact = write_profile(blocks, SCHEMA, tmp_path / "p", dataset_hash="d1", **options)
    assert artifact.made_from == {"dataset": "d1"}
    read, again = read_profile(tmp_path / "p")
    assert again.content_hash == artifact.content_hash
    in_memory = count_rows(blocks, SCHEMA, **options)
    assert set(in_memory.locality) == ({"users", "words", "tags"} if num_samples > 200 else set())
    for found in (written, read):
        facts, expected = dict(vars(found)), dict(vars(in_memory))
        for counts in ("counts", "heldout"):
            assert lists(facts.pop(counts)) == lists(expected.pop(counts))
        assert facts == expected
    with pytest.raises(ValueError, match="read-only"):
        read.counts["users"][0] = 1


@given(counts=arrays(np.int64, st.integers(1, 40), elements=st.integers(0, 9)), data=st.data())
def test_coverage_is_that_of_the_hottest_rows(counts, data):
    """Of rows with equal counts the mean is taken; the curve rises and bends down."""
    heldout = np.array(data.draw(st.permutations(counts.tolist())))
    histogram = build_histogram(counts, heldout)
    order = np.argsort(-counts, kind="stable")
    alike = np.unique(counts[order], return_inverse=True)[1]
    means = np.bincount(alike, heldout[order]) / np.bincount(alike)
    covered = [np.cumsum(of) / max(1, counts.sum()) for of in (counts[order], means[alike])]
    fracs = np.arange(1, counts.size + 1) / counts.size
    train, held = cover_lookups(histogram, fracs)
    curve = coverage_curve(histogram)
    assert (curve["rows_frac"][0], curve["rows_frac"][-1]) == (0.0, 1.0)
    assert (np.diff([curve["rows_frac"], curve["train"]]) >= -1e-12).all()
    if counts.sum():
        assert train == pytest.approx(covered[0])
        assert held == pytest.approx(covered[1])
        assert (np.subtract(curve["train"], curve["rows_frac"]) >= -1e-12).all()
    else:
        assert (train.tolist(), held) == ([0] * counts.size, None)
