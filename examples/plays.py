"""Random histories of items with skewed ids and a model of them, for the examples of sequences."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import IterableDataset
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

NUM_ROWS = {"item": 50_000, "artist": 2_000}
# Both histories have a length for each sample, and both candidates one id.
FEATURES = {"item": ["played_item", "item"], "artist": ["played_artist", "artist"]}
PLAYED, CANDIDATE = zip(*FEATURES.values(), strict=True)
MAX_LENGTH = 30


class Plays(IterableDataset[Batch]):
    """One rank's batches, the same in every run; an item is liked for its artist."""

    def __init__(self, rank: int, batch_size: int, num_batches: int) -> None:
        self.rank, self.batch_size, self.num_batches = rank, batch_size, num_batches

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.num_batches):
            rng = np.random.default_rng((step, self.rank))
            lengths = rng.integers(0, MAX_LENGTH + 1, self.batch_size)
            played = (rng.random(lengths.sum()) ** 6 * NUM_ROWS["item"]).astype(np.int64)
            item = (rng.random(self.batch_size) ** 6 * NUM_ROWS["item"]).astype(np.int64)
            ones = np.ones(self.batch_size, np.int64)
            yield Batch(
                torch.empty(self.batch_size, 0),
                KeyedJaggedTensor(
                    [name for names in FEATURES.values() for name in names],
                    torch.from_numpy(np.concatenate([played, item, played % 2000, item % 2000])),
                    lengths=torch.from_numpy(np.concatenate([lengths, ones] * 2)),
                ),
                torch.from_numpy((item % 2000 < 20).astype(np.float32)),
            )


class Listener(nn.Module):
    """The candidate attends to the history; (batch) -> (loss, (loss, logits))."""

    def __init__(self, tables: EmbeddingCollection, device: torch.device) -> None:
        super().__init__()
        self.tables, width = tables, 2 * tables.embedding_dim()
        self.attention = nn.MultiheadAttention(
            width, 2, add_zero_attn=True, batch_first=True, device=device
        )
        self.over = nn.Linear(2 * width, 1, device=device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        rows = self.tables(batch.sparse_features)  # a JaggedTensor for each feature
        played, item = (
            torch.cat([rows[name].to_padded_dense(length) for name in names], dim=2)
            for names, length in ((PLAYED, MAX_LENGTH), (CANDIDATE, 1))
        )
        lengths = rows[PLAYED[0]].lengths().unsqueeze(1)
        is_padding = torch.arange(MAX_LENGTH, device=played.device) >= lengths
        read, _ = self.attention(item, played, played, key_padding_mask=is_padding)
        logits = self.over(torch.cat([item, read], dim=2)).flatten()
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach())
