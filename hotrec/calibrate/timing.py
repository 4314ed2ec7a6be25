"""Kernels timed on all ranks at once, in rounds, and a straight line through their times.

Noise comes in phases: consecutive repeats of a call may all fall into one of them, which is not
visible in the repeats. So the calls are interleaved in rounds, and noisy ones get more rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hotrec.cost_model.costs import CostsError, Line, fit_nonnegative
from hotrec.runtime.ranks import all_gather_object, barrier, broadcast_object

# A call that takes longer is warmed up once and timed MIN_REPEATS times in a row.
SLOW_CALL_S = 0.05
MIN_REPEATS = 2
# Untimed calls: the first ones allocate, load and compile, and on CPU the allocator reuses freed
# memory, as in training, only after several.
NUM_WARM = 3
# Written between calls on CPU: more than a core's own cache, less than the shared one.
FILLED_BYTES = 8 << 20
# Minimum number of rounds of every call, if time allows; fewer would not show drift.
MIN_ROUNDS = 2
REPEATS_A_ROUND = 4
# The measurement of a call ends when the relative standard error of its median is below this.
MAX_ERROR = 0.03


@dataclass(frozen=True)
class Timing:
    """Median of repeated measurements.

    Args:
        seconds: Median.
        spread: Interquartile range / median.
        error: Relative standard error of the median, of normal measurements with this spread.
    """

    seconds: float
    spread: float
    error: float = 0.0


# Interquartile range of a normal distribution, and the standard error of its median times sqrt(n),
# both in standard deviations.
NORMAL_RANGE, NORMAL_MEDIAN_ERROR = 1.349, 1.2533


def median_and_spread(times_s: Sequence[float]) -> Timing:
    """Median, interquartile range / median, and standard error."""
    low, middle, high = np.percentile(np.asarray(times_s, np.float64), [25, 50, 75])
    spread = float((high - low) / middle) if middle > 0 else 0.0
    error = spread / NORMAL_RANGE * NORMAL_MEDIAN_ERROR / math.sqrt(len(times_s))
    return Timing(float(middle), spread, error)


def _once(run: Callable[[Any], object], prepare: Callable[[], Any], device: torch.device) -> float:
    value = prepare()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    barrier()
    start = time.perf_counter()
    run(value)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def time_on_all_ranks(
    run: Callable[[Any], object],
    device: torch.device,
    num_warm: int,
    num_repeats: int,
    *,
    prepare: Callable[[], Any] = lambda: None,
) -> list[list[float]]:
    """Seconds of each repeat by rank, on all ranks at once; ``prepare`` is untimed; collective.

    Calls that take longer than SLOW_CALL_S are warmed up once and repeated MIN_REPEATS times.
    """
    # All ranks must have the same number of repeats, or a barrier would wait forever.
    if max(all_gather_object(_once(run, prepare, device))) > SLOW_CALL_S:
        num_warm, num_repeats = 1, min(num_repeats, MIN_REPEATS)
    for _ in range(num_warm - 1):
        _once(run, prepare, device)
    times = [_once(run, prepare, device) for _ in range(num_repeats)]
    return all_gather_object(times)


def slowest_rank(times_by_rank: Sequence[Sequence[float]]) -> Timing:
    """Timing of a call that synchronizes the ranks: each repeat counts on its slowest rank."""
    return median_and_spread([max(times) for times in zip(*times_by_rank, strict=True)])


def slowest_median(times_by_rank: Sequence[Sequence[float]]) -> Timing:
    """Timing of local work: the rank with the largest median.

    Noise in single repeats evens out over a step, while a slow rank delays all of them.
    """
    return max((median_and_spread(times) for times in times_by_rank), key=lambda t: t.seconds)


@dataclass(frozen=True)
class Work:
    """One call of a kernel, with the result of ``prepare``, which is not timed.

    Items and bytes are counted as ``hotrec.cost_model.costs.KERNELS`` does.
    """

    run: Callable[[Any], object]
    num_items: float
    num_bytes: float
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Probe:
    """A kernel, the function that makes its work of (items, dimension), and the sizes to measure.

    Costs per item and per byte can only be separated if ``sizes`` has two dimensions.
    """

    name: str
    make: Callable[[int, int], Work]
    sizes: Sequence[tuple[int, int]]
    is_by_items: bool = True
    is_by_bytes: bool = True


@dataclass(frozen=True)
class Point:
    """A measured size: items, bytes, seconds, interquartile range / median."""

    num_items: float
    num_bytes: float
    seconds: float
    spread: float


def time_work(
    work: Work, device: torch.device, num_warm: int, num_repeats: int
) -> list[list[float]]:
    """Seconds of each repeat of a call by rank, with cold caches; collective."""
    filled = torch.zeros(FILLED_BYTES // 4 if device.type == "cpu" else 0)

    def prepare() -> Any:
        prepared = work.prepare()
        filled.add_(1.0)  # evicts the kernel's data from the cache, as the rest of a step does
        return prepared

    return time_on_all_ranks(work.run, device, num_warm, num_repeats, prepare=prepare)


def fit_line(
    points: Sequence[Point],
    *,
    is_by_items: bool = True,
    is_by_bytes: bool = True,
    is_growing: bool = False,
) -> Line:
    """Fit a line with non-negative parts by least squares of (predicted - measured) / measured.

    With ``is_growing`` it is not constant: noise at small sizes can hide the cost per item, and a
    constant line would mean infinite bandwidth for a planner.

    Raises:
        CostsError: If there are fewer points than coefficients, or a time is not above 0.
    """
    seconds = np.array([point.seconds for point in points], np.float64)
    used = np.array([True, is_by_items, is_by_bytes])
    if seconds.size < used.sum() or not (np.isfinite(seconds) & (seconds > 0)).all():
        raise CostsError(
            f"costs fit: expected {used.sum()} or more measured times above 0, got "
            f"{seconds.tolist()}. Measure more sizes."
        )
    columns = np.array([(1.0, point.num_items, point.num_bytes) for point in points])
    matrix = used * columns / seconds[:, None]
    found = fit_nonnegative(matrix, np.ones(seconds.size))
    if is_growing and not found[1:].any():
        found = fit_nonnegative(matrix * [0, 1, 1], np.ones(seconds.size))
    fixed_s, per_item_s, per_byte_s = found.tolist()
    spread = float(np.median([point.spread for point in points]))
    return Line(fixed_s, per_item_s, per_byte_s, spread)


class Budget:
    """Seconds for all measurements, by rank 0's clock, so that all ranks continue or stop alike."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start_s = time.perf_counter()

    def own_s(self) -> float:
        """Seconds since the start by this rank's clock: for display, not for decisions."""
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
        """Relative standard deviation of the rounds' medians; 0 with one round."""
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
        measure: Runs a number of untimed and a number of timed calls, and returns the seconds of
            each timed call by rank, equal on every rank; collective.
    """

    measure: Callable[[int, int], list[list[float]]] = field(kw_only=True)

    def run_round(self) -> None:
        """Measure once more; collective."""
        # In later rounds, warm-up only loads data and code into the caches again.
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
        series: The calls to measure. Those without any measurement are measured once in any case.
        budget: Clock of the measurements.
        until_s: Seconds of the budget at which to stop.
        max_repeats: Maximum number of timed calls of each.
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
