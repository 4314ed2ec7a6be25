"""TorchRec's own exchanges in bf16: codecs for its sharders, and DDP's all-reduce."""

# No `from __future__ import annotations`: DDP reads the hook's annotations as objects.

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import CommOp, QuantizedCommCodec, QuantizedCommCodecs

from hotrec.types import WireType


class Codec(QuantizedCommCodec[None]):
    """A codec for TorchRec that sends one bfloat16 for each value."""

    def encode(self, input_tensor: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """Float32 of any shape -> bfloat16, same shape."""
        return input_tensor.bfloat16()

    def decode(self, input_grad: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """Bfloat16 of any shape -> float32, same shape."""
        return input_grad.float()

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        return input_len

    @property
    def quantized_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def padded_size(
        self, input_tensor: torch.Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: None
    ) -> tuple[int, int]:
        """Columns of the pooled vectors (B, sum of D), and how many to add: none."""
        return input_tensor.shape[-1], 0


def wire_codecs(wire_type: WireType) -> dict[str, QuantizedCommCodecs] | None:
    """The registry to pass to TorchRec's sharders and sharded modules as ``qcomm_codecs_registry``.

    Args:
        wire_type: Type of rows, pooled vectors and their gradients in messages.

    Returns:
        Codecs by TorchRec's name of the exchange; None for fp32, which leaves TorchRec as it is.
    """
    if wire_type is WireType.fp32:
        return None
    exchanges = (
        CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
        CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
        CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    )
    return {op.name: QuantizedCommCodecs(Codec(), Codec()) for op in exchanges}


def compress_dense(modules: Iterable[DistributedDataParallel], wire_type: WireType) -> None:
    """Make DDP all-reduce gradients in bf16 (sums are bf16 too).

    Args:
        modules: Before their first step.
        wire_type: fp32 leaves DDP as it is.
    """
    if wire_type is not WireType.fp32:
        for ddp in modules:
            ddp.register_comm_hook(ddp.process_group, _reduce_mean)


def _reduce_mean(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: the mean over the ranks, by an all-reduce in bf16.

    Unlike torch's own hooks it scales before converting to bf16, and supports gloo.
    """
    buffer = bucket.buffer()
    message = buffer.div_(dist.get_world_size(group)).bfloat16()
    work = dist.all_reduce(message, group=group, async_op=True)

    def take(_: Any) -> torch.Tensor:
        return buffer.copy_(message)

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(take)
    return future
