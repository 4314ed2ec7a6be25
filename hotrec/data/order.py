"""The order of samples: a pure function of (seed, epoch, chunk sizes).

An epoch is the chunks in a shuffled order, each with its rows shuffled. Step s of the epoch covers
samples [s * G, (s + 1) * G) of that order, G = batch_size * world_size, and rank r takes the r-th
slice of it; so the number of ranks does not change the global batches. The last step holds the
rest, split as evenly as possible. Any step can be computed directly, without state, and a run can
continue after any sample with another G. If only some of the samples are used, all this applies to
them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hotrec.types import Rows

# A batch spans few chunks; the permutations of earlier ones are not needed again.
_CACHED_PERMUTATIONS = 4


@dataclass(frozen=True)
class Piece:
    """Part of a batch: rows of one chunk, int64, in reading order."""

    chunk: int
    rows: Rows


def num_steps_of(
    num_samples: int, batch_size: int, world_size: int, *, drop_last: bool = False
) -> int:
    """Steps of one epoch, the same on every rank."""
    global_batch = batch_size * world_size
    return num_samples // global_batch if drop_last else -(-num_samples // global_batch)


@dataclass(frozen=True)
class GlobalBatch:
    """Samples ``first`` to ``first + num_samples`` of the order of an epoch, over all ranks."""

    epoch: int
    first: int
    num_samples: int


@dataclass(frozen=True)
class StepSequence:
    """The global batches of a run.

    Args:
        parts: Samples of the parts of an epoch, such as days, each 1 or more. No step crosses a
            boundary of parts; an undivided epoch is one part.
        global_batch: Samples of a full step over all ranks.
        first_sample: Samples before the first step, counted over all epochs.
        drop_last: Whether to drop the last step of a part if it is not full.
    """

    parts: tuple[int, ...]
    global_batch: int
    first_sample: int = 0
    drop_last: bool = False

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return int(self._ends[-1])

    def __getitem__(self, step: int) -> GlobalBatch:
        """The global batch of a step, counted from 0."""
        epoch, part, offset, left = self._start
        if step < left:
            end, first = int(self._ends[part]), offset + step * self.global_batch
        else:
            # As if the first epoch had started at its first sample.
            step += int(self._last_steps[part]) - left
            whole, step = divmod(step, int(self._last_steps[-1]))
            epoch += whole
            part = int(np.searchsorted(self._last_steps, step, side="right"))
            end = int(self._ends[part])
            step -= int(self._last_steps[part - 1]) if part else 0
            first = end - self.parts[part] + step * self.global_batch
        return GlobalBatch(epoch, first, min(self.global_batch, end - first))

    def samples_before(self, step: int) -> int:
        """Samples before a step, counted over all epochs."""
        batch = self[step]
        return batch.epoch * self.num_samples + batch.first

    def count_steps(self, epochs: int) -> int:
        """Steps from ``first_sample`` to the end of the last of ``epochs`` epochs."""
        epoch, part, _, left = self._start
        if epoch >= epochs:
            return 0
        skipped = int(self._last_steps[part]) - left
        return (epochs - epoch) * int(self._last_steps[-1]) - skipped

    def part_ends(self) -> dict[int, int]:
        """Parts by the number of steps to their end, in the epoch of ``first_sample``.

        A part that ends just before the first step is included with 0.
        """
        _, first, offset, left = self._start
        skipped = int(self._last_steps[first]) - left
        ended = {0: first - 1} if first and offset == self._ends[first - 1] else {}
        return ended | {
            int(self._last_steps[part]) - skipped: part for part in range(first, len(self.parts))
        }

    def count_part_steps(self, part: int) -> int:
        """Steps of a part of an epoch."""
        return num_steps_of(self.parts[part], self.global_batch, 1, drop_last=self.drop_last)

    @cached_property
    def _ends(self) -> Rows:
        return np.cumsum(self.parts)

    @cached_property
    def _last_steps(self) -> Rows:
        """Steps to the end of each part of an epoch, int64."""
        return np.cumsum([self.count_part_steps(part) for part in range(len(self.parts))])

    @cached_property
    def _start(self) -> tuple[int, int, int, int]:
        """Epoch, part and offset in the epoch of the first sample, and the steps of this part."""
        epoch, offset = divmod(self.first_sample, self.num_samples)
        part = int(np.searchsorted(self._ends, offset, side="right"))
        num_samples = int(self._ends[part]) - offset
        left = num_steps_of(num_samples, self.global_batch, 1, drop_last=self.drop_last)
        return epoch, part, offset, left


class SampleOrder:
    """The samples that a rank reads in each step; without ``shuffle`` in the order of the files.

    If only some samples are used, ``chunk_sizes`` counts only these, and ``rows_of_chunk`` returns
    their positions in a chunk, int64.
    """

    def __init__(
        self,
        chunk_sizes: Sequence[int],
        *,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        rows_of_chunk: Callable[[int], Rows] | None = None,
    ) -> None:
        self._sizes = np.asarray(chunk_sizes, np.int64)
        self.num_samples = int(self._sizes.sum())
        self.rank = rank
        self._world_size = world_size
        self._seed = seed
        self._shuffle = shuffle
        self._rows_of_chunk = rows_of_chunk
        self._epoch = -1
        self._chunk_order = np.arange(self._sizes.size)
        self._bounds = np.zeros(1, np.int64)
        self._permutations: OrderedDict[tuple[int, int], Rows] = OrderedDict()

    def shares(self, batch: GlobalBatch) -> Rows:
        """Samples of each rank in a global batch, int64 (W,).

        Equal in full steps; in the last one the first ranks may have one sample more.
        """
        share, extra = divmod(batch.num_samples, self._world_size)
        return share + (np.arange(self._world_size) < extra)

    def pieces(self, batch: GlobalBatch) -> list[Piece]:
        """This rank's pieces of a global batch; may be empty."""
        self._enter_epoch(batch.epoch)
        shares = self.shares(batch)
        first = batch.first + int(shares[: self.rank].sum())
        return self._pieces_between(batch.epoch, first, first + int(shares[self.rank]))

    def global_pieces(self, batch: GlobalBatch) -> list[Piece]:
        """The pieces of all ranks, in the order of the ranks."""
        self._enter_epoch(batch.epoch)
        return self._pieces_between(batch.epoch, batch.first, batch.first + batch.num_samples)

    def _pieces_between(self, epoch: int, first: int, last: int) -> list[Piece]:
        pieces = []
        position = int(np.searchsorted(self._bounds, first, side="right")) - 1
        while first < last:
            begin, end = int(self._bounds[position]), int(self._bounds[position + 1])
            until = min(last, end)
            if until > first:
                chunk = int(self._chunk_order[position])
                rows = self._rows_of(epoch, chunk)[first - begin : until - begin]
                pieces.append(Piece(chunk, rows))
            first = until
            position += 1
        return pieces

    def _enter_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        if self._shuffle:
            rng = np.random.default_rng([self._seed, epoch])
            self._chunk_order = rng.permutation(self._sizes.size)
        sizes = self._sizes[self._chunk_order]
        self._bounds = np.concatenate([[0], np.cumsum(sizes)])
        self._epoch = epoch

    def _rows_of(self, epoch: int, chunk: int) -> Rows:
        size = int(self._sizes[chunk])
        if not self._shuffle and self._rows_of_chunk is None:
            return np.arange(size)
        key = (epoch, chunk)
        if key not in self._permutations:
            rows = np.arange(size) if self._rows_of_chunk is None else self._rows_of_chunk(chunk)
            if self._shuffle:
                rng = np.random.default_rng([self._seed, epoch, chunk + 1])
                rows = rows[rng.permutation(size)]
            self._permutations[key] = rows
            if len(self._permutations) > _CACHED_PERMUTATIONS:
                self._permutations.popitem(last=False)
        return self._permutations[key]


def select_pieces(pieces: Sequence[Piece], samples: Rows) -> list[Piece]:
    """The parts of some pieces that contain certain samples.

    Args:
        pieces: Pieces whose samples are numbered consecutively.
        samples: int64, numbers of the samples to select, in increasing order.
    """
    selected = []
    begin = 0
    for piece in pieces:
        end = begin + piece.rows.size
        first, last = np.searchsorted(samples, [begin, end])
        if first < last:
            selected.append(Piece(piece.chunk, piece.rows[samples[first:last] - begin]))
        begin = end
    return selected
