"""Probabilities that lookups drawn from those of a profile meet a row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def prob_drawn(counts: Floats, num_lookups: float, num_draws: float) -> Floats:
    """Probability that ``num_draws`` of ``num_lookups`` lookups, drawn without replacement, hit.

    1 - C(K - c, n) / C(K, n) is a product of m = min(c, n) factors 1 - M / (K - j), M the larger of
    the two; all are taken at the middle j, which is off by less than 0.1 / K of q.

    Args:
        counts: float64, any shape: c of each row, above 0.
        num_lookups: K; at least every c.
        num_draws: n; may be a fraction (a mean), and exceed K.

    Returns:
        float64 of the same shape, in 0..1.
    """
    smaller, larger = np.minimum(counts, num_draws), np.maximum(counts, num_draws)
    rate = np.minimum(larger / (num_lookups - (smaller - 1) / 2), 1.0)
    with np.errstate(divide="ignore"):  # log 0 where no lookup is left to miss the row
        log_missed = smaller * np.log1p(-np.where(counts + num_draws > num_lookups, 1.0, rate))
    return np.asarray(-np.expm1(np.where(smaller > 0, log_missed, 0.0)))


def prob_met(probs: Floats, num_draws: float) -> Floats:
    """1 - (1 - p)^n, exact also where p is tiny."""
    with np.errstate(divide="ignore", invalid="ignore"):  # log 0 where p is 1
        log_missed = num_draws * np.log1p(-probs)
    return np.asarray(-np.expm1(log_missed if num_draws > 0 else np.zeros_like(probs)))


def prob_both(
    counts: Floats, num_lookups: float, num_draws: float, num_other_draws: float
) -> Floats:
    """Probability that a row is met by some draws and by some others, apart from the first.

    P(A and B) = P(A) + P(B) - P(A or B), each by ``prob_drawn``, is unbiased: of the rows that the
    profile saw once it says that they are not met twice, where the product of the two would count
    them all as likely to be met twice as rows of that probability are. If there are not as many
    lookups as all these draws, it is the product, which leans high.

    Args:
        counts: float64, any shape: c of each row, above 0.
        num_lookups: K; at least every c.
        num_draws: n of the first, a fraction if it is a mean.
        num_other_draws: n of the others.

    Returns:
        float64 of the same shape, in 0..1.
    """
    first, other = (prob_drawn(counts, num_lookups, n) for n in (num_draws, num_other_draws))
    both_draws = num_draws + num_other_draws
    if both_draws > num_lookups:
        return np.asarray(first * other)
    either = prob_drawn(counts, num_lookups, both_draws)
    return np.clip(first + other - either, 0.0, np.minimum(first, other))
