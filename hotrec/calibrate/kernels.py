"""Kernels timed on all ranks at once, and a straight line through their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotrec.cost_model.costs import CostsError, Line, fit_nonnegative
from hotrec.runtime.ranks import all_gather_object, barrier

# The least number of repeats of a point, however long it takes: a median of two is a mean.
MIN_REPEATS = 3
# Untimed calls: the first ones allocate, load and compile, and on CPU it takes several until the
# allocator reuses freed memory, as it does in training.
NUM_WARM = 3
# Written between calls on CPU: more than a core's own cache, less than the shared one.
FILLED_BYTES = 8 << 20


@dataclass(frozen=True)
class Timing:
    """Median of repeated measurements, and interquartile range / median."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Effort:
    """At most this many repeats per point, in so many seconds if that allows MIN_REPEATS."""

    repeats: int = 7
    budget_s: float = 0.5

    def num_repeats(self, call_s: float) -> int:
        """Number of repeats of a call that takes ``call_s``."""
        within = int(self.budget_s / call_s) if call_s > 0 else self.repeats
        return max(MIN_REPEATS, min(self.repeats, within))


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
    """Seconds of each repeat by rank, on all ranks at once; ``prepare`` is untimed; collective."""
    warm = [_once(run, prepare, device) for _ in range(NUM_WARM)]
    warm_s = max(all_gather_object(warm[-1]))
    # All ranks must repeat equally often, or a barrier would wait for ever.
    times = [_once(run, prepare, device) for _ in range(effort.num_repeats(warm_s))]
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
    """One call of a kernel, which receives what ``prepare`` made, untimed.

    Items and bytes are counted as ``hotrec.cost_model.costs.KERNELS`` does.
    """

    run: Callable[[Any], object]
    num_items: float
    num_bytes: float
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Probe:
    """A kernel, what makes its work of (items, dimension), and the sizes to measure.

    Costs per item and per byte can be told apart only if ``sizes`` has two dimensions.
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


def measure_probe(probe: Probe, device: torch.device, effort: Effort) -> list[Point]:
    """Time a kernel at each of its sizes, on all ranks at once; collective."""
    points = []
    filled = torch.zeros(FILLED_BYTES // 4 if device.type == "cpu" else 0)
    for num_items, dim in probe.sizes:
        work = probe.make(num_items, dim)

        def prepare(work: Work = work) -> Any:
            prepared = work.prepare()
            filled.add_(1.0)  # evicts the kernel's data from the cache, as the rest of a step does
            return prepared

        timing = slowest_median(time_on_all_ranks(work.run, device, effort, prepare=prepare))
        points.append(Point(work.num_items, work.num_bytes, timing.seconds, timing.spread))
    return points


def fit_line(
    points: Sequence[Point],
    *,
    is_by_items: bool = True,
    is_by_bytes: bool = True,
    is_growing: bool = False,
) -> Line:
    """Fit a line with non-negative parts by least squares of (predicted - measured) / measured.

    With ``is_growing`` it is not constant: noise at small sizes can hide the cost per item, and a
    planner would take a constant line for infinite bandwidth.

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
