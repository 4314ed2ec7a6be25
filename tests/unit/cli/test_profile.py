"""What ``hotrec profile`` says of its figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotrec.cli.profile import DRIFT_AT, DRIFT_RATIO, _warn_of_drift
from hotrec.cost_model.profile import Profile, Sampling, summarize_profile

NUM_ROWS, NUM_HOT = 1000, 10


def profile_of(hot_frac: float, heldout_frac: float | None, **more: Any) -> Profile:
    """A table whose ten popular rows take these shares of a million lookups; and others."""

    def counts(frac: float) -> Any:
        found = np.full(NUM_ROWS, round(1_000_000 * (1 - frac) / (NUM_ROWS - NUM_HOT)))
        found[:NUM_HOT] = round(1_000_000 * frac / NUM_HOT)
        return found

    train = {"item": counts(hot_frac)}
    heldout = {} if heldout_frac is None else {"item": counts(heldout_frac)}
    for name, (of_train, of_heldout) in more.items():
        train[name], heldout[name] = np.array(of_train), np.array(of_heldout)
    return Profile(10_000, 10_000, 20_000, Sampling(), train, heldout)


@pytest.mark.parametrize(
    ("train", "heldout", "is_said"), [(0.7, 0.62, True), (0.7, 0.64, False), (0.7, None, False)]
)
def test_drift_is_said(
    train: float, heldout: float | None, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    profile = profile_of(train, heldout)
    _warn_of_drift(profile, summarize_profile(profile))
    assert ("adapt_every_steps" in caplog.text) == is_said


def test_a_table_of_new_values_is_no_drift(caplog: pytest.LogCaptureFixture) -> None:
    """A validation day's weekday, of which training had none: its rows are the popular ones."""
    weekday = ([0] + [160_000] * 6, [1_000_000] + [0] * 6)
    profile = profile_of(0.7, 0.7, weekday=weekday)
    content = summarize_profile(profile)
    [point] = [point for point in content["landmarks"] if point["rows_frac"] == DRIFT_AT]
    assert point["heldout"] < DRIFT_RATIO * point["train"]  # of all tables together
    _warn_of_drift(profile, content)
    [record] = caplog.records
    assert "table weekday: 100.0% of the held-out lookups have values unseen" in record.getMessage()
    # What drifts besides is said of the others alone.
    caplog.clear()
    profile = profile_of(0.7, 0.5, weekday=weekday)
    _warn_of_drift(profile, summarize_profile(profile))
    assert "70.0% of the lookups in training, and 50.0%" in caplog.text.replace("\n", " ")
