"""A model of your own for ``hotrec train model=own``: layers over pooled columns."""

from collections.abc import Sequence

import torch
from torch import nn


class MyModel(nn.Module):
    """A linear model of all columns plus the products of each feature with the first one.

    hotrec gives the names of the dense columns, features and labels, and the embedding dimension;
    ``hidden`` is ``model.args.hidden`` of the configuration.
    """

    def __init__(
        self,
        dense: Sequence[str],
        features: Sequence[str],
        embedding_dim: int,
        labels: Sequence[str],
        hidden: int = 32,
    ) -> None:
        super().__init__()
        num_inputs = len(dense) + len(features) * embedding_dim
        self.wide = nn.Linear(num_inputs, len(labels))
        self.deep = nn.Sequential(
            nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, len(labels))
        )
        self.scale = nn.Parameter(torch.ones(len(labels)))

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Dense columns (B, N) and pooled features (B, F, D) -> logits (B, L)."""
        inputs = torch.cat((dense, pooled.flatten(1)), dim=1)
        products = (pooled[:, :1] * pooled).sum((1, 2)).unsqueeze(1)
        return self.wide(inputs) + self.deep(inputs) + self.scale * products
