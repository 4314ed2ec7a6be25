"""A batch in one block of shared memory, for the transfer from a loader worker to its rank.

Torch uses a file descriptor per tensor, which the rank requests from the worker over another
connection. A routed batch has a dozen tensors, and that cost its rank more than reading the batch;
one block is also pinned in one call.
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from typing import Any

import torch

# Alignment of tensors: a cache line, as in torch's allocator.
ALIGNED_BYTES = 64


@dataclass(frozen=True)
class Packed:
    """Any picklable object with its tensors in one block, uint8 (N,)."""

    pickled: bytes
    block: torch.Tensor

    def pin_memory(self) -> Packed:
        return Packed(self.pickled, self.block.pin_memory())

    def unpack(self) -> Any:
        """The object; its tensors share the block, which exists as long as any of them."""
        return _Unpickler(self.pickled, self.block).load()


def pack(value: Any) -> Packed:
    """Copy the CPU tensors of a picklable object into one block of shared memory."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    block = torch.empty(0, dtype=torch.uint8)
    block.set_(torch.UntypedStorage._new_shared(max(1, pickler.num_bytes)))
    for begin, tensor in pickler.tensors.values():
        _view(block, begin, tensor.dtype, tensor.shape).copy_(tensor)
    return Packed(stream.getvalue(), block)


def _view(
    block: torch.Tensor, begin: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    # Not views of the block for autograd: each tensor has its own version counter.
    first = begin // dtype.itemsize
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(block.untyped_storage(), first, shape, strides)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.num_bytes = 0
        # By id; the tensors are kept alive, so that no other one gets the same id.
        self.tensors: dict[int, tuple[int, torch.Tensor]] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) not in self.tensors:
            self.tensors[id(value)] = (self.num_bytes, value)
            num_bytes = value.numel() * value.itemsize
            self.num_bytes += math.ceil(num_bytes / ALIGNED_BYTES) * ALIGNED_BYTES
        begin, _ = self.tensors[id(value)]
        return begin, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, block: torch.Tensor) -> None:
        super().__init__(io.BytesIO(pickled))
        self._block = block

    def persistent_load(self, key: tuple[int, torch.dtype, tuple[int, ...]]) -> torch.Tensor:
        return _view(self._block, *key)
