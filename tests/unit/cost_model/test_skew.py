"""Skew is found from the ids of a table."""

from __future__ import annotations

import numpy as np
import pytest

from hotrec.cost_model.skew import fit_zipf_exponent


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 1.5])
@pytest.mark.parametrize("num_rows", [50, 5000, 200_000])
def test_skew_is_found_from_the_ids(exponent: float, num_rows: int) -> None:
    weights = np.arange(1, num_rows + 1) ** -exponent
    cumulative = np.cumsum(weights / weights.sum())
    ids = np.searchsorted(cumulative, np.random.default_rng(0).random(50_000))
    near = 0.03 if num_rows > 50 else 0.3  # all of few rows are soon read
    assert fit_zipf_exponent(ids, num_rows) == pytest.approx(exponent, abs=near)
