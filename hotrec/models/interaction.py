"""Feature interactions of DLRM and DCNv2: TorchRec's arches with fewer passes over memory.

Same results to rounding. Pairs are picked by columns both ways, not by two index tensors, whose
backward is a scattered sum; the gradient of X is one product with a symmetric matrix.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch import nn
from torch.autograd.function import once_differentiable
from torchrec.models.dlrm import InteractionArch
from torchrec.modules.crossnet import LowRankCrossNet

# Vectors per sample are filled up to a multiple of this with zeros: 27 of 64 floats (B = 2048, one
# CPU thread) take MKL 7.3 ms, 28 of them 5.6 ms.
_MULTIPLE = 4


def dot_interaction(
    dense_BD: torch.Tensor, sparse_BFD: torch.Tensor, pairs: torch.Tensor, mirror: torch.Tensor
) -> torch.Tensor:
    """Dense vector and the dot products of all pairs; see ``DotInteraction``."""
    device = sparse_BFD.device.type
    if torch.is_autocast_enabled(device):
        # Backward runs outside of autocast, so both directions use one type here.
        dtype = torch.get_autocast_dtype(device)
        dense_BD, sparse_BFD = dense_BD.to(dtype), sparse_BFD.to(dtype)
    out: torch.Tensor = _DotInteraction.apply(dense_BD, sparse_BFD, pairs, mirror)
    return out


# A leaf for the tracer of TorchRec's pipelines.
torch.fx.wrap("dot_interaction")


class _DotInteraction(torch.autograd.Function):
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
        num_vectors = padded_vectors(num_features)
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


def padded_vectors(num_features: int) -> int:
    """P, vectors in the product: the dense one and F sparse ones, up to a multiple of 4."""
    return -(-(num_features + 1) // _MULTIPLE) * _MULTIPLE


class DotInteraction(InteractionArch):
    """TorchRec's ``InteractionArch``, in fewer passes; differentiable once.

    On one CPU thread with B = 2048, F = 26, D = 64 forward takes 9 ms instead of 13, backward 10
    instead of 31 (benchmarks/dense_layers.py). Kept for backward: B P D values, P = F + 1 up to a
    multiple of 4.

    Args:
        num_sparse_features: F; with 0 the output is the dense vector alone.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__(num_sparse_features)
        num_vectors = padded_vectors(self.F)
        first, second = self.triu_indices
        # The position of pair k in the flattened Z; and the position of the gradient of pair (f,
        # p).
        pairs = first * num_vectors + second
        mirror = torch.full((num_vectors, num_vectors), len(pairs))
        numbers = torch.arange(len(pairs))
        mirror[first, second] = numbers
        mirror[second, first] = numbers
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("mirror", mirror[1 : self.F + 1].flatten(), persistent=False)

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Dense (B, D) and sparse (B, F, D) -> (B, D + F (F + 1) / 2)."""
        if self.F <= 0:
            return dense_features
        return dot_interaction(dense_features, sparse_features, self.pairs, self.mirror)


class CrossNet(LowRankCrossNet):
    """TorchRec's ``LowRankCrossNet`` with two passes over (B, N) less in every layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(B, N) -> (B, N)."""
        x_0 = x_l = input
        for v, w, bias in zip(self.V_kernels, self.W_kernels, self.bias, strict=True):
            low = nn.functional.linear(x_l, v)
            x_l = torch.addcmul(x_l, x_0, nn.functional.linear(low, w, bias))
        return x_l
