"""The interval of measured over predicted steps."""

from __future__ import annotations

import numpy as np
import pytest

from hotrec.cost_model.costs import (
    NARROWEST_INTERVAL,
    UNKNOWN_INTERVAL,
    interval_text,
    ratio_interval,
)


def test_the_interval_holds_nine_of_ten_further_cases() -> None:
    rng = np.random.default_rng(1)
    held = []
    for _ in range(400):
        bias = np.exp(rng.normal(0.05, 0.15, 9))
        ratios = [[b * np.exp(rng.normal(0, 0.03)) for _ in range(3)] for b in bias[:8]]
        low, high = ratio_interval(ratios)
        held.append(low <= bias[8] * np.exp(rng.normal(0, 0.03)) <= high)
    assert 0.86 <= np.mean(held) <= 0.96


def test_noise_of_repeats_widens_the_interval() -> None:
    calm = ratio_interval([[1.0, 1.0]] * 4)
    noisy = ratio_interval([[0.8, 1.25]] * 4)
    assert calm == NARROWEST_INTERVAL
    assert noisy[0] < 0.9
    assert noisy[1] > 1.1


def test_more_cases_narrow_the_interval() -> None:
    few, many = (ratio_interval([[0.9], [1.0], [1.1]] * n) for n in (1, 4))
    assert few[0] < many[0] < 1 < many[1] < few[1]


def test_a_biased_fit_has_an_interval_on_one_side() -> None:
    low, high = ratio_interval([[1.3]] * 5)
    assert (low, high) == (NARROWEST_INTERVAL[0], pytest.approx(1.3))
    assert interval_text((low, high)) == "-5% to +30%"


def test_too_few_cases_have_no_interval() -> None:
    assert ratio_interval([[1.0], [1.0]]) == UNKNOWN_INTERVAL
