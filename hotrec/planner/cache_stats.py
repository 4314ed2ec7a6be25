"""Miss-ratio curves -> the cache statistics that TorchRec's planner can read.

TorchRec's ``EmbeddingOffloadStats`` (distributed/planner/shard_estimators.py) holds a histogram of
cache sizes: bin k of n holds the lookups that a cache of ``(k, k + 1] / n`` of the table's rows is
the first to serve. Its curve is 1 for no cache and 0 for one of all rows, by definition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats

# Of the histogram. A bin is read at its upper end, so this bounds how much the curve loses: what it
# falls within R / 4096 rows. TorchRec copies the statistics with every option it considers.
MAX_BINS = 4096

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MissCurve:
    """How often the device cache of a host table misses.

    Args:
        sizes: (S,), cached rows, rising, from 0 or more to the table's rows or fewer.
        miss_ratio: (S,), misses / lookups at each size, in 0..1, not rising.
        expected_lookups: distinct rows of the table that a global batch reads from it.

    Raises:
        ValueError: if it is no such curve.
    """

    sizes: Floats
    miss_ratio: Floats
    expected_lookups: float

    def __post_init__(self) -> None:
        sizes, misses = np.asarray(self.sizes), np.asarray(self.miss_ratio)
        if sizes.ndim != 1 or sizes.shape != misses.shape or not sizes.size:
            raise ValueError(
                f"miss-ratio curve: expected as many ratios as sizes, at least one, got shapes "
                f"{misses.shape} and {sizes.shape}."
            )
        is_finite = bool(np.isfinite(sizes).all() and np.isfinite(misses).all())
        is_rising = bool((np.diff(sizes) > 0).all() and sizes[0] >= 0)
        is_share = bool((misses >= 0).all() and (misses <= 1).all())
        is_curve = is_finite and is_rising and is_share and bool((np.diff(misses) <= 1e-9).all())
        if not is_curve:
            raise ValueError(
                "miss-ratio curve: expected rising sizes and ratios in 0..1 that do not rise, got "
                f"sizes {sizes[:8].tolist()} and ratios {misses[:8].tolist()} (the first 8)."
            )
        if not (np.isfinite(self.expected_lookups) and self.expected_lookups >= 0):
            raise ValueError(
                f"miss-ratio curve expected_lookups: expected at least 0, got "
                f"{self.expected_lookups}."
            )

    def at(self, sizes: Floats, num_rows: int) -> Floats:
        """The curve between its points, through (0, 1) and (num_rows, 0), whatever was measured.

        A cache of all rows misses each of them once; TorchRec's curve leaves that out.
        """
        inside = (self.sizes > 0) & (self.sizes < num_rows)
        known = np.concatenate([[0.0], np.asarray(self.sizes, np.float64)[inside], [num_rows]])
        ratios = np.concatenate([[1.0], np.asarray(self.miss_ratio, np.float64)[inside], [0.0]])
        return np.interp(sizes, known, ratios)


def offload_stats(curve: MissCurve, num_rows: int) -> EmbeddingOffloadStats:
    """A miss-ratio curve in TorchRec's form.

    Args:
        curve: of the table's cache.
        num_rows: R, rows of the table.

    Returns:
        Statistics whose ``expected_miss_rate(c)`` is the curve at ``c * num_rows`` rows, exact
        where that is a multiple of ``num_rows / MAX_BINS``, below it by less than the curve falls
        within one bin elsewhere. ``cacheability`` is the area under the curve.
    """
    num_bins = min(num_rows, MAX_BINS)
    edges = np.linspace(0, num_rows, num_bins + 1)
    misses = curve.at(edges, num_rows)
    area = float(((misses[1:] + misses[:-1]) / 2).mean())
    # Lookups below 1 a step would vanish as an int; their histogram is a matter of shares anyway.
    first_served = -np.diff(misses) * max(curve.expected_lookups, 1.0)
    return EmbeddingOffloadStats(
        cacheability=area,
        expected_lookups=round(curve.expected_lookups),
        mrc_hist_counts=torch.from_numpy(first_served).double(),
        height=num_rows,
    )
