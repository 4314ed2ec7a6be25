"""Models the hits of a device cache in front of host rows.

The cache holds C rows of a table, over all ranks together, and the hot rows are not in it: they
have replicas. Lookups are independent, row i with probability p_i (the independent reference
model). Two policies:

    LFU   keeps the C most looked-up rows for good. The best that any policy without foresight can
          do here, and what a warm frequency cache comes to.
    LRU   Che's approximation (Che, Tung, Wang, IEEE JSAC 20(7), 2002): a row is in the
          cache if it was looked up within the last T lookups, T being the same for all rows and
          such that the cache is full:
              h_i = 1 - (1 - p_i)^T      sum over i of h_i = C

Hits are counted per distinct row of a rank's batch (weights q_i), which is what a step pays for, or
per lookup (weights p_i), which is the usual hit ratio. Rows that the profile never saw are left
out: their first reads are misses that the model cannot predict.

FBGEMM's cache is neither fully associative nor per table. All cached tables of one module share
one LRU cache: TorchRec gives it the sum of their slots
(embedding_sharding.py, _get_weighted_avg_cache_load_factor). And it is split into sets of A = 32
ways, a row's set being a hash of its number, so how many rows compete for a set is Poisson (the
limit of the binomial for many sets; Smith, IEEE TSE 4(2), 1978, has the same for memory caches):

    LRU with A ways   a row is gone once A others of its set were looked up. While n rows were, X of
                      them were in its set, Poisson with mean A n / C; X >= A where n / C exceeds
                      G / A, G being Gamma(A) distributed. So h_i is Che's at a cache of C G / A
                      rows, in the mean over G.
    conflicts         of rows that must all be in at once (those of a step, which FBGEMM does not
                      evict in it) X are in a set, Poisson with mean A load, and those above A find
                      no way: E max(X - A, 0) / E X of them. They are read and written in the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import gammainc, gammaincinv

from hotrec.cost_model.demand import Floats, TableDemand, take_rows

Policy = Literal["lfu", "lru"]
# Halvings of the logarithm of T, whose bounds lie some 1e30 apart at most: to rounding.
NUM_HALVINGS = 64
# Ways of a set of FBGEMM's cache (DEFAULT_ASSOC), and its sizes in the mean over G: quantiles of
# G / A of equal weight.
CACHE_WAYS = 32
NUM_QUANTILES = 64
SIZE_QUANTILES = (
    gammaincinv(CACHE_WAYS, (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES) / CACHE_WAYS
)


def lfu_hit_frac(
    demand: TableDemand, num_cached: float, num_skipped: int = 0, *, is_per_lookup: bool = False
) -> float:
    """Hit ratio of a cache that keeps the most looked-up rows after the hot ones.

    Args:
        demand: The demand of the table.
        num_cached: Cached rows C; a part of a group counts in proportion.
        num_skipped: Hot rows, which do not enter the cache and are not counted.
        is_per_lookup: Whether to count lookups, not the distinct rows of a rank's batch.

    Returns:
        A fraction in 0..1; 1 if only hot rows are looked up.
    """
    curve = miss_ratio_curve(demand, [num_cached], "lfu", num_skipped, is_per_lookup=is_per_lookup)
    return 1.0 - float(curve[0])


def miss_ratio_curve(
    demand: TableDemand,
    sizes: Sequence[float] | npt.NDArray[np.generic],
    policy: Policy,
    num_skipped: int = 0,
    *,
    is_per_lookup: bool = False,
) -> Floats:
    """Miss ratio of a cache at several sizes.

    With LRU, within 0.01 of a simulated cache from some ten rows up; too low where the cache holds
    fewer rows than one step reads, since FBGEMM fetches the rows of a step together.

    Args:
        demand: The demand of the table.
        sizes: Cached rows C, (S,).
        policy: "lfu" or "lru".
        num_skipped: Hot rows, which do not enter the cache and are not counted.
        is_per_lookup: Whether to count lookups, not the distinct rows of a rank's batch.

    Returns:
        float64 (S,), in 0..1; 0 if only hot rows are looked up.

    Raises:
        ValueError: If a size or ``num_skipped`` is negative, or the policy is unknown.
    """
    sizes_S = np.asarray(sizes, np.float64)
    if num_skipped < 0 or (sizes_S.size and not sizes_S.min() >= 0):
        raise ValueError(
            f"cache of table {demand.name}: expected sizes and hot rows of at least 0, got sizes "
            f"{sizes_S.tolist()} and {num_skipped} hot rows."
        )
    cold_G = demand.rows_G - take_rows(demand, num_skipped)
    weights_G = cold_G * (demand.probs_G if is_per_lookup else demand.by_rank_G)
    if weights_G.sum() <= 0:
        return np.zeros(sizes_S.size)
    if policy == "lfu":
        cached_SG = [take_rows(demand, size, num_skipped) for size in sizes_S]
        held_SG = [cached / np.maximum(cold_G, 1e-300) for cached in cached_SG]
    elif policy == "lru":
        held_SG = list(_held_by_lru(cold_G, demand.probs_G, sizes_S))
    else:
        raise ValueError(
            f"cache of table {demand.name} policy: expected 'lfu' or 'lru', got {policy!r}."
        )
    misses_S = np.array([weights_G @ (1 - held_G) for held_G in held_SG])
    return np.asarray(np.clip(misses_S / weights_G.sum(), 0.0, 1.0))


def _held_by_lru(rows_G: Floats, probs_G: Floats, sizes_S: Floats) -> Floats:
    """Che's h of each group at each size, float64 (S, G)."""
    is_read_G = (probs_G > 0) & (rows_G > 0)
    # 1 - (1 - p)^T = 1 - e^(-rate T); a row that takes every lookup has no finite rate.
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
    # 1 - e^-x <= x gives the least T; rows all as rare as the rarest would need the most.
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
    """Fraction of the rows of a step that find no way in their set.

    Args:
        load: Rows that must be cached at once, divided by the slots of the cache.
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

    Args:
        demand: The demand of the table.
        num_skipped: Hot rows, which do not enter the cache and are not counted.
        share: Fraction of its other rows, with as large a share of the lookups.
        is_per_lookup: Whether to count lookups, not the distinct rows of a rank's batch.
    """

    demand: TableDemand
    num_skipped: int = 0
    share: float = 1.0
    is_per_lookup: bool = False


