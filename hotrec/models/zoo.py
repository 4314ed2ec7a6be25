"""Click models: TorchRec's own arches, and lookups followed by any layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN, SparseArch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from hotrec.models.flops import num_bottom_inputs
from hotrec.models.interaction import CrossNet, DotInteraction
from hotrec.models.plain import Architecture, Sequences, make_layers
from hotrec.runtime.stages import backward_point, mark, mark_backward, mark_backward_of
from hotrec.types import ModelKind

# Built from TorchRec's parts, and their work is known by formula.
OF_TORCHREC = (ModelKind.dlrm.name, ModelKind.dcnv2.name)


def _stack_columns(pooled: KeyedTensor, names: list[str], dim: int) -> torch.Tensor:
    """Pooled columns in the order of ``names``; (B, F, D)."""
    if list(pooled.keys()) == names:
        return pooled.values().view(-1, len(names), dim)  # no copy
    columns = pooled.to_dict()
    return torch.cat([columns[name] for name in names], dim=1).view(-1, len(names), dim)


def _dense_inputs(dense_BN: torch.Tensor) -> torch.Tensor:
    """The inputs of the bottom MLP: the dense columns, or a column of ones, (B, 1)."""
    return dense_BN if dense_BN.size(1) else dense_BN.new_ones(dense_BN.size(0), 1)


def _rows_by_feature(found: Mapping[str, JaggedTensor]) -> Sequences:
    """What ``Sequences`` are of a collection's output; waits for it."""
    return {name: (jagged.values(), jagged.lengths()) for name, jagged in found.items()}


def _mark_rows(columns: Sequences, stage: str, *points: torch.Tensor | None) -> Sequences:
    rows = mark_backward_of([rows_KD for rows_KD, _ in columns.values()], stage, *points)
    lengths = [lengths_B for _, lengths_B in columns.values()]
    return dict(zip(columns, zip(rows, lengths, strict=True), strict=True))


# Leaves for the tracer of TorchRec's pipelines, which cannot follow data-dependent branches.
torch.fx.wrap("_stack_columns")
torch.fx.wrap("_dense_inputs")
torch.fx.wrap("_rows_by_feature")
torch.fx.wrap("_mark_rows")
torch.fx.wrap("backward_point")
torch.fx.wrap("mark_backward")


class ClickModel(nn.Module, ABC):
    """A model: dense (B, N) and ids -> logits (B, L)."""

    @abstractmethod
    def dense_parts(self) -> list[nn.Module]:
        """The modules of its dense layers, to compile and to run in another precision."""


class BagModel(ClickModel):
    """A model of bags whose lookups start before its bottom layers, and are used after them.

    So the rows are sent while the bottom layers compute, and their gradients during the backward of
    those layers.
    """

    sparse_arch: SparseArch

    @abstractmethod
    def before_rows(self, dense_BN: torch.Tensor) -> torch.Tensor:
        """The output of the bottom layers for the dense columns."""

    @abstractmethod
    def with_rows(self, early: torch.Tensor, sparse_BFD: torch.Tensor) -> torch.Tensor:
        """Logits (B, L) of that and of the pooled columns."""

    def forward(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        """Dense (B, N) and ids -> logits (B, L)."""
        mark("ids_exchange")
        pooled = self.sparse_arch.embedding_bag_collection(sparse_features)
        mark("row_lookup")
        bottom_is_undone = backward_point("dense", dense_features)
        early = self.before_rows(dense_features)
        mark("dense")
        rows_are_sent = backward_point("grads_exchange", dense_features)
        sparse_BFD = _stack_columns(
            pooled, self.sparse_arch.sparse_feature_names, self.sparse_arch.D
        )
        mark("rows_exchange")
        sparse_BFD = mark_backward(sparse_BFD, "dense", bottom_is_undone, rows_are_sent)
        return self.with_rows(early, sparse_BFD)


class _Dlrm(BagModel, DLRM):
    """TorchRec's model with its parts called in that order; the results are the same."""

    dense_arch: nn.Module
    inter_arch: nn.Module
    over_arch: nn.Module

    def before_rows(self, dense_BN: torch.Tensor) -> torch.Tensor:
        dense_BD: torch.Tensor = self.dense_arch(_dense_inputs(dense_BN))
        return dense_BD

    def with_rows(self, early: torch.Tensor, sparse_BFD: torch.Tensor) -> torch.Tensor:
        interactions = self.inter_arch(dense_features=early, sparse_features=sparse_BFD)
        logits: torch.Tensor = self.over_arch(interactions)
        return logits

    def dense_parts(self) -> list[nn.Module]:
        return [self.dense_arch, self.inter_arch, self.over_arch]


class _Dcnv2(_Dlrm, DLRM_DCN):
    """DCNv2 in that order."""


class PooledModel(BagModel):
    """Lookups, and layers of ``hotrec.models.plain.make_layers`` over the pooled columns."""

    def __init__(self, embeddings: Any, layers: Any, *, has_bottom: bool) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embeddings)
        self.layers = layers
        self.has_bottom = has_bottom

    def before_rows(self, dense_BN: torch.Tensor) -> torch.Tensor:
        return self.layers.bottom(_dense_inputs(dense_BN)) if self.has_bottom else dense_BN

    def with_rows(self, early: torch.Tensor, sparse_BFD: torch.Tensor) -> torch.Tensor:
        join = self.layers.join if self.has_bottom else self.layers
        logits: torch.Tensor = join(early, sparse_BFD)
        return logits

    def dense_parts(self) -> list[nn.Module]:
        layers = self.layers
        return [layers.bottom, layers.interaction, layers.top] if self.has_bottom else [layers]


