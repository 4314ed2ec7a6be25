"""Synthetic logs: Zipf popularity per table, multi-hot, drift, labels that can be learned.

Which rows are popular is known in advance and stored with the dataset, so that a profile and a
partition have exact expected answers. Everything is a pure function of the specification, drawn
piece by piece: memory is a few numbers per row of the tables and one piece of samples. Numpy only.

The model: in period p, table t is read by popularity rank k with probability ~ k ** -exponent, and
``row_of_rank[t]`` is the row with that rank (row 0, for out-of-vocabulary ids, has none). Each row
has a latent effect; the logit is a weighted sum of the bags' effects and of the dense columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrec.artifact import Artifact, scratch_directory
from hotrec.config.data import SyntheticSpec
from hotrec.config.validate import validate
from hotrec.data.chunks import (
    DATASET,
    SPLITS,
    Block,
    ChunkWriter,
    Integers,
    Jagged,
    commit_dataset,
    offsets_of,
)
from hotrec.data.days import day_document
from hotrec.data.kept import check_not_grown
from hotrec.runtime.progress import Progress
from hotrec.types import Feature, Rows, Schema, Table

# Samples drawn at once. Part of the definition of the data: another value gives other samples.
_PIECE = 65_536
_DENSE_SHARE = 0.25  # of the logit's variance
# Streams of random numbers that must not repeat each other.
_EFFECTS, _PERMUTATIONS, _SAMPLES, _DENSE_WEIGHTS = range(4)

Float64s = npt.NDArray[np.float64]

CLICK_RATE = 0.25  # about the mean of the labels
NUM_HOT_RECORDED = 10_000  # most popular rows of each table and period


class _ZipfTable:
    """Draws rows of one table: Zipf over ranks, a permutation from rank to row."""

    def __init__(self, spec: SyntheticSpec, index: int) -> None:
        self._spec = spec
        self._index = index
        num_ranks = spec.num_rows[index] - 1
        weights = np.arange(1, num_ranks + 1, dtype=np.float64) ** -spec.zipf_exponent
        self._cumulative = np.cumsum(weights / weights.sum())
        # Rounding must not leave a gap above the last rank.
        self._cumulative[-1] = 1.0
        self._permutation_rng = np.random.default_rng([spec.seed, _PERMUTATIONS, index])
        if spec.rows_by_popularity:
            ranks = np.arange(num_ranks)
        else:
            ranks = self._permutation_rng.permutation(num_ranks)
        self.row_of_rank: Rows = ranks.astype(np.int64) + 1
        rng = np.random.default_rng([spec.seed, _EFFECTS, index])
        self.effects = rng.standard_normal(num_ranks + 1)
        # One row may serve a fifth of the lookups: without this its effect alone would set the
        # click rate. Mean 0 and variance 1 over lookups, not over rows.
        share = np.diff(self._cumulative, prepend=0.0)
        of_rank = self.effects[self.row_of_rank]
        self.effects -= share @ of_rank
        deviation = math.sqrt(share @ np.square(self.effects[self.row_of_rank]))
        self.effects /= max(deviation, 1e-12)

    def drift(self) -> None:
        """Start the next period: some ranks, popular and unpopular, swap their rows."""
        num_ranks = self.row_of_rank.size
        num_moved = round(self._spec.drift_frac * num_ranks)
        if num_moved < 2:
            return
        moved = self._permutation_rng.choice(num_ranks, num_moved, replace=False)
        # One cycle through the chosen ranks: every one of them really gets another row.
        self.row_of_rank[moved] = self.row_of_rank[np.roll(moved, 1)]

    def draw(self, rng: np.random.Generator, num_ids: int) -> Rows:
        ranks = np.searchsorted(self._cumulative, rng.random(num_ids), side="right")
        # random() < 1 and the last bound is 1, so a rank beyond the end cannot occur.
        return self.row_of_rank[ranks]


def synthetic_schema(spec: SyntheticSpec) -> Schema:
    """Tables ``t0, t1, ...`` read by features ``c0, c1, ...``, dense columns ``d0, d1, ...``."""
    lengths = _mean_lengths(spec)
    return Schema(
        dense=tuple(f"d{index}" for index in range(spec.num_dense)),
        features=tuple(
            Feature(f"c{index}", f"t{index}", is_multi_hot=length != 1.0)
            for index, length in enumerate(lengths)
        ),
        tables=tuple(Table(f"t{index}", num_rows) for index, num_rows in enumerate(spec.num_rows)),
    )


def _mean_lengths(spec: SyntheticSpec) -> list[float]:
    if len(spec.mean_lengths) == len(spec.num_rows):
        return list(spec.mean_lengths)
    return (spec.mean_lengths or [1.0]) * len(spec.num_rows)


class SyntheticLog:
    """The samples of a specification, in order of time."""

    def __init__(self, spec: SyntheticSpec) -> None:
        validate(spec, "synthetic")
        self.spec = spec
        self.num_samples = spec.num_train + spec.num_valid + spec.num_test
        self._mean_lengths = _mean_lengths(spec)
        self._tables = [_ZipfTable(spec, index) for index in range(len(spec.num_rows))]
        rng = np.random.default_rng([spec.seed, _DENSE_WEIGHTS])
        weights = rng.standard_normal(spec.num_dense)
        self._dense_weights = weights / max(float(np.linalg.norm(weights)), 1e-12)
        self.hot_rows: list[list[Rows]] = []
        self._record_hot_rows()

    def _record_hot_rows(self) -> None:
        top = NUM_HOT_RECORDED
        self.hot_rows.append([table.row_of_rank[:top].copy() for table in self._tables])

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """All samples, once, with their split; ``hot_rows[p][t]`` is filled period by period."""
        spec, first = self.spec, 0
        sizes = (spec.num_train, spec.num_valid, spec.num_test)
        split_ends = dict(zip(SPLITS, itertools.accumulate(sizes), strict=True))
        for piece in itertools.count():
            if first >= self.num_samples:
                return
            period = self._period_of(first)
            while len(self.hot_rows) <= period:
                for table in self._tables:
                    table.drift()
                self._record_hot_rows()
            split = next(name for name in SPLITS if first < split_ends[name])
            # No piece crosses a period or a split.
            period_end = (period + 1) * self.num_samples // spec.num_periods
            last = min(first + _PIECE, split_ends[split], period_end)
            rng = np.random.default_rng([spec.seed, _SAMPLES, piece])
            yield split, self._draw(rng, last - first)
            first = last

    def _period_of(self, sample: int) -> int:
        ends = range(1, self.spec.num_periods + 1)
        return next(p - 1 for p in ends if sample < p * self.num_samples // self.spec.num_periods)

    def _draw(self, rng: np.random.Generator, num_samples: int) -> Block:
        spec = self.spec
        dense = rng.standard_normal((num_samples, spec.num_dense), np.float32)
        features: dict[str, Integers | Jagged] = {}
        effect = np.zeros(num_samples)
        for index, (table, mean) in enumerate(zip(self._tables, self._mean_lengths, strict=True)):
            if mean == 1.0:
                rows = table.draw(rng, num_samples)
                features[f"c{index}"] = rows
                effect += table.effects[rows]
            else:
                bags = _draw_bags(rng, table, mean, num_samples)
                features[f"c{index}"] = bags
                effect += _mean_effects(table, bags)
        dense_share = _DENSE_SHARE if spec.num_dense else 0.0
        logit = effect * math.sqrt((1 - dense_share) / len(self._tables))
        logit += (dense @ self._dense_weights) * math.sqrt(dense_share)
        bias = _bias_for(CLICK_RATE, spec.signal)
        clicked = rng.random(num_samples) < 1 / (1 + np.exp(-(bias + spec.signal * logit)))
        return Block(clicked.astype(np.float32), dense, features)


def _draw_bags(
    rng: np.random.Generator, table: _ZipfTable, mean: float, num_samples: int
) -> Jagged:
    lengths = rng.poisson(mean, num_samples)
    offsets = offsets_of(lengths)
    return Jagged(table.draw(rng, int(offsets[-1])), offsets)


def _mean_effects(table: _ZipfTable, bags: Jagged) -> Float64s:
    lengths = np.diff(bags.offsets)
    owner = np.repeat(np.arange(lengths.size), lengths)
    sums = np.bincount(owner, table.effects[bags.values], minlength=lengths.size)
    # The root keeps the variance of a bag's effect at one, whatever its length.
    scaled: Float64s = sums / np.sqrt(np.maximum(lengths, 1))
    return scaled


def _bias_for(click_rate: float, signal: float) -> float:
    """The bias b with E[sigmoid(b + signal * z)] about ``click_rate``, z standard normal.

    Uses sigmoid(x) ~ Phi(x / 1.702), whose mean over a normal x has a closed form.
    """
    return math.log(click_rate / (1 - click_rate)) * math.sqrt(1 + (signal / 1.702) ** 2)


def write_synthetic(
    spec: SyntheticSpec, output: str | Path, *, overwrite: bool = False
) -> Artifact:
    """Draw a synthetic log and write it as a dataset.

    Besides the chunks it writes ``popularity/<table>.npy``: int64 (periods, top), the most popular
    rows of each period in decreasing order; the manifest names the first ones of the first period.

    Args:
        spec: What to draw.
        output: The directory of the dataset, replaced if it exists.
        overwrite: Whether to replace a dataset that files were appended to.

    Raises:
        ValueError: if the specification is invalid.
    """
    log = SyntheticLog(spec)
    schema = synthetic_schema(spec)
    with scratch_directory(Path(output), kind=DATASET) as scratch:
        if not overwrite:
            check_not_grown(Path(output))
        writers = {
            split: ChunkWriter(scratch, split, schema, spec.rows_per_chunk) for split in SPLITS
        }
        with Progress("synthetic", log.num_samples, unit="samples") as progress:
            for split, block in log.blocks():
                writers[split].write(block)
                progress.update(len(block))
        splits = {split: writer.close() for split, writer in writers.items()}
        _write_popularity(scratch, log)
        source = {
            "format": "synthetic",
            "days": _days(spec),
            "spec": vars(spec),
            "hot_rows": {
                f"t{index}": rows[:100].tolist() for index, rows in enumerate(log.hot_rows[0])
            },
        }
        return commit_dataset(scratch, Path(output), schema, splits, source)


def _days(spec: SyntheticSpec) -> list[dict[str, Any]]:
    """The periods, as days of the manifest."""
    ends = np.cumsum([0, spec.num_train, spec.num_valid, spec.num_test])
    bounds = np.arange(spec.num_periods + 1) * ends[-1] // spec.num_periods
    return [
        day_document(f"period {period}", np.diff(ends.clip(*bounds[period : period + 2])))
        for period in range(spec.num_periods)
    ]


def _write_popularity(scratch: Path, log: SyntheticLog) -> None:
    directory = scratch / "popularity"
    directory.mkdir()
    for index in range(len(log.spec.num_rows)):
        np.save(directory / f"t{index}.npy", np.stack([rows[index] for rows in log.hot_rows]))