@dataclass(frozen=True)
class CacheShares:
    """Hits and misses of a table's cold rows, or of their lookups, as fractions.

    Args:
        hit: Found in the cache.
        conflict: Not found and without a way in their set, so read and updated on the host.
    """

    hit: float
    conflict: float

    @property
    def miss(self) -> float:
        """Not found, and fetched into the cache."""
        return 1.0 - self.hit - self.conflict


def num_slots(num_cached: float) -> int:
    """Slots that FBGEMM gives a cache of this number of rows: whole sets, at least one."""
    return CACHE_WAYS * max(1, math.ceil(num_cached / CACHE_WAYS))


def shared_cache_shares(
    tables: Sequence[CachedTable], slots: float, *, is_prefetched: bool = False
) -> list[CacheShares]:
    """Returns the hits of each of the tables that share a cache of FBGEMM's.

    Args:
        tables: The tables.
        slots: Slots C of all ranks that the rows are spread over.
        is_prefetched: Whether the rows of the next step are fetched while those of this step are
            in use, so that the cache must hold both.
    """
    cold = [t.share * (t.demand.rows_G - take_rows(t.demand, t.num_skipped)) for t in tables]
    total = sum(t.demand.lookups_per_sample for t in tables)
    rates = [t.demand.probs_G * t.demand.lookups_per_sample / max(total, 1e-300) for t in tables]
    held_SG = _held_by_lru(
        np.concatenate([np.empty(0), *cold]),
        np.concatenate([np.empty(0), *rates]),
        slots * SIZE_QUANTILES,
    )
    held = np.split(held_SG.mean(axis=0), np.cumsum([rows.size for rows in cold])[:-1])
    in_step = sum(float(rows @ t.demand.by_any_G) for rows, t in zip(cold, tables, strict=True)) * (
        2 if is_prefetched else 1
    )
    conflict = conflict_frac(in_step / slots)
    shares = []
    for rows_G, held_G, table in zip(cold, held, tables, strict=True):
        demand = table.demand
        weights_G = rows_G * (demand.probs_G if table.is_per_lookup else demand.by_rank_G)
        total = weights_G.sum()
        hit = float(np.clip(weights_G @ held_G / total, 0.0, 1.0)) if total > 0 else 1.0
        shares.append(CacheShares(hit, min(conflict, 1.0 - hit)))
    return shares
