"""Coverage curves of a histogram and their confidence intervals."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrec.cost_model.histogram import CountHistogram

Floats = npt.NDArray[np.float64]
NUM_CURVE_POINTS = 65
# Read off the curve for tables and messages.
LANDMARK_FRACS = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5)


def wilson_interval(
    num_hits: npt.ArrayLike, num_trials: npt.ArrayLike, *, confidence: float
) -> tuple[Floats, Floats]:
    """Wilson's score interval of a proportion (Wilson, JASA 1927); 0..1 where there is no trial.

    The trials are taken as independent. Lookups of one multi-hot bag are not quite, so for them the
    interval is somewhat too narrow.

    Args:
        num_hits: Any shape, broadcast against ``num_trials``.
        confidence: Such as 0.95, two-sided.

    Returns:
        Lower and upper end, float64.

    Raises:
        ValueError: If confidence is not inside 0..1.
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: expected a value between 0 and 1, got {confidence}.")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    hits = np.asarray(num_hits, np.float64)
    trials = np.asarray(num_trials, np.float64)
    n = np.maximum(trials, 1.0)
    p = np.where(trials > 0, hits / n, 0.5)
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = np.where(trials > 0, np.maximum(centre - half, 0.0), 0.0)
    high = np.where(trials > 0, np.minimum(centre + half, 1.0), 1.0)
    # The formula ends at 0 and 1 only up to rounding; an interval must hold its own estimate.
    return np.where(hits == 0, 0.0, low), np.where(hits == trials, 1.0, high)


def cover_lookups(histogram: CountHistogram, fracs: Floats) -> tuple[Floats, Floats | None]:
    """The share of lookups that the most accessed rows take.

    Rows are ranked by their train counts for both shares, so the held-out one shows drift. Inside a
    group of equal counts the held-out share is interpolated: the mean over the orders of the ties.

    Args:
        fracs: float64 (P,), fractions of all rows.

    Returns:
        float64 (P,) for train, and for the held-out data, or None where there is none. Zeros where
        there is no lookup.
    """
    ends = np.concatenate([[0], np.cumsum(histogram.num_rows), [histogram.total_rows]])
    position = fracs * histogram.total_rows
    train = np.concatenate([[0], np.cumsum(histogram.values * histogram.num_rows)])
    train_at = np.interp(position, ends, np.append(train, train[-1]))
    train_share = train_at / max(int(train[-1]), 1)
    total = histogram.num_heldout_lookups
    if total == 0:
        return train_share, None
    heldout = np.concatenate([[0], np.cumsum(histogram.heldout), [total]])
    return train_share, np.interp(position, ends, heldout) / total


def coverage_curve(histogram: CountHistogram) -> dict[str, Any]:
    """The coverage curve as plain lists: ``rows_frac``, ``train``, ``heldout`` (list or None).

    The points are spaced by ratio, from one row to all of them, with 0 in front.
    """
    total = max(histogram.total_rows, 1)
    fracs = np.geomspace(1 / total, 1.0, NUM_CURVE_POINTS)
    fracs = np.union1d(np.concatenate([[0.0], fracs]), [f for f in LANDMARK_FRACS if f > 1 / total])
    fracs[-1] = 1.0
    train, heldout = cover_lookups(histogram, fracs)
    return {
        "rows_frac": fracs.tolist(),
        "train": train.tolist(),
        "heldout": None if heldout is None else heldout.tolist(),
    }


def coverage_landmarks(
    histogram: CountHistogram, *, confidence: float | None
) -> list[dict[str, Any]]:
    """Coverage at a few round fractions of the rows.

    Args:
        confidence: Give Wilson intervals of this confidence for a sampled profile; None for an
            exact one. The train share of a sample leans high, since the same sample ranked the
            rows; the held-out share does not.
    """
    train, heldout = cover_lookups(histogram, np.array(LANDMARK_FRACS))
    landmarks = []
    for i, frac in enumerate(LANDMARK_FRACS):
        point: dict[str, Any] = {"rows_frac": frac, "train": float(train[i]), "heldout": None}
        if heldout is not None:
            point["heldout"] = float(heldout[i])
        if confidence is not None:
            point["train_interval"] = _interval(train[i], histogram.num_lookups, confidence)
            if heldout is not None:
                trials = histogram.num_heldout_lookups
                point["heldout_interval"] = _interval(heldout[i], trials, confidence)
        landmarks.append(point)
    return landmarks


def _interval(share: float, num_trials: int, confidence: float) -> list[float]:
    low, high = wilson_interval(share * num_trials, num_trials, confidence=confidence)
    return [float(low), float(high)]
