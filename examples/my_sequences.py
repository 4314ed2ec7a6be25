"""A model of your own that reads sequences, for ``hotrec train model=own``."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn


class MySequences(nn.Module):
    """Layers over a sum of each feature's rows, in which recent ids weigh more.

    With ``reads_sequences`` hotrec gives the rows of every id instead of pooled features.
    """

    reads_sequences = True

    def __init__(
        self,
        dense: Sequence[str],
        features: Sequence[str],
        embedding_dim: int,
        labels: Sequence[str],
        hidden: int = 32,
    ) -> None:
        super().__init__()
        self.features = list(features)
        self.decay = nn.Parameter(torch.ones(()))
        num_inputs = len(dense) + len(features) * embedding_dim
        self.layers = nn.Sequential(
            nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, len(labels))
        )

    def forward(
        self, dense: torch.Tensor, columns: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Dense columns (B, N), and by feature rows (K, D) and lengths (B,) -> logits (B, L)."""
        sums = [self.summed(*columns[name]) for name in self.features]
        logits: torch.Tensor = self.layers(torch.cat([dense, *sums], dim=1))
        return logits

    def summed(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Rows (K, D), sample by sample, the last id of each last -> (B, D); 0 without an id."""
        lengths = lengths.long()
        ends = lengths.cumsum(0).repeat_interleave(lengths, output_size=len(rows))
        age = ends - torch.arange(len(rows), device=rows.device)  # 1 for the last
        weights = age.to(rows.dtype) ** -self.decay
        return torch.segment_reduce(rows * weights[:, None], "sum", lengths=lengths, initial=0.0)
