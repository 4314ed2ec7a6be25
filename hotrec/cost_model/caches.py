"""Hits of a device cache in front of host rows, without the hot ones, which have replicas.

Lookups are independent, row i with probability p_i. Hits are counted per distinct row of a rank's
batch (weights q_i), which determine the time of a step, or per lookup (weights p_i). Rows that the
profile never saw are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import gammainc, gammaincinv

from hotrec.cost_model.demand import Floats, TableDemand, take_rows

# Bisections of the logarithm of T, whose bounds differ by at most about 1e30: down to rounding.
NUM_HALVINGS = 64
# Ways of a set of FBGEMM's cache (DEFAULT_ASSOC), and relative cache sizes for the mean over G:
# quantiles of G / A with equal weights.
CACHE_WAYS = 32
NUM_QUANTILES = 64
SIZE_QUANTILES = (
    gammaincinv(CACHE_WAYS, (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES) / CACHE_WAYS
)


def _weigh(
    demand: TableDemand, num_skipped: int, *, is_per_lookup: bool, share: float = 1.0
) -> tuple[Floats, Floats]:
    """Rows of each group that may be cached, and the weight of their hits; (G,) each."""
    rows_G = share * (demand.rows_G - take_rows(demand, num_skipped))
    return rows_G, rows_G * (demand.probs_G if is_per_lookup else demand.by_rank_G)


def lfu_hit_frac(
    demand: TableDemand, num_cached: float, num_skipped: int = 0, *, is_per_lookup: bool = False
) -> float:
    """Hit ratio of a cache that keeps the most-read rows after the hot ones.

    No online policy does better, and a warm frequency cache reaches it.

    Args:
        num_cached: Cached rows C; a part of a group counts in proportion.
        num_skipped: Hot rows, which do not enter the cache and are not counted.
        is_per_lookup: Whether to count lookups, not the distinct rows of a rank's batch.

    Returns:
        A fraction in 0..1; 1 if only hot rows are looked up.
    """
    rows_G, weights_G = _weigh(demand, num_skipped, is_per_lookup=is_per_lookup)
    if weights_G.sum() <= 0:
        return 1.0
    held_G = take_rows(demand, num_cached, num_skipped) / np.maximum(rows_G, 1e-300)
    missed = weights_G @ (1 - held_G) / weights_G.sum()
    return 1.0 - float(np.clip(missed, 0.0, 1.0))


def lru_miss_ratios(
    demand: TableDemand, sizes: npt.ArrayLike, num_skipped: int = 0, *, is_per_lookup: bool = False
) -> Floats:
    """Miss ratio, float64 (S,), of a fully associative LRU cache of several sizes C, (S,).

    Within 0.01 of a simulated cache of about ten rows or more; too low if the cache has fewer slots
    than a step reads rows, since FBGEMM fetches the rows of a step together. Other arguments as in
    ``lfu_hit_frac``; 0 if only hot rows are looked up.
    """
    rows_G, weights_G = _weigh(demand, num_skipped, is_per_lookup=is_per_lookup)
    sizes_S = np.asarray(sizes, np.float64)
    if weights_G.sum() <= 0:
        return np.zeros(sizes_S.size)
    missed_SG = 1 - _held_by_lru(rows_G, demand.probs_G, sizes_S)
    return np.asarray(np.clip(missed_SG @ weights_G / weights_G.sum(), 0.0, 1.0))


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
    """A table, or a part of its rows, behind a device cache.

    ``share`` is the fraction of its cold rows, with the same share of the lookups; the others as in
    ``lfu_hit_frac``.
    """

    demand: TableDemand
    num_skipped: int = 0
    share: float = 1.0
    is_per_lookup: bool = False


@dataclass(frozen=True)
class CacheShares:
    """Hits and misses of a table's cold rows, or of their lookups, as fractions.

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
    weighed = [
        _weigh(t.demand, t.num_skipped, is_per_lookup=t.is_per_lookup, share=t.share)
        for t in tables
    ]
    total = max(sum(t.demand.lookups_per_sample for t in tables), 1e-300)
    held_SG = _held_by_lru(
        np.concatenate([rows_G for rows_G, _ in weighed]),
        np.concatenate([t.demand.probs_G * t.demand.lookups_per_sample / total for t in tables]),
        slots * SIZE_QUANTILES,
    )
    held = np.split(held_SG.mean(axis=0), np.cumsum([rows_G.size for rows_G, _ in weighed])[:-1])
    in_step = sum(
        float(rows_G @ t.demand.by_any_G) for (rows_G, _), t in zip(weighed, tables, strict=True)
    )
    conflict = conflict_frac((2 if is_prefetched else 1) * in_step / slots)
    shares = []
    for (_, weights_G), held_G in zip(weighed, held, strict=True):
        weight = weights_G.sum()
        hit = float(np.clip(weights_G @ held_G / weight, 0.0, 1.0)) if weight > 0 else 1.0
        shares.append(CacheShares(hit, min(conflict, 1.0 - hit)))
    return shares
