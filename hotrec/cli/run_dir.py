"""One run, one directory, decided once.

Hydra names the directory by the time at which each process starts, so ranks would disagree.
Here ``HOTREC_RUN_DIR`` wins; without it a single process takes a time stamp, and under torchrun
rank 0 decides and the others read its choice from the store that torchrun itself keeps at
MASTER_ADDR:MASTER_PORT, before Hydra starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hotrec.cli.environment import (
    RUN_DIR,
    environment_rank,
    environment_world_size,
    is_under_torchrun,
)

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_KEY = "hotrec/run_dir"
# Commands whose runs are known by the experiment; those of the others by the command.
NAMED_BY_EXPERIMENT = ("train", "bench")
# torch keeps the server alive for as long as somebody holds it, where this process is the host.
_held_store: Store | None = None


def decide_run_dir(command: str, overrides: Sequence[str], *, is_multirun: bool) -> str:
    """The run's directory, the same on every rank; also put into the environment for Hydra."""
    chosen = os.environ.get(RUN_DIR)
    if not chosen:
        chosen = _propose(command, overrides, is_multirun=is_multirun)
        if is_under_torchrun() and environment_world_size() > 1:
            chosen = _agree(chosen)
        os.environ[RUN_DIR] = chosen
    return chosen


def _propose(command: str, overrides: Sequence[str], *, is_multirun: bool) -> str:
    name = command
    if command in NAMED_BY_EXPERIMENT:
        for override in overrides:
            key, _, value = override.partition("=")
            if key.lstrip("+") == "experiment" and value.isidentifier():
                name = value
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(_start_time_s()))
    folder = Path("runs") / ("sweep" if is_multirun else "") / name / stamp
    return _unused(folder).as_posix() if not is_under_torchrun() else folder.as_posix()


def _unused(folder: Path) -> Path:
    """The folder, or the first of folder-1, folder-2, ... that does not exist yet."""
    candidate, number = folder, 0
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def _start_time_s() -> float:
    """Now; under torchrun the start of its agent, which outlives a restart of the workers."""
    stat = Path(f"/proc/{os.getppid()}/stat")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not stat.exists():
        return time.time()
    # proc(5): field 22 is the start in clock ticks after boot; the name in field 2 may hold spaces.
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK")


def _agree(proposal: str) -> str:
    global _held_store
    from torch.distributed import rendezvous

    _held_store, _, _ = next(iter(rendezvous("env://")))
    if environment_rank() == 0:
        _held_store.set(STORE_KEY, proposal)
    return str(_held_store.get(STORE_KEY).decode())
