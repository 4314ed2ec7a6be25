"""Blocks: consecutive samples that profiling reads from a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrec.types import Rows, Schema

IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """Consecutive samples, column by column.

    Args:
        num_samples: Samples in the block.
        rows: Int32 or int64 (K,) per feature: the rows that the samples look up, in sample order,
            with concatenated bags.
        lengths: integer (num_samples,) per multi-hot feature: the ids in each bag, 0 for an empty
            one. A feature that is not in the mapping has exactly one id per sample.
    """

    num_samples: int
    rows: Mapping[str, IntArray]
    lengths: Mapping[str, npt.NDArray[np.integer[Any]]] = field(default_factory=dict)

    def at(self, samples: Rows) -> Block:
        """The block of these samples, int64 (s,), in their order."""
        taken = {name: take_bags(self, name, samples) for name in self.rows}
        lengths = {name: np.diff(taken[name][1]) for name in self.lengths}
        return Block(samples.size, {name: rows for name, (rows, _) in taken.items()}, lengths)

    def pieces(self, num_samples: int) -> Iterator[Block]:
        """Its samples in blocks of ``num_samples``; the last may have fewer."""
        starts = {name: _starts(lengths) for name, lengths in self.lengths.items()}
        for first in range(0, self.num_samples, num_samples):
            last = min(first + num_samples, self.num_samples)
            ends = {name: of[[first, last]] for name, of in starts.items()}
            rows = {
                name: values[slice(*ends.get(name, (first, last)))]
                for name, values in self.rows.items()
            }
            lengths = {name: of[first:last] for name, of in self.lengths.items()}
            yield Block(last - first, rows, lengths)


def join(first: Block, second: Block) -> Block:
    """The samples of two blocks with the same features."""
    rows: dict[str, IntArray] = {
        name: np.concatenate([values, second.rows[name]]) for name, values in first.rows.items()
    }
    lengths = {
        name: np.concatenate([of, second.lengths[name]]) for name, of in first.lengths.items()
    }
    return Block(first.num_samples + second.num_samples, rows, lengths)


def take_bags(block: Block, feature: str, samples: Rows) -> tuple[IntArray, Rows]:
    """The concatenated bags of some samples, and the start of each, int64 (s + 1,)."""
    rows, lengths = block.rows[feature], block.lengths.get(feature)
    if lengths is None:
        return rows[samples], np.arange(samples.size + 1)
    offsets = _starts(lengths[samples])
    shift = _starts(lengths)[samples] - offsets[:-1]
    return rows[np.arange(offsets[-1]) + np.repeat(shift, np.diff(offsets))], offsets


def _starts(lengths: npt.NDArray[np.integer[Any]]) -> Rows:
    """The start of each bag, and the end of the last, int64 (s + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def check_block(block: Block, schema: Schema, *, position: int) -> None:
    """Check the columns of a block and that every row lies in its table.

    Args:
        position: Stream position of the block's first sample, for the message.

    Raises:
        ValueError: If a feature is missing or unknown, lengths do not add up, ids are not int32 or
            int64, or a row lies outside its table.
    """
    known = set(schema.feature_names)
    if set(block.rows) != known:
        raise ValueError(
            f"block at sample {position}: expected the features {sorted(known)}, got "
            f"{sorted(set(block.rows) - known)} in addition and {sorted(known - set(block.rows))} "
            "missing. Read the dataset with its own schema."
        )
    for feature in schema.features:
        where = f"feature {feature.name} at sample {position}"
        values = block.rows[feature.name]
        lengths = block.lengths.get(feature.name)
        _check_lengths(values, lengths, block.num_samples, where)
        # As unsigned numbers, negative rows are huge, so one pass finds rows outside either bound.
        num_rows = schema.table(feature.table).num_rows
        unsigned: npt.NDArray[np.unsignedinteger[Any]]
        unsigned = values.view(np.uint32 if values.dtype == np.int32 else np.uint64)
        if values.size and int(unsigned.max()) >= num_rows:
            at = int(np.argmax(unsigned >= num_rows))
            sample = (
                at if lengths is None else int(np.searchsorted(np.cumsum(lengths), at, "right"))
            )
            raise ValueError(
                f"feature {feature.name} at sample {position + sample}: expected a row of table "
                f"{feature.table} in 0..{num_rows - 1}, got {values[at]}. "
                f"Prepare the dataset again."
            )


def _check_lengths(
    values: IntArray,
    lengths: npt.NDArray[np.integer[Any]] | None,
    num_samples: int,
    where: str,
) -> None:
    is_vector = values.ndim == 1 and values.dtype in (np.int32, np.int64)
    is_whole = lengths is None or (lengths.shape == (num_samples,) and lengths.min(initial=0) >= 0)
    num_ids = num_samples if lengths is None else int(lengths.sum())
    if not is_vector or not is_whole or num_ids != values.size:
        raise ValueError(
            f"{where}: expected an int32 or int64 vector of rows, one for each of {num_samples} "
            f"samples or as many as their lengths of at least 0 add up to, got {values.dtype} of "
            f"shape {values.shape} and the lengths {lengths}. Pass integers (floats lose rows "
            "above 2**24), and lengths for a multi-hot feature."
        )
