"""Where the ranks of a run tell one another how they are: the store that they met at.

It answers as long as its server lives, also when a collective hangs or a peer is dead. torchrun
keeps the server in its own process on the first host, so it outlives every rank.
"""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hotrec.runtime.watchdog.verdict import RankState, Verdict

# A request is a small message to one server; what takes longer is not coming.
_REQUEST_S = 10.0


class BoardError(RuntimeError):
    """The store does not answer."""


class Board:
    """One rank's view of what all ranks have told.

    Args:
        store: a ``torch.distributed.Store`` of its own: one that another thread waits on would
            block.
        rank: this one.
        world_size: W.
        name: the same on every rank, another for every use of the store.
    """

    def __init__(self, store: Any, rank: int, world_size: int, name: str) -> None:
        store.set_timeout(timedelta(seconds=_REQUEST_S))
        self._store = dist.PrefixStore(f"hotrec/runtime/watchdog/{name}", store)
        self._rank = rank
        self._world_size = world_size
        self._can_get_many = store.has_extended_api()
        # The main thread asks when it has an error, while the watchdog's thread may still ask.
        self._lock = threading.Lock()

    def tell(self, state: RankState) -> None:
        """Put up this rank's state in place of its last one."""
        with self._lock, _board_errors():
            self._store.set(f"rank/{self._rank}", state.to_text())

    def states(self) -> dict[int, RankState]:
        """The last state of every rank that has told one, by rank, this rank's included."""
        keys = [f"rank/{rank}" for rank in range(self._world_size)]
        with self._lock, _board_errors():
            # A read of what is not there waits for it.
            if self._can_get_many and self._store.check(keys):
                texts = self._store.multi_get(keys)
            else:
                texts = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
        states = [RankState.from_text(text.decode()) for text in texts if text]
        return {state.rank: state for state in states}

    def verdict(self) -> Verdict | None:
        """What a rank has found, if any has."""
        with self._lock, _board_errors():
            if not self._store.check(["verdict"]):
                return None
            return Verdict.from_text(self._store.get("verdict").decode())

    def settle(self, verdict: Verdict) -> Verdict:
        """Put up a verdict unless there is one; the one that stands, the same on every rank."""
        with self._lock, _board_errors():
            text = self._store.compare_set("verdict", "", verdict.to_text())
        return Verdict.from_text(text.decode())


class _board_errors:  # noqa: N801 (reads as what it is: with ... errors)
    """Whatever the store raises becomes a BoardError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError | ValueError | OSError):
            raise BoardError(f"{type(error).__name__}: {error}") from error


def host_key() -> str:
    """The same for all processes that see one another's process ids, on this boot of the host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def started_at(pid: int) -> str | None:
    """Tells a process from a later one with the same id; None if it is gone.

    A process that has died and that nobody has waited for yet is gone, too.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self/stat").exists() else _answers(pid)
    return None if fields[0] in "ZX" else fields[19]


def _answers(pid: int) -> str | None:
    """For systems without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "running"
