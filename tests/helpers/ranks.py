"""Run a function on several real ranks over gloo, from inside a test.

Every rank is a process of its own with one thread, joined by a FileStore (no ports, so tests can
run side by side). It is forked from a server that has imported torch and hotrec and has one thread.
Whatever goes wrong on a rank (an exception, a hang, a sudden death) comes back to the test as one
error that names the rank; no rank and no file outlives the call.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# How long the other ranks may go on after the first failure. Their peer is gone, so most of them
# fail within milliseconds, and what they say often helps.
GRACE_S = 3.0

# What ranks import in any case. A test imports more where it needs it.
PRELOAD = [
    *("pytest", "torch", "tests.helpers.quiet", "hotrec.assemble.order", "hotrec.program.parallel"),
    *("tests.distributed.setups", "hotrec.cli.train", "hotrec.cli.evaluate"),
]


class RanksError(RuntimeError):
    """One rank or more raised, died or ran past the limit.

    Args:
        text: what each of them did.
        exit_codes: of the ranks that died by themselves, by rank; 0 for the others.
    """

    def __init__(self, text: str, exit_codes: Sequence[int]) -> None:
        super().__init__(text)
        self.exit_codes = exit_codes


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 2,
    timeout_s: float = 60.0,
    start_method: str = "forkserver",
    stand_in: str = "",
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(**kwargs)`` on every rank of a gloo process group and return the results.

    Inside ``fn`` the default process group exists (``torch.distributed.get_rank()``), and RANK,
    WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are set as torchrun would set them. The first call
    costs some seconds of imports, a later one tenths.

    Args:
        fn: a function at the top level of a module, so that it pickles.
        world_size: number of ranks.
        timeout_s: limit for the whole call, imports included; what still runs then is killed.
        start_method: "spawn" where the ranks start CUDA, which a forked process may not be able to.
        stand_in: the module of a stand-in for a device, which ranks that are spawned import before
            torch; their process group is then "nccl".
        kwargs: arguments of ``fn``, picklable; the same for every rank.

    Returns:
        What ``fn`` returned on each rank, in rank order, pickled on the way.

    Raises:
        RanksError: if a rank raised (with its traceback as text), died, or was killed at the limit.
    """
    # Pickled here: what cannot be pickled is an error of the caller, not of a rank.
    call = pickle.dumps((fn, kwargs))
    with tempfile.TemporaryDirectory(prefix="hotrec-ranks-") as name:
        folder = Path(name)
        context = multiprocessing.get_context(start_method)
        context.set_forkserver_preload(PRELOAD)
        processes: list[BaseProcess] = [
            context.Process(  # type: ignore[attr-defined]
                target=_run_rank,
                args=(call, dict(os.environ), rank, world_size, timeout_s, folder, stand_in),
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            killed = _wait(processes, folder, timeout_s)
            return _collect(processes, folder, killed, timeout_s)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
                    process.close()


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}.pickle"


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.txt"


def _wait(processes: list[BaseProcess], folder: Path, timeout_s: float) -> list[int]:
    """Wait for all ranks, or for the first failure and a little longer; return the killed ranks."""
    deadline = time.monotonic() + timeout_s
    alive = dict(enumerate(processes))
    has_failed = False
    while alive and (left_s := deadline - time.monotonic()) > 0:
        # Short waits, because a rank may write its error and then hang in a destructor.
        wait([process.sentinel for process in alive.values()], timeout=min(left_s, 0.2))
        for rank in [rank for rank, process in alive.items() if process.exitcode is not None]:
            alive.pop(rank)
            has_failed = has_failed or not _result_file(folder, rank).exists()
        has_failed = has_failed or any(_error_file(folder, rank).exists() for rank in alive)
        if has_failed:
            deadline = min(deadline, time.monotonic() + GRACE_S)
            has_failed = False
    for process in alive.values():
        process.kill()
        process.join()
    return sorted(alive)


def _collect(
    processes: list[BaseProcess], folder: Path, killed: list[int], timeout_s: float
) -> list[Any]:
    failures, exit_codes = [], [0] * len(processes)
    for rank, process in enumerate(processes):
        if _error_file(folder, rank).exists():
            failures.append(f"[rank {rank}] raised:\n{_error_file(folder, rank).read_text()}")
        elif rank in killed:
            failures.append(
                f"[rank {rank}] hung: killed after the limit of {timeout_s:g} s, "
                f"or {GRACE_S:g} s after another rank failed."
            )
        elif not _result_file(folder, rank).exists():
            failures.append(f"[rank {rank}] died with exit code {process.exitcode}.")
            exit_codes[rank] = process.exitcode or 0
    if failures:
        raise RanksError("\n".join(failures), exit_codes)
    return [pickle.loads(_result_file(folder, rank).read_bytes()) for rank in range(len(processes))]


def _run_rank(
    call: bytes,
    environment: dict[str, str],
    rank: int,
    world_size: int,
    timeout_s: float,
    folder: Path,
    stand_in: str,
) -> None:
    gc.freeze()  # so that collections copy no pages of what the server has imported
    # The server has the environment of the first call.
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
    )
    if "lo" in [name for _, name in socket.if_nameindex()]:
        # Else gloo looks the host name up, which may answer with an address that is not ours.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        device: Any = importlib.import_module(stand_in) if stand_in else None  # before torch
        backend = "nccl" if stand_in else "gloo"
        result = _call_in_group(call, backend, rank, world_size, timeout_s, folder)
        partial = folder / f".result-{rank}"
        partial.write_bytes(pickle.dumps(result))
        if device is not None:
            device.close()
        partial.rename(_result_file(folder, rank))
    except BaseException:  # SystemExit too: the test must hear of it
        partial = folder / f".error-{rank}"
        partial.write_text(traceback.format_exc())
        partial.rename(_error_file(folder, rank))
    if stand_in:
        # Threads of autograd may be at work; they have nothing to say any more.
        os._exit(0)


def _call_in_group(
    call: bytes, backend: str, rank: int, world_size: int, timeout_s: float, folder: Path
) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if "torchrec" in sys.modules:  # not in a spawned rank, which may need none
        from tests.helpers.quiet import log_little

        log_little()
    store = dist.FileStore(str(folder / "rendezvous"), world_size)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        dist.barrier()  # a rank that destroys the group would fail others that are still connecting
        fn, kwargs = pickle.loads(call)
        return fn(**kwargs)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
