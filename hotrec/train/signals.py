"""Signals that stop a run after a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

# The exit code of a run that stopped on SIGTERM after a complete checkpoint, as a shell reports it.
# After SIGINT it is 130.
STOPPED_EXIT_CODE = 128 + signal.SIGTERM
_STOPS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class StopRequest:
    """Whether a signal requested this rank to stop, and which."""

    number: int | None = None

    @property
    def is_set(self) -> bool:
        return self.number is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Inside the block, record SIGTERM or SIGINT as a request to stop at the next check-up.

    A second SIGINT ends the block at once, as it would without it. If SIGINT is ignored, as in a
    background job, it stays ignored.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may set handlers
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not request.is_set:
            request.number = number
        elif number == signal.SIGINT:
            before = previous[signal.SIGINT]
            (before if callable(before) else signal.default_int_handler)(number, frame)

    previous = {
        number: signal.getsignal(number)
        for number in _STOPS
        if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        for number in previous:
            signal.signal(number, handle)
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Start processes in the block that ignore SIGTERM and SIGINT: they inherit the signal mask.

    torchrun sends them to the whole process group, as a terminal does, and loader workers must
    outlive it while their rank still needs batches. One to this process is delivered at the end of
    the block.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
