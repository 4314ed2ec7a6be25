"""A tiny model in plain torch, and plain optimizers of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class TinyClickModel(nn.Module):
    """Pooled embeddings and dense features -> one logit; holds any collection of embeddings."""

    def __init__(self, embeddings: nn.Module, num_dense: int, num_columns_dim: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.hidden = nn.Linear(num_dense + num_columns_dim, 8)
        self.out = nn.Linear(8, 1)
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for layer in (self.hidden, self.out):
                layer.weight.uniform_(-0.5, 0.5, generator=generator)
                layer.bias.uniform_(-0.5, 0.5, generator=generator)

    def forward(self, dense: torch.Tensor, sparse: object) -> torch.Tensor:
        pooled = self.embeddings(sparse)
        if not isinstance(pooled, torch.Tensor):
            pooled = pooled.values()
        return self.out(torch.tanh(self.hidden(torch.cat([dense, pooled], dim=1))))


class PlainRowWiseAdagrad(torch.optim.Optimizer):
    """v += mean of g^2 over the row; w -= lr g / (sqrt(v) + eps)."""

    def __init__(self, params: Sequence[nn.Parameter], lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("sum", torch.zeros(p.shape[0]))
                state["sum"] += p.grad.pow(2).mean(1)
                p -= group["lr"] * p.grad / (state["sum"].sqrt() + group["eps"])[:, None]


class PlainLazyAdam(torch.optim.Optimizer):
    """Adam on the rows with ids in the batch; the update count is the optimizer's."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.touched: dict[nn.Parameter, torch.Tensor] = {}
        self.num_updates = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.num_updates += 1
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("m", torch.zeros_like(p))
                state.setdefault("v", torch.zeros_like(p))
                rows = self.touched[p]
                grad = p.grad[rows]
                state["m"][rows] = beta1 * state["m"][rows] + (1 - beta1) * grad
                state["v"][rows] = beta2 * state["v"][rows] + (1 - beta2) * grad**2
                mean = state["m"][rows] / (1 - beta1**self.num_updates)
                square = state["v"][rows] / (1 - beta2**self.num_updates)
                p[rows] -= group["lr"] * mean / (square.sqrt() + group["eps"])


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean binary cross entropy over the global batch."""
    return F.binary_cross_entropy_with_logits(logits.squeeze(-1), labels)
