"""Area under the ROC curve."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]


def measure_auc(
    scores: npt.NDArray[np.number[Any]],
    is_click: npt.NDArray[np.bool_],
    weights: Floats | None = None,
) -> float:
    """Area under the ROC curve by rank statistic, exact, ties counted half. O(S log S).

    Scores (S,), clicks bool (S,) with at least one of each. It is (pairs with click above non-click
    + half of the tied pairs) / pairs, in whole numbers; with weights (S,) a pair counts as the
    product of its two.
    """
    # The weights come last, so that even the rounding of sums does not depend on the order.
    order = np.argsort(scores) if weights is None else np.lexsort((weights, is_click, scores))
    ranked = scores[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    if weights is not None:
        ranked_weights = weights[order].astype(np.float64)
        clicks = np.add.reduceat(ranked_weights * is_click[order], starts)
        others = np.add.reduceat(ranked_weights * ~is_click[order], starts)
        below = np.cumsum(others) - others
        won = float(np.sum(clicks * (below + others / 2)))
        return won / (float(clicks.sum()) * float(others.sum()))
    clicks = np.add.reduceat(is_click[order].astype(np.int64), starts)
    others = np.diff(np.r_[starts, scores.size]) - clicks
    others_below = np.cumsum(others) - others
    # Twice the statistic is an integer, below 2^63 up to 2 * 10^9 clicks and as many non-clicks.
    twice_won = int(np.sum(clicks * (2 * others_below + others)))
    return twice_won / (2 * int(clicks.sum()) * int(others.sum()))