class SequenceModel(ClickModel):
    """Lookups, and layers of ``hotrec.models.plain.make_layers`` over the rows of each feature."""

    def __init__(self, embeddings: Any, layers: Any) -> None:
        super().__init__()
        self.embedding_collection = embeddings
        self.layers = layers

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

    def dense_parts(self) -> list[nn.Module]:
        return [self.layers]


def build_architecture(
    shape: Architecture, embeddings: nn.Module, seed: int, device: torch.device
) -> ClickModel:
    """The model of an architecture on these embeddings, its dense layers on ``device``.

    The seed determines the dense layers' weights, independent of the embeddings' implementation.

    Raises:
        ValueError: If the sizes do not match, or a user's class does not fit.
    """
    if shape.kind in OF_TORCHREC:
        return _build_of_torchrec(shape, embeddings, seed, device)
    layers = make_checked_layers(shape, seed).to(device)
    if shape.reads_sequences:
        return SequenceModel(embeddings, layers)
    return PooledModel(embeddings, layers, has_bottom=shape.has_bottom)


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


def _build_of_torchrec(
    shape: Architecture, embeddings: nn.Module, seed: int, device: torch.device
) -> _Dlrm:
    configs = embeddings.embedding_bag_configs()  # type: ignore[operator]
    dims = {table.embedding_dim for table in configs}
    if len(dims) != 1:
        raise ValueError(
            f"model.embedding_dim: expected one dimension for all tables, got {sorted(dims)}. "
            f"{ModelKind[shape.kind].value} needs equal dimensions."
        )
    dim, num_inputs = dims.pop(), num_bottom_inputs(len(shape.dense))
    bottom, top = list(shape.dense_layer_sizes), list(shape.over_layer_sizes)
    if _last(bottom) != dim:
        raise ValueError(
            f"model.dense_layer_sizes: expected the last to be the embedding dimension {dim}, "
            f"got {_last(bottom)}."
        )
    if _last(top) != 1:
        raise ValueError(f"model.over_layer_sizes: expected the last to be 1, got {_last(top)}.")
    top[-1] = len(shape.labels)
    # Created on CPU, whose generator makes weights independent of the device; then moved.
    made_on = device if device.type == "meta" else torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        if shape.kind == ModelKind.dlrm.name:
            model = _Dlrm(embeddings, num_inputs, bottom, top, made_on)
        else:
            cross = shape.cross_num_layers, shape.cross_low_rank_dim
            model = _Dcnv2(embeddings, num_inputs, bottom, top, *cross, made_on)
    _take_faster_parts(model)
    for name, part in model.named_children():
        if name != "sparse_arch":
            part.to(device)
    return model


def _take_faster_parts(model: DLRM) -> None:
    """Replace TorchRec's parts by hotrec's; the drawn weights are kept."""
    if isinstance(model, DLRM_DCN):
        drawn = model.inter_arch.crossnet
        with torch.device("meta"):
            low_rank = drawn.W_kernels[0].shape[1]
            crossnet = CrossNet(len(drawn.bias[0]), len(drawn.bias), low_rank)
        crossnet.load_state_dict(drawn.state_dict(), assign=True)
        model.inter_arch.crossnet = crossnet
    else:
        model.inter_arch = DotInteraction(model.inter_arch.F)


def _last(layer_sizes: Sequence[int]) -> int | None:
    return layer_sizes[-1] if len(layer_sizes) else None
