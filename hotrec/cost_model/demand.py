"""The demand of a step on a table: the probability that a rank, or any rank, reads each row.

Rows with equal access counts form a group, so a table of 1e8 rows takes a few hundred numbers.
Lookups are independent: of n lookups of a rank, W ranks, K lookups in the profile and c of them of
a row, p = c / K, q is the probability that a rank reads the row and Q that any rank does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hotrec.cost_model.costs import World
from hotrec.cost_model.histogram import CountHistogram
from hotrec.types import Rows, TableOutput

Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", np.int64, np.float64)
MAX_GROUPS = 512


def prob_drawn(counts: Floats, num_lookups: float, num_draws: float) -> Floats:
    """q, as the probability to draw a row's lookups: 1 - C(K - c, n) / C(K, n).

    p is unknown, only c is known. With p = c / K, rows seen once would also get the share of rows
    that the profile missed: 9% too few rows seen once if a batch is a fifth of the profile. Drawing
    without replacement gives an unbiased estimate of the distinct rows ("rarefaction", Hurlbert,
    Ecology 52, 1971), in which rarely seen rows also stand for unseen rows. If n exceeds K, each
    seen row counts as read. The quotient is a product of m = min(c, n) factors 1 - M / (K - j),
    with M = max(c, n); all are evaluated at the middle j, with an error below 0.1 / K of q. Draws
    in excess of K - c, all other lookups, find the row: a fraction of the first one, if n is a
    mean, with that probability.

    Args:
        counts: Count c of each row, above 0; float64 of any shape.
        num_lookups: Lookups K of the profile, at least every c.
        num_draws: Draws n; a mean may be a fraction. May exceed K.

    Returns:
        float64 of the same shape, in 0..1.
    """
    missing = np.minimum(num_draws, num_lookups - counts)
    smaller, larger = np.minimum(counts, missing), np.maximum(counts, missing)
    rate = larger / (num_lookups - (smaller - 1) / 2)
    with np.errstate(divide="ignore"):  # log 0 if no draw can miss the row
        log_missed = np.log1p(-np.minimum(num_draws - missing, 1.0))
    return np.asarray(-np.expm1(log_missed + smaller * np.log1p(-rate)))


def prob_met(probs: Floats, num_draws: float) -> Floats:
    """1 - (1 - p)^n, exact also where p is tiny."""
    with np.errstate(divide="ignore", invalid="ignore"):  # log 0 where p is 1
        log_missed = num_draws * np.log1p(-probs)
    return np.asarray(-np.expm1(log_missed if num_draws > 0 else np.zeros_like(probs)))


def prob_both(
    counts: Floats, num_lookups: float, num_draws: float, first: Floats, other: Floats
) -> Floats:
    """Probability that a row occurs in each of two sets of draws, ``num_draws`` in total.

    ``first`` and ``other`` are the probabilities of each set (``prob_drawn``).

    P(A) + P(B) - P(A or B) is unbiased, whereas P(A) P(B) is too high for rows with low counts: a
    row that the profile saw once cannot be drawn twice. The product is used if the draws in total
    exceed the lookups.
    """
    if num_draws > num_lookups:
        return np.asarray(first * other)
    either = prob_drawn(counts, num_lookups, num_draws)
    return np.clip(first + other - either, 0.0, np.minimum(first, other))


@dataclass(frozen=True)
class TableDemand:
    """The demand of a step on one table.

    Args:
        name: Name of the table.
        num_rows: Rows R, including those never seen.
        dim: Embedding dim D.
        row_bytes: Bytes of a row with its optimizer state, at least 4 D.
        lookups_per_sample: Mean number of ids L of a sample, over all features of the table.
        num_columns: The number of features that read the table.
        rows_G: Rows of each group, most-read first, int64 (G,). Rows never seen are in no group.
        probs_G: Mean p of a row of each group, float64 (G,).
        by_rank_G: Mean q of a row of each group, float64 (G,).
        by_any_G: Mean Q of a row of each group, float64 (G,).
        by_both_G: Mean probability that a rank reads a row in a step and any rank reads it in the
            next, float64 (G,). None means q Q.
        by_host_G: Mean probability that some rank of a host reads a row, float64 (G,). None where
            hosts have one rank or there is one host.
        by_host_both_G: As ``by_both_G``, for some rank of a host in the first step.
        output: What the table's collection returns for its ids.
    """

    name: str
    num_rows: int
    dim: int
    row_bytes: int
    lookups_per_sample: float
    num_columns: int
    rows_G: Rows
    probs_G: Floats
    by_rank_G: Floats
    by_any_G: Floats
    by_both_G: Floats | None = None
    by_host_G: Floats | None = None
    by_host_both_G: Floats | None = None
    output: TableOutput = TableOutput.pooled

    @property
    def is_pooled(self) -> bool:
        return self.output is TableOutput.pooled


def build_demand(  # noqa: PLR0913
    name: str,
    histogram: CountHistogram,
    *,
    dim: int,
    row_bytes: int,
    lookups_per_sample: float,
    num_columns: int,
    batch_size: int,
    world: World,
    max_groups: int = MAX_GROUPS,
    num_draws: tuple[float, float] | None = None,
) -> TableDemand:
    """Builds a table's demand from the counts of its rows; other arguments as in ``TableDemand``.

    Groups are the distinct counts. If there are more than ``max_groups``, the highest counts stay
    separate and adjacent lower ones are merged, which preserves the sums of rows, lookups and
    expected distinct rows.

    Args:
        batch_size: Batch B of a rank.
        world: Ranks and hosts. The number of independent lookups of a host lies between those of
            one rank and of all, on the power of the number of ranks through both.
        max_groups: Maximum number of groups.
        num_draws: Numbers of independent lookups equivalent to those of a rank and of all ranks
            (``hotrec.cost_model.locality``). None assumes independent lookups: n = B L, and n W.
    """
    num_lookups = lookups_per_sample * batch_size
    of_rank, of_all = num_draws or (num_lookups, num_lookups * world.num_ranks)
    counts, total = histogram.values.astype(np.float64), histogram.num_lookups
    starts = _group_starts(counts, max_groups)
    rows_G = _sum_groups(histogram.num_rows, starts)

    def mean(of_rows: Floats) -> Floats:
        return _sum_groups(histogram.num_rows * of_rows, starts) / rows_G

    def met(num_draws: float) -> tuple[Floats, Floats]:
        """The probability to read a row with these lookups, and to read it again in a step."""
        drawn = prob_drawn(counts, total, num_draws)
        return drawn, prob_both(counts, total, num_draws + of_all, drawn, by_any)

    by_any = prob_drawn(counts, total, of_all)
    by_rank, by_both = met(of_rank)
    by_host = by_host_both = None
    if world.has_levels:
        power = math.log(of_all / of_rank) / math.log(world.num_ranks) if of_rank > 0 else 1.0
        of_host = met(of_rank * world.ranks_per_host**power)
        by_host, by_host_both = (mean(part) for part in of_host)
    return TableDemand(
        name=name,
        num_rows=histogram.total_rows,
        dim=dim,
        row_bytes=row_bytes,
        lookups_per_sample=lookups_per_sample,
        num_columns=num_columns,
        rows_G=rows_G,
        probs_G=mean(counts / max(total, 1)),
        by_rank_G=mean(by_rank),
        by_any_G=mean(by_any),
        by_both_G=mean(by_both),
        by_host_G=by_host,
        by_host_both_G=by_host_both,
    )


def expected_distinct(demand: TableDemand, num_hot: int = 0) -> tuple[float, float, float]:
    """Expected distinct rows of a step if the ``num_hot`` most-read rows are hot.

    A partly hot group counts in proportion. All other rows are cold, including those that the
    profile never saw, whose reads the estimate includes.

    Returns:
        Hot rows of a rank, cold rows of a rank, hot rows of any rank.
    """
    hot_G = take_rows(demand, num_hot)
    hot = float(hot_G @ demand.by_rank_G)
    cold = float((demand.rows_G - hot_G) @ demand.by_rank_G)
    return hot, cold, float(hot_G @ demand.by_any_G)


def expected_cold_of_any(demand: TableDemand, num_hot: int = 0) -> float:
    """Expected distinct cold rows that any rank reads in a step."""
    return float((demand.rows_G - take_rows(demand, num_hot)) @ demand.by_any_G)


def expected_urgent(demand: TableDemand, num_hot: int = 0) -> float:
    """Expected distinct cold rows that a rank reads in a step and some rank in the next step.

    With exact look-ahead only their updates must arrive before the next step. Steps are assumed
    independent unless the profile has measured that they are not (``hotrec.cost_model.reuse``).
    """
    cold_G = demand.rows_G - take_rows(demand, num_hot)
    both_G = demand.by_rank_G * demand.by_any_G if demand.by_both_G is None else demand.by_both_G
    return float(cold_G @ both_G)


@dataclass(frozen=True)
class HostRows:
    """Expected distinct rows that the ranks of a host read in a step."""

    hot: float
    cold: float
    urgent: float


def expected_of_host(demand: TableDemand, num_hot: int = 0) -> HostRows | None:
    """The rows of a host; None where hosts have one rank or there is one host."""
    if demand.by_host_G is None or demand.by_host_both_G is None:
        return None
    hot_G = take_rows(demand, num_hot)
    cold_G = demand.rows_G - hot_G
    of_all = (hot_G @ demand.by_host_G, cold_G @ demand.by_host_G, cold_G @ demand.by_host_both_G)
    return HostRows(*map(float, of_all))


def take_rows(demand: TableDemand, num_taken: float, num_skipped: float = 0) -> Floats:
    """Rows of each group, (G,), among the ``num_taken`` most-read after the first ``num_skipped``.

    Numbers beyond the seen rows add nothing.
    """
    starts = np.cumsum(demand.rows_G).astype(np.float64) - demand.rows_G
    skipped, reached = (
        np.clip(count - starts, 0, demand.rows_G)
        for count in (num_skipped, num_skipped + num_taken)
    )
    return np.asarray(reached - skipped)


def coverage(demand: TableDemand, num_hot: int) -> float:
    """H: share of the table's lookups that the ``num_hot`` most-read rows serve.

    It is biased high: p = c / K assigns nothing to rows that the profile never saw, which get about
    (rows seen once) / K of the lookups (Good, Biometrika 1953).
    """
    return min(float(take_rows(demand, num_hot) @ demand.probs_G), 1.0)


def all_hot_share(demands: Sequence[TableDemand], num_hot: Mapping[str, int]) -> float:
    """Share of the samples with only hot lookups: the product of H_t^L_t (SCARS).

    Lookups of a sample are assumed independent. Real ones are not, so more samples are all-hot.
    """
    share = 1.0
    for demand in demands:
        if demand.lookups_per_sample > 0:
            share *= coverage(demand, num_hot.get(demand.name, 0)) ** demand.lookups_per_sample
    return share


def _group_starts(counts: Floats, max_groups: int) -> Rows:
    """The start of each group of descending counts, int64 (G,), G at most ``max_groups``.

    The highest half stay separate; below them a group spans a fixed ratio of counts, so that low
    counts, which have most of the rows, stay separate as well.
    """
    if counts.size <= max_groups:
        return np.arange(counts.size)
    num_apart = max_groups // 2
    logs = np.log(counts[num_apart:])
    num_bins = max_groups - num_apart
    step = (logs[0] - logs[-1]) / num_bins
    bins = np.minimum(((logs[0] - logs) / step).astype(np.int64), num_bins - 1)
    starts = np.flatnonzero(np.diff(bins, prepend=-1)) + num_apart
    return np.concatenate([np.arange(num_apart), starts])


def _sum_groups(values: npt.NDArray[Number], starts: Rows) -> npt.NDArray[Number]:
    # reduceat rejects an empty list of starts
    return np.add.reduceat(values, starts) if starts.size else values[:0]
