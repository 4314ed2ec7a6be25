"""Feature interactions of DLRM and DCNv2, with few passes over memory.

Only needs torch, and no other module of hotrec, so that it can be copied into an export. Pairs are
picked by columns both ways, not by two index tensors, whose backward is a scattered sum; the
gradient of X is one product with a symmetric matrix.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

# Vectors per sample are filled up to a multiple of this with zeros: 27 of 64 floats (B = 2048, one
# CPU thread) take MKL 7.3 ms, 28 of them 5.6 ms.
_MULTIPLE = 4


def stack_vectors(first_BD: torch.Tensor, others_BFD: torch.Tensor) -> torch.Tensor:
    """The dense vector and those of the features, (B, 1 + F, D)."""
    return torch.cat((first_BD.unsqueeze(1), others_BFD), dim=1)


def dot_pairs(
    dense_BD: torch.Tensor, sparse_BFD: torch.Tensor, pairs: torch.Tensor, mirror: torch.Tensor
) -> torch.Tensor:
    """Dense vector and the dot products of all pairs; see ``DotPairs``."""
    device = sparse_BFD.device.type
    if torch.is_autocast_enabled(device):
        # Backward runs outside of autocast, so both directions use one type here.
        dtype = torch.get_autocast_dtype(device)
        dense_BD, sparse_BFD = dense_BD.to(dtype), sparse_BFD.to(dtype)
    out: torch.Tensor = _DotPairs.apply(dense_BD, sparse_BFD, pairs, mirror)
    return out


# A leaf for the tracer of TorchRec's pipelines.
torch.fx.wrap("dot_pairs")


class _DotPairs(torch.autograd.Function):
    """X = dense and sparse vectors and P - F - 1 zero vectors, (B, P, D); Z = X X^T."""

    @staticmethod
    def forward(
        ctx: Any,
        dense_BD: torch.Tensor,
        sparse_BFD: torch.Tensor,
        pairs: torch.Tensor,
        mirror: torch.Tensor,
    ) -> torch.Tensor:
        num_samples, num_features, dim = sparse_BFD.shape
        num_vectors = _padded(num_features)
        zeros = dense_BD.new_zeros(num_samples, num_vectors - num_features - 1, dim)
        x_BPD = torch.cat((dense_BD.unsqueeze(1), sparse_BFD, zeros), dim=1)
        products = torch.bmm(x_BPD, x_BPD.transpose(1, 2)).view(num_samples, num_vectors**2)
        ctx.save_for_backward(x_BPD, mirror)
        return torch.cat((dense_BD, products.index_select(1, pairs)), dim=1)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x_BPD, mirror = ctx.saved_tensors
        num_samples, num_vectors, dim = x_BPD.shape
        num_features = len(mirror) // num_vectors
        grad_dense = grad_sparse = None
        if ctx.needs_input_grad[0]:
            # The pairs with the dense vector are the first F.
            with_dense = grad[:, None, dim : dim + num_features]
            sparse_BFD = x_BPD[:, 1 : 1 + num_features]
            grad_dense = torch.baddbmm(grad[:, None, :dim], with_dense, sparse_BFD).squeeze(1)
        if ctx.needs_input_grad[1]:
            # dX = (G + G^T) X, G the upper triangle of pair gradients; a last column for zeros.
            of_pairs = torch.cat((grad[:, dim:], grad.new_zeros(num_samples, 1)), dim=1)
            symmetric = of_pairs.index_select(1, mirror).view(-1, num_features, num_vectors)
            grad_sparse = torch.bmm(symmetric, x_BPD)
        return grad_dense, grad_sparse, None, None


def _padded(num_features: int) -> int:
    """P, vectors in the product: the dense one and F sparse ones, up to a multiple of 4."""
    return -(-(num_features + 1) // _MULTIPLE) * _MULTIPLE


class DotPairs(nn.Module):
    """DLRM: the dense vector and the dot products of all pairs of vectors; differentiable once.

    As TorchRec's ``InteractionArch`` to rounding: on one CPU thread with B = 2048, F = 26, D = 64
    forward takes 9 ms instead of 13, backward 10 instead of 31. Kept
    for backward: B P D values, P = F + 1 up to a multiple of 4.

    Args:
        num_features: F, at least 1.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        num_vectors = _padded(num_features)
        first, second = torch.triu_indices(num_features + 1, num_features + 1, offset=1)
        # The position of pair k in the flattened Z; and the position of the gradient of pair (f,
        # p).
        pairs = first * num_vectors + second
        mirror = torch.full((num_vectors, num_vectors), len(pairs))
        numbers = torch.arange(len(pairs))
        mirror[first, second] = numbers
        mirror[second, first] = numbers
        self.pairs: torch.Tensor
        self.mirror: torch.Tensor
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("mirror", mirror[1 : num_features + 1].flatten(), persistent=False)

    def forward(self, dense_BD: torch.Tensor, sparse_BFD: torch.Tensor) -> torch.Tensor:
        """-> (B, D + F (F + 1) / 2)."""
        return dot_pairs(dense_BD, sparse_BFD, self.pairs, self.mirror)


class CrossLayers(nn.Module):
    """DCNv2: x <- x + x_0 * (W V x + b), with W (N, r) and V (r, N) (Wang et al. 2021, 3.4).

    As TorchRec's ``LowRankCrossNet`` with the same first weights, in two passes over (B, N) less.
    """

    def __init__(self, width: int, num_layers: int, rank: int, device: str = "cpu") -> None:
        super().__init__()

        def make(*shape: int) -> nn.ParameterList:
            weights = [torch.zeros(shape, device=device) for _ in range(num_layers)]
            return nn.ParameterList(map(nn.init.xavier_normal_, weights) if shape[1:] else weights)

        self.w, self.v, self.bias = make(width, rank), make(rank, width), make(width)

    def forward(self, dense_BD: torch.Tensor, sparse_BFD: torch.Tensor) -> torch.Tensor:
        """-> (B, N), N = (1 + F) D."""
        x_0 = x = stack_vectors(dense_BD, sparse_BFD).flatten(1)
        for v, w, bias in zip(self.v, self.w, self.bias, strict=True):
            x = torch.addcmul(x, x_0, F.linear(F.linear(x, v), w, bias))
        return x
