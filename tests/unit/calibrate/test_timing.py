"""Timing of kernels, and the fit of a line: known lines come back, and no part is negative."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.calibrate.timing import (
    MIN_ROUNDS,
    REPEATS_A_ROUND,
    Budget,
    Point,
    Series,
    fit_line,
    median_and_spread,
    run_rounds,
    slowest_median,
    slowest_rank,
)
from hotrec.cost_model.costs import CostsError, Line

ITEMS, DIMS = (100, 1000, 10_000, 100_000), (16, 64)


def points_of(line: Line, noise: float = 0.0, seed: int = 0) -> list[Point]:
    rng = np.random.default_rng(seed)
    return [
        Point(
            items,
            4 * dim * items,
            line.seconds(items, 4 * dim * items) * (1 + noise * rng.uniform(-1, 1)),
            0.1,
        )
        for items, dim in product(ITEMS, DIMS)
    ]


@settings(deadline=None, max_examples=60)
@given(
    fixed=st.floats(1e-6, 1e-3),
    per_item=st.one_of(st.just(0.0), st.floats(1e-9, 1e-6)),
    per_byte=st.one_of(st.just(0.0), st.floats(1e-11, 1e-8)),
)
def test_a_known_line_comes_back(fixed: float, per_item: float, per_byte: float) -> None:
    line = Line(fixed, per_item, per_byte)
    found = fit_line(points_of(line))
    for point in points_of(line):
        at_point = found.seconds(point.num_items, point.num_bytes)
        assert at_point == pytest.approx(point.seconds, rel=1e-6)


@pytest.mark.parametrize("bad", [0.0, -1e-3, float("nan"), float("inf")])
def test_impossible_times_and_too_few_sizes_are_refused(bad: float) -> None:
    points = points_of(Line(1e-4))
    for chosen in ([*points, Point(1, 1, bad, 0.0)], points[:2]):
        with pytest.raises(CostsError, match="costs fit: expected 3 or more measured times"):
            fit_line(chosen)


def test_the_slowest_rank_counts_and_noise_of_one_repeat_does_not() -> None:
    timing = median_and_spread([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (timing.seconds, timing.spread) == (3.0, pytest.approx((4.0 - 2.0) / 3.0))
    assert slowest_rank([[1.0, 5.0, 1.0], [2.0, 1.0, 3.0]]).seconds == 3.0  # of 2, 5, 3
    assert slowest_median([[1.0, 9.0, 1.0], [2.0, 2.0, 2.0]]).seconds == 2.0


QUIET, NOISY = [1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 1.0, 2.0]


def series(turns: list[str], name: str, times: list[float], growth: float = 1.0) -> Series:
    def measure(num_warm: int, num_repeats: int) -> list[list[float]]:
        turns.append(name)
        factor = growth ** (turns.count(name) - 1)
        return [[factor * t for t in times[:num_repeats]]]

    return Series(slowest_median, measure=measure)


def test_calls_take_turns_and_noisy_ones_take_more() -> None:
    turns: list[str] = []
    both = [series(turns, "quiet", QUIET), series(turns, "noisy", NOISY)]
    run_rounds(both, Budget(1e9), until_s=1e9, max_repeats=5 * REPEATS_A_ROUND)
    assert turns == ["quiet", "noisy"] * MIN_ROUNDS + ["noisy"] * (5 - MIN_ROUNDS)
    assert both[1].num_repeats == 5 * REPEATS_A_ROUND


def test_drift_between_rounds_is_an_error_that_repeats_do_not_show() -> None:
    drifting = series([], "drifting", QUIET, growth=1.5)
    for _ in range(3):
        drifting.run_round()
    assert drifting.timing(drifting.rounds[0]).error == 0.0
    assert drifting.drift == pytest.approx(0.39736, rel=1e-3)  # of 1, 1.5, 2.25
    assert drifting.error >= drifting.drift / 3**0.5
