"""Random numbers of rows that only depend on their coordinates, and stochastic rounding.

Counter-based: each value hashes its coordinates, with the 32-bit mixing function "lowbias32"
(C. Wellons, "Prospecting for Hash Functions", 2018).
"""

from __future__ import annotations

import math

import torch


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply lowbias32 to the bits of int32 tensors, in place."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= -2073254261  # 0x846CA68B
    x ^= (x >> 16) & 0xFFFF
    return x


def random_bits(key: int, rows_R: torch.Tensor, dim: int) -> torch.Tensor:
    """Int32 (R, D), a function of the key (an int32), the row (int64 (R,)) and the column."""
    key_R = _mix(_mix((rows_R >> 31).int() ^ key) ^ (rows_R & 0x7FFFFFFF).int())
    columns_D = torch.arange(dim, dtype=torch.int32, device=rows_R.device)
    return _mix(key_R[:, None] + columns_D * -1640531527)  # 2^32 / phi


def round_randomly(values_RD: torch.Tensor, key: int, rows_R: torch.Tensor) -> torch.Tensor:
    """Round float32 (R, D) to one of the two neighbours in bf16, on average to the value.

    A value x between neighbours a < b becomes b with probability (x - a) / (b - a) (stochastic
    rounding: Gupta et al., ICML 2015), by the ``random_bits`` of the key and the row. Values above
    the largest number of bf16 are clamped to it.
    """
    info = torch.finfo(torch.bfloat16)
    mantissa = -math.frexp(info.eps)[1] + 1  # 7
    least = math.frexp(info.smallest_normal)[1]
    exponents = torch.frexp(values_RD).exponent.clamp_(min=least) - (mantissa + 1)
    # The bits of float32 beyond those of bf16, so that the sum below is exact.
    num_bits = 23 - mantissa
    bits_RD = random_bits(key, rows_R, values_RD.shape[1])
    uniform_RD = ((bits_RD >> 8) & ((1 << num_bits) - 1)).float().mul_(2.0**-num_bits)
    # In units of the distance between neighbours.
    found = torch.ldexp(torch.ldexp(values_RD, -exponents).add_(uniform_RD).floor_(), exponents)
    return found.clamp_(-info.max, info.max).bfloat16()
