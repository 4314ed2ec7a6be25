"""Pooling of looked-up rows into bags, forward and backward, without atomics.

Pooling is a product with a sparse matrix (bags x ids); its gradient is a product with the
transposed matrix. The router stores the incidence in both orders, so either direction is one
``embedding_bag`` call over contiguous segments: on CPU FBGEMM's vectorised kernel, on CUDA one
thread block per segment; both bitwise reproducible.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hotrec.routing import RoutedGroup
from hotrec.stages import mark


def _sum_segments(
    source: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    """out[s] = sum over positions of segment s of scale * source[position]; (S, D)."""
    if positions.numel() == 0:
        return source.new_zeros(offsets.numel(), source.shape[1])
    return F.embedding_bag(positions, source, offsets, mode="sum", per_sample_weights=scales)


class _PoolRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UD: torch.Tensor, routed: RoutedGroup) -> torch.Tensor:
        ctx.routed = routed
        return _sum_segments(rows_UD, routed.positions_K, routed.bag_offsets, routed.scales_K)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        mark("grads_exchange")  # of the group before
        routed = ctx.routed
        grad_rows = _sum_segments(
            grads[0].contiguous(), routed.bags_K, routed.row_offsets_U, routed.row_scales_K
        )
        mark("pool")
        return grad_rows, None


def pool_rows(rows_UD: torch.Tensor, routed: RoutedGroup, num_columns: int) -> torch.Tensor:
    """Pool the rows that a batch reads into its bags.

    Args:
        rows_UD: float (U, D), one row per value of ``routed.rows``, in its order.
        routed: where each row goes.
        num_columns: F, columns of the group.

    Returns:
        float (B, F * D): the columns side by side, as a ``KeyedTensor`` holds them.
    """
    bags: torch.Tensor = _PoolRows.apply(rows_UD, routed)
    return bags.view(-1, num_columns * rows_UD.shape[1])
