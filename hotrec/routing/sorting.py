"""Sorting of integer keys, for routing and for summing gradients by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def sort_keys(keys_K: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort keys int64 (K,) in 0..limit - 1 stably; returns them and their original positions.

    On CPU, key and position are packed into one integer and sorted by numpy, whose vectorised sort
    of plain integers takes a third of the time of torch's sort of pairs.
    """
    position_bits = max(keys_K.numel() - 1, 0).bit_length()
    if keys_K.is_cuda or position_bits + limit.bit_length() > 63:
        sorted_K, order_K = torch.sort(keys_K, stable=True)
        return sorted_K, order_K
    packed_K = (keys_K << position_bits) | torch.arange(keys_K.numel())
    packed_K.numpy().sort()
    return packed_K >> position_bits, packed_K & ((1 << position_bits) - 1)


@dataclass(frozen=True)
class Runs:
    """Runs of equal keys among sorted ones.

    On CUDA, reading the number of runs would wait for the device, so ``keys`` and ``begins`` have
    length K there, with padding after the last run.
    """

    keys: torch.Tensor  # of each run, int64 (U,), ascending, padded with the largest integer
    begins: torch.Tensor  # the start of each run, int64 (U,), padded with K
    run_K: torch.Tensor  # the run of each sorted key, int64
    num: torch.Tensor  # U, int64 (1,)


def find_runs(sorted_K: torch.Tensor) -> Runs:
    """Find the runs of sorted keys, int64 (K,), without waiting for the device."""
    if not sorted_K.is_cuda or sorted_K.numel() == 0:
        keys, run_K, counts = torch.unique_consecutive(
            sorted_K, return_inverse=True, return_counts=True
        )
        num = sorted_K.new_full((1,), keys.numel())
        return Runs(keys, counts.cumsum(0) - counts, run_K, num)
    run_K = torch.zeros_like(sorted_K)
    torch.cumsum(sorted_K[1:] != sorted_K[:-1], 0, out=run_K[1:])
    # All keys of a run are equal and written to the same place.
    keys = torch.full_like(sorted_K, torch.iinfo(torch.int64).max).scatter_(0, run_K, sorted_K)
    places = torch.arange(sorted_K.numel(), device=sorted_K.device)
    return Runs(keys, torch.searchsorted(run_K, places), run_K, run_K[-1:] + 1)
