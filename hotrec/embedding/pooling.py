"""Pooling of looked-up rows into bags, forward and backward.

The router stores the incidence of bags and ids in both orders, so either direction is an
``embedding_bag`` over contiguous segments, without atomics and so bitwise reproducible.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hotrec.routing.features import RoutedGroup
from hotrec.runtime.stages import mark

# On CUDA one thread sums a segment for each value of a row, and a hot row's segment has thousands
# of ids. Pieces of this size bound the longest sum for any batch and skew.
MOST_IDS = 256


def cut_segments(offsets_S: torch.Tensor, num_ids: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut segments into pieces of at most ``MOST_IDS`` ids, without waiting for the device.

    Returns:
        The start of each piece among the ids, int64 (P,) with P = S + K // MOST_IDS, where excess
        pieces are empty and last; and the start of each segment among the pieces, int64 (S + P',),
        where the last P' hold the excess pieces.
    """
    num_segments = offsets_S.numel()
    num_spare = num_ids // MOST_IDS
    num_most = num_segments + num_spare
    ends_S = torch.cat([offsets_S[1:], offsets_S.new_full((1,), num_ids)])
    # An empty segment keeps one piece, so that it has a sum.
    num_pieces_S = ((ends_S - offsets_S + (MOST_IDS - 1)) // MOST_IDS).clamp_(min=1)
    last_S = num_pieces_S.cumsum(0)
    first_S = last_S - num_pieces_S
    piece_P = torch.arange(num_most, device=offsets_S.device)
    segment_P = torch.searchsorted(last_S, piece_P, right=True).clamp_(max=num_segments - 1)
    begins_P = offsets_S[segment_P] + (piece_P - first_S[segment_P]) * MOST_IDS
    # Without their own segments, the excess pieces would belong to the last segment.
    spare = torch.arange(0, num_spare, MOST_IDS, device=offsets_S.device)
    spare_begins = (last_S[-1:] + spare).clamp_(max=num_most)
    return begins_P.clamp_(max=num_ids), torch.cat([first_S, spare_begins])


def sum_segments(
    source: torch.Tensor,
    positions_K: torch.Tensor,
    offsets_S: torch.Tensor,
    scales_K: torch.Tensor | None,
    longest: int,
) -> torch.Tensor:
    """out[s] = sum over the positions of segment s of scale * source[position]; float (S, D).

    Bitwise reproducible: on CPU the ids of a segment are summed in order, on CUDA those of each
    piece of ``MOST_IDS``, then the pieces. ``longest`` bounds the number of ids in a segment.
    """
    if positions_K.numel() == 0:
        return source.new_zeros(offsets_S.numel(), source.shape[1])
    longest = longest if source.is_cuda else 0
    return sum_in_pieces(source, positions_K, offsets_S, scales_K, longest)


def sum_in_pieces(
    source: torch.Tensor,
    positions_K: torch.Tensor,
    offsets_S: torch.Tensor,
    scales_K: torch.Tensor | None,
    longest: int,
) -> torch.Tensor:
    """``sum_segments`` without sums of more than ``MOST_IDS`` values."""
    if longest <= MOST_IDS:
        return _sum(source, positions_K, offsets_S, scales_K)
    begins_P, firsts = cut_segments(offsets_S, positions_K.numel())
    sums_PD = _sum(source, positions_K, begins_P, scales_K)
    pieces_P = torch.arange(begins_P.numel(), device=source.device)
    sums = sum_in_pieces(sums_PD, pieces_P, firsts, None, -(-longest // MOST_IDS))
    return sums[: offsets_S.numel()]


def _sum(
    source: torch.Tensor,
    positions_K: torch.Tensor,
    offsets_S: torch.Tensor,
    scales_K: torch.Tensor | None,
) -> torch.Tensor:
    return F.embedding_bag(positions_K, source, offsets_S, mode="sum", per_sample_weights=scales_K)


class _PoolRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UD: torch.Tensor, routed: RoutedGroup) -> torch.Tensor:
        ctx.routed = routed
        return sum_segments(
            rows_UD, routed.positions_K, routed.bag_offsets, routed.scales_K, routed.longest_bag
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        mark("grads_exchange")  # of the previous group
        routed = ctx.routed
        grad_rows = sum_segments(
            grads[0].contiguous(),
            routed.bags_K,
            routed.row_offsets_U,
            routed.row_scales_K,
            routed.longest_row,
        )
        mark("pool")
        return grad_rows, None


def pool_rows(rows_UD: torch.Tensor, routed: RoutedGroup, num_columns: int) -> torch.Tensor:
    """Pool the rows float (U, D) that a batch reads into its F columns, float (B, F * D)."""
    bags: torch.Tensor = _PoolRows.apply(rows_UD, routed)
    return bags.view(-1, num_columns * rows_UD.shape[1])
