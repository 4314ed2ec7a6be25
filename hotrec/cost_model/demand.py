"""What a step asks of a table: how likely each row is read, by one rank and by any rank.

Rows of equal access count are one group, so a table of 1e8 rows is a few hundred numbers.

Symbols: B batch per rank, W ranks, L lookups per sample, c a row's count among the K lookups of
the profile; p = c / K the probability that one lookup reads the row; n = B L lookups of a rank and
step. Lookups are taken as independent (the sum of q over rows is what SCARS, arXiv 2411.01611,
calls coalesced accesses):

    q = 1 - (1 - p)^n          the row is among a rank's distinct rows
    Q = 1 - (1 - p)^(n W)      the row is among those of any rank

p is not known, only c. Putting c / K for it gives too few distinct rows, since rows that the
profile missed lend their share to those it saw once or twice: 9% too few of the rows seen once if a
batch is a fifth of the profile. So q and Q are those of n (n W) lookups drawn from the K without
replacement, which is the unbiased estimate of the table's distinct rows ("rarefaction", Hurlbert,
Ecology 52, 1971), and, if the profile is of the very data that are trained on in
random order, the expectation itself:

    q = 1 - C(K - c, n) / C(K, n)

Unseen rows are thus counted, in the sum, with those seen seldom. Where a step reads more than the
whole profile, every seen row is taken as read and the sum falls short. ``coverage`` and the caches
use p = c / K; the share of the lookups that go to unseen rows, about (rows seen once) / K (Good,
Biometrika 1953), is missing there, so both lean high; the held-out demand does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hotrec.cost_model.histogram import CountHistogram, slices
from hotrec.types import Rows

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


Number = TypeVar("Number", np.int64, np.float64)
MAX_GROUPS = 512


@dataclass(frozen=True)
class TableDemand:
    """What a step asks of one table.

    Args:
        name: of the table.
        num_rows: R, rows never seen included.
        dim: D.
        row_bytes: bytes of a row with its optimizer state, at least 4 D.
        lookups_per_sample: L, ids of all its features in a sample, in the mean.
        num_columns: features that read it, each a pooled vector of a sample.
        rows_G: int64 (G,), rows of each group, most looked-up first; rows never seen in no group.
        probs_G: float64 (G,), p of one row of the group, in the mean.
        by_rank_G: float64 (G,), q of one row, in the mean.
        by_any_G: float64 (G,), Q of one row, in the mean.
        by_both_G: float64 (G,), how likely a rank reads a row in a step and any rank in the next
            one, in the mean; None for q Q, of steps that are independent and a p that is known.
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


def build_demand(
    name: str,
    histogram: CountHistogram,
    *,
    dim: int,
    row_bytes: int,
    lookups_per_sample: float,
    num_columns: int,
    batch_size: int,
    world_size: int,
    max_groups: int = MAX_GROUPS,
    num_draws: tuple[float, float] | None = None,
) -> TableDemand:
    """What a step asks of a table, by the train counts of its rows.

    Groups are the distinct counts. If there are more than ``max_groups``, the highest counts stay
    apart and neighbours among the others are merged; rows, lookups and expected distinct rows stay
    as they were.

    Args:
        histogram: of the table's rows.
        row_bytes: of a row with its optimizer state.
        lookups_per_sample: L, of all features that read the table together.
        num_columns: features that read the table.
        batch_size: B, per rank.
        world_size: W.
        num_draws: as how many independent lookups those of a rank and of all ranks count, n and
            n W (``hotrec.cost_model.locality``); None if they are independent.

    Raises:
        ValueError: if a number is below 1 (``lookups_per_sample`` may be anything from 0 up), or a
            row has fewer bytes than its floats, or all ranks draw less than one rank.
    """
    _check(
        name,
        lookups_per_sample,
        max_groups,
        dim=dim,
        row_bytes=row_bytes,
        num_columns=num_columns,
        batch_size=batch_size,
        world_size=world_size,
    )
    counts = histogram.values.astype(np.float64)
    of_rank, of_all = _draws(name, num_draws, lookups_per_sample * batch_size, world_size)
    total = histogram.num_lookups
    by_rank = prob_drawn(counts, total, of_rank)
    by_any = prob_drawn(counts, total, of_all)
    by_both = prob_both(counts, total, of_rank, of_all)
    starts = _group_starts(counts, max_groups)
    rows_G = _sum_groups(histogram.num_rows, starts)
    return TableDemand(
        name=name,
        num_rows=histogram.total_rows,
        dim=dim,
        row_bytes=row_bytes,
        lookups_per_sample=lookups_per_sample,
        num_columns=num_columns,
        rows_G=rows_G,
        probs_G=_sum_groups(histogram.num_rows * (counts / max(total, 1)), starts) / rows_G,
        by_rank_G=_sum_groups(histogram.num_rows * by_rank, starts) / rows_G,
        by_any_G=_sum_groups(histogram.num_rows * by_any, starts) / rows_G,
        by_both_G=_sum_groups(histogram.num_rows * by_both, starts) / rows_G,
    )


