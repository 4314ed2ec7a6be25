"""Operating-system settings of a rank: thread scheduling, safe forks, CPU affinity."""

from __future__ import annotations

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
    """Threads that are started within are batch threads; they inherit it from the calling thread.

    Does nothing where the calling thread has another policy than the ordinary one already, or where
    the system has no such policy or refuses it: it is about speed alone.
    """
    if not _is_ordinary() or not _set_policy("SCHED_BATCH"):
        yield
        return
    try:
        yield
    finally:
        _set_policy("SCHED_OTHER")


def _is_ordinary() -> bool:
    has_policies = hasattr(os, "sched_getscheduler") and hasattr(os, "SCHED_BATCH")
    return has_policies and os.sched_getscheduler(0) == os.SCHED_OTHER


def _set_policy(name: str) -> bool:
    """Set the policy of the calling thread; returns whether the system allowed it."""
    try:
        os.sched_setscheduler(0, getattr(os, name), os.sched_param(0))
    except OSError as error:
        logger.debug("threads: the system refuses %s: %s", name, error)
        return False
    return True


# The first version that recreates the lock in the child.
FIXED_VERSION = (3, 11, 10)
# A thread may compute for longer; then it most likely holds no lock.
LIMIT_S = 1.0
_PAUSE_S = 0.001
_TASKS = Path("/proc/self/task")


@functools.cache
def make_forks_safe() -> None:
    """Let every later ``os.fork`` of this process wait; nothing where Python is fixed."""
    if sys.version_info[:3] < FIXED_VERSION and _TASKS.exists():
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


_SYSTEM = Path("/sys")


def bind_to_gpu(device: torch.device, system: Path = _SYSTEM) -> None:
    """Keep this process, with the threads and workers that it starts, on its GPU's NUMA node.

    Memory follows: the system takes it from the node of the processor that first writes to it.
    Where the system does not report the node, or has only one, nothing changes.

    Args:
        device: A CUDA device.
        system: Mount point of sysfs.
    """
    about: Any = torch.cuda.get_device_properties(device)
    address = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        if node < 0:  # not reported, as on most systems with one node
            logger.debug("%s: its NUMA node is not known to the system", device)
            return
        of_node = _read_cpus(system / f"devices/system/node/node{node}/cpulist")
        allowed = os.sched_getaffinity(0)
        near = of_node & allowed
        if not near:
            logger.warning(
                "%s: expected processors of its NUMA node %d, got %s from the launcher, none "
                "of them. Copies cross sockets; look at the launcher's CPU binding.",
                device,
                node,
                sorted(allowed),
            )
            return
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), near)
    except OSError as error:
        logger.info("%s: not bound to the processors beside it: %s", device, error)
        return
    logger.info("%s: bound to %d processors of NUMA node %d", device, len(near), node)


def _read_cpus(path: Path) -> set[int]:
    """Processors of a list such as "0-3,8"."""
    cpus: set[int] = set()
    for part in path.read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
