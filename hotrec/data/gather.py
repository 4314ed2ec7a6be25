"""Gathers the arrays of one batch from mapped chunks, vectorised, and checks ids.

Data is checked as it is read: an id outside its table would otherwise read another table's memory,
or stop a single rank in the middle of a collective.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hotrec.data.chunks import Block, Dataset, Floats, Integers, Jagged
from hotrec.data.order import Piece
from hotrec.types import Feature, Rows

Scalar = TypeVar("Scalar", bound=np.generic)

# Batches span few chunks at a time; mapping one again costs a millisecond.
_OPEN_CHUNKS = 4


@dataclass(frozen=True)
class Gathered:
    """The arrays of one batch.

    Args:
        label: float32 (B,), or (B, L) with several labels.
        dense: float32 (B, N).
        weight: float32 (B,); None without weights.
        values: int64 (K,), feature-major: all bags of the first feature, then the second, ...
        lengths: int32 (F * B,), feature-major.
    """

    label: Floats
    dense: Floats
    weight: Floats | None
    values: Rows
    lengths: npt.NDArray[np.int32]


def with_empty(gathered: Gathered, num_empty: int) -> Gathered:
    """The samples of a batch, then ``num_empty`` of weight 0 without ids."""
    num_samples, weight = len(gathered.label), gathered.weight
    if weight is None:
        weight = np.ones(num_samples, np.float32)
    added = (0, num_empty)
    return Gathered(
        label=np.pad(gathered.label, (added, (0, 0))[: gathered.label.ndim]),
        dense=np.pad(gathered.dense, (added, (0, 0))),
        weight=np.pad(weight, added),
        values=gathered.values,
        lengths=np.pad(gathered.lengths.reshape(-1, num_samples), ((0, 0), added)).reshape(-1),
    )


class Gatherer:
    """Reads batches of one split of a dataset."""

    def __init__(self, dataset: Dataset, split: str) -> None:
        self._dataset = dataset
        self._split = split
        self.schema = dataset.schema
        self._features = dataset.schema.features
        self._num_rows = np.array(
            [dataset.schema.table(feature.table).num_rows for feature in self._features], np.int64
        )
        self._is_one_hot = not any(feature.is_multi_hot for feature in self._features)
        self._open: OrderedDict[int, Block] = OrderedDict()

    def read(self, pieces: Sequence[Piece]) -> Gathered:
        """The samples of the pieces, in order.

        Raises:
            ValueError: if an id is outside its table, a label is not 0 or 1, a weight is negative,
                or a number is not finite; the message names the chunk and the sample.
            ArtifactError: if a chunk is missing or damaged.
        """
        return Gathered(*self.read_numbers(pieces), *self.read_ids(pieces))

    def read_numbers(self, pieces: Sequence[Piece]) -> tuple[Floats, Floats, Floats | None]:
        """Only label, dense columns and weight, as in ``Gathered``; raises as ``read``."""
        parts = [(self._block(piece.chunk), piece.rows) for piece in pieces]
        # Plain indexing is faster than numpy.take on these sizes.
        label = _join([block.label[rows] for block, rows in parts])
        dense = _join([block.dense[rows] for block, rows in parts])
        self._check_numbers(label, dense, pieces)
        weights = [block.weight[rows] for block, rows in parts if block.weight is not None]
        weight = _join(weights) if weights else None
        if weight is not None and not ((weight >= 0) & np.isfinite(weight)).all():
            bad = int(np.argmin((weight >= 0) & np.isfinite(weight)))
            raise ValueError(
                f"weight: expected a finite number of at least 0, got {weight[bad]} "
                f"({self._place(bad, pieces)}). Prepare the dataset again."
            )
        return label, dense, weight

    def read_ids(self, pieces: Sequence[Piece]) -> tuple[Rows, npt.NDArray[np.int32]]:
        """Only values and lengths, as in ``Gathered``; raises as ``read``."""
        blocks = [self._block(piece.chunk) for piece in pieces]
        if self._is_one_hot:
            return self._one_hot(blocks, pieces, sum(piece.rows.size for piece in pieces))
        return self._jagged(blocks, pieces)

    def read_lengths(self, pieces: Sequence[Piece]) -> npt.NDArray[np.int32]:
        """Only lengths, as in ``Gathered``, without their ids.

        Raises:
            ArtifactError: if a chunk is missing or damaged.
        """
        parts = [(self._block(piece.chunk), piece.rows) for piece in pieces]
        lengths = [
            _count_ids(block.features[feature.name], rows)
            for feature in self._features
            for block, rows in parts
        ]
        return np.concatenate(lengths)

    def _block(self, chunk: int) -> Block:
        if chunk not in self._open:
            self._open[chunk] = self._dataset.block(self._split, chunk)
            if len(self._open) > _OPEN_CHUNKS:
                self._open.popitem(last=False)
        self._open.move_to_end(chunk)
        return self._open[chunk]

    def _one_hot(
        self, blocks: Sequence[Block], pieces: Sequence[Piece], num_samples: int
    ) -> tuple[Rows, npt.NDArray[np.int32]]:
        values_FB = np.empty((len(self._features), num_samples), np.int64)
        for index, feature in enumerate(self._features):
            start = 0
            for block, piece in zip(blocks, pieces, strict=True):
                ids = block.features[feature.name]
                assert not isinstance(ids, Jagged)
                values_FB[index, start : start + piece.rows.size] = ids[piece.rows]
                start += piece.rows.size
        # Seen as unsigned, a negative id is a huge one: one comparison checks both ends.
        largest = values_FB.view(np.uint64).max(axis=1, initial=0)
        for position in np.nonzero(largest >= self._num_rows.view(np.uint64))[0].tolist():
            lengths = np.ones(num_samples, np.int64)
            self._refuse_id(self._features[position], values_FB[position], lengths, pieces)
        return values_FB.reshape(-1), np.ones(values_FB.size, np.int32)

    def _jagged(
        self, blocks: Sequence[Block], pieces: Sequence[Piece]
    ) -> tuple[Rows, npt.NDArray[np.int32]]:
        all_values = []
        all_lengths = []
        for feature, num_rows in zip(self._features, self._num_rows, strict=True):
            bags = [
                gather_bags(block.features[feature.name], piece.rows)
                for block, piece in zip(blocks, pieces, strict=True)
            ]
            values = _join([values for values, _ in bags])
            lengths = _join([lengths for _, lengths in bags])
            if values.size and int(values.view(np.uint64).max()) >= num_rows:
                self._refuse_id(feature, values, lengths, pieces)
            all_values.append(values)
            all_lengths.append(lengths)
        return np.concatenate(all_values), np.concatenate(all_lengths).astype(np.int32)

    def _refuse_id(
        self, feature: Feature, values: Rows, lengths: Rows, pieces: Sequence[Piece]
    ) -> None:
        num_rows = self._dataset.schema.table(feature.table).num_rows
        at = int(np.nonzero((values < 0) | (values >= num_rows))[0][0])
        sample = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        raise ValueError(
            f"table {feature.table}: expected rows in 0..{num_rows - 1}, got row {values[at]} in "
            f"feature {feature.name} ({self._place(sample, pieces)}). Prepare the dataset again."
        )

    def _check_numbers(self, label: Floats, dense: Floats, pieces: Sequence[Piece]) -> None:
        bad = np.nonzero((label != 0) & (label != 1))[0]
        if bad.size:
            raise ValueError(
                f"label: expected 0 or 1, got {label[bad[0]]} "
                f"({self._place(int(bad[0]), pieces)}). Prepare the dataset again."
            )
        # The sum is finite only if all terms are, but may overflow: then check each.
        if not np.isfinite(dense.sum(dtype=np.float64)):
            sample, column = np.argwhere(~np.isfinite(dense))[0]
            raise ValueError(
                f"dense column {self._dataset.schema.dense[column]}: expected a finite number, got "
                f"{dense[sample, column]} ({self._place(int(sample), pieces)}). "
                "Prepare the dataset again."
            )

    def _place(self, sample: int, pieces: Sequence[Piece]) -> str:
        for piece in pieces:
            if sample < piece.rows.size:
                file = self._dataset.chunks(self._split)[piece.chunk].file
                return f"chunk {file}, sample {piece.rows[sample]}"
            sample -= piece.rows.size
        raise AssertionError(f"sample {sample} is in none of {len(pieces)} pieces")


def _join(parts: Sequence[npt.NDArray[Scalar]]) -> npt.NDArray[Scalar]:
    # Concatenating one part would copy it.
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _count_ids(ids: Integers | Jagged, samples: Rows) -> npt.NDArray[np.int32]:
    """The number of ids of some samples, int32 (B,)."""
    if not isinstance(ids, Jagged):
        return np.ones(samples.size, np.int32)
    return (ids.offsets[samples + 1] - ids.offsets[samples]).astype(np.int32)


def gather_bags(ids: Integers | Jagged, samples: Rows) -> tuple[Rows, Rows]:
    """The concatenated bags of some samples: values int64 (K,) and lengths int64 (B,)."""
    if not isinstance(ids, Jagged):
        return ids[samples].astype(np.int64), np.ones(samples.size, np.int64)
    starts = ids.offsets[samples].astype(np.int64)
    lengths = ids.offsets[samples + 1].astype(np.int64) - starts
    ends = np.cumsum(lengths)
    # Position k of the output lies (k - start of its bag) into a bag that starts at `starts`.
    positions = np.arange(int(ends[-1]) if ends.size else 0) + np.repeat(
        starts - (ends - lengths), lengths
    )
    return ids.values[positions].astype(np.int64), lengths


def select_bags(
    values: Rows, lengths: npt.NDArray[np.int32], samples: Rows, num_features: int
) -> tuple[Rows, npt.NDArray[np.int32]]:
    """The ids of some samples of a batch.

    Args:
        values: int64 (K,), feature-major.
        lengths: int32 (F * S,), feature-major.
        samples: int64 (B,), in the order wanted.
        num_features: F.

    Returns:
        values int64 and lengths int32 (F * B,) of these samples, feature-major.
    """
    num_samples = lengths.size // num_features
    bags = (np.arange(num_features)[:, None] * num_samples + samples).reshape(-1)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return gather_bags(Jagged(values, offsets), bags)[0], lengths[bags]
