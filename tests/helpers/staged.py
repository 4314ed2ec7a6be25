# torch declares several forms of a collective, of which a back end needs one.
# mypy: disable-error-code="override,assignment"
"""A process-group back end that carries tensors of any device through host memory and gloo.

NCCL refuses two ranks on one GPU. Over "staged" any number of ranks may share one: every tensor is
copied to pinned host memory, gloo exchanges it, and it is copied back. On CPU tensors the same
class makes the same copies, so that what a machine with one GPU runs is tested everywhere.

It is NCCL's twin in what can go wrong: every exchange is asynchronous, what an exchange writes is
NaN or -1 until it is over, and a tensor that is not contiguous or not of the agreed size is
refused. It is slow, and for tests alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    _create_work_from_future,
)
from torch.distributed.distributed_c10d import _get_default_store
from torch.futures import Future

NAME = "staged"
Tensors = Sequence[torch.Tensor]

_uses = itertools.count()


def use_staged(device: str = "cpu", timeout_s: float = 120.0) -> None:
    """Put a staged group in the place of the default group, on every rank of it.

    Args:
        device: "cpu" or "cuda", which groups say is theirs.
        timeout_s: how long an exchange may wait.
    """
    StagedProcessGroup.device_type = device
    rank, world_size, store = dist.get_rank(), dist.get_world_size(), _get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(
        NAME,
        store=dist.PrefixStore(f"{NAME}{next(_uses)}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def run_staged(action: Callable[..., Any], device: str = "cpu", **kwargs: Any) -> Any:
    """Call ``action(**kwargs)`` on this rank over a staged default group; all share one device."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    use_staged(device)
    return action(**kwargs)


