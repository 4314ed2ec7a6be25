"""Random clicks with skewed ids, the data of the DLRM examples."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

NUM_ROWS = {"user": 200_000, "item": 50_000, "shop": 2_000, "city": 500}
NUM_DENSE = 4


class Clicks(IterableDataset[Batch]):
    """One rank's batches, the same in every run; labels follow from the item."""

    def __init__(self, rank: int, batch_size: int, num_batches: int) -> None:
        self.rank, self.batch_size, self.num_batches = rank, batch_size, num_batches

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.num_batches):
            rng = np.random.default_rng((step, self.rank))
            ids = [
                (rng.random(self.batch_size) ** 6 * n).astype(np.int64) for n in NUM_ROWS.values()
            ]
            yield Batch(
                torch.from_numpy(rng.random((self.batch_size, NUM_DENSE), np.float32)),
                KeyedJaggedTensor.from_lengths_sync(
                    list(NUM_ROWS),
                    torch.from_numpy(np.concatenate(ids)),
                    torch.ones(len(ids) * self.batch_size, dtype=torch.int64),
                ),
                torch.from_numpy((ids[1] % 3 == 0).astype(np.float32)),
            )
