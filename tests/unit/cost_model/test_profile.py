import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hotrec.cost_model.blocks import Block, sample_mask
from hotrec.cost_model.histogram import build_histogram
from hotrec.cost_model.profile import (
    Sampling,
    count_rows,
    cover_lookups,
    coverage_curve,
    read_profile,
    write_profile,
)
from hotrec.types import Feature, Schema, Table
from tests.unit.cost_model.samples import SCHEMA, as_lists, count_slowly, cut, make_samples


def lists(counts):
    return {table: values.tolist() for table, values in counts.items()}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10),
    size=st.integers(1, 70),
    dtype=st.sampled_from([np.int32, np.int64]),
    heldout_frac=st.sampled_from([0.0, 0.1, 0.25, 0.5]),
    frac=st.sampled_from([1.0, 0.3]),
    half_life=st.sampled_from([None, 9.0, 1e9]),
)
def test_counts_are_the_loop_over_samples(seed, size, dtype, heldout_frac, frac, half_life):
    """Exact, sampled and fading, whole and with the last part held out, whatever the blocks."""
    block = make_samples(60, seed=seed, dtype=dtype)
    sampling = Sampling(frac, seed, half_life=half_life)
    options = {"num_samples": 60, "heldout_frac": heldout_frac, "sampling": sampling}
    profile = count_rows(cut(block, size), SCHEMA, **options)
    drawn, samples = sample_mask(0, 60, frac=frac, seed=seed), as_lists(block)
    num_train = 60 - int(60 * heldout_frac)
    of_train = list(drawn)
    if half_life is not None:
        chances = [frac * 0.5 ** ((num_train - 1 - i) / half_life) for i in range(num_train)]
        of_train = [
            sample_mask(i, 1, frac=chance, seed=seed)[0] for i, chance in enumerate(chances)
        ]
    train = [samples[i] for i in range(num_train) if of_train[i]]
    heldout = [samples[i] for i in range(num_train, 60) if drawn[i]]
    assert lists(profile.counts) == count_slowly(train)
    assert lists(profile.heldout) == (count_slowly(heldout) if heldout_frac else {})
    assert (profile.num_samples, profile.num_heldout_samples) == (len(train), len(heldout))
    assert profile.num_total_samples == 60
    assert all(counts.dtype == np.int64 for counts in profile.counts.values())
    assert profile.num_rows == {"users": 50, "words": 20, "tags": 9}


def test_a_sample_counts_half_as_often_after_a_half_life():
    """Row d is read in stretch d alone, each as long as the half-life."""
    rows = np.repeat(np.arange(4), 20_000)
    schema = Schema((), (Feature("a", "t"),), (Table("t", 4),))
    sampling = Sampling(0.8, half_life=20_000)
    profile = count_rows(
        [Block(rows.size, {"a": rows})], schema, num_samples=80_000, sampling=sampling
    )
    counts = profile.counts["t"]
    # The mean over a stretch is 1 / (2 ln 2) of the chance at its end.
    expected = 0.8 * 20_000 / (2 * np.log(2)) * 0.5 ** np.arange(3, -1, -1)
    assert abs(counts - expected).max() < 5 * np.sqrt(expected.max())
    assert abs(counts[1:] / counts[:-1] - 2).max() < 0.2
    assert profile.num_samples == counts.sum()
    assert abs(sampling.num_drawn(80_000) - counts.sum()) < 5 * np.sqrt(counts.sum())
    assert profile.num_total_samples == 80_000


@pytest.mark.parametrize("num_samples", [200, 1200])
def test_what_is_counted_is_written_and_read_back(tmp_path, num_samples):
    """With the locality of drawn batches, where blocks are large enough for some."""
    blocks = cut(make_samples(num_samples), num_samples // 4)
    options = {"num_samples": num_samples, "heldout_frac": 0.25}
    options["sampling"] = Sampling(0.5, 7, 2)
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
