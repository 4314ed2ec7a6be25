"""The samples of all ranks, dealt out by owner before the clock, as loader workers would."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.batch import Batch
from hotrec.cli.bench.samples import ZipfTables
from hotrec.data.gather import select_bags
from hotrec.data.locality import ByOwner
from hotrec.distributed import Ranks


def assigned_batches(
    samples: ZipfTables, assign: ByOwner, num_batches: int, *, batch_size: int, ranks: Ranks
) -> list[Batch]:
    """This rank's part of the same global batches as ``samples.batches`` of all ranks make."""
    streams = [
        samples.stream(num_batches, batch_size=batch_size, rank=rank, world_size=ranks.world_size)
        for rank in range(ranks.world_size)
    ]
    return [_take(of_ranks, assign, ranks.rank) for of_ranks in zip(*streams, strict=True)]


def _take(of_ranks: Sequence[Batch], assign: ByOwner, rank: int) -> Batch:
    """One rank's part of a global batch; a benchmark's bags hold one id each."""
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
