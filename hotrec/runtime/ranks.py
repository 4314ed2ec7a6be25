"""Ranks, device, process group, and the collectives that are also defined for one process.

No other module checks whether the process group exists: each function here also works without one.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group, _get_default_store

from hotrec.artifact import ArtifactError, scratch_directory
from hotrec.runtime.process import (
    announced,
    batch_threads,
    bind_to_gpu,
    keep_freed_memory,
    make_forks_safe,
)

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# How long a rank waits for pending work of a group that it leaves.
LEAVE_S = 3.0

# With several ranks a kernel that is loaded at its first launch may wait for the whole device, and
# so for a collective of another thread whose peer waits as well (CUDA programming guide, "Lazy
# Loading"). CUDA reads this when it starts, so it is set before anything here asks for a device.
# Only NCCL's collectives wait on the device: ranks that have joined over gloo keep CUDA's default,
# which takes less memory and opens no kernel that is never launched.
if os.environ.get("WORLD_SIZE", "1") != "1" and (
    not dist.is_initialized() or "nccl" in dist.get_backend_config()
):
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
# Hardware queues for the work of streams, 1 to 32, by default 8 (CUDA programming guide, "CUDA
# Environment Variables"). Streams that share one wait for each other, and look-ahead with cached
# rows has ten: copies would wait behind kernels. A user's setting of 1, which starts kernels in the
# order of their launch (Megatron), is kept.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@dataclass(frozen=True)
class Ranks:
    """This process in the group. ``local_rank`` chooses a device, never "am I the first"."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def num_hosts(self) -> int:
        return -(-self.world_size // self.local_world_size)


def _environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"environment {name}: expected an integer, got {text!r}. Start with torchrun."
        ) from None


@contextmanager
def _joining(timeout_s: float) -> Iterator[None]:
    """Context of the rendezvous: logs what it waits for and explains a failure.

    Raises:
        RuntimeError: If not all ranks join in time.
    """
    host, port = (os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    rank, num_ranks = (os.environ.get(*of) for of in (("RANK", "0"), ("WORLD_SIZE", "1")))
    who = f"all {num_ranks} ranks to join at {host}:{port}"
    advice = "Check that every host has started its ranks"
    with announced(f"{who}; this is rank {rank}. {advice}"):
        try:
            yield
        except dist.DistError as error:
            raise RuntimeError(
                f"rendezvous of rank {rank}: expected {who} within {timeout_s:g} s, got an error: "
                f"{str(error).splitlines()[0].rstrip('.')}. {advice}, and MASTER_ADDR and "
                "MASTER_PORT."
            ) from error


@contextmanager
def process_group(*, device: str = "auto", timeout_s: float = 600.0) -> Iterator[Ranks]:
    """Join the process group that torchrun describes, or form one of a single process.

    With a GPU each rank is bound to nearby cores. The ranks are connected when the block starts.
    After an error the block does not wait for other ranks, which may be gone.

    Args:
        device: "cpu", "cuda", or "auto" (cuda if available).
        timeout_s: how long a collective may wait for the slowest rank.

    Raises:
        RuntimeError: if cuda is requested and there is none, or if the ranks cannot communicate.
    """
    rank, world_size = _environment_int("RANK", 0), _environment_int("WORLD_SIZE", 1)
    local_rank = _environment_int("LOCAL_RANK", 0)
    local_world_size = _environment_int("LOCAL_WORLD_SIZE", world_size)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "trainer.device: expected a CUDA device, got none visible to torch "
            f"{torch.__version__}. Set trainer.device=cpu, or run `hotrec doctor`."
        )
    bound: torch.device | None = None
    if device == "cuda":
        bound = torch.device("cuda", local_rank)
        torch.cuda.set_device(bound)
        bind_to_gpu(bound)
    else:
        keep_freed_memory()
    backend, timeout = BACKENDS[device], timedelta(seconds=timeout_s)
    make_forks_safe()
    with _joining(timeout_s), _threads_of(backend):
        store: dist.Store = dist.HashStore()
        if world_size > 1:
            store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
            # torchrun keeps one store for all its restarts, in which restarted ranks would find the
            # addresses of earlier ones.
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"restart_{restart}", store)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=bound,  # creates NCCL's communicator now, and those of later groups at once
        )
    is_failed = True
    try:
        assert dist.group.WORLD is not None
        _connect(dist.group.WORLD)
        yield Ranks(rank, world_size, local_rank, local_world_size, bound or torch.device("cpu"))
        is_failed = False
    finally:
        if dist.is_initialized():
            # Destroying NCCL's groups waits for their pending work with other ranks, which may be
            # gone. There is no public way to abort several of them at once.
            if is_failed and backend != "gloo":
                _abort_process_group()
            else:
                _leave([None])


