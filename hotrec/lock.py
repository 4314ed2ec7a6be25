"""Locks on files that end with their process, also across the hosts of a shared disk.

``flock`` locks belong to an open file, so the system always releases them when a process ends;
Linux passes them on to NFS servers. A lock file names its holder for the message of a refused
process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class LockedError(ValueError):
    """Another process holds the lock."""


def describe_process() -> str:
    """This process for the message of another: command, number, host and start of the lock."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]])
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{command} (process {os.getpid()} on {socket.gethostname()} since {since})"


def is_of_lock(path: Path) -> bool:
    """Whether a file is one of ``lock_file``, and not another program's."""
    with path.open("rb") as file:
        return re.search(rb" \(process \d+ on \S+ since [-\d: ]+\)$", file.read(4096)) is not None


def try_flock(descriptor: int, path: Path, *, is_shared: bool = False) -> bool:
    """Lock an open file without waiting.

    A file system without locks is reported once in the log and taken as unlocked.

    Returns:
        False if another open file holds a lock that excludes this one.
    """
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        logger.warning(
            "%s: this file system has no locks (%s), so a second writer is not excluded",
            path,
            error.strerror,
        )
    return True


def is_current(descriptor: int, path: Path) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def lock_file(path: Path, subject: Path) -> Iterator[None]:
    """Hold a lock file, which is removed at the end.

    Args:
        path: The lock file; its directory must exist.
        subject: What it protects, for messages.

    Raises:
        LockedError: If another process holds it; the message names that process.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not try_flock(descriptor, path):
            holder = os.read(descriptor, 4096).decode(errors="replace").strip()
            os.close(descriptor)
            raise LockedError(
                f"{subject}: expected no other process writing there, got "
                f"{holder or 'one that has just started'}. Wait for its end, or choose another "
                "directory."
            )
        # The holder before this one removes its file while it still holds the lock.
        if is_current(descriptor, path):
            break
        os.close(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, describe_process().encode())
        yield
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
        os.close(descriptor)