def build_demand_heldout(
    name: str,
    histogram: CountHistogram,
    *,
    dim: int,
    row_bytes: int,
    lookups_per_sample: float,
    num_columns: int,
    batch_size: int,
    world_size: int,
    max_groups: int = MAX_GROUPS,
    num_draws: tuple[float, float] | None = None,
    counts: tuple[Rows, Rows] | None = None,
) -> TableDemand:
    """What a step of the held-out data asks of a table whose rows were ranked by the train data.

    p of a group is its share of the held-out lookups by its rows. With ``counts``, q of a row is
    that of its own held-out count, as in ``build_demand``, and a group has the mean. Without, rows
    of equal train count are taken as equally likely, q = 1 - (1 - p)^n: the expectation for
    held-out counts that are Poisson with the group's mean; where the rows of a group differ in
    truth (those never seen in train do: most are never read, some are new and popular) it is an
    upper bound. Rows never seen in train that held-out lookups read are the last group. p need not
    fall from group to group.

    Args:
        histogram: with held-out lookups.
        lookups_per_sample: L in the held-out data.
        num_draws: as in ``build_demand``, of held-out batches.
        counts: train and held-out counts of each row, int64 (R,) each: those of the histogram.

    Raises:
        ValueError: as ``build_demand``, or if the histogram has no held-out lookups, or is not of
            ``counts``.
    """
    _check(
        name,
        lookups_per_sample,
        max_groups,
        dim=dim,
        row_bytes=row_bytes,
        num_columns=num_columns,
        batch_size=batch_size,
        world_size=world_size,
    )
    total = histogram.num_heldout_lookups
    if total == 0:
        raise ValueError(
            f"table {name} held-out lookups: expected some, got 0. Profile with "
            "profile.heldout_frac above 0."
        )
    starts = _group_starts(histogram.values.astype(np.float64), max_groups)
    rows_G = _sum_groups(histogram.num_rows, starts)
    lookups_G = _sum_groups(histogram.heldout, starts)
    if histogram.heldout_unseen:
        rows_G = np.append(rows_G, histogram.num_unseen)
        lookups_G = np.append(lookups_G, histogram.heldout_unseen)
    probs_G = lookups_G / (float(total) * rows_G)
    of_rank, of_all = _draws(name, num_draws, lookups_per_sample * batch_size, world_size)
    if counts is None:
        by_rank_G, by_any_G = prob_met(probs_G, of_rank), prob_met(probs_G, of_all)
    else:
        distinct = _distinct_by_group(name, histogram, starts, counts, (of_rank, of_all))
        by_rank_G, by_any_G = distinct[:, : rows_G.size] / rows_G
    return TableDemand(
        name=name,
        num_rows=histogram.total_rows,
        dim=dim,
        row_bytes=row_bytes,
        lookups_per_sample=lookups_per_sample,
        num_columns=num_columns,
        rows_G=rows_G,
        probs_G=probs_G,
        by_rank_G=by_rank_G,
        by_any_G=by_any_G,
    )


def _draws(
    name: str, num_draws: tuple[float, float] | None, num_lookups: float, world_size: int
) -> tuple[float, float]:
    """Independent lookups of a rank and of all ranks."""
    if num_draws is None:
        return num_lookups, num_lookups * world_size
    of_rank, of_all = num_draws
    if not 0 <= of_rank <= of_all < math.inf:
        raise ValueError(
            f"table {name} num_draws: expected 0 <= a rank's <= all ranks', got {of_rank} and "
            f"{of_all}."
        )
    return num_draws


def _distinct_by_group(
    name: str,
    histogram: CountHistogram,
    starts: Rows,
    counts: tuple[Rows, Rows],
    num_draws: tuple[float, float],
) -> Floats:
    """Expected distinct rows of each group of train counts, drawn by their held-out counts.

    Args:
        starts: int64 (G,), first of the histogram's counts in each group.

    Returns:
        float64 (2, G + 1), for either number of draws; last the rows never seen in train.
    """
    train, heldout = counts
    if not train.size == heldout.size == histogram.total_rows:
        raise ValueError(
            f"table {name} counts: expected {histogram.total_rows} rows, got {train.size} and "
            f"{heldout.size}. Pass the counts that the histogram was built from."
        )
    total = histogram.num_heldout_lookups
    distinct = np.zeros((2, starts.size + 1))
    rising = np.append(-histogram.values, 0)  # 0 is the count of the rows never seen
    for part in slices(train.size):
        read = np.flatnonzero(heldout[part])
        value = np.searchsorted(rising, -train[part][read])
        group = np.searchsorted(np.append(starts, histogram.values.size), value, "right") - 1
        for i, draws in enumerate(num_draws):
            weights = prob_drawn(heldout[part][read].astype(np.float64), total, draws)
            distinct[i] += np.bincount(group, weights, minlength=starts.size + 1)
    return distinct


