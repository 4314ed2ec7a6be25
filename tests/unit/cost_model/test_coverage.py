import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hotrec.cost_model.coverage import (
    cover_lookups,
    coverage_curve,
    coverage_landmarks,
    wilson_interval,
)
from hotrec.cost_model.histogram import build_histogram

SOME_COUNTS = arrays(np.int64, st.integers(1, 40), elements=st.integers(0, 9))


def test_wilson_reference_values():
    # Newcombe (Statistics in Medicine 1998), table I, method 3: 81/263, 15/148, 0/20, 1/29.
    low, high = wilson_interval([81, 15, 0, 1], [263, 148, 20, 29], confidence=0.95)
    assert low == pytest.approx([0.2553, 0.0624, 0.0, 0.0061], abs=5e-5)
    assert high == pytest.approx([0.3662, 0.1605, 0.1611, 0.1718], abs=5e-5)


def test_wilson_without_trials_says_nothing():
    low, high = wilson_interval(0, 0, confidence=0.95)
    assert (float(low), float(high)) == (0.0, 1.0)


@given(trials=st.integers(1, 10**9), share=st.floats(0, 1), confidence=st.floats(0.5, 0.999))
def test_wilson_holds_its_estimate(trials, share, confidence):
    hits = math.floor(share * trials)
    low, high = wilson_interval(hits, trials, confidence=confidence)
    assert 0.0 <= low <= hits / trials <= high <= 1.0


@pytest.mark.parametrize("confidence", [0.0, 1.0, 1.5])
def test_wilson_refuses(confidence):
    with pytest.raises(ValueError, match="confidence: expected a value between 0 and 1"):
        wilson_interval(1, 2, confidence=confidence)


def test_coverage_by_hand():
    counts = np.array([0, 6, 3, 1, 0])
    heldout = np.array([2, 4, 0, 4, 0])
    fracs = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    train, held = cover_lookups(build_histogram(counts, heldout), fracs)
    assert train == pytest.approx([0, 0.6, 0.9, 1.0, 1.0, 1.0])
    # The two unseen rows hold 2 of 10 held-out lookups; half of them on average is in the first.
    assert held == pytest.approx([0, 0.4, 0.4, 0.8, 0.9, 1.0])


def test_coverage_without_lookups():
    train, held = cover_lookups(build_histogram(np.zeros(4, np.int64)), np.array([0.0, 0.5, 1.0]))
    assert train.tolist() == [0, 0, 0]
    assert held is None


@given(counts=SOME_COUNTS)
def test_curve_rises_bends_down_and_ends_at_one(counts):
    curve = coverage_curve(build_histogram(counts, counts))
    fracs, train = np.array(curve["rows_frac"]), np.array(curve["train"])
    assert (fracs[0], fracs[-1]) == (0.0, 1.0)
    assert (np.diff(fracs) > 0).all()
    assert (np.diff(train) >= -1e-12).all()
    if counts.sum():
        assert (train[0], train[-1]) == (0.0, pytest.approx(1.0))
        assert (train >= fracs - 1e-12).all()
        assert curve["heldout"] == pytest.approx(curve["train"])
    else:
        assert curve["heldout"] is None


def test_landmarks_carry_intervals_only_for_samples():
    counts = np.concatenate([np.full(10, 90), np.full(990, 1)])
    histogram = build_histogram(counts, np.ones(1000, np.int64))
    exact = {p["rows_frac"]: p for p in coverage_landmarks(histogram, confidence=None)}
    assert exact[0.01] == {
        "rows_frac": 0.01,
        "train": pytest.approx(900 / 1890),
        "heldout": pytest.approx(0.01),
    }
    sampled = {p["rows_frac"]: p for p in coverage_landmarks(histogram, confidence=0.95)}
    low, high = wilson_interval(900, 1890, confidence=0.95)
    assert sampled[0.01]["train_interval"] == pytest.approx([float(low), float(high)])
    low, high = wilson_interval(10, 1000, confidence=0.95)
    assert sampled[0.01]["heldout_interval"] == pytest.approx([float(low), float(high)])