def joined_ranks(device: torch.device | str | None = None) -> Ranks:
    """This process's ranks; joins a process group if there is none.

    A group that it joins is left when the process exits. Collective.

    Args:
        device: Device of this rank; None for the one of the group's backend, or cuda if available.
    """
    if not dist.is_initialized():
        kind = "auto" if device is None else torch.device(device).type
        stack = ExitStack()
        ranks = stack.enter_context(process_group(device=kind))
        atexit.register(stack.close)
        return ranks
    if device is None:
        device = _device_of(dist.group.WORLD)
    found = torch.device(device)
    if found.type == "cpu":
        keep_freed_memory()
    make_forks_safe()
    hosts = all_gather_object(socket.gethostname())
    of_host = [at for at, host in enumerate(hosts) if host == hosts[rank()]]
    local = _environment_int("LOCAL_WORLD_SIZE", len(of_host))
    return Ranks(rank(), world_size(), of_host.index(rank()) % local, local, found)


def _connect(group: dist.ProcessGroup) -> None:
    """Run a group's first collectives immediately, in the thread that creates it.

    NCCL connects at a group's first collective, and threads that do so at once can deadlock.
    """
    own, others = torch.ones(2, group.size(), device=_device_of(group))
    dist.all_to_all_single(others, own, group=group)
    dist.all_reduce(others, group=group)
    sums = others.tolist()  # waits for the device
    if sums != [group.size()] * group.size():
        raise RuntimeError(
            f"process group {dist.get_backend(group)}: expected sums of {group.size()} over its "
            f"ranks, got {sums}. Check the network, or NCCL with NCCL_DEBUG=INFO."
        )


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The device of this rank whose tensors a group exchanges; cuda if it supports both."""
    if "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend of a group, None for the default one, for tensors of a device: gloo or nccl.

    A group that was created without a backend has one for each kind of device.
    """
    name: str = dist.get_backend(group)
    if name != "undefined":
        return name
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return dict(part.split(":") for part in config.split(",")).get(device.type, name)


def _threads_of(backend: str) -> AbstractContextManager[None]:
    return batch_threads() if backend == "gloo" else nullcontext()


_FIRST_ERROR = "first_error"
# Numbers groups in the order of their creation, which is the same on all ranks.
_groups = count()


