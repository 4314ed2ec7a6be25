"""Click models: lookups followed by layers of ``hotrec.models.plain.make_layers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from hotrec.models.plain import Architecture, Sequences, make_layers
from hotrec.runtime.stages import backward_point, mark, mark_backward, mark_backward_of


def _stack_columns(pooled: KeyedTensor, names: Sequence[str], dim: int) -> torch.Tensor:
    """Pooled columns in the order of ``names``; (B, F, D)."""
    if list(pooled.keys()) == list(names):
        return pooled.values().view(-1, len(names), dim)  # no copy
    columns = pooled.to_dict()
    return torch.cat([columns[name] for name in names], dim=1).view(-1, len(names), dim)


def _rows_by_feature(found: Mapping[str, JaggedTensor]) -> Sequences:
    """What ``Sequences`` are of a collection's output; waits for it."""
    return {name: (jagged.values(), jagged.lengths()) for name, jagged in found.items()}


def _mark_rows(columns: Sequences, stage: str, *points: torch.Tensor | None) -> Sequences:
    rows = mark_backward_of([rows_KD for rows_KD, _ in columns.values()], stage, *points)
    lengths = [lengths_B for _, lengths_B in columns.values()]
    return dict(zip(columns, zip(rows, lengths, strict=True), strict=True))


# Leaves for the tracer of TorchRec's pipelines, which cannot follow data-dependent branches.
torch.fx.wrap("_stack_columns")
torch.fx.wrap("_rows_by_feature")
torch.fx.wrap("_mark_rows")
torch.fx.wrap("backward_point")
torch.fx.wrap("mark_backward")


class ClickModel(nn.Module):
    """A model: dense (B, N) and ids -> logits (B, L)."""

    layers: Any

    @property
    def dense_parts(self) -> list[nn.Module]:
        """The modules of its dense layers, to compile and to run in another precision."""
        return [self.layers]


class PooledModel(ClickModel):
    """A model of bags whose lookups start before its bottom layers, and are used after them.

    So the rows are sent while the bottom layers compute, and their gradients during the backward of
    those layers.
    """

    def __init__(self, embeddings: nn.Module, layers: nn.Module, shape: Architecture) -> None:
        super().__init__()
        self.embedding_bag_collection, self.layers = embeddings, layers
        self.names, self.dim = [name for name, _ in shape.features], shape.embedding_dim
        self.has_bottom = shape.has_bottom

    def forward(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        """Dense (B, N) and ids -> logits (B, L)."""
        mark("ids_exchange")
        pooled = self.embedding_bag_collection(sparse_features)
        mark("row_lookup")
        bottom_is_undone = backward_point("dense", dense_features)
        early = self.layers.before_rows(dense_features) if self.has_bottom else dense_features
        mark("dense")
        rows_are_sent = backward_point("grads_exchange", dense_features)
        sparse_BFD = _stack_columns(pooled, self.names, self.dim)
        mark("rows_exchange")
        sparse_BFD = mark_backward(sparse_BFD, "dense", bottom_is_undone, rows_are_sent)
        with_rows = self.layers.with_rows if self.has_bottom else self.layers
        logits: torch.Tensor = with_rows(early, sparse_BFD)
        return logits

    @property
    def dense_parts(self) -> list[nn.Module]:
        layers = self.layers
        return [layers.bottom, layers.interaction, layers.top] if self.has_bottom else [layers]


class SequenceModel(ClickModel):
    """A model whose layers read the rows of each feature."""

    def __init__(self, embeddings: nn.Module, layers: nn.Module) -> None:
        super().__init__()
        self.embedding_collection, self.layers = embeddings, layers

    def forward(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        """Dense (B, N) and ids -> logits (B, L)."""
        mark("ids_exchange")
        found = self.embedding_collection(sparse_features)
        mark("row_lookup")
        rows_are_sent = backward_point("grads_exchange", dense_features)
        columns = _rows_by_feature(found)
        mark("rows_exchange")
        logits: torch.Tensor = self.layers(
            dense_features, _mark_rows(columns, "dense", rows_are_sent)
        )
        return logits


def build_architecture(
    shape: Architecture, embeddings: nn.Module, seed: int, device: torch.device
) -> ClickModel:
    """The model of an architecture on these embeddings, its dense layers on ``device``.

    The seed determines the dense layers' weights, independent of the embeddings' implementation.

    Raises:
        ValueError: If a user's class does not fit.
    """
    layers = make_checked_layers(shape, seed).to(device)
    if shape.reads_sequences:
        return SequenceModel(embeddings, layers)
    return PooledModel(embeddings, layers, shape)


def make_checked_layers(shape: Architecture, seed: int) -> nn.Module:
    """The layers on the CPU, whose generator makes weights independent of the device.

    Raises:
        ValueError: If ``forward`` does not map two samples to their logits.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.random.default_generator.manual_seed(seed)
        layers = make_layers(shape)
        dense, num_labels = (2, len(shape.dense)), len(shape.labels)
        features, dim = [name for name, _ in shape.features], shape.embedding_dim
        rows = zero_rows(shape, dict.fromkeys(features, (1, 0)))
        read = f"pooled features {(2, len(features), dim)}"
        if shape.reads_sequences:
            read = f"the rows of {len(features)} features, of one id and of none,"
        try:
            with torch.no_grad():
                logits = layers.eval()(torch.zeros(dense), rows)
            found = str(tuple(logits.shape)) if torch.is_tensor(logits) else type(logits).__name__
        except Exception as error:
            found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        layers.train()
    if found != str((2, num_labels)):
        raise ValueError(
            f"model._target_: expected {shape.target or shape.kind} to map dense columns "
            f"{dense} and {read} to logits {(2, num_labels)}, got {found}. "
            "Correct the class."
        )
    return layers


def zero_rows(shape: Architecture, lengths: Mapping[str, Sequence[int]]) -> Any:
    """Zeros in the form of the rows that the layers read.

    Args:
        shape: Their architecture.
        lengths: The number of ids in each sample, by feature.

    Returns:
        Float (B, F, D), or ``Sequences``; they require a gradient.
    """
    dim = shape.embedding_dim
    if not shape.reads_sequences:
        num_samples = max(map(len, lengths.values()))
        return torch.zeros(num_samples, len(lengths), dim, requires_grad=True)
    return {
        name: (torch.zeros(sum(of_B), dim, requires_grad=True), torch.tensor(of_B))
        for name, of_B in lengths.items()
    }
