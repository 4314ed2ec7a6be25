"""How the operating system schedules threads that only carry messages.

Gloo's network threads wake for every piece of a message that arrives. With as many ranks as cores
each wake-up puts the computing thread off its core, and while that thread holds what gloo wants the
woken one spins. As batch threads (``SCHED_BATCH``, sched(7)) they do not preempt; they run when the
core is free, or at the end of the running thread's time slice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


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
    """Of the calling thread; whether it could be set."""
    try:
        os.sched_setscheduler(0, getattr(os, name), os.sched_param(0))
    except OSError as error:
        logger.debug("threads: the system refuses %s: %s", name, error)
        return False
    return True
