"""Samples of a prepared dataset for a benchmark, in place of drawn ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from hotrec.data.batch import Batch
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader
from hotrec.data.locality import Assign
from hotrec.runtime.ranks import Ranks
from hotrec.types import Rows

_COUNTED_AT_ONCE = 1024


class StoredSamples:
    """The training split of a dataset, again and again.

    Args:
        path: The directory of the dataset.
        seed: Seed of the shuffle.
        shuffle: Whether samples are shuffled; else they come in the order of the files.

    Raises:
        ArtifactError: If there is no complete dataset.
    """

    exponent = None  # the popularity of the rows is the data's

    def __init__(self, path: Path, *, seed: int, shuffle: bool = True) -> None:
        dataset = Dataset.open(path)
        self.schema = dataset.schema
        self.num_samples = dataset.num_samples("train")
        self._path, self._seed, self._shuffle = path, seed, shuffle

    def count(self, num_samples: int) -> dict[str, Rows]:
        """Lookups per row, int64 (R,) by table, of the first samples."""
        counts = {table.name: np.zeros(table.num_rows, np.int64) for table in self.schema.tables}
        blocks = self._stream(min(_COUNTED_AT_ONCE, num_samples), rank=0, world_size=1)
        left = num_samples
        while left > 0:
            features = next(blocks).sparse.to_dict()
            for feature in self.schema.features:
                ids = features[feature.name]
                rows = ids.values()[: int(ids.lengths()[:left].sum())].numpy()
                np.add.at(counts[feature.table], rows, 1)
            left -= _COUNTED_AT_ONCE
        return counts

    def batches(
        self, num_batches: int, *, batch_size: int, rank: int, world_size: int
    ) -> list[Batch]:
        """The first batches of a rank.

        Raises:
            ValueError: If the split has fewer samples than a global batch.
        """
        return [*islice(self._stream(batch_size, rank=rank, world_size=world_size), num_batches)]

    def assigned(
        self, assign: Assign, num_batches: int, *, batch_size: int, ranks: Ranks
    ) -> list[Batch]:
        """The same, with the samples of each global batch assigned to the ranks."""
        rank, world_size = ranks.rank, ranks.world_size
        stream = self._stream(batch_size, rank=rank, world_size=world_size, assign=assign)
        return [*islice(stream, num_batches)]

    def _stream(
        self, batch_size: int, *, rank: int, world_size: int, assign: Assign | None = None
    ) -> Iterator[Batch]:
        return iter(
            make_loader(
                self._path,
                "train",
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
                seed=self._seed,
                shuffle=self._shuffle,
                drop_last=True,
                assign=assign,
            )
        )