class StagedProcessGroup(dist.ProcessGroup):
    """Copies to host memory, gloo, copies back.

    An exchange is handed to gloo in the caller's thread, so in the caller's order, once the current
    stream has made the copies. A thread of the group waits for it and copies back.
    """

    device_type = "cpu"

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        # Any: its collectives are not in torch's type hints.
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        # TorchRec and collectives of objects ask a group for its device.
        device = torch.device(self.device_type)
        self._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, self._gloo)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=NAME)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._group_name = name  # torch's own asks a back end in C++ for it

    @property
    def group_name(self) -> str:
        return self._group_name

    def shutdown(self) -> None:
        self._thread.shutdown(wait=False)
        self._gloo.shutdown()

    def abort(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._gloo.abort()

    # What torch.distributed, DDP and TorchRec call.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or AllreduceOptions()
        return self._start(lambda i, _: self._gloo.allreduce(i, opts), tensors, tensors)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or BroadcastOptions()
        return self._start(lambda i, _: self._gloo.broadcast(i, opts), tensors, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        [parts], [source] = outputs, inputs
        self._check(len(parts) == self.size(), "all_gather", f"{len(parts)} outputs")
        self._check(parts[self.rank()].numel() == source.numel(), "all_gather", "another size")
        if len({part.numel() for part in parts}) == 1:
            opts = opts or AllgatherOptions()
            return self._start(lambda i, o: self._gloo.allgather([o], i, opts), inputs, parts)

        # As NCCL does it where sizes differ, which gloo refuses.
        def broadcasts(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[dist.Work]:
            theirs[self.rank()].copy_(mine[0])
            return [self._from_root(part, root) for root, part in enumerate(theirs)]

        return self._start(broadcasts, inputs, parts)

    def _allgather_base(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        opts, fits = opts or AllgatherOptions(), output.numel() == source.numel() * self.size()
        self._check(fits, "all_gather", "another size")
        return self._start(
            lambda i, o: self._gloo._allgather_base(o[0].view(-1), i[0].view(-1), opts),
            [source],
            [output],
        )

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> dist.Work:
        [output], [parts] = outputs, inputs
        self._check(len(parts) == self.size(), "reduce_scatter", f"{len(parts)} inputs")
        self._check(parts[self.rank()].numel() == output.numel(), "reduce_scatter", "another size")
        each = ReduceOptions()
        each.reduceOp = (opts or ReduceScatterOptions()).reduceOp

        # Each rank's part is added up there, whatever the sizes.
        def reduces(mine: list[torch.Tensor], result: list[torch.Tensor]) -> list[dist.Work]:
            works = []
            for root, part in enumerate(mine):
                options = ReduceOptions()
                options.reduceOp, options.rootRank = each.reduceOp, root
                works.append(self._gloo.reduce([part], options))
            works[self.rank()].wait()
            result[0].copy_(mine[self.rank()].view_as(result[0]))
            return works

        return self._start(reduces, parts, outputs)

    def _reduce_scatter_base(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        self._check(
            source.numel() == output.numel() * self.size(), "reduce_scatter", "another size"
        )
        self._check(source.is_contiguous(), "reduce_scatter", "a tensor that is not contiguous")
        return self.reduce_scatter([output], [list(source.view(-1).chunk(self.size()))], opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        opts = opts or AllToAllOptions()
        for tensor, sizes in ((output, output_sizes), (source, input_sizes)):
            num_rows = tensor.shape[0] if tensor.dim() else 0
            fits = sum(sizes) == num_rows if sizes else num_rows % self.size() == 0
            self._check(fits, "all_to_all", f"sizes {sizes} for {num_rows} rows")
        return self._start(
            lambda i, o: self._gloo.alltoall_base(
                o[0], i[0], list(output_sizes), list(input_sizes), opts
            ),
            [source],
            [output],
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or AllToAllOptions()
        for parts in (outputs, inputs):
            self._check(len(parts) == self.size(), "all_to_all", f"{len(parts)} parts")

        # gloo has it for one tensor only.
        def exchange(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> dist.Work:
            joined = torch.cat([part.reshape(-1) for part in mine])
            sizes = [part.numel() for part in theirs]
            received = joined.new_empty(sum(sizes))
            work = self._gloo.alltoall_base(
                received, joined, sizes, [part.numel() for part in mine], opts
            )
            work.wait()
            for part, values in zip(theirs, received.split(sizes), strict=True):
                part.copy_(values.view_as(part))
            return work

        return self._start(exchange, inputs, outputs)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or GatherOptions()
        parts = list(outputs[0]) if outputs else []
        return self._start(
            lambda i, o: self._gloo.gather([o] if outputs else [], i, opts), inputs, parts
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        del opts  # it may name a device that gloo does not know
        return self._start(lambda _i, _o: self._gloo.barrier(BarrierOptions()), [], [])

    # Names of the same in torch 2.13.
    all_to_all_single = alltoall_base
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def _from_root(self, part: torch.Tensor, root: int) -> dist.Work:
        options = BroadcastOptions()
        options.rootRank = root
        return self._gloo.broadcast([part], options)

    def _start(
        self,
        exchange: Callable[[list[torch.Tensor], list[torch.Tensor]], Any],
        inputs: Tensors,
        outputs: Tensors,
    ) -> dist.Work:
        """Copy the inputs, begin the exchange, and have its results copied to the outputs.

        Args:
            exchange: (copies of the inputs, copies for the outputs) -> gloo's Work, or a list.
                Where the outputs are the inputs, so are their copies.
        """
        for tensor in (*inputs, *outputs):
            self._check(tensor.is_contiguous(), "exchange", "a tensor that is not contiguous")
        is_in_place = inputs is outputs
        with torch.no_grad():
            sources = [_copy_to_host(tensor) for tensor in inputs]
            targets = sources if is_in_place else [_room_on_host(tensor) for tensor in outputs]
            for tensor in outputs:
                _spoil(tensor)
        device = next((t.device for t in (*inputs, *outputs) if t.is_cuda), None)
        if device is not None:
            # Copies to the host are there, and nothing before still reads what is to be written.
            torch.cuda.current_stream(device).synchronize()
        works = exchange(sources, targets)
        future: Future[list[torch.Tensor]] = Future(devices=None if device is None else [device])

        def finish() -> None:
            try:
                for work in works if isinstance(works, list) else [works]:
                    work.wait()
                with torch.no_grad(), _stream_of_its_own(device) as stream:
                    for source, target in zip(targets, outputs, strict=True):
                        target.detach().copy_(source, non_blocking=True)
                    if stream is not None:
                        stream.synchronize()
                    # Who waits for the future waits for this stream, not for anybody else's.
                    future.set_result(list(outputs))
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        self._thread.submit(finish)
        return _create_work_from_future(future)

    def _check(self, is_right: bool, collective: str, got: str) -> None:
        if not is_right:
            raise ValueError(
                f"{NAME} {collective}: expected contiguous tensors of sizes that fit "
                f"{self.size()} ranks, got {got}."
            )


def _room_on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return _room_on_host(tensor).copy_(tensor, non_blocking=True)


@contextmanager
def _stream_of_its_own(device: torch.device | None) -> Iterator[torch.cuda.Stream | None]:
    if device is None:
        yield None
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield stream


def _spoil(tensor: torch.Tensor) -> None:
    """Write what nobody may read."""
    if tensor.is_floating_point():
        tensor.detach().fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.detach().fill_(-1 if tensor.dtype.is_signed else 255)


dist.Backend.register_backend(NAME, StagedProcessGroup, devices=["cpu", "cuda"])
