"""Medians, spreads, and how often to repeat."""

from __future__ import annotations

import pytest
import torch

from hotrec.calibrate.clock import (
    NUM_WARM,
    Effort,
    median_and_spread,
    slowest_median,
    slowest_rank,
    time_on_all_ranks,
)


def test_median_and_spread() -> None:
    timing = median_and_spread([1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.seconds == 3.0
    assert timing.spread == pytest.approx((4.0 - 2.0) / 3.0)


def test_the_slowest_rank_counts_in_each_repeat() -> None:
    assert slowest_rank([[1.0, 5.0, 1.0], [2.0, 1.0, 3.0]]).seconds == 3.0  # of 2, 5, 3


def test_a_slow_rank_counts_a_single_slow_repeat_does_not() -> None:
    assert slowest_median([[1.0, 9.0, 1.0], [2.0, 2.0, 2.0]]).seconds == 2.0


@pytest.mark.parametrize(
    ("call_s", "repeats"), [(1e-5, 7), (0.1, 5), (0.2, 3), (10.0, 3), (0.0, 7)]
)
def test_repeats_fit_into_the_budget(call_s: float, repeats: int) -> None:
    assert Effort(repeats=7, budget_s=0.5).num_repeats(call_s) == repeats


def test_warm_up_is_left_out_and_preparation_is_not_timed() -> None:
    prepared: list[int] = []
    seen: list[int] = []

    def prepare() -> int:
        prepared.append(len(prepared))
        return prepared[-1]

    times = time_on_all_ranks(seen.append, torch.device("cpu"), Effort(5), prepare=prepare)
    assert seen == prepared  # each run gets what was prepared for it
    assert len(seen) == 5 + NUM_WARM
    assert [len(of_rank) for of_rank in times] == [5]
    assert min(times[0]) > 0
