"""TorchRec's own exchanges in 16 bits: codecs for its sharders, and DDP's all-reduce.

In fp16 gradients are sent in blocks of up to 32 values, each preceded by its own scale, a power of
two (see ``wire``): 33 halves for 32 floats. FBGEMM's codec loses small gradients even with a loss
scale, because it divides before converting to fp32. If a collective adds up or fixes sizes, one
constant factor replaces the scales of blocks, and values beyond fp16's range arrive as infinity.
"""

# No `from __future__ import annotations`: DDP reads the hook's annotations as objects.

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import CommOp, QuantizedCommCodec, QuantizedCommCodecs

from hotrec.runtime.wire import DTYPES, fp16_shift, power_of_two
from hotrec.types import WireType

# The largest block that shares a power of two; a larger one hardly saves bytes.
_MOST_PER_BLOCK = 32
# With them fp16 holds gradients up to 4 and up to 64, and keeps 11 bits down to 4e-9 and 6e-8.
_POOLED_GRADIENT_FACTOR = 2.0**14
_DENSE_GRADIENT_FACTOR = 2.0**10


class Codec(QuantizedCommCodec[None]):
    """A codec for TorchRec that sends one element for each value.

    Args:
        dtype: Type on the wire.
        factor: Power of two that values are multiplied by on the wire.
    """

    def __init__(self, dtype: torch.dtype, factor: float = 1.0) -> None:
        self._dtype = dtype
        self._factor = factor

    def encode(self, input_tensor: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """Float32 of any shape -> the wire's type, same shape."""
        scaled = input_tensor if self._factor == 1.0 else input_tensor * self._factor
        return scaled.to(self._dtype)

    def decode(self, input_grad: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """The wire's type of any shape -> float32, same shape."""
        values = input_grad.float()
        return values if self._factor == 1.0 else values.div_(self._factor)

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        return input_len

    @property
    def quantized_dtype(self) -> torch.dtype:
        return self._dtype

    def padded_size(
        self, input_tensor: torch.Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: None
    ) -> tuple[int, int]:
        """Columns of the pooled vectors (B, sum of D), and how many to add: none."""
        return input_tensor.shape[-1], 0


class BlockCodec(Codec):
    """fp16 with a power of two in front of each block of values; blocks fill every message."""

    def __init__(self, block: int) -> None:
        super().__init__(torch.float16)
        self._block = block

    def encode(self, input_tensor: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """Float32, n values of any shape -> float16 (n / block * (block + 1),)."""
        blocks = input_tensor.reshape(-1, self._block)
        shifts = fp16_shift(blocks.abs().amax(1, keepdim=True))
        message = torch.empty(
            blocks.shape[0], self._block + 1, dtype=torch.float16, device=blocks.device
        )
        message[:, :1] = shifts
        message[:, 1:] = blocks * power_of_two(shifts)
        return message.view(-1)

    def decode(self, input_grad: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """Float16 (n / block * (block + 1),) -> float32 (n,)."""
        message = input_grad.view(-1, self._block + 1)
        return (message[:, 1:].float() * power_of_two(-message[:, :1].int())).view(-1)

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        if input_len % self._block:
            raise ValueError(
                f"wire fp16: expected messages of whole blocks of {self._block} values, got "
                f"{input_len}. Pass the dimensions of all shards to wire_codecs."
            )
        return input_len // self._block * (self._block + 1)


def wire_codecs(wire_type: WireType, dims: Iterable[int]) -> dict[str, QuantizedCommCodecs] | None:
    """The registry to pass to TorchRec's sharders and sharded modules as ``qcomm_codecs_registry``.

    Args:
        wire_type: Type of rows, pooled vectors and their gradients in messages.
        dims: Embedding dims of the tables, and of their shards under column-wise sharding.

    Returns:
        Codecs by TorchRec's name of the exchange; None for fp32, which leaves TorchRec as it is.
    """
    if wire_type is WireType.fp32:
        return None
    dtype = DTYPES[wire_type]
    rows = Codec(dtype)
    if wire_type is WireType.fp16:
        gradients: Codec = BlockCodec(math.gcd(_MOST_PER_BLOCK, *dims))
        fixed = Codec(dtype, _POOLED_GRADIENT_FACTOR)
    else:
        gradients = fixed = rows
    of_op = {
        CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL: gradients,
        CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL: gradients,
        CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER: fixed,
    }
    return {op.name: QuantizedCommCodecs(rows, backward) for op, backward in of_op.items()}


def compress_dense(modules: Iterable[DistributedDataParallel], wire_type: WireType) -> None:
    """Make DDP all-reduce gradients in 16 bits (sums are 16-bit too).

    Args:
        modules: Before their first step.
        wire_type: fp32 leaves DDP as it is.
    """
    if wire_type is WireType.fp32:
        return
    codec = Codec(DTYPES[wire_type], _DENSE_GRADIENT_FACTOR if wire_type is WireType.fp16 else 1.0)
    for ddp in modules:
        ddp.register_comm_hook(_Reduction(ddp.process_group, codec), _reduce_mean)


@dataclass(frozen=True)
class _Reduction:
    group: dist.ProcessGroup
    codec: Codec


def _reduce_mean(state: _Reduction, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: the mean over the ranks, by an all-reduce in the codec's type.

    Unlike torch's own hooks it scales before converting to 16 bits, and supports bf16 over gloo.
    """
    buffer = bucket.buffer()
    message = state.codec.encode(buffer.div_(dist.get_world_size(state.group)))
    work = dist.all_reduce(message, group=state.group, async_op=True)

    def take(_: Any) -> torch.Tensor:
        return buffer.copy_(state.codec.decode(message))

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(take)
    return future
