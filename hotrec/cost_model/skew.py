"""The skew of a table's lookups, as the exponent of Zipf's law."""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq

from hotrec.types import Rows

# Default skew, the maximum that is fitted, and the number of groups of similar ranks.
DEFAULT_EXPONENT, MAX_EXPONENT, NUM_RANK_GROUPS = 1.05, 3.0, 400
MAX_READ_FRAC = 0.9


def fit_zipf_exponent(ids: Rows, num_rows: int) -> float:
    """The exponent for which the same number of lookups reads as many distinct rows on average.

    With n lookups of probabilities p_k ~ k^-exponent, row k is read with probability 1 - e^(-n
    p_k). Lookups that read nearly all rows carry little information, so fewer of them are used.

    Args:
        ids: Rows looked up, as they come.
        num_rows: Rows of the table.

    Returns:
        0 to MAX_EXPONENT; DEFAULT_EXPONENT if it cannot be estimated.
    """
    num_distinct = np.unique(ids).size
    while num_distinct > MAX_READ_FRAC * num_rows and ids.size >= 2 * num_rows:
        ids = ids[: ids.size // 2]
        num_distinct = np.unique(ids).size
    if num_rows <= 2 or num_distinct <= 1:
        return DEFAULT_EXPONENT
    edges = np.unique(np.geomspace(1, num_rows + 1, NUM_RANK_GROUPS).round())
    rows_G, ranks_G = np.diff(edges), (edges[:-1] + edges[1:] - 1) / 2

    def excess(exponent: float) -> float:
        weights_G = ranks_G**-exponent
        lookups_G = ids.size * weights_G / (weights_G * rows_G).sum()
        return float((rows_G * -np.expm1(-lookups_G)).sum()) - num_distinct

    if excess(0.0) <= 0:
        return 0.0
    if excess(MAX_EXPONENT) >= 0:
        return MAX_EXPONENT
    return float(brentq(excess, 0.0, MAX_EXPONENT))
