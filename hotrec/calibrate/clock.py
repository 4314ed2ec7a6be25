"""The clock: medians with their spread, warm-up excluded, all ranks at work at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotrec.runtime.ranks import all_gather_object, barrier

# A point is measured at least so often, however long it takes: a median of two is a mean.
LEAST_REPEATS = 3
# Calls before the clock: the first allocate, load and compile, and on CPU it takes several until
# freed memory is found again instead of new pages, which in training never happens after a while.
NUM_WARM = 3


@dataclass(frozen=True)
class Timing:
    """What repeated measurements of one thing say.

    Args:
        seconds: median.
        spread: interquartile range / median.
    """

    seconds: float
    spread: float


@dataclass(frozen=True)
class Effort:
    """How long to measure a point: so often, or until the time is used up.

    Args:
        repeats: at most; at least LEAST_REPEATS.
        budget_s: no more repeats than fit into this, LEAST_REPEATS excepted.
    """

    repeats: int = 7
    budget_s: float = 0.5

    def num_repeats(self, call_s: float) -> int:
        """Repeats of a call that takes ``call_s``."""
        within = int(self.budget_s / call_s) if call_s > 0 else self.repeats
        return max(LEAST_REPEATS, min(self.repeats, within))


def median_and_spread(times_s: Sequence[float]) -> Timing:
    """Median, and interquartile range / median."""
    low, middle, high = np.percentile(np.asarray(times_s, np.float64), [25, 50, 75])
    return Timing(float(middle), float((high - low) / middle) if middle > 0 else 0.0)


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
    effort: Effort,
    *,
    prepare: Callable[[], Any] = lambda: None,
) -> list[list[float]]:
    """Time a call on all ranks at once; collective.

    Args:
        run: what is timed, called with what ``prepare`` returns.
        device: whose work is waited for.
        effort: how often.
        prepare: called before each run, off the clock.

    Returns:
        Seconds of each repeat, for each rank, the same on every rank.
    """
    warm = [_once(run, prepare, device) for _ in range(NUM_WARM)]
    warm_s = max(all_gather_object(warm[-1]))
    # All ranks must repeat equally often, or a barrier would wait for ever.
    times = [_once(run, prepare, device) for _ in range(effort.num_repeats(warm_s))]
    return all_gather_object(times)


def slowest_rank(times_by_rank: Sequence[Sequence[float]]) -> Timing:
    """Of something that all ranks wait for: each repeat takes as long as on its slowest rank."""
    return median_and_spread([max(times) for times in zip(*times_by_rank, strict=True)])


def slowest_median(times_by_rank: Sequence[Sequence[float]]) -> Timing:
    """Of something that each rank does alone: the rank with the largest median.

    What slows one repeat on one rank evens out over a step; a rank that is slow holds up all.
    """
    return max((median_and_spread(times) for times in times_by_rank), key=lambda t: t.seconds)
