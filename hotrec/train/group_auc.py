"""GAUC: the AUC inside each group of samples, such as a user's, averaged over the groups.

GAUC = sum_g w_g AUC_g / sum_g w_g over the groups with clicks and non-clicks, where w_g is the
number of samples of group g, or the sum of their weights: equation 7 of "Deep Interest Network for
Click-Through Rate Prediction" (KDD 2018), with impressions as weights. Groups of one class have no
AUC and are skipped. TorchEasyRec's ``GroupedAUC`` skips the same groups, but takes the plain mean
of the rest, and TorchRec's also skips groups in which all scores are equal; here their AUC is 0.5,
as that of any tie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrec.data.groups import NO_GROUP

Numbers = npt.NDArray[np.number[Any]]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GroupAuc:
    """The result of ``measure_group_auc``.

    Args:
        gauc: The mean; None without a group that has both classes.
        samples_frac: Share of the samples, or of their weights, that are in such groups.
    """

    gauc: float | None
    samples_frac: float


def measure_group_auc(
    scores: Numbers,
    is_click: npt.NDArray[np.bool_],
    groups: Rows,
    weights: Numbers | None = None,
) -> GroupAuc:
    """GAUC over all samples, exact, ties counted half. O(S log S), without a loop over groups.

    The result does not depend on the order of the samples, so neither on the number of ranks that
    they come from. With weights (S,) a pair of samples counts as the product of its two.

    Args:
        scores: (S,), without NaN.
        is_click: (S,).
        groups: (S,); samples of ``NO_GROUP`` are left out.
        weights: (S,), above 0; None for none.
    """
    total = float(len(scores) if weights is None else weights.sum(dtype=np.float64))
    is_grouped = groups != NO_GROUP
    if not is_grouped.any():
        return GroupAuc(None, 0.0)
    # The weights come last, so that even the rounding of sums does not depend on the order.
    keys = (scores, groups) if weights is None else (weights, is_click, scores, groups)
    order = np.flatnonzero(is_grouped)
    order = order[np.lexsort([key[order] for key in keys])]
    scores, is_click, groups = scores[order], is_click[order], groups[order]
    # Integers without weights, so that all sums are exact.
    counts = np.ones(len(order), np.int64) if weights is None else weights[order].astype(np.float64)
    is_new_group = np.r_[True, groups[1:] != groups[:-1]]
    # A run is the samples of one group with the same score.
    runs = np.flatnonzero(is_new_group | np.r_[True, scores[1:] != scores[:-1]])
    starts = np.flatnonzero(is_new_group[runs])  # the first run of each group
    clicks = np.add.reduceat(counts * is_click, runs)
    others = np.add.reduceat(counts * ~is_click, runs)
    below = _sums_in_groups(others, starts) - others
    twice_won = np.add.reduceat(clicks * (2 * below + others), starts)
    clicks, others = np.add.reduceat(clicks, starts), np.add.reduceat(others, starts)
    has_both = (clicks > 0) & (others > 0)
    sizes = (clicks + others)[has_both]
    if not sizes.size:
        return GroupAuc(None, 0.0)
    aucs = twice_won[has_both] / (2.0 * clicks[has_both] * others[has_both])
    return GroupAuc(float(np.average(aucs, weights=sizes)), float(sizes.sum()) / total)


def _sums_in_groups(values: Numbers, starts: Rows) -> Numbers:
    """Running sums (N,), which start anew in each group.

    By doubling: the difference of two sums over all groups would lose the digits of small weights.
    """
    lengths = np.diff(np.r_[starts, values.size])
    places = np.arange(values.size) - np.repeat(starts, lengths)
    shift = 1
    while shift < lengths.max():
        later = np.flatnonzero(places >= shift)
        sums = values.copy()
        sums[later] = values[later] + values[later - shift]
        values, shift = sums, 2 * shift
    return values