def default_store() -> dist.Store:
    """Messages between the ranks beside the collectives; torch has no public way to it."""
    store: dist.Store = _get_default_store()
    return store


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because of another rank: gloo raises a plain RuntimeError."""
    is_of_gloo = isinstance(error, RuntimeError) and "gloo/" in str(error)
    return isinstance(error, dist.DistError) or is_of_gloo


class Group:
    """Another process group, connected, with the default one's timeout.

    The creator must close it, or its threads and connections leak. Creation is a collective over
    all ranks.

    Args:
        name: Its purpose, shown by torch's flight recorder.
        members: Disjoint sets of ranks, each a group; None for one group of all ranks. A rank in
            none of them has no group.
        backend: Its backend; None for the default one's.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[Sequence[int]] | None = None,
        backend: str | None = None,
    ) -> None:
        default: Any = dist.group.WORLD
        # There is no public getter, and a new group's default is half an hour.
        timeout = default._get_backend(default._device_types[0]).options._timeout
        self._name = name
        self._store = dist.PrefixStore(f"hotrec_group_{next(_groups)}", default_store())
        self._held: list[dist.ProcessGroup | None] = []
        with _threads_of(backend or backend_of(default, torch.device("cpu"))):
            for ranks in [None] if members is None else map(list, members):
                made: Any = dist.new_group(ranks, timeout=timeout, backend=backend, group_desc=name)
                if made is not dist.GroupMember.NON_GROUP_MEMBER:
                    self._held.append(made)
                    _connect(made)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, for torch. Keep this object instead: other references delay its destruction.

        Raises:
            RuntimeError: If this rank is in no group, or has left it.
        """
        if not self._held or self._held[0] is None:
            raise RuntimeError(
                f"process group {self._name!r} of rank {rank()}: expected an open group with this "
                "rank, got a closed one or one without it. Create a new pipeline."
            )
        return self._held[0]

    def first_error(self, error: BaseException) -> BaseException:
        """The error of a rank whose work in the group has failed: its own, or the cause of it.

        A rank with an error of its own leaves it to the others, whose collectives fail once that
        rank ends. They get a ``RankError``.
        """
        if isinstance(error, RankError):
            return error
        with suppress(Exception):  # the store may be gone, with the rank that has it
            if not _is_lost_connection(error):
                text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                self._store.set(_FIRST_ERROR, json.dumps([rank(), text]))
            elif self._store.check([_FIRST_ERROR]):
                return RankError(*json.loads(self._store.get(_FIRST_ERROR)))
        if not _is_lost_connection(error):
            return error
        reason = str(error).splitlines()[0]
        return RuntimeError(
            f"process group {self._name!r} of rank {rank()}: expected all ranks in a collective, "
            f"got {reason} Another rank has ended or is late: see its output."
        )

    def close(self, after: Callable[[], None] | None = None) -> None:
        """Leave the group; idempotent.

        Returns when its threads have ended, but does not wait for long: pending work ends at the
        latest when the other ranks close the group or exit.

        Args:
            after: Waits for the group's remaining users.
        """
        held, self._held = self._held, []
        if held:
            _leave(held, after)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _leave(held: list[dist.ProcessGroup | None], after: Callable[[], None] | None = None) -> None:
    """Destroy a group, or with None all of them, in a thread that removes it from ``held``.

    A gloo group is destroyed with its last reference, which blocks on pending work that failed
    ranks never join. gloo has no way to abort it (torch 2.13: ``abort`` is a no-op). But the work
    fails once another rank drops the group, and some rank always can: the one with the fewest
    started operations.
    """

    def leave() -> None:
        if after is not None:
            after()
        with suppress(KeyError, ValueError):  # destroyed meanwhile, with the default group
            dist.destroy_process_group(held[0])
        held.clear()

    leaving = threading.Thread(target=leave, name="hotrec-leave", daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)


# What the main thread waits for before collectives of the default group.
_FINISHED_FIRST: list[Callable[[], None]] = []


@contextmanager
def finished_first(drain: Callable[[], None]) -> Iterator[None]:
    """Call ``drain`` before collectives of the default group inside the block.

    For a thread that calls collectives of another group over NCCL, which requires one order over
    all groups of a device, the same on every rank.
    """
    _FINISHED_FIRST.append(drain)
    try:
        yield
    finally:
        _FINISHED_FIRST.remove(drain)


def finish_others() -> None:
    """Wait for the threads of ``finished_first``; before a collective of the main thread.

    Raises:
        Exception: what one of their tasks raised.
    """
    for drain in _FINISHED_FIRST:
        drain()


def world_size() -> int:
    """Ranks of the process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process in the group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_gather_object(value: T) -> list[T]:
    """The value of every rank, in rank order."""
    if world_size() == 1:
        return [value]
    finish_others()
    values: list[T | None] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def broadcast_object(value: T) -> T:
    """Rank 0's value, on every rank."""
    if world_size() == 1:
        return value
    finish_others()
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def reduce_array(
    values: npt.NDArray[np.int64], how: dist.ReduceOp.RedOpType
) -> npt.NDArray[np.int64]:
    """The sum, maximum, ... over the ranks of arrays of one shape, int64, on every rank.

    May change ``values``.
    """
    if world_size() == 1:
        return values
    finish_others()
    reduced = torch.from_numpy(values).to(_device_of(None))
    dist.all_reduce(reduced, how)
    found: npt.NDArray[np.int64] = reduced.cpu().numpy()
    return found


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        finish_others()
        dist.barrier()


class RankError(RuntimeError):
    """The error of another rank, ``of_rank``; every rank of the group ends with its message."""

    def __init__(self, of_rank: int, text: str) -> None:
        super().__init__(f"[rank {of_rank}] {text}")
        self.of_rank = of_rank


def same_verdict(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; if any rank raises, all ranks raise, with the first error.

    Use around code that can fail on a single rank (reading a file, checking an input) before a
    collective, which the failing rank would never reach.

    Raises:
        RankError: on the ranks whose own action succeeded; the others raise their own exception.
    """
    error: BaseException | None = None
    result: T | None = None
    try:
        result = action()
    except BaseException as caught:  # every kind: the verdict must reach the other ranks
        error = caught
    texts = all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for index, text in enumerate(texts):
        if text is not None:
            raise RankError(index, text)
    return result  # type: ignore[return-value]


@contextmanager
def shared_scratch(target: Path, *, kind: str) -> Iterator[Path]:
    """``scratch_directory`` by rank 0, for all ranks to write into; collective.

    Raises:
        ArtifactError, LockedError: On every rank, if the target may not be replaced, or if a rank
            does not see the directory.
        RankError: On the ranks without an error of their own.
    """

    def check_seen() -> None:
        if not scratch.is_dir():
            raise ArtifactError(
                f"{target}: expected a shared file system, got none of rank 0's files on rank "
                f"{rank()}. Choose another directory."
            )

    with ExitStack() as stack:
        make = scratch_directory(target, kind=kind)
        made = same_verdict(lambda: stack.enter_context(make) if rank() == 0 else None)
        scratch = Path(broadcast_object(str(made)))
        same_verdict(check_seen)
        yield scratch
