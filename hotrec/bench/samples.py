"""Synthetic samples with Zipf popularity, and lookup counts as in a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.data.batch import Batch
from hotrec.data.gather import select_bags
from hotrec.data.locality import Assign
from hotrec.runtime.ranks import Ranks
from hotrec.types import Feature, Rows, Schema, Table

# Independent streams of random numbers: popularity, profile, samples of a rank.
_POPULARITY, _PROFILE, _SAMPLES = 1, 2, 3


def table_per_feature(
    table_rows: Sequence[int], num_dense: int, columns: Schema | None = None
) -> Schema:
    """Features with a table each, named ``C1`` and so on, or as the features of ``columns``."""
    names: Sequence[str] = [f"C{number}" for number in range(1, len(table_rows) + 1)]
    dense = tuple(f"I{number}" for number in range(1, num_dense + 1))
    if columns is not None:
        names, dense = columns.feature_names, columns.dense
    return Schema(
        dense=dense,
        features=tuple(Feature(name, name) for name in names),
        tables=tuple(map(Table, names, table_rows)),
    )


class ZipfTables:
    """Tables whose k-th most popular row is looked up with probability ~ k^-exponent, by table.

    Rows are numbered without regard to popularity (a seeded permutation), since row-wise shards are
    contiguous; with ``by_popularity`` they are numbered by it. Features and tables are those of
    ``table_per_feature``. A bag of a feature has one of the feature's ``bag_lengths``, or one id.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        *,
        exponent: float | Sequence[float],
        num_dense: int,
        seed: int,
        columns: Schema | None = None,
        bag_lengths: Sequence[Rows] | None = None,
        by_popularity: bool = False,
    ) -> None:
        self.schema = table_per_feature(table_rows, num_dense, columns)
        self.exponent = exponent
        self._seed = seed
        self._bag_lengths = bag_lengths
        rng = np.random.default_rng([seed, _POPULARITY])
        self._cumulative = []
        self._rows_by_rank = []
        for num_rows, power in zip(
            table_rows, np.broadcast_to(exponent, len(table_rows)), strict=True
        ):
            cumulative = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -power)
            self._cumulative.append(cumulative / cumulative[-1])
            rows = np.arange(num_rows) if by_popularity else rng.permutation(num_rows)
            self._rows_by_rank.append(rows.astype(np.int64))

    def count(self, num_samples: int) -> dict[str, Rows]:
        """Lookups per row, int64 (R,) by table, of a profile of ``num_samples`` other samples."""
        rng = np.random.default_rng([self._seed, _PROFILE])
        counts = {}
        means = [1.0] * len(self.schema.tables)
        if self._bag_lengths is not None:
            means = [float(lengths.mean()) for lengths in self._bag_lengths]
        for table, cumulative, rows, mean in zip(
            self.schema.tables, self._cumulative, self._rows_by_rank, means, strict=True
        ):
            num_lookups = round(num_samples * mean)
            by_rank = rng.multinomial(num_lookups, np.diff(cumulative, prepend=0.0))
            counts[table.name] = np.empty(table.num_rows, np.int64)
            counts[table.name][rows] = by_rank
        return counts

    def batches(
        self, num_batches: int, *, batch_size: int, rank: int, world_size: int
    ) -> list[Batch]:
        """Batches of one rank: a bag per feature, and labels that can be predicted.

        They depend on a dense column, or without any, on the first feature.
        """
        return [*self.stream(num_batches, batch_size=batch_size, rank=rank, world_size=world_size)]

    def stream(
        self, num_batches: int, *, batch_size: int, rank: int, world_size: int
    ) -> Iterator[Batch]:
        """Generate the batches of ``batches`` one by one."""
        rng = np.random.default_rng([self._seed, _SAMPLES, rank])
        for _ in range(num_batches):
            yield self._batch(rng, batch_size, world_size)

    def assigned(
        self, assign: Assign, num_batches: int, *, batch_size: int, ranks: Ranks
    ) -> list[Batch]:
        """This rank's samples, as assigned, of the global batches of ``batches``."""
        streams = [
            self.stream(num_batches, batch_size=batch_size, rank=rank, world_size=ranks.world_size)
            for rank in range(ranks.world_size)
        ]
        return [_take(of_ranks, assign, ranks.rank) for of_ranks in zip(*streams, strict=True)]

    def _batch(self, rng: np.random.Generator, batch_size: int, world_size: int) -> Batch:
        lengths_FB = np.ones((len(self._cumulative), batch_size), np.int32)
        drawn: dict[bytes, Rows] = {}  # lists of the same lengths are columns of one list
        for of_feature, lengths in zip(lengths_FB, self._bag_lengths or (), strict=False):
            key = lengths.tobytes()
            if key not in drawn or len(lengths) == 1:
                drawn[key] = rng.choice(lengths, batch_size)
            of_feature[:] = drawn[key]
        ids = [
            rows[np.searchsorted(cumulative, rng.random(number), side="right")]
            for cumulative, rows, number in zip(
                self._cumulative, self._rows_by_rank, lengths_FB.sum(axis=1), strict=True
            )
        ]
        dense_BN = rng.standard_normal((batch_size, len(self.schema.dense)), dtype=np.float32)
        if self.schema.dense:
            signal = dense_BN[:, 0]
        else:
            of_id = np.repeat(np.arange(batch_size), lengths_FB[0])
            odd = np.bincount(of_id, ids[0] % 2, minlength=batch_size)
            signal = 2.0 * odd / np.maximum(lengths_FB[0], 1) - 1.0
        click_prob = 1 / (1 + np.exp(1.0 - signal))
        labels = (rng.random(batch_size) < click_prob).astype(np.float32)
        sparse = KeyedJaggedTensor(
            keys=list(self.schema.feature_names),
            values=torch.from_numpy(np.concatenate(ids)),
            lengths=torch.from_numpy(lengths_FB.reshape(-1)),
        )
        return Batch(
            dense=torch.from_numpy(dense_BN),
            sparse=sparse,
            labels=torch.from_numpy(labels),
            weights=torch.ones(batch_size),
            num_global_samples=batch_size * world_size,
        )


def _take(of_ranks: Sequence[Batch], assign: Assign, rank: int) -> Batch:
    """One rank's samples of a global batch, whose bags hold one id each."""
    keys = of_ranks[0].sparse.keys()
    values_FS = torch.cat([b.sparse.values().view(len(keys), -1) for b in of_ranks], dim=1)
    lengths = np.ones(values_FS.numel(), np.int32)
    values = values_FS.flatten().numpy()
    shares = np.array([batch.labels.numel() for batch in of_ranks])
    mine = np.flatnonzero(assign(values, lengths, shares) == rank)
    own_values, own_lengths = select_bags(values, lengths, mine, len(keys))
    at = torch.from_numpy(mine)
    return Batch(
        dense=torch.cat([batch.dense for batch in of_ranks]).index_select(0, at),
        sparse=KeyedJaggedTensor(
            keys=keys, values=torch.from_numpy(own_values), lengths=torch.from_numpy(own_lengths)
        ),
        labels=torch.cat([batch.labels for batch in of_ranks]).index_select(0, at),
        weights=torch.ones(mine.size),
        num_global_samples=of_ranks[0].num_global_samples,
    )
