"""Hits of FBGEMM's device cache in front of host rows, in TorchRec's plans.

Lookups are independent, row i with probability p_i. Hits are counted per lookup (weights p_i). Rows
that the profile never saw are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import gammainc, gammaincinv

from hotrec.cost_model.demand import Floats, TableDemand

# Bisections of the logarithm of T, whose bounds differ by at most about 1e30: down to rounding.
NUM_HALVINGS = 64
# Ways of a set of FBGEMM's cache (DEFAULT_ASSOC), and relative cache sizes for the mean over G:
# quantiles of G / A with equal weights.
CACHE_WAYS = 32
NUM_QUANTILES = 64
SIZE_QUANTILES = (
    gammaincinv(CACHE_WAYS, (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES) / CACHE_WAYS
)


def _held_by_lru(rows_G: Floats, probs_G: Floats, sizes_S: Floats) -> Floats:
    """The probability that a row of each group is cached at each size C, float64 (S, G).

    Che's approximation (Che, Tung, Wang, IEEE JSAC 20(7), 2002): a row is in the cache if it was
    looked up within the last T lookups, with T such that the cache is full:

        h_i = 1 - (1 - p_i)^T      sum over i of h_i = C
    """
    is_read_G = (probs_G > 0) & (rows_G > 0)
    # 1 - (1 - p)^T = 1 - e^(-rate T); a row with all lookups has no finite rate.
    rates_G = -np.log1p(-np.minimum(probs_G[is_read_G], 1 - 2.0**-53))
    rows_G = rows_G[is_read_G]
    num_rows = rows_G.sum()
    held_SG = np.zeros((sizes_S.size, probs_G.size))
    is_full_S = sizes_S >= num_rows
    held_SG[is_full_S] = is_read_G
    is_part_S = ~is_full_S & (sizes_S > 0)
    if not is_part_S.any():
        return held_SG
    size_S1 = sizes_S[is_part_S, None]
    # 1 - e^-x <= x gives a lower bound on T; rows all as rare as the rarest give an upper bound.
    low_S1 = np.log(size_S1 / (rows_G @ rates_G))
    high_S1 = np.log(-np.log1p(-size_S1 / num_rows) / rates_G.min())
    for _ in range(NUM_HALVINGS):
        middle_S1 = (low_S1 + high_S1) / 2
        filled_S1 = (-np.expm1(-np.exp(middle_S1) * rates_G) @ rows_G)[:, None]
        low_S1 = np.where(filled_S1 < size_S1, middle_S1, low_S1)
        high_S1 = np.where(filled_S1 < size_S1, high_S1, middle_S1)
    held_SG[np.ix_(is_part_S, is_read_G)] = -np.expm1(-np.exp(high_S1) * rates_G)
    return held_SG


def conflict_frac(load: float) -> float:
    """Fraction of a step's rows without a free way in their set, at rows / slots = ``load``.

    FBGEMM does not evict rows of the current step. X of them are in a set, Poisson with mean A
    load, and those beyond A are read and written on the host: E max(X - A, 0) / E X.
    """
    if load <= 0:
        return 0.0
    mean = CACHE_WAYS * load
    # E max(X - A, 0) = mean P(X >= A) - A P(X > A), and P(X >= k) of a Poisson X is gammainc(k, .).
    left_out = mean * gammainc(CACHE_WAYS, mean) - CACHE_WAYS * gammainc(CACHE_WAYS + 1, mean)
    return float(max(left_out, 0.0) / mean)


@dataclass(frozen=True)
class CachedTable:
    """A table, or a share of its rows with the same share of the lookups, behind a device cache."""

    demand: TableDemand
    share: float = 1.0

    @property
    def rows_G(self) -> Floats:  # noqa: N802
        return np.asarray(self.share * self.demand.rows_G)


@dataclass(frozen=True)
class CacheShares:
    """Hits and misses of a table's lookups, as fractions.

    Rows with a ``conflict`` have no free way in their set, and are read and updated on the host.
    """

    hit: float
    conflict: float

    @property
    def miss(self) -> float:
        """Not found, and fetched into the cache."""
        return 1.0 - self.hit - self.conflict


def num_slots(num_cached: float) -> int:
    """Slots of FBGEMM's cache for this number of rows: whole sets, at least one."""
    return CACHE_WAYS * max(1, math.ceil(num_cached / CACHE_WAYS))


def shared_cache_shares(
    tables: Sequence[CachedTable], slots: float, *, is_prefetched: bool = False
) -> list[CacheShares]:
    """Returns the hits of each of the tables that share one LRU cache of FBGEMM.

    A set has A = 32 ways, and a row's set is a hash of its number. A row is evicted once A others
    of its set were looked up; of n rows looked up, X are in its set, Poisson with mean A n / C
    (Smith, IEEE TSE 4(2), 1978). X >= A where n / C exceeds G / A, G being Gamma(A) distributed, so
    a row's hits are Che's at a cache of C G / A rows, in the mean over G.

    Args:
        slots: Slots C over all ranks with these rows.
        is_prefetched: Whether the rows of the next step are fetched while those of this step are
            in use, so that the cache must hold both.
    """
    total = max(sum(t.demand.lookups_per_sample for t in tables), 1e-300)
    held_SG = _held_by_lru(
        np.concatenate([t.rows_G for t in tables]),
        np.concatenate([t.demand.probs_G * t.demand.lookups_per_sample / total for t in tables]),
        slots * SIZE_QUANTILES,
    )
    held = np.split(held_SG.mean(axis=0), np.cumsum([t.rows_G.size for t in tables])[:-1])
    in_step = sum(float(t.rows_G @ t.demand.by_any_G) for t in tables)
    conflict = conflict_frac((2 if is_prefetched else 1) * in_step / slots)
    shares = []
    for table, held_G in zip(tables, held, strict=True):
        weights_G = table.rows_G * table.demand.probs_G
        weight = weights_G.sum()
        hit = float(np.clip(weights_G @ held_G / weight, 0.0, 1.0)) if weight > 0 else 1.0
        shares.append(CacheShares(hit, min(conflict, 1.0 - hit)))
    return shares
