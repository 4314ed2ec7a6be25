"""Kernels: seconds over items and bytes, fitted with a straight line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch

from hotrec.calibrate.clock import Effort, slowest_median, time_on_all_ranks
from hotrec.calibrate.memory import CacheFiller
from hotrec.cost_model.costs import CostsError, Line


@dataclass(frozen=True)
class Work:
    """One call of a kernel, ready to be timed.

    Args:
        run: what is timed, called with what ``prepare`` returns.
        num_items: that it handles, see ``hotrec.cost_model.KERNELS``.
        num_bytes: likewise.
        prepare: called before each run, off the clock.
    """

    run: Callable[[Any], object]
    num_items: float
    num_bytes: float
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Probe:
    """A kernel to be measured.

    Args:
        name: one of ``hotrec.cost_model.KERNELS``.
        make: (items, dimension) -> the work, on this rank.
        sizes: (items, dimension) to be measured.
        is_by_items: whether its line has a cost of an item.
        is_by_bytes: whether its line has a cost of a byte; together with items only where ``sizes``
            has two dimensions, or the two cannot be told apart.
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
        advance: called after each size.
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
    """The line with the least relative errors whose three parts are not negative.

    Least squares of (predicted - measured) / measured. With three columns the non-negative
    optimum (Lawson, Hanson 1974, ch. 23) is found by trying every set of columns: it is the best
    among those whose own optimum has no negative part.

    Args:
        points: what was measured.
        is_by_items: whether an item may cost something.
        is_by_bytes: whether a byte may cost something.
        is_growing: refuse the flat line. Noise at small sizes can hide what an item of a kernel
            costs, but it is never nothing, and a planner would take it for infinite bandwidth.

    Raises:
        CostsError: if there are fewer points than parts, or a time is not above 0.
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
    """How far the line is from the farthest point, relative to the measured time."""
    return max(
        abs(line.seconds(point.num_items, point.num_bytes) / point.seconds - 1) for point in points
    )
