"""Run a function on ranks that have the stand-in for a CUDA device, from inside a test.

Like ``tests.helpers.ranks``, but every rank is a new process: the stand-in must be there before
torch. So a test puts many cases into one call.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.helpers.ranks import GRACE_S, RanksError


def run_on_device(
    function: str, world_size: int = 1, timeout_s: float = 90.0, **kwargs: Any
) -> Any:
    """Call a function on every rank, in a process group "nccl", and return the results.

    Args:
        function: "module:name", imported by the ranks alone.
        world_size: number of ranks.
        timeout_s: limit for the whole call; what still runs then is killed.
        kwargs: arguments, picklable without torch.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RanksError: if a rank raised (with its traceback as text), died, or was killed at the limit.
    """
    with tempfile.TemporaryDirectory(prefix="hotrec-stand-in-") as name:
        folder = Path(name)
        (folder / "call.pickle").write_bytes(pickle.dumps((function, kwargs, timeout_s)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = [sys.executable, "-m", "tests.stand_in.ranks"]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                environment |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(world_size),
                }
                with (folder / f"output-{rank}.txt").open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            [*command, name, str(0.9 * timeout_s)],
                            env=environment,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                        )
                    )
            _wait(processes, timeout_s)
            return _collect(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    has_failed = False
    while any(process.poll() is None for process in processes):
        if not has_failed and any(process.poll() for process in processes):
            has_failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _collect(processes: list[subprocess.Popen[bytes]], folder: Path) -> list[Any]:
    failures = []
    for rank, process in enumerate(processes):
        code = process.poll()
        if code != 0:
            said = (folder / f"output-{rank}.txt").read_text(errors="replace")[-6000:]
            what = "was killed at the limit" if code is None else f"ended with exit code {code}"
            failures.append(f"[rank {rank}] {what}:\n{said}")
    if failures:
        codes = [process.returncode or 0 for process in processes]
        raise RanksError("\n".join(failures), codes)
    return [
        pickle.loads((folder / f"result-{rank}.pickle").read_bytes())
        for rank in range(len(processes))
    ]


def _main(folder: Path) -> None:
    device = importlib.import_module("tests.stand_in.device")  # before torch

    import torch
    import torch.distributed as dist

    function, kwargs, timeout_s = pickle.loads((folder / "call.pickle").read_bytes())
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(str(folder / "rendezvous"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(**kwargs)
    partial = folder / f".result-{rank}"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(folder / f"result-{rank}.pickle")
    dist.barrier()
    device.close()


if __name__ == "__main__":
    code = 0
    # A rank that hangs says where, before it is killed.
    faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
    try:
        _main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo and of autograd may be at work; they have nothing to say any more.
    os._exit(code)
