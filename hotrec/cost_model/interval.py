"""How far measured steps are from predicted ones: an interval of their ratio."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

# Measured over predicted step where no whole step was measured. Assumed: built-in costs are of
# similar machines, whose parts differ by less than a factor of two and not all in one direction.
UNKNOWN_INTERVAL = (0.6, 1.7)
# The interval is never narrower, since the steps of two runs of the same plan differ by as much.
NARROWEST_INTERVAL = (0.95, 1.05)
# A standard deviation of two cases says nothing.
MIN_CASES = 3
QUANTILE = 0.95


def ratio_interval(ratios: Sequence[Sequence[float]]) -> tuple[float, float]:
    """5% and 95% quantiles of measured over predicted step in a case that was not measured.

    Student's t prediction interval of one more observation, on the logarithms of the ratios: mean
    +- t(0.95, n - 1) s sqrt(1 + 1/n), where n counts cases, not repeats, since all repeats of a
    case have its error of prediction in common (Hahn and Meeker, Statistical Intervals, 1991,
    prediction intervals of a normal distribution). It is widened to hold NARROWEST_INTERVAL.

    Args:
        ratios: Measured over predicted step of each repeat of each case. A case should be
            predicted without having been fitted to.

    Returns:
        Low and high, or UNKNOWN_INTERVAL of fewer than MIN_CASES cases.
    """
    if len(ratios) < MIN_CASES:
        return UNKNOWN_INTERVAL
    logs = [np.log(np.asarray(of_case, np.float64)) for of_case in ratios]
    means = np.array([of_case.mean() for of_case in logs])
    # Noise within cases does not shrink with more repeats: the next run has it too.
    within = np.mean([of_case.var() for of_case in logs])
    deviation = np.sqrt(means.var(ddof=1) + within)
    num_cases = len(logs)
    half = stdtrit(num_cases - 1, QUANTILE) * deviation * np.sqrt(1 + 1 / num_cases)
    low, high = np.exp([means.mean() - half, means.mean() + half]).tolist()
    return min(low, NARROWEST_INTERVAL[0]), max(high, NARROWEST_INTERVAL[1])


def interval_text(interval: tuple[float, float]) -> str:
    """An interval of ratios in words, "-12% to +15%"."""
    low, high = interval
    return f"{low - 1:+.0%} to {high - 1:+.0%}"
