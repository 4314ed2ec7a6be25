"""The items of samples: their probabilities as negatives, uniform negatives, and the catalogue.

A loss of retrieval compares the item of a sample with the items of others, its negatives. Either
those are the items of the global batch, which occur as often as in the training split, or they are
drawn uniformly. Drawn items are samples of weight 0 that the loader adds to the batch: their ids
are looked up like all others, and every number of ranks draws the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from hotrec.data.batch import BatchItems
from hotrec.data.chunks import Dataset, Floats, Integers, Jagged
from hotrec.data.gather import Gathered, with_empty
from hotrec.data.groups import NO_GROUP, GroupBy, group_by_of
from hotrec.data.order import GlobalBatch, SampleOrder
from hotrec.runtime.ranks import rank, reduce_array, same_verdict, world_size
from hotrec.types import Rows

# The configuration key of the column.
ITEM_ID = "model.item_id"


@dataclass(frozen=True)
class Negatives:
    """Which items a positive sample is compared with in training.

    Args:
        feature: The column of the item.
        num_uniform: Items that each step draws, over all ranks; 0 for those of the global batch.
        seed: Seed of the drawn ones.
    """

    feature: str
    num_uniform: int = 0
    seed: int = 0


@dataclass(frozen=True)
class DrawnItems:
    """Draws uniform negatives.

    Args:
        feature: Number of the item's feature.
        rows: The rows that are items.
        num_drawn: Items of a step over all ranks, drawn with replacement.
        seed: Seed, the same on all ranks.
    """

    feature: int
    rows: range
    num_drawn: int
    seed: int

    @property
    def log_q(self) -> float:
        """The log of the expected occurrences of an item."""
        return float(np.log(self.num_drawn / len(self.rows)))

    def append(
        self, gathered: Gathered, step: GlobalBatch, order: SampleOrder
    ) -> tuple[Gathered, int]:
        """A rank's samples, then its share of the drawn items, and the size of that share.

        Those are samples of weight 0 with no id besides the item's.
        """
        rng = np.random.default_rng([self.seed, step.epoch, step.first])
        ids = rng.integers(self.rows.start, self.rows.stop, self.num_drawn)
        ends = np.cumsum(order.shares(replace(step, num_samples=self.num_drawn)))
        ids = ids[ends[order.rank - 1] if order.rank else 0 : ends[order.rank]]
        padded, num_samples = with_empty(gathered, ids.size), len(gathered.label)
        lengths_FB = padded.lengths.reshape(-1, num_samples + ids.size)
        at = int(lengths_FB[: self.feature + 1].sum())
        lengths_FB[self.feature, num_samples:] = 1
        values = np.concatenate((gathered.values[:at], ids, gathered.values[at:]))
        return replace(padded, values=values), int(ids.size)


@dataclass(frozen=True)
class ItemColumn:
    """The items of a loader's samples.

    Args:
        by: The column of the item; a sample without an id has none.
        log_q_N: Float32 (N,), the log of the probability of each row; None for an evaluation, which
            needs none.
        drawn: The uniform negatives; None if the items of the samples are candidates.
        seen: The column of the items that a sample's ranking leaves out; None for none.
    """

    by: GroupBy
    log_q_N: Floats | None = None
    drawn: DrawnItems | None = None
    seen: str | None = None

    def items_of(self, sparse: KeyedJaggedTensor, num_drawn: int) -> BatchItems:
        """The items of a batch, of which the last samples are drawn ones."""
        ids_B = self.by.groups_of(sparse)
        is_item_B = ids_B != NO_GROUP
        log_q_B = torch.zeros(ids_B.shape)
        if self.drawn is not None:
            log_q_B.fill_(self.drawn.log_q)
            is_item_B = torch.arange(ids_B.numel()) >= ids_B.numel() - num_drawn
        elif self.log_q_N is not None:
            log_q_B[is_item_B] = torch.from_numpy(self.log_q_N[ids_B[is_item_B].numpy()])
        seen_BS = None if self.seen is None else _padded(sparse[self.seen])
        return BatchItems(ids_B, log_q_B, is_item_B, seen_BS)


def _padded(ids: JaggedTensor) -> torch.Tensor:
    """The ids of each sample, int64 (B, S), behind them ``NO_GROUP``."""
    lengths_B = ids.lengths()
    is_id_BS = torch.arange(int(lengths_B.max())) < lengths_B.unsqueeze(1)
    ids_BS = torch.full(is_id_BS.shape, NO_GROUP, dtype=torch.int64)
    ids_BS[is_id_BS] = ids.values().long()
    return ids_BS


def training_items(dataset: Dataset, split: str, negatives: Negatives) -> ItemColumn:
    """The items of the training samples, with the probabilities of their negatives; collective.

    Raises:
        ValueError: If the dataset has no such column.
        ArtifactError: If a chunk is damaged.
    """
    by = same_verdict(lambda: item_column(dataset, negatives.feature))
    # For the model, the row of unknown values is an item like any other, except for drawing.
    column = ItemColumn(replace(by, skips_first_row=False))
    if not negatives.num_uniform:
        counts_N = count_items(dataset, split, column.by)
        with np.errstate(divide="ignore"):  # items that no sample has are not looked up
            log_q_N = np.log(counts_N / counts_N.sum()).astype(np.float32)
        return replace(column, log_q_N=log_q_N)
    schema, number = dataset.schema, list(dataset.schema.feature_names).index(by.feature)
    rows = range(by.skips_first_row, schema.table(schema.features[number].table).num_rows)
    drawn = DrawnItems(number, rows, negatives.num_uniform, negatives.seed)
    return replace(column, drawn=drawn)


def items_to_rank(dataset: Dataset, feature: str, seen: str | None) -> ItemColumn:
    """The items of samples to evaluate.

    Args:
        dataset: The dataset.
        feature: The column of the item.
        seen: The column of the items that the ranking leaves out; None for none.

    Raises:
        ValueError: If the dataset has no such column, or its items are of another table.
    """
    by, features = item_column(dataset, feature), dataset.schema.features
    (table,) = (of.table for of in features if of.name == feature)
    lists = [of.name for of in features if of.is_multi_hot and of.table == table]
    if seen is not None and seen not in lists:
        raise ValueError(
            f"trainer.eval_ranking_without: expected a column of kind categorical_list of table "
            f"{table}, as {feature} is, one of {lists}, got {seen!r}. Correct the name, or remove "
            "it."
        )
    return ItemColumn(by, seen=seen)


def item_column(dataset: Dataset, feature: str) -> GroupBy:
    """The column of the item.

    Raises:
        ValueError: If the dataset has no such column with one id per sample.
    """
    by = group_by_of(dataset, feature, ITEM_ID)
    assert by is not None
    return by


def count_items(dataset: Dataset, split: str, by: GroupBy) -> Rows:
    """The samples of a split that have each row as their item, int64 (N,); collective."""

    def count() -> Rows:
        counts_N = np.zeros(_num_rows(dataset, by), np.int64)
        for _, _, ids in _ids_of_my_chunks(dataset, split, by):
            counts_N += np.bincount(ids, minlength=counts_N.size)
        return counts_N

    return reduce_array(same_verdict(count), ReduceOp.SUM)


@dataclass(frozen=True)
class ItemSamples:
    """The last sample of each item of a split, for a loader: its columns describe the item.

    Args:
        rows_of_chunks: Positions in each chunk, int64, increasing.
        identity: What distinguishes this selection from others.
    """

    rows_of_chunks: tuple[Rows, ...]
    identity: Mapping[str, Any]
    is_all_hot: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of these samples in each chunk."""
        return tuple(rows.size for rows in self.rows_of_chunks)

    def rows(self, chunk: int) -> Rows:
        """Their positions in a chunk."""
        return self.rows_of_chunks[chunk]


