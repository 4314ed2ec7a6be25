"""Operating-system settings of a rank: thread scheduling, safe forks, CPU affinity."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)


@contextmanager
def announced(what: str, after_s: float = 5.0) -> Iterator[None]:
    """Log what the block waits for, after ``after_s`` and then twice a minute."""
    is_over = threading.Event()

    def announce() -> None:
        wait_s = after_s
        while not is_over.wait(wait_s):
            logger.warning("waiting for %s", what)
            wait_s = 30.0

    threading.Thread(target=announce, name="hotrec-wait", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


@contextmanager
def batch_threads() -> Iterator[None]:
    """Threads started in the block are batch threads, inherited from the calling thread.

    No-op if the calling thread has another policy or the system refuses.
    """
    is_changed = False
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            is_changed = True
    except (AttributeError, OSError) as error:
        logger.debug("threads: the system refuses SCHED_BATCH: %s", error)
    try:
        yield
    finally:
        if is_changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


FIXED_VERSION = (3, 11, 10)  # the first that recreates the lock in the child
LIMIT_S = 1.0  # a thread that computes for longer most likely holds no lock
_TASKS = Path("/proc/self/task")


@functools.cache
def make_forks_safe() -> None:
    """Make every later ``os.fork`` wait for other threads; no-op on fixed Python versions."""
    if sys.version_info[:3] < FIXED_VERSION and _TASKS.exists():
        os.register_at_fork(before=wait_for_native_threads)


def wait_for_native_threads() -> None:
    """Wait until no thread but Python's own is running, for LIMIT_S at most."""
    until_s = time.monotonic() + LIMIT_S
    own = {thread.native_id for thread in threading.enumerate()}
    while running_threads(own) and time.monotonic() < until_s:
        time.sleep(0.001)  # releases the interpreter's lock, which they may need


def running_threads(ignored: Container[int | None] = ()) -> list[int]:
    """Threads of this process that run, are runnable, or wait for memory, by thread id."""
    found = []
    for task in _TASKS.iterdir():
        try:
            # "14745 (gloo_tcp_loop) S ...": a name may contain parentheses.
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has exited meanwhile
        if state in "RD" and int(task.name) not in ignored:
            found.append(int(task.name))
    return found


def bind_to_gpu(device: torch.device, system: Path = Path("/sys")) -> None:
    """Bind this process, with the threads and workers that it starts, to its GPU's NUMA node.

    Memory is then allocated there (first touch). No-op if the system does not report the node, or
    has only one.
    """
    about: Any = torch.cuda.get_device_properties(device)
    address = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        if node < 0:  # not reported, as on most systems with one node
            logger.debug("%s: NUMA node unknown", device)
            return
        allowed = os.sched_getaffinity(0)
        near = allowed & _read_cpus(system / f"devices/system/node/node{node}/cpulist")
        if not near:
            logger.warning(
                "%s: expected cores of NUMA node %d, got only others (%s) from the launcher: "
                "copies cross sockets. Check the launcher's CPU binding.",
                device,
                node,
                sorted(allowed),
            )
            return
        for thread in os.listdir(_TASKS):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), near)
        logger.info("%s: bound to %d cores of NUMA node %d", device, len(near), node)
    except OSError as error:
        logger.info("%s: could not bind to its NUMA node's cores: %s", device, error)


def _read_cpus(path: Path) -> set[int]:
    """Cores of a list such as "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, path.read_text().strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


# glibc's mallopt parameters (malloc.h): thresholds for trimming, growing and mapping.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step instead of returning it to the kernel.

    Every step frees and allocates the same tens of megabytes. By default glibc unmaps and maps them
    each time and the kernel zeroes every page: a third of the CPU time of a step with 8,192 samples
    of 26 features of 64 floats. No-op with other C libraries.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**31 - 1)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 << 20)