def expected_distinct(demand: TableDemand, num_hot: int = 0) -> tuple[float, float, float]:
    """Expected distinct rows of a step, the ``num_hot`` most looked-up rows being hot.

    A group that is partly hot counts in proportion. Cold are all the others, also rows of which
    the profile knows nothing, as far as the estimate holds (see the module).

    Returns:
        Hot rows of a rank, cold rows of a rank, hot rows of any rank.
    """
    hot_G = take_rows(demand, num_hot)
    hot = float(hot_G @ demand.by_rank_G)
    cold = float((demand.rows_G - hot_G) @ demand.by_rank_G)
    return hot, cold, float(hot_G @ demand.by_any_G)


def expected_urgent(demand: TableDemand, num_hot: int = 0) -> float:
    """Expected distinct cold rows that a rank reads in a step and some rank in the next step.

    Their updates must be known before the next step, those of the others need not (exact
    look-ahead). Steps are taken as independent of one another: batches of one chunk have more rows
    in common than this.
    """
    cold_G = demand.rows_G - take_rows(demand, num_hot)
    both_G = demand.by_rank_G * demand.by_any_G if demand.by_both_G is None else demand.by_both_G
    return float(cold_G @ both_G)


def take_rows(demand: TableDemand, num_taken: float, num_skipped: float = 0) -> Floats:
    """Rows of each group among the most looked-up ``num_taken`` after ``num_skipped``.

    Returns:
        float64 (G,); numbers beyond the seen rows take nothing more.
    """
    ends = np.cumsum(demand.rows_G).astype(np.float64)
    reached = [
        np.clip(count - (ends - demand.rows_G), 0, demand.rows_G)
        for count in (num_skipped, num_skipped + num_taken)
    ]
    return np.asarray(reached[1] - reached[0])


def coverage(demand: TableDemand, num_hot: int) -> float:
    """H: share of the table's lookups that the ``num_hot`` most looked-up rows take."""
    return min(float(take_rows(demand, num_hot) @ demand.probs_G), 1.0)


def all_hot_share(demands: Sequence[TableDemand], num_hot: Mapping[str, int]) -> float:
    """Share of the samples all of whose lookups are hot: the product of H_t^L_t (SCARS).

    Lookups of a sample are taken as independent. In data they are not, so that more samples are all
    hot than this (``measure_hot_share`` counts them). A table without lookups leaves it as it is.

    Args:
        num_hot: hot rows by table; none where absent.
    """
    log_share = 0.0
    for demand in demands:
        if demand.lookups_per_sample == 0:
            continue
        hot_frac = coverage(demand, num_hot.get(demand.name, 0))
        if hot_frac <= 0:
            return 0.0
        log_share += demand.lookups_per_sample * math.log(hot_frac)
    return math.exp(log_share)


def _group_starts(counts: Floats, max_groups: int) -> Rows:
    """Where each group of falling counts starts, int64 (G,), G at most ``max_groups``.

    The highest half stay apart; below them a group spans a fixed ratio of counts, so that low
    counts, which hold most rows, stay apart as well.
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
    # reduceat refuses an empty list of starts
    return np.add.reduceat(values, starts) if starts.size else values[:0]


def _check(name: str, lookups_per_sample: float, max_groups: int, **whole: int) -> None:
    for what, value in whole.items():
        if value < 1:
            raise ValueError(f"table {name} {what}: expected at least 1, got {value}.")
    if not (math.isfinite(lookups_per_sample) and lookups_per_sample >= 0):
        raise ValueError(
            f"table {name} lookups_per_sample: expected at least 0, got {lookups_per_sample}."
        )
    if max_groups < 2:
        raise ValueError(f"table {name} max_groups: expected at least 2, got {max_groups}.")
    if whole["row_bytes"] < 4 * whole["dim"]:
        raise ValueError(
            f"table {name} row_bytes: expected at least 4 x dim = {4 * whole['dim']}, got "
            f"{whole['row_bytes']}. Count a row's floats and its optimizer state."
        )
