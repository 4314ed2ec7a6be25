"""Kernels timed on all ranks at once, and a straight line through their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch

from hotrec.cost_model.costs import CostsError, Line
from hotrec.runtime.ranks import all_gather_object, barrier

# The least number of repeats of a point, however long it takes: a median of two is a mean.
MIN_REPEATS = 3
# Untimed calls: the first ones allocate, load and compile, and on CPU it takes several until the
# allocator reuses freed memory, as it does in training.
NUM_WARM = 3


@dataclass(frozen=True)
class Timing:
    """Median of repeated measurements, and interquartile range / median."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Effort:
    """Repeats per point.

    Args:
        repeats: Largest number of repeats.
        budget_s: Seconds for the repeats of a point, which may exceed it to reach MIN_REPEATS.
    """

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
    """Time a call on all ranks at once; collective.

    Args:
        run: The timed call, which receives the result of ``prepare``.
        device: Device to synchronize with.
        effort: Number of repeats.
        prepare: Called before each run, untimed.

    Returns:
        Seconds of each repeat by rank, the same on every rank.
    """
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


class CacheFiller:
    """Evicts a kernel's data from the CPU cache between calls, as the rest of a step does.

    Args:
        device: Device of the kernel; on CUDA nothing is done, since its caches are small.
        num_bytes: Bytes to write: more than a core's own cache, less than the shared one.
    """

    def __init__(self, device: torch.device, num_bytes: int = 8 << 20) -> None:
        self._values = torch.zeros(num_bytes // 4) if device.type == "cpu" else None

    def fill(self) -> None:
        if self._values is not None:
            self._values.add_(1.0)


@dataclass(frozen=True)
class Work:
    """One call of a kernel, ready to be timed.

    Args:
        run: The timed call, which receives the result of ``prepare``.
        num_items: Items that one call processes, as ``hotrec.cost_model.KERNELS`` counts them.
        num_bytes: Bytes that one call processes, likewise.
        prepare: Called before each run, untimed.
    """

    run: Callable[[Any], object]
    num_items: float
    num_bytes: float
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Probe:
    """A kernel to measure.

    Args:
        name: One of ``hotrec.cost_model.KERNELS``.
        make: Builds the work of this rank from (items, dimension).
        sizes: Pairs of (items, dimension) to measure.
        is_by_items: Whether to fit a cost per item.
        is_by_bytes: Whether to fit a cost per byte; both can be fitted only if ``sizes`` has two
            dimensions.
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


def measure_probe(
    probe: Probe, device: torch.device, effort: Effort, advance: Callable[[], object]
) -> list[Point]:
    """Time a kernel at each of its sizes, on all ranks at once; collective.

    Args:
        probe: Kernel and its sizes.
        device: Device that it runs on.
        effort: Number of repeats.
        advance: Called after each size.
    """
    points = []
    filler = CacheFiller(device)
    for num_items, dim in probe.sizes:
        work = probe.make(num_items, dim)

        def prepare(work: Work = work) -> Any:
            prepared = work.prepare()
            filler.fill()
            return prepared

        times = time_on_all_ranks(work.run, device, effort, prepare=prepare)
        timing = slowest_median(times)
        points.append(Point(work.num_items, work.num_bytes, timing.seconds, timing.spread))
        advance()
    return points


def fit_line(
    points: Sequence[Point],
    *,
    is_by_items: bool = True,
    is_by_bytes: bool = True,
    is_growing: bool = False,
) -> Line:
    """Fit a line with non-negative coefficients by least relative squares.

    Minimizes the squares of (predicted - measured) / measured. With at most three columns the
    non-negative optimum (Lawson, Hanson 1974, ch. 23) is found by trying every subset of them.

    Args:
        points: Measured sizes.
        is_by_items: Whether to fit a cost per item.
        is_by_bytes: Whether to fit a cost per byte.
        is_growing: Whether to refuse a constant line. Noise at small sizes can hide the cost per
            item, and a planner would take a constant line for infinite bandwidth.

    Raises:
        CostsError: If there are fewer points than coefficients, or a time is not above 0.
    """
    seconds = np.array([point.seconds for point in points], np.float64)
    columns = {"fixed_s": np.ones(seconds.size)}
    if is_by_items:
        columns["per_item_s"] = np.array([point.num_items for point in points], np.float64)
    if is_by_bytes:
        columns["per_byte_s"] = np.array([point.num_bytes for point in points], np.float64)
    if seconds.size < len(columns) or not (np.isfinite(seconds) & (seconds > 0)).all():
        raise CostsError(
            f"costs fit: expected {len(columns)} or more measured times above 0, got "
            f"{seconds.tolist()}. Measure more sizes."
        )
    best: dict[str, float] = {}
    best_error = np.inf
    for num_columns in range(1, len(columns) + 1):
        for names in combinations(columns, num_columns):
            if is_growing and names == ("fixed_s",):
                continue
            matrix = np.stack([columns[name] for name in names], axis=1) / seconds[:, None]
            # Items, bytes and calls differ by many orders of magnitude.
            scales = np.abs(matrix).max(axis=0)
            if (scales == 0).any():
                continue
            found = np.linalg.lstsq(matrix / scales, np.ones(seconds.size), rcond=None)[0] / scales
            error = float(((matrix @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < best_error:
                best_error = error
                best = dict(zip(names, map(float, found), strict=True))
    return Line(
        best.get("fixed_s", 0.0),
        best.get("per_item_s", 0.0),
        best.get("per_byte_s", 0.0),
        float(np.median([point.spread for point in points])),
    )


def largest_error(line: Line, points: Sequence[Point]) -> float:
    """Largest error of the line over the points, relative to the measured time."""
    return max(
        abs(line.seconds(point.num_items, point.num_bytes) / point.seconds - 1) for point in points
    )
