"""Rounds of measurements: who takes more turns, and when they end."""

from __future__ import annotations

import pytest

from hotrec.calibrate.kernels import slowest_median
from hotrec.calibrate.rounds import MIN_ROUNDS, REPEATS_A_ROUND, Budget, Series, run_rounds

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


def test_everything_is_measured_once_however_little_time_there_is() -> None:
    turns: list[str] = []
    both = [series(turns, "a", NOISY), series(turns, "b", NOISY)]
    run_rounds(both, Budget(0.0), until_s=0.0, max_repeats=100)
    assert turns == ["a", "b"]


def test_what_was_measured_before_waits_for_the_others() -> None:
    turns: list[str] = []
    both = [series(turns, "early", QUIET), series(turns, "late", QUIET)]
    both[0].run_round()
    run_rounds(both, Budget(1e9), until_s=1e9, max_repeats=100)
    assert turns == ["early", "late"] * MIN_ROUNDS


def test_drift_between_rounds_is_an_error_that_repeats_do_not_show() -> None:
    drifting = series([], "drifting", QUIET, growth=1.5)
    for _ in range(3):
        drifting.run_round()
    assert drifting.timing(drifting.rounds[0]).error == 0.0
    assert drifting.drift == pytest.approx(0.39736, rel=1e-3)  # of 1, 1.5, 2.25
    assert drifting.error >= drifting.drift / 3**0.5
