"""Measurements in rounds: all calls in turn, until each is known well enough or time is up.

Noise comes in phases: a call that is repeated in a row may fall into one of them, and nothing in
its own repeats says so. So all calls take turns, and those that are still noisy take more turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hotrec.calibrate.kernels import NUM_WARM, Timing
from hotrec.runtime.ranks import broadcast_object

# Every call is measured in so many rounds, if time allows, or drift would not show.
MIN_ROUNDS = 2
REPEATS_A_ROUND = 4
# A call is measured no more when the relative standard error of its median is below.
MAX_ERROR = 0.03


class Budget:
    """Seconds for all measurements, by rank 0's clock, so that all ranks go on or stop alike."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start_s = time.perf_counter()

    def own_s(self) -> float:
        """Seconds since the start by this rank's clock, to show and not to decide by."""
        return time.perf_counter() - self._start_s

    def spent_s(self) -> float:
        """Seconds since the start, the same on every rank; collective."""
        return broadcast_object(self.own_s())


@dataclass
class Repeats:
    """Seconds of a call, measured in rounds.

    Args:
        timing: Summary of the repeats by rank: ``slowest_rank`` or ``slowest_median``.
        rounds: Seconds of each repeat by rank, of each round; equal on every rank.
    """

    timing: Callable[[Sequence[Sequence[float]]], Timing]
    rounds: list[list[list[float]]] = field(default_factory=list)

    @property
    def num_repeats(self) -> int:
        return sum(len(by_rank[0]) for by_rank in self.rounds)

    @property
    def result(self) -> Timing:
        """Summary of the repeats of all rounds."""
        by_rank = zip(*self.rounds, strict=True)
        return self.timing([[s for times in of_rank for s in times] for of_rank in by_rank])

    @property
    def drift(self) -> float:
        """Relative standard deviation of the rounds' medians; 0 of one round."""
        medians = [self.timing(by_rank).seconds for by_rank in self.rounds]
        return float(np.std(medians, ddof=1) / np.mean(medians)) if len(medians) > 1 else 0.0

    @property
    def error(self) -> float:
        """Relative standard error of the result, from the repeats or from the rounds."""
        return max(self.result.error, self.drift / math.sqrt(len(self.rounds)))

    @property
    def is_enough(self) -> bool:
        return len(self.rounds) >= MIN_ROUNDS and self.error <= MAX_ERROR


@dataclass
class Series(Repeats):
    """A call that can be measured once more.

    Args:
        measure: Runs so many untimed and then timed calls, and returns the seconds of each of the
            latter by rank, equal on every rank; collective.
    """

    measure: Callable[[int, int], list[list[float]]] = field(kw_only=True)

    def run_round(self) -> None:
        """Measure once more; collective."""
        # Later rounds only bring data and code back into the caches.
        num_warm = 1 if self.rounds else NUM_WARM
        self.rounds.append(self.measure(num_warm, REPEATS_A_ROUND))


def run_rounds(
    series: Sequence[Series],
    budget: Budget,
    *,
    until_s: float,
    max_repeats: int,
    after_turn: Callable[[], object] = lambda: None,
    after_round: Callable[[], object] = lambda: None,
) -> None:
    """Measure in rounds until every error is below MAX_ERROR or time is up; collective.

    Args:
        series: What to measure. Those without any measurement are measured once in any case.
        budget: Clock of the measurements.
        until_s: Seconds of the budget at which to stop.
        max_repeats: Most timed calls of each.
        after_turn: Called after each measurement.
        after_round: Called after each round.
    """
    for number in range(-(-max_repeats // REPEATS_A_ROUND)):
        for one in [one for one in series if len(one.rounds) <= number and not one.is_enough]:
            if one.rounds and budget.spent_s() > until_s:
                return
            one.run_round()
            after_turn()
        after_round()
