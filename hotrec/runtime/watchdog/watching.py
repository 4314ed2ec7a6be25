"""The watchdog around a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hotrec.runtime.ranks import Ranks
from hotrec.runtime.watchdog.board import Board
from hotrec.runtime.watchdog.dog import GRACE_S, Watchdog
from hotrec.runtime.watchdog.position import MAIN, START, positioned

# Uses of the store by this process; every rank makes the same ones.
_uses = count()


def _no_advice() -> str:
    return "Start the run again from its last checkpoint."


@contextmanager
def watching(
    ranks: Ranks,
    *,
    limit_s: float = 120.0,
    advice: Callable[[], str] = _no_advice,
    flight_recorder: Path | None = None,
) -> Iterator[None]:
    """Watch the ranks inside the block; to be entered on every rank of the process group.

    If a rank dies, fails, or nothing moves in a step for ``limit_s``, every other rank raises
    ``LostRank``, or its process ends with ``EXIT_CODE`` where the main thread cannot raise, with
    the same message on the log. An error of this rank's own passes as it is and is told to the
    others. With one rank there is nothing to do.

    Args:
        limit_s: for anything to move on any rank in a step, above 0. Start, first step, evaluation
            and checkpoints have no other limit than that of the process group's collectives.
        advice: the message's last sentence; asked when it is needed.
        flight_recorder: directory in which every rank that is left writes its last collectives when
            a rank is lost; None for none.

    Raises:
        LostRank: instead of the error of a collective that failed; that error is its cause.
        BoardError: at the start, if the process group's store does not answer.
    """
    if ranks.world_size == 1:
        yield
        return
    default_store: Any = _get_default_store()  # torch has no public way to it
    store = default_store.clone()
    board = Board(store, ranks.rank, ranks.world_size, name=str(next(_uses)))
    # NCCL's own watchdog may abort the process soon after it has seen an error.
    grace_s = 0.0 if dist.get_backend() == "nccl" else GRACE_S
    with positioned() as position:
        position.enter(MAIN, START)
        dog = Watchdog(
            board,
            ranks.rank,
            ranks.world_size,
            position,
            limit_s=limit_s,
            advice=advice,
            grace_s=grace_s,
            flight_recorder=flight_recorder,
        )
        dog.start()
        try:
            with _sigterm_heard_by(dog):
                yield
        except BaseException as error:
            with _sigterm_ignored():
                lost = dog.explain(error)
                if lost is not None:
                    dog.write_flight_recorder()
                dog.leave(f"ended by {type(error).__name__}")
            if lost is not None:
                raise lost from error
            raise
        dog.leave("finished")


@contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """SIGTERM, which torchrun sends after a death, must not end the search for who has died."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _sigterm_heard_by(dog: Watchdog) -> Iterator[None]:
    """Let the watchdog know of signals at once, even if the main thread waits inside C++.

    Python's handlers wait for the main thread; what the interpreter writes at once is this.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.set_wakeup_fd(dog.waker.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
