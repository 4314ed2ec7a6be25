"""Pooling of looked-up rows into bags, or their copies to each id, forward and backward.

The router stores the incidence of bags and ids in both orders, so either direction is an
``embedding_bag`` over contiguous segments, without atomics and so bitwise reproducible. Without
pooling, so is backward: the sum over the ids that read a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hotrec.routing.features import RoutedGroup, RoutedRows, RoutedSequences
from hotrec.runtime.stages import mark

# On CUDA one thread sums a segment for each value of a row, and a hot row's segment has thousands
# of ids. Pieces of this size bound the longest sum for any batch and skew.
MAX_IDS = 256


def cut_segments(offsets_S: torch.Tensor, num_ids: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut segments at every multiple of ``MAX_IDS`` ids, without waiting for the device.

    Args:
        offsets_S: The start of each segment, int64 (S,), ascending from 0.
        num_ids: The number of ids K.

    Returns:
        The start of each piece among the ids, int64 (S + K / MAX_IDS,), and the start of each
        segment among the pieces, int64 (S,).
    """
    cuts_C = torch.arange(0, num_ids, MAX_IDS, device=offsets_S.device)
    num_segments, num_cuts = offsets_S.numel(), cuts_C.numel()
    places_P = torch.arange(num_segments + num_cuts, device=offsets_S.device)
    # Merge both, with a segment's start before a cut at the same id.
    first_S = torch.searchsorted(cuts_C, offsets_S) + places_P[:num_segments]
    place_C = torch.searchsorted(offsets_S, cuts_C, right=True) + places_P[:num_cuts]
    begins_P = torch.empty_like(places_P).index_copy_(0, first_S, offsets_S)
    return begins_P.index_copy_(0, place_C, cuts_C), first_S


def sum_segments(
    source: torch.Tensor,
    positions_K: torch.Tensor,
    offsets_S: torch.Tensor,
    scales_K: torch.Tensor | None,
    longest: int,
) -> torch.Tensor:
    """out[s] = sum over the positions of segment s of scale * source[position]; float (S, D).

    Bitwise reproducible: on CPU the ids of a segment are summed in order, on CUDA those of each
    piece of ``MAX_IDS``, then the pieces. ``longest`` bounds the number of ids in a segment.
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
    """``sum_segments`` without sums of more than ``MAX_IDS`` values."""
    if longest <= MAX_IDS:
        return _sum(source, positions_K, offsets_S, scales_K)
    begins_P, firsts_S = cut_segments(offsets_S, positions_K.numel())
    sums_PD = _sum(source, positions_K, begins_P, scales_K)
    pieces_P = torch.arange(begins_P.numel(), device=source.device)
    return sum_in_pieces(sums_PD, pieces_P, firsts_S, None, 1 + -(-longest // MAX_IDS))


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
        mark("dense")  # what a model of any kind has done since its lookup
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


class CopyRows(torch.autograd.Function):
    """Rows float (U, D) -> the row of each index, (K, D).

    Backward is ``sums``, (K, D) -> (U, D), which adds up the gradients of a row in a fixed order;
    that of ``index_select`` does not on every device.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_UD: torch.Tensor,
        index_K: torch.Tensor,
        sums: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.sums = sums
        return rows_UD.index_select(0, index_K)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.sums(grads[0].contiguous()), None, None


def _sum_ids(routed: RoutedSequences, grads_KD: torch.Tensor) -> torch.Tensor:
    mark("dense")
    grad_rows = sum_segments(
        grads_KD, routed.by_row_K, routed.row_offsets_U, None, routed.longest_row
    )
    mark("pool")
    return grad_rows


def output_rows(rows_UD: torch.Tensor, routed: RoutedRows, num_columns: int) -> torch.Tensor:
    """The output of F columns for the rows float (U, D) that a batch reads.

    Returns:
        Float (B, F * D) if they are pooled, else (K, D), feature by feature.
    """
    if isinstance(routed, RoutedSequences):
        copies: torch.Tensor = CopyRows.apply(
            rows_UD, routed.positions_K, partial(_sum_ids, routed)
        )
        return copies
    assert isinstance(routed, RoutedGroup), type(routed)
    return pool_rows(rows_UD, routed, num_columns)
