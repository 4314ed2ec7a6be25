"""Exact quality of predictions, in float64 on the host: AUC, log loss, normalised entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Quality:
    """How well logits predict clicks.

    Args:
        auc: chance that a click scores above a non-click; None unless both occur.
        log_loss: mean cross entropy in nats.
        normalized_entropy: log loss over that of always predicting the click rate of the same
            samples; below 1 is better than that. None unless clicks and non-clicks occur.
    """

    auc: float | None
    log_loss: float
    normalized_entropy: float | None
    num_samples: int


def measure_quality(logits: Floats, labels: Floats) -> Quality:
    """Measure the quality of all predictions of a split.

    Args:
        logits: (S,), log odds of a click, finite.
        labels: (S,), 0 or 1.

    Raises:
        ValueError: if there is no sample, a logit is not finite, or a label is neither 0 nor 1.
    """
    if logits.shape != labels.shape or logits.ndim != 1 or logits.size == 0:
        raise ValueError(
            f"evaluation: expected as many labels as logits and at least one, got shapes "
            f"{logits.shape} and {labels.shape}. Check that the split has samples."
        )
    if not np.isfinite(logits).all():
        raise ValueError(
            f"evaluation: expected finite logits, got {np.count_nonzero(~np.isfinite(logits))} of "
            f"{logits.size} not finite. The model has diverged; lower the learning rate."
        )
    is_click = labels == 1
    if not np.all(is_click | (labels == 0)):
        wrong = labels[~(is_click | (labels == 0))][0]
        raise ValueError(f"evaluation: expected labels 0 or 1, got {wrong}.")
    log_loss = measure_log_loss(logits, labels)
    rate = float(is_click.mean())
    has_both = 0.0 < rate < 1.0
    base_entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)) if has_both else 0.0
    return Quality(
        auc=measure_auc(logits, is_click) if has_both else None,
        log_loss=log_loss,
        normalized_entropy=float(log_loss / base_entropy) if has_both else None,
        num_samples=int(logits.size),
    )


def measure_log_loss(logits: Floats, labels: Floats) -> float:
    """Mean of log(1 + exp(z)) - y z, which does not overflow for large logits."""
    z = logits.astype(np.float64)
    return float(np.mean(np.logaddexp(0.0, z) - labels.astype(np.float64) * z))


def measure_auc(scores: Floats, is_click: npt.NDArray[np.bool_]) -> float:
    """Area under the ROC curve by rank statistic, exact, ties counted half. O(S log S).

    (pairs with click above non-click + half of the tied pairs) / pairs, in whole numbers.

    Args:
        scores: (S,), any order-preserving score.
        is_click: bool (S,), with at least one of each.
    """
    order = np.argsort(scores)
    ranked = scores[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    clicks = np.add.reduceat(is_click[order].astype(np.int64), starts)
    others = np.diff(np.r_[starts, scores.size]) - clicks
    others_below = np.cumsum(others) - others
    # Twice the statistic stays whole; below 2^63 up to 2 * 10^9 clicks times as many others.
    twice_won = int(np.sum(clicks * (2 * others_below + others)))
    return twice_won / (2 * int(clicks.sum()) * int(others.sum()))
