"""Exchanges of float values over a process group, in fp32 or bf16, that count sent bytes.

bf16 has fp32's range, so that the small gradients of a mean loss survive. A rank's own share stays
in fp32, except where all ranks have to add up the same values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hotrec.runtime.ranks import Group, backend_of
from hotrec.runtime.traffic import counted_by_sender
from hotrec.types import WireType


def encode(values: torch.Tensor, wire_type: WireType) -> torch.Tensor:
    """Float32 (n,) -> (n,) of the wire's type; bf16 is off by at most 2**-8 of each value."""
    return values if wire_type is WireType.fp32 else values.bfloat16()


def decode(message: torch.Tensor, wire_type: WireType) -> torch.Tensor:
    """The values of a message, float32 (n,)."""
    return message if wire_type is WireType.fp32 else message.float()


class Wire:
    """Exchanges over one process group; calls must come in the same order on every rank.

    Args:
        group: The process group, not used concurrently by others; closed by its owner.
        wire_type: Type in which float32 values are sent; other types are sent unchanged.
    """

    def __init__(
        self, group: dist.ProcessGroup | Group, wire_type: WireType = WireType.fp32
    ) -> None:
        self._group = group
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.wire_type = wire_type
        self._peers = [dist.get_global_rank(self.group, r) for r in range(self.world_size)]

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group.group if isinstance(self._group, Group) else self._group

    def all_to_all(
        self, source: torch.Tensor, sizes_to: Sequence[int], sizes_from: Sequence[int]
    ) -> torch.Tensor:
        """Send each rank its part of ``source`` (sum of sizes_to,), the parts in rank order.

        ``sizes_from`` are the numbers of elements that each rank sends to this one. Returns (sum of
        sizes_from,), of the same type, the parts in rank order.
        """
        if self.world_size == 1:
            return source
        wire_type = self.type_of(source)
        parts = list(source.split(list(sizes_to)))
        if wire_type is WireType.fp32:
            return self._exchange("all_to_all", parts, sizes_from)
        own = parts[self.rank]
        # This rank's own part is not sent: an empty part replaces it.
        parts[self.rank] = own[:0]
        arriving = list(sizes_from)
        arriving[self.rank] = 0
        messages = [encode(part, wire_type) for part in parts]
        received = self._exchange("all_to_all", messages, arriving).split(arriving)
        decoded = [decode(part, wire_type) for part in received]
        decoded[self.rank] = own
        return torch.cat(decoded)

    def all_gather_joined(self, source: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Every rank's ``source`` (sizes[rank],) in rank order, (sum of sizes,).

        All ranks get the same bits, so a rank decodes its own message too.
        """
        if self.world_size == 1:
            return source
        wire_type = self.type_of(source)
        message = encode(source, wire_type)
        if backend_of(self.group, source.device) == "gloo":
            received = self._exchange("all_gather", [message] * self.world_size, sizes)
        else:
            received = self._gather(message, sizes)
        return decode(received, wire_type)

    def type_of(self, values: torch.Tensor) -> WireType:
        """The type in which these values travel."""
        return self.wire_type if values.dtype == torch.float32 else WireType.fp32

    def _exchange(
        self, collective: str, parts: list[torch.Tensor], sizes_from: Sequence[int]
    ) -> torch.Tensor:
        """Send ``parts[r]`` to rank r; returns the concatenated parts from all ranks."""
        source = parts[self.rank]
        joined = source.new_empty(sum(sizes_from))
        out = list(joined.split(list(sizes_from)))
        sent_bytes = [part.nbytes for part in parts]
        sent_bytes[self.rank] = 0
        with counted_by_sender(collective, sent_bytes, self._peers):
            if backend_of(self.group, source.device) != "gloo":
                dist.all_to_all(out, parts, group=self.group)
                return joined
            # Receive first: in gloo's all-to-all a rank only announces that it can receive after
            # all its sends, so of two ranks the earlier one sends when the other has finished.
            out[self.rank].copy_(source)
            works = []
            for step in range(1, self.world_size):
                peer = (self.rank - step) % self.world_size
                if out[peer].numel():
                    works.append(dist.irecv(out[peer], self._peers[peer], self.group))
            for step in range(1, self.world_size):
                peer = (self.rank + step) % self.world_size
                if parts[peer].numel():
                    works.append(dist.isend(parts[peer], self._peers[peer], self.group))
            for work in works:
                assert work is not None
                work.wait()
        return joined

    def _gather(self, message: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The concatenated messages of all ranks."""
        out = message.new_empty(sum(sizes))
        num_bytes = (self.world_size - 1) * message.nbytes
        with counted_by_sender("all_gather", num_bytes, self._peers):
            if len(set(sizes)) == 1:
                dist.all_gather_into_tensor(out, message, group=self.group)
            else:  # NCCL runs it as one group of broadcasts
                dist.all_gather(list(out.split(list(sizes))), message, group=self.group)
        return out

    def all_reduce(self, values: torch.Tensor) -> None:
        """Add up over the ranks, in place, in fp32."""
        if self.world_size == 1:
            return
        if self.type_of(values) is WireType.fp32:
            self.start_all_reduce(values, is_async=False)
            return
        # Sums in 16 bits lose small terms: gather shares, add up in fp32.
        flat = values.view(-1)
        length = -(-flat.numel() // self.world_size)
        share_sizes = [
            max(0, min(length, flat.numel() - length * rank)) for rank in range(self.world_size)
        ]
        own = share_sizes[self.rank]
        received = self.all_to_all(flat, share_sizes, [own] * self.world_size)
        share = received.view(self.world_size, own).sum(0)
        flat.copy_(self.all_gather_joined(share, share_sizes))

    def start_all_reduce(self, values: torch.Tensor, is_async: bool = True) -> dist.Work | None:
        """Start to add up in the values' own type, in place; None if not ``is_async``."""
        sent = 2 * values.nbytes * (self.world_size - 1) // self.world_size
        with counted_by_sender("all_reduce", sent, self._peers):
            return dist.all_reduce(values, group=self.group, async_op=is_async)
