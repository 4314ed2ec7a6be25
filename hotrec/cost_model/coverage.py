"""What follows from counts: coverage curves, distinct rows per batch, confidence, hot samples.

Everything here is arithmetic on a histogram, except the share of all-hot samples, which needs the
samples themselves and takes one more pass over the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrec.cost_model.blocks import Block, Mask, check_block
from hotrec.cost_model.histogram import CountHistogram
from hotrec.types import Partition, Schema

Floats = npt.NDArray[np.float64]
NUM_CURVE_POINTS = 65
# Read off the curve for tables and messages.
LANDMARK_FRACS = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5)


def wilson_interval(
    num_hits: npt.ArrayLike, num_trials: npt.ArrayLike, *, confidence: float
) -> tuple[Floats, Floats]:
    """Wilson's score interval of a proportion (Wilson, JASA 1927); 0..1 where there is no trial.

    The trials are taken as independent. Lookups of one multi-hot bag are not quite, so for them the
    interval is somewhat too narrow.

    Args:
        num_hits: Any shape, broadcast against ``num_trials``.
        confidence: Such as 0.95, two-sided.

    Returns:
        Lower and upper end, float64.

    Raises:
        ValueError: If confidence is not inside 0..1.
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: expected a value between 0 and 1, got {confidence}.")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    hits = np.asarray(num_hits, np.float64)
    trials = np.asarray(num_trials, np.float64)
    n = np.maximum(trials, 1.0)
    p = np.where(trials > 0, hits / n, 0.5)
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = np.where(trials > 0, np.maximum(centre - half, 0.0), 0.0)
    high = np.where(trials > 0, np.minimum(centre + half, 1.0), 1.0)
    # The formula ends at 0 and 1 only up to rounding; an interval must hold its own estimate.
    return np.where(hits == 0, 0.0, low), np.where(hits == trials, 1.0, high)


def cover_lookups(histogram: CountHistogram, fracs: Floats) -> tuple[Floats, Floats | None]:
    """The share of lookups that the most accessed rows take.

    Rows are ranked by their train counts for both shares, so the held-out one shows drift. Inside a
    group of equal counts the held-out share is interpolated: the mean over the orders of the ties.

    Args:
        fracs: float64 (P,), fractions of all rows.

    Returns:
        float64 (P,) for train, and for the held-out data, or None where there is none. Zeros where
        there is no lookup.
    """
    ends = np.concatenate([[0], np.cumsum(histogram.num_rows), [histogram.total_rows]])
    position = fracs * histogram.total_rows
    train = np.concatenate([[0], np.cumsum(histogram.values * histogram.num_rows)])
    train_at = np.interp(position, ends, np.append(train, train[-1]))
    train_share = train_at / max(int(train[-1]), 1)
    total = histogram.num_heldout_lookups
    if total == 0:
        return train_share, None
    heldout = np.concatenate([[0], np.cumsum(histogram.heldout), [total]])
    return train_share, np.interp(position, ends, heldout) / total


def coverage_curve(histogram: CountHistogram) -> dict[str, Any]:
    """The coverage curve as plain lists: ``rows_frac``, ``train``, ``heldout`` (list or None).

    The points are spaced by ratio, from one row to all of them, with 0 in front.
    """
    total = max(histogram.total_rows, 1)
    fracs = np.geomspace(1 / total, 1.0, NUM_CURVE_POINTS)
    fracs = np.union1d(np.concatenate([[0.0], fracs]), [f for f in LANDMARK_FRACS if f > 1 / total])
    fracs[-1] = 1.0
    train, heldout = cover_lookups(histogram, fracs)
    return {
        "rows_frac": fracs.tolist(),
        "train": train.tolist(),
        "heldout": None if heldout is None else heldout.tolist(),
    }


def coverage_landmarks(
    histogram: CountHistogram, *, confidence: float | None
) -> list[dict[str, Any]]:
    """Coverage at a few round fractions of the rows.

    Args:
        confidence: Give Wilson intervals of this confidence for a sampled profile; None for an
            exact one. The train share of a sample leans high, since the same sample ranked the
            rows; the held-out share does not.
    """
    train, heldout = cover_lookups(histogram, np.array(LANDMARK_FRACS))
    landmarks = []
    for i, frac in enumerate(LANDMARK_FRACS):
        point: dict[str, Any] = {"rows_frac": frac, "train": float(train[i]), "heldout": None}
        if heldout is not None:
            point["heldout"] = float(heldout[i])
        if confidence is not None:
            point["train_interval"] = _interval(train[i], histogram.num_lookups, confidence)
            if heldout is not None:
                trials = histogram.num_heldout_lookups
                point["heldout_interval"] = _interval(heldout[i], trials, confidence)
        landmarks.append(point)
    return landmarks


