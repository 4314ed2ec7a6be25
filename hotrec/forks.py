"""Forking beside threads of C++ that use Python, as loaders do that start worker processes.

Threads of a process group take Python's lock of thread states whenever they run Python code or let
go of a tensor that Python has let go of before, which they do just after a collective. A process
that is forked at that moment waits for this lock for ever, in CPython before 3.11.10 (gh-112275).
So a fork waits until no such thread is running. Python's own threads hold that lock only together
with the interpreter's, which the forking thread has.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Container
from pathlib import Path

# The first version that makes the lock anew in the child.
MENDED = (3, 11, 10)
# Not for ever: a thread may compute without end, and then most likely holds no lock.
LIMIT_S = 1.0
_PAUSE_S = 0.001
_TASKS = Path("/proc/self/task")


@functools.cache
def make_forks_safe() -> None:
    """Let every later ``os.fork`` of this process wait; nothing where Python is mended."""
    if sys.version_info[:3] < MENDED and _TASKS.exists():
        os.register_at_fork(before=wait_for_native_threads)


def wait_for_native_threads() -> None:
    """Wait until no thread but Python's own is running, for LIMIT_S at most."""
    until_s = time.monotonic() + LIMIT_S
    own = {thread.native_id for thread in threading.enumerate()}
    while running_threads(own) and time.monotonic() < until_s:
        time.sleep(_PAUSE_S)  # without the interpreter's lock, which they may want


def running_threads(ignored: Container[int | None] = ()) -> list[int]:
    """Threads of this process that run, want to, or wait for memory, by the system's number."""
    found = []
    for task in _TASKS.iterdir():
        try:
            # "14745 (gloo_tcp_loop) S ...": a name may hold parentheses.
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has ended meanwhile
        if state in "RD" and int(task.name) not in ignored:
            found.append(int(task.name))
    return found
