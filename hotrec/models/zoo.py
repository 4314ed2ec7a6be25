"""Click models, from TorchRec's own arches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.sparse.jagged_tensor import KeyedTensor

from hotrec.models.flops import num_bottom_inputs
from hotrec.models.interaction import CrossNet, DotInteraction
from hotrec.runtime.stages import backward_point, mark, mark_backward
from hotrec.types import ModelKind


def _stack_columns(pooled: KeyedTensor, names: list[str], dim: int) -> torch.Tensor:
    """Pooled columns in the order of ``names``; (B, F, D)."""
    if list(pooled.keys()) == names:
        return pooled.values().view(-1, len(names), dim)  # no copy
    columns = pooled.to_dict()
    return torch.cat([columns[name] for name in names], dim=1).view(-1, len(names), dim)


def _dense_inputs(dense_BN: torch.Tensor) -> torch.Tensor:
    """The dense columns; in place of none a column of ones, (B, 1), as inputs of the bottom MLP."""
    return dense_BN if dense_BN.size(1) else dense_BN.new_ones(dense_BN.size(0), 1)


# Leaves for the tracer of TorchRec's pipelines, which cannot follow what is decided by a tensor.
torch.fx.wrap("_stack_columns")
torch.fx.wrap("_dense_inputs")
torch.fx.wrap("backward_point")
torch.fx.wrap("mark_backward")


class _LookupsFirst(DLRM):
    """TorchRec's model with its parts called in another order; the results are the same.

    Lookups are started before the bottom layers and used after them, so the rows travel while the
    bottom layers compute, and their gradients while those compute backward.
    """

    def forward(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        """Dense (B, N) and ids -> logits (B, 1)."""
        mark("ids_exchange")
        pooled = self.sparse_arch.embedding_bag_collection(sparse_features)
        mark("row_lookup")
        bottom_is_undone = backward_point("dense", dense_features)
        dense_BD = self.dense_arch(_dense_inputs(dense_features))
        mark("dense")
        rows_are_sent = backward_point("grads_exchange", dense_features)
        sparse_BFD = _stack_columns(
            pooled, self.sparse_arch.sparse_feature_names, self.sparse_arch.D
        )
        mark("rows_exchange")
        sparse_BFD = mark_backward(sparse_BFD, "dense", bottom_is_undone, rows_are_sent)
        interactions = self.inter_arch(dense_features=dense_BD, sparse_features=sparse_BFD)
        logits: torch.Tensor = self.over_arch(interactions)
        return logits


class _Dcnv2(_LookupsFirst, DLRM_DCN):
    """DCNv2 in that order."""


def build_model(
    kind: ModelKind,
    embeddings: nn.Module,
    *,
    num_dense: int,
    dense_layer_sizes: Sequence[int],
    over_layer_sizes: Sequence[int],
    cross_num_layers: int = 3,
    cross_low_rank_dim: int = 512,
    seed: int,
    device: torch.device,
) -> DLRM:
    """A model that maps (dense (B, N), sparse) to logits (B, 1).

    Args:
        kind: The model.
        embeddings: ``EmbeddingBagCollection`` or ``HotColdEmbeddingBagCollection``; all tables of
            the same dimension D.
        num_dense: The number N of dense columns. Without any the bottom MLP reads a column of
            ones, so that its output is a learned vector, the same for all samples.
        dense_layer_sizes: The bottom MLP's; the last must be D.
        over_layer_sizes: The top MLP's; the last must be 1.
        cross_num_layers: The number of DCNv2's cross layers.
        cross_low_rank_dim: The rank of DCNv2's cross matrices.
        seed: Gives the dense layers the same weights whatever holds the embeddings.
        device: The device of the dense layers.

    Raises:
        ValueError: if the sizes do not fit together.
    """
    configs = embeddings.embedding_bag_configs()  # type: ignore[operator]
    dims = {table.embedding_dim for table in configs}
    if len(dims) != 1:
        raise ValueError(
            f"model.embedding_dim: expected one dimension for all tables, got {sorted(dims)}. "
            f"{kind.value} needs equal dimensions."
        )
    dim, num_inputs = dims.pop(), num_bottom_inputs(num_dense)
    if _last(dense_layer_sizes) != dim:
        raise ValueError(
            f"model.dense_layer_sizes: expected the last to be the embedding dimension {dim}, "
            f"got {_last(dense_layer_sizes)}."
        )
    if _last(over_layer_sizes) != 1:
        raise ValueError(
            f"model.over_layer_sizes: expected the last to be 1, got {_last(over_layer_sizes)}."
        )
    # Made on CPU, whose generator gives the same weights whatever the device; then moved.
    made_on = device if device.type == "meta" else torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        if kind is ModelKind.dlrm:
            model: DLRM = _LookupsFirst(
                embeddings, num_inputs, list(dense_layer_sizes), list(over_layer_sizes), made_on
            )
        else:
            model = _Dcnv2(
                embeddings,
                num_inputs,
                list(dense_layer_sizes),
                list(over_layer_sizes),
                cross_num_layers,
                cross_low_rank_dim,
                made_on,
            )
    _take_faster_parts(model)
    for name, part in model.named_children():
        if name != "sparse_arch":
            part.to(device)
    return model


def _take_faster_parts(model: DLRM) -> None:
    """Put hotrec's parts in the place of TorchRec's; the weights stay what they were drawn."""
    if isinstance(model, DLRM_DCN):
        drawn = model.inter_arch.crossnet
        with torch.device("meta"):
            crossnet = CrossNet(len(drawn.bias[0]), len(drawn.bias), drawn._low_rank)
        crossnet.load_state_dict(drawn.state_dict(), assign=True)
        model.inter_arch.crossnet = crossnet
    else:
        model.inter_arch = DotInteraction(model.inter_arch.F)


def _last(layer_sizes: Sequence[int]) -> int | None:
    return layer_sizes[-1] if len(layer_sizes) else None