def _interval(share: float, num_trials: int, confidence: float) -> list[float]:
    low, high = wilson_interval(share * num_trials, num_trials, confidence=confidence)
    return [float(low), float(high)]


def estimate_num_rows_above(
    histogram: CountHistogram, *, num_samples: int, accesses_per_sample: float, confidence: float
) -> tuple[int, int, int]:
    """How many rows of the whole data reach an access rate, from a sample of it (FAE, section 4).

    Args:
        num_samples: The number of samples that were counted.
        accesses_per_sample: The lowest rate of the rows to count.

    Returns:
        Rows whose rate is surely above (lower end of the Wilson interval), rows whose estimate is,
        and rows that may be (upper end). Only rows that the sample has seen are counted.
    """
    trials = np.maximum(num_samples, histogram.values)
    low, high = wilson_interval(histogram.values, trials, confidence=confidence)
    estimate = histogram.values / max(num_samples, 1)
    sure, likely, possible = (
        int(histogram.num_rows[rate >= accesses_per_sample].sum()) for rate in (low, estimate, high)
    )
    return sure, likely, possible


def predict_distinct_rows(histogram: CountHistogram, *, num_samples: int, batch_size: int) -> float:
    """Distinct rows that a batch is expected to touch: sum over rows of 1 - (1 - p)^K.

    p is a row's share of the lookups and K the lookups of a batch, all taken as independent; with
    one id per sample K is the batch size. Exact counts of the same data are met to a few percent.
    Rows that a sampled profile never saw are missing from the sum.

    Args:
        histogram: of the rows to count: a table, several tables one by one, or a part of one only
            if its lookups are scaled by the caller.
        num_samples: Samples that were counted, over which the lookups of a batch are averaged.
        batch_size: Samples in the batch.
    """
    num_lookups = histogram.num_lookups
    return predict_distinct(
        histogram.values,
        histogram.num_rows,
        num_lookups=num_lookups,
        num_draws=batch_size * num_lookups / max(num_samples, 1),
    )


def predict_distinct(
    values: npt.NDArray[np.int64],
    num_rows: npt.NDArray[np.int64],
    *,
    num_lookups: int,
    num_draws: float,
) -> float:
    """Expected distinct rows among ``num_draws`` lookups, for rows grouped by count.

    Args:
        values: int64 (V,), counts.
        num_rows: int64 (V,), rows with that count.
        num_lookups: Lookups that the counts are shares of, also those of other rows.
        num_draws: Lookups drawn.
    """
    if num_draws <= 0 or num_lookups == 0:
        return 0.0
    with np.errstate(divide="ignore"):  # a row that takes every lookup: log 0, and 1 - 0 is right
        log_missed = num_draws * np.log1p(-values / num_lookups)
    return float((num_rows * -np.expm1(log_missed)).sum())


@dataclass(frozen=True)
class HotShare:
    """How much of a stream is hot under a partition."""

    num_samples: int
    num_all_hot: int
    num_lookups: int
    num_hot_lookups: int

    @property
    def all_hot_frac(self) -> float:
        """Share of the samples all of whose ids are hot; an empty bag is hot. 0 without samples."""
        return self.num_all_hot / max(self.num_samples, 1)

    @property
    def hot_lookup_frac(self) -> float:
        return self.num_hot_lookups / max(self.num_lookups, 1)


def measure_hot_share(blocks: Iterable[Block], schema: Schema, partition: Partition) -> HotShare:
    """Count the samples and the lookups that are all hot, in one pass and one byte per row.

    Raises:
        ValueError: If a block does not fit the schema, or the partition another one.
    """
    is_hot = _hot_masks(schema, partition)
    num_samples = num_all_hot = num_lookups = num_hot_lookups = 0
    for block in blocks:
        check_block(block, schema, position=num_samples)
        all_hot = np.ones(block.num_samples, np.bool_)
        for feature in schema.features:
            hot = is_hot[feature.table][block.rows[feature.name]]
            lengths = block.lengths.get(feature.name)
            if lengths is None:
                all_hot &= hot
            else:
                all_hot[np.repeat(np.arange(block.num_samples), lengths)[~hot]] = False
            num_lookups += hot.size
            num_hot_lookups += int(np.count_nonzero(hot))
        num_samples += block.num_samples
        num_all_hot += int(np.count_nonzero(all_hot))
    return HotShare(num_samples, num_all_hot, num_lookups, num_hot_lookups)


def _hot_masks(schema: Schema, partition: Partition) -> dict[str, Mask]:
    expected = {table.name: table.num_rows for table in schema.tables}
    if dict(partition.num_rows) != expected:
        raise ValueError(
            f"partition: expected the tables {expected}, got {dict(partition.num_rows)}. "
            f"Make the partition from this dataset's profile."
        )
    masks = {}
    for name, num_rows in expected.items():
        masks[name] = np.zeros(num_rows, np.bool_)
        masks[name][partition.hot(name)] = True
    return masks
