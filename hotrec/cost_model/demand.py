"""The demand of a step on a table: how likely each row is read, by one rank and by any rank.

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
from typing import Literal, NotRequired, TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from hotrec.cost_model.histogram import CountHistogram, slices
from hotrec.types import Rows

Floats = npt.NDArray[np.float64]


def prob_drawn(counts: Floats, num_lookups: float, num_draws: float) -> Floats:
    """Probability that drawing ``num_draws`` of ``num_lookups`` lookups hits a row.

    Lookups are drawn without replacement.
    1 - C(K - c, n) / C(K, n) is a product of m = min(c, n) factors 1 - M / (K - j), M the larger of
    the two; all are taken at the middle j, which is off by less than 0.1 / K of q.

    Args:
        counts: Count c of each row, above 0; float64 of any shape.
        num_lookups: Lookups K of the profile, at least every c.
        num_draws: Draws n; a mean may be a fraction. May exceed K.

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
    """Probability that a row is hit both by some draws and by further draws.

    P(A and B) = P(A) + P(B) - P(A or B), each by ``prob_drawn``, is unbiased, where the product
    P(A) P(B) is too high for rows with few counts: a row that the profile saw once cannot be drawn
    twice. The product is used where the draws together exceed the lookups.

    Args:
        counts: Count c of each row, above 0; float64 of any shape.
        num_lookups: Lookups K of the profile, at least every c.
        num_draws: The number of draws.
        num_other_draws: The number of further draws.

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
    """The demand of a step on one table.

    Args:
        name: Name of the table.
        num_rows: Rows R, also those never seen.
        dim: Embedding dim D.
        row_bytes: Bytes of a row with its optimizer state, at least 4 D.
        lookups_per_sample: Mean number of ids L of a sample, over all features of the table.
        num_columns: The number of features that read the table.
        rows_G: Rows of each group, most looked-up first, int64 (G,). Rows never seen are in none.
        probs_G: Mean p of a row of each group, float64 (G,).
        by_rank_G: Mean q of a row of each group, float64 (G,).
        by_any_G: Mean Q of a row of each group, float64 (G,).
        by_both_G: Mean probability that a rank reads a row in a step and any rank reads it in the
            next, float64 (G,). None stands for q Q.
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


class DemandOptions(TypedDict):
    """The table and the step of a demand.

    Args:
        dim: Embedding dim D.
        row_bytes: Bytes of a row with its optimizer state.
        lookups_per_sample: Mean number of ids L of a sample, over all features of the table.
        num_columns: The number of features that read the table.
        batch_size: Batch B of a rank.
        world_size: World size W.
        max_groups: The largest number of groups.
        num_draws: Independent lookups that the lookups of a rank and of all ranks are worth
            (``hotrec.cost_model.locality``). By default they are independent, n and n W.
    """

    dim: int
    row_bytes: int
    lookups_per_sample: float
    num_columns: int
    batch_size: int
    world_size: int
    max_groups: NotRequired[int]
    num_draws: NotRequired[tuple[float, float] | None]


def build_demand(
    name: str, histogram: CountHistogram, **options: Unpack[DemandOptions]
) -> TableDemand:
    """Builds a table's demand from the train counts of its rows.

    Groups are the distinct counts. If there are more than ``max_groups``, the highest counts stay
    separate and neighbours among the others are merged, which keeps the sums of rows, lookups and
    expected distinct rows.

    Raises:
        ValueError: If a number is below 1 (0 for ``lookups_per_sample``), a row has fewer bytes
            than its floats, or all ranks draw less than one rank.
    """
    max_groups, of_rank, of_all = _check(name, options)
    counts = histogram.values.astype(np.float64)
    total = histogram.num_lookups
    by_rank = prob_drawn(counts, total, of_rank)
    by_any = prob_drawn(counts, total, of_all)
    by_both = prob_both(counts, total, of_rank, of_all)
    starts = _group_starts(counts, max_groups)
    rows_G = _sum_groups(histogram.num_rows, starts)
    return TableDemand(
        name=name,
        num_rows=histogram.total_rows,
        dim=options["dim"],
        row_bytes=options["row_bytes"],
        lookups_per_sample=options["lookups_per_sample"],
        num_columns=options["num_columns"],
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
    counts: tuple[Rows, Rows] | None = None,
    **options: Unpack[DemandOptions],
) -> TableDemand:
    """Builds the demand of held-out data on a table whose rows are ranked by the train data.

    p of a group is its share of the held-out lookups by its rows. With ``counts``, q of a row is
    that of its own held-out count, as in ``build_demand``, and a group has the mean. Without, rows
    of equal train count are taken as equally likely, q = 1 - (1 - p)^n: the expectation for
    held-out counts that are Poisson with the group's mean; where the rows of a group differ in
    truth (those never seen in train do: most are never read, some are new and popular) it is an
    upper bound. Rows never seen in train that held-out lookups read are the last group. p need not
    fall from group to group.

    Args:
        name: Name of the table.
        histogram: Histogram with held-out lookups.
        counts: Train and held-out counts of each row, int64 (R,) each, of the histogram.
        **options: As in ``build_demand``, but of the held-out data.

    Raises:
        ValueError: As ``build_demand``, or if the histogram has no held-out lookups, or is not of
            ``counts``.
    """
    max_groups, of_rank, of_all = _check(name, options)
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
    if counts is None:
        by_rank_G, by_any_G = prob_met(probs_G, of_rank), prob_met(probs_G, of_all)
    else:
        distinct = _distinct_by_group(name, histogram, starts, counts, (of_rank, of_all))
        by_rank_G, by_any_G = distinct[:, : rows_G.size] / rows_G
    return TableDemand(
        name=name,
        num_rows=histogram.total_rows,
        dim=options["dim"],
        row_bytes=options["row_bytes"],
        lookups_per_sample=options["lookups_per_sample"],
        num_columns=options["num_columns"],
        rows_G=rows_G,
        probs_G=probs_G,
        by_rank_G=by_rank_G,
        by_any_G=by_any_G,
    )


