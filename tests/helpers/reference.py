"""The oracle: an unsplit model in one process, from plain torch modules and plain optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class PlainTable:
    """A table of the reference: what ``EmbeddingBagConfig`` says, without torchrec."""

    name: str
    num_rows: int
    dim: int
    features: tuple[str, ...]
    is_mean: bool


# feature -> list (B) of (ids, per-sample weights or None)
Bags = Mapping[str, Sequence[tuple[list[int], list[float] | None]]]


class PlainBags(nn.Module):
    """Looks up and pools bag by table with ``nn.EmbeddingBag``; output columns in table order."""

    def __init__(self, tables: Sequence[PlainTable], weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.tables = tables
        self.bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag.from_pretrained(
                    weights[table.name].clone(), freeze=False, mode="sum"
                )
                for table in tables
            }
        )

    def forward(self, bags: Bags) -> torch.Tensor:
        columns = []
        for table in self.tables:
            for feature in table.features:
                samples = bags[feature]
                ids = torch.tensor([i for ids, _ in samples for i in ids], dtype=torch.int64)
                lengths = torch.tensor([len(ids) for ids, _ in samples])
                offsets = lengths.cumsum(0) - lengths
                scales = torch.tensor(
                    [
                        weight
                        for ids, weights in samples
                        for weight in (weights if weights is not None else [1.0] * len(ids))
                    ]
                )
                pooled = self.bags[table.name](ids, offsets, per_sample_weights=scales)
                if table.is_mean:
                    pooled = pooled / lengths.clamp(min=1)[:, None]
                columns.append(pooled)
        return torch.cat(columns, dim=1)


def weights_of_places(length: int) -> list[float]:
    """1, 1/2, 1/3 ... for the places of a sequence, so that their order matters."""
    return [1 / (1 + place) for place in range(length)]


class SumsByPlace(nn.Module):
    """Sums each sequence of an unpooled collection, weighted by ``weights_of_places``."""

    def __init__(self, sequences: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.sequences = sequences
        self.sums = _Sums(names)

    def forward(self, sparse: object) -> torch.Tensor:
        return self.sums(self.sequences(sparse))


class _Sums(nn.Module):
    """A leaf for the tracer of TorchRec's pipelines.

    By name, since TorchRec's sharded collections order their output by sharding.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names

    def forward(self, found: Mapping[str, Any]) -> torch.Tensor:
        sums = []
        for sequence in (found[name] for name in self.names):
            rows, lengths = sequence.values(), sequence.lengths().long()
            begins = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
            places_K = torch.arange(rows.shape[0], device=rows.device) - begins
            weights_K = 1 / (1.0 + places_K)
            sums.append(
                torch.segment_reduce(rows * weights_K[:, None], "sum", lengths=lengths, initial=0.0)
            )
        return torch.cat(sums, dim=1)


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
