"""Gradients averaged over the ranks in the background, several parameters in one message.

fp32 goes out as an asynchronous all-reduce of the process group. For 16 bits ``Wire.all_reduce``
takes two exchanges with additions between them; on CPU a thread of its own makes them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hotrec.traffic import counted_by_sender, note_sent
from hotrec.wire import Wire, WireType


class Sender:
    """All-reduces of one process group, in the order in which they are started.

    Args:
        group: the ranks; nothing else may use it.
        wire_type: in which float32 values travel; sums are made in float32.
    """

    def __init__(self, group: dist.ProcessGroup, wire_type: WireType = WireType.FP32) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self._is_nccl = dist.get_backend(group) == "nccl"
        self._wire = Wire(group, wire_type)
        self._exact_wire = Wire(group)
        self._queue: SimpleQueue[tuple[torch.Tensor, int, Future[None]] | None] = SimpleQueue()
        self._has_thread = False
        self._has_failed = False

    def agree_on(self, facts: Mapping[str, tuple[int, ...]]) -> None:
        """Check that all ranks hold the same tensors: facts that must match, by name.

        Raises:
            ValueError: on every rank, if not.
        """
        if self.world_size == 1:
            return
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, list(facts.items()), group=self.group)
        for rank, others in enumerate(gathered):
            if others != gathered[0]:
                differing = sorted(set(others) ^ set(gathered[0]))
                raise ValueError(
                    f"dense layers of rank {rank}: expected the parameters of rank 0, got others "
                    f"(name, shape, is trained): {differing[:4] or 'in another order'}. Build the "
                    "same model on every rank."
                )

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every rank the values that the group's first rank has."""
        if self.world_size > 1:
            for tensor in tensors:
                source = dist.get_global_rank(self.group, 0)
                dist.broadcast(tensor.detach(), src=source, group=self.group)

    def start(self, message: torch.Tensor, num_values: int) -> Any:
        """Add up ``message`` over the ranks, in place, until the returned Work or Future is done.

        Args:
            message: (n,); the first ``num_values`` travel in the wire's type, the rest as they are.
        """
        if self._wire.wire_type is WireType.FP32 or message.dtype != torch.float32:
            num_bytes = message.numel() * message.element_size()
            note_sent("all_reduce", 2 * num_bytes * (self.world_size - 1) // self.world_size)
            with counted_by_sender():
                return dist.all_reduce(message, group=self.group, async_op=True)
        future: Future[None] = Future()
        if self._is_nccl:
            # In the order of the current stream; the host does not wait.
            self._add_up(message, num_values)
            future.set_result(None)
            return future
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._run, name="dense gradients", daemon=True).start()
        self._queue.put((message, num_values, future))
        return future

    def _add_up(self, message: torch.Tensor, num_values: int) -> None:
        self._wire.all_reduce(message[:num_values])
        self._exact_wire.all_reduce(message[num_values:])

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            message, num_values, future = item
            try:
                if self._has_failed:
                    # Its messages would meet the wrong ones of other ranks.
                    raise RuntimeError(
                        "dense gradients: expected all messages before this one to arrive, got a "
                        "failure. See the first error of this rank."
                    )
                self._add_up(message, num_values)
            except BaseException as error:  # whatever it is, the main thread must see it
                self._has_failed = True
                future.set_exception(error)
            else:
                future.set_result(None)

    def close(self) -> None:
        """Let the thread end after the messages that it has; does not wait."""
        self._queue.put(None)


class GradMean:
    """The mean over the ranks of the gradients of some parameters.

    The message is their values / W, then for each parameter whether this rank has a gradient, so
    that one which no rank has stays None. Memory: one copy of the gradients, if W > 1.

    Args:
        parameters: of one type and device, the same on every rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sender: Sender) -> None:
        self._parameters = list(parameters)
        self._sender = sender
        self._has_grad: list[bool] = []
        self._is_used: torch.Tensor | None = None  # the same, float (n,) on the device
        self._grads: list[torch.Tensor | None] = []
        self._work: Any = None
        self._num_values = sum(parameter.numel() for parameter in parameters)
        self._message: torch.Tensor | None = None

    def start(self) -> None:
        """Take the parameters' ``grad`` (None afterwards) and start averaging."""
        grads = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if self._sender.world_size == 1:
            self._grads = grads
            return
        if self._message is None:
            self._message = self._parameters[0].new_empty(self._num_values + len(grads))
        has_grad = [grad is not None for grad in grads]
        if self._is_used is None or has_grad != self._has_grad:
            # Hardly ever twice: a copy to the device makes the host wait for it.
            self._is_used = torch.tensor(has_grad, dtype=self._message.dtype).to(
                self._message.device
            )
            self._has_grad = has_grad
        views = self._views(self._message)
        for view, grad in zip(views, grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                torch.mul(grad, 1 / self._sender.world_size, out=view)
        self._message[self._num_values :].copy_(self._is_used)
        self._work = self._sender.start(self._message, self._num_values)

    def _views(self, message: torch.Tensor) -> list[torch.Tensor]:
        parts = message.detach()[: self._num_values].split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def wait(self) -> None:
        """Until the means are there; on CUDA the current stream waits.

        Raises:
            RuntimeError: if a rank has failed.
        """
        if self._work is not None:
            work, self._work = self._work, None
            work.result() if isinstance(work, Future) else work.wait()

    def take(self) -> list[torch.Tensor | None]:
        """The means, valid until the next ``start``; None for what no rank has a gradient of."""
        self.wait()
        if self._sender.world_size == 1:
            grads, self._grads = self._grads, []
            return grads
        assert self._message is not None
        views = self._views(self._message)
        if all(self._has_grad):  # no need to read, which on CUDA waits for the device
            return [*views]
        is_used = self._message[self._num_values :].tolist()
        return [view if used else None for view, used in zip(views, is_used, strict=True)]