def _distinct_by_group(
    name: str,
    histogram: CountHistogram,
    starts: Rows,
    counts: tuple[Rows, Rows],
    num_draws: tuple[float, float],
) -> Floats:
    """Expected distinct rows of each group of train counts, drawn by their held-out counts.

    Args:
        name: Name of the table.
        histogram: Histogram with held-out lookups.
        starts: First count of each group in the histogram, int64 (G,).
        counts: Train and held-out counts of each row.
        num_draws: Draws of a rank and of all ranks.

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
    """Expected distinct rows of a step where the ``num_hot`` most looked-up rows are hot.

    A group that is partly hot counts in proportion. All other rows are cold, also those that the
    profile never saw, whose reads the estimate includes (see the module).

    Returns:
        Hot rows of a rank, cold rows of a rank, hot rows of any rank.
    """
    hot_G = take_rows(demand, num_hot)
    hot = float(hot_G @ demand.by_rank_G)
    cold = float((demand.rows_G - hot_G) @ demand.by_rank_G)
    return hot, cold, float(hot_G @ demand.by_any_G)


def expected_urgent(demand: TableDemand, num_hot: int = 0) -> float:
    """Expected distinct cold rows that a rank reads in a step and some rank in the next step.

    With exact look-ahead only their updates must arrive before the next step. Steps are taken as
    independent; batches of one chunk have more rows in common.
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

    Lookups of a sample are taken as independent. Real ones are not, so more samples are all hot.

    Args:
        demands: The demand of every table. Tables without lookups do not count.
        num_hot: Hot rows of each table, 0 where absent.
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


def _check(name: str, options: DemandOptions) -> tuple[int, float, float]:
    """Checks the options and returns the number of groups and the draws of a rank and of all."""
    dim, row_bytes = options["dim"], options["row_bytes"]
    keys: tuple[Literal["dim", "row_bytes", "num_columns", "batch_size", "world_size"], ...]
    keys = ("dim", "row_bytes", "num_columns", "batch_size", "world_size")
    for key in keys:
        if options[key] < 1:
            raise ValueError(f"table {name} {key}: expected at least 1, got {options[key]}.")
    per_sample = options["lookups_per_sample"]
    if not (math.isfinite(per_sample) and per_sample >= 0):
        raise ValueError(f"table {name} lookups_per_sample: expected at least 0, got {per_sample}.")
    max_groups = options.get("max_groups", MAX_GROUPS)
    if max_groups < 2:
        raise ValueError(f"table {name} max_groups: expected at least 2, got {max_groups}.")
    if row_bytes < 4 * dim:
        raise ValueError(
            f"table {name} row_bytes: expected at least 4 x dim = {4 * dim}, got {row_bytes}. "
            "Count a row's floats and its optimizer state."
        )
    num_lookups = per_sample * options["batch_size"]
    draws = options.get("num_draws") or (num_lookups, num_lookups * options["world_size"])
    if not 0 <= draws[0] <= draws[1] < math.inf:
        raise ValueError(
            f"table {name} num_draws: expected 0 <= a rank's <= all ranks', got {draws[0]} and "
            f"{draws[1]}."
        )
    return max_groups, *draws
