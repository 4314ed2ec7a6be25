"""The rows of all ranks on every rank, with gradients that go back to the rank of each row.

The numbers of rows may differ between ranks, and may be 0. The gradients of a row are added up in
the order of the ranks, so that a repeat gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hotrec.runtime.ranks import finish_others, rank, world_size


def gather_sizes(num_rows: int, device: torch.device) -> list[int]:
    """The number of rows of every rank; collective, of tensors on ``device``."""
    if world_size() == 1:
        return [num_rows]
    finish_others()
    size = torch.tensor([num_rows], device=device)
    sizes = [torch.empty_like(size) for _ in range(world_size())]
    dist.all_gather(sizes, size)
    return [int(of_rank) for of_rank in torch.cat(sizes).tolist()]


def gather_rows(rows_BD: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The rows of all ranks, (C, D), those of rank 0 first; collective, and so is its backward.

    Args:
        rows_BD: The rows of this rank.
        sizes: Result of ``gather_sizes``; C is their sum.
    """
    if world_size() == 1:
        return rows_BD
    gathered: torch.Tensor = _GatheredRows.apply(rows_BD, sizes)
    return gathered


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_BD: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        ctx.sizes = sizes
        finish_others()
        # gloo and NCCL gather equal shapes.
        padded = rows_BD.new_zeros(max(sizes), rows_BD.size(1))
        padded[: rows_BD.size(0)] = rows_BD
        of_ranks = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(of_ranks, padded)
        return torch.cat([rows[:size] for rows, size in zip(of_ranks, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads_CD: torch.Tensor) -> tuple[torch.Tensor, None]:
        finish_others()
        mine = ctx.sizes[rank()]
        received = grads_CD.new_empty(len(ctx.sizes) * mine, grads_CD.size(1))
        splits = [mine] * len(ctx.sizes)
        dist.all_to_all_single(received, grads_CD.contiguous(), splits, ctx.sizes)
        return received.view(len(ctx.sizes), mine, grads_CD.size(1)).sum(0), None