def last_samples(dataset: Dataset, split: str, by: GroupBy) -> ItemSamples:
    """The last sample of each item, in the order of the files; collective.

    Raises:
        ValueError: If no sample has an item.
        ArtifactError: If a chunk is damaged.
    """

    def find() -> Rows:
        last_N = np.full(_num_rows(dataset, by), -1, np.int64)
        for _, first, ids in _ids_of_my_chunks(dataset, split, by):
            np.maximum.at(last_N, ids, first + np.arange(ids.size))
        return last_N

    last_N = reduce_array(same_verdict(find), ReduceOp.MAX)
    found = np.sort(last_N[int(by.skips_first_row) :])
    found = found[found >= 0]
    if not found.size:
        raise ValueError(
            f"{ITEM_ID}: expected a column with items in the split {split}, got {by.feature!r}, "
            "which has none. Name another column."
        )
    ends = np.cumsum([chunk.num_samples for chunk in dataset.chunks(split)])
    bounds = np.searchsorted(found, [0, *ends])
    return ItemSamples(
        tuple(
            found[begin:end] - (ends[chunk - 1] if chunk else 0)
            for chunk, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
        ),
        {"samples": f"the last of each {by.feature}"},
    )


def _num_rows(dataset: Dataset, by: GroupBy) -> int:
    tables = {feature.name: feature.table for feature in dataset.schema.features}
    return dataset.schema.table(tables[by.feature]).num_rows


def _ids_of_my_chunks(
    dataset: Dataset, split: str, by: GroupBy
) -> Iterator[tuple[int, int, Integers]]:
    """This rank's chunks: the number, the number of samples before it, and the items (S,)."""
    num_rows, first = _num_rows(dataset, by), 0
    for chunk, info in enumerate(dataset.chunks(split)):
        if chunk % world_size() == rank():
            ids = dataset.block(split, chunk).features[by.feature]
            assert not isinstance(ids, Jagged), by
            if ids.size and (ids.min() < 0 or ids.max() >= num_rows):
                outside = ids[(ids < 0) | (ids >= num_rows)][0]
                raise ValueError(
                    f"feature {by.feature}: expected rows in 0..{num_rows - 1}, got row {outside} "
                    f"in chunk {info.file}. Prepare the dataset again."
                )
            yield chunk, first, ids
        first += info.num_samples
