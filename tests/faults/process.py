"""Runs one command of a case: in a child of its own session that leaves nothing unnoticed.

The process that calls this adopts every orphan below it (a "subreaper"), so processes that outlive
their parents are found as its descendants. Where it may (as root), it has a mount namespace of its
own, with an empty /dev/shm and, if asked, a small disk.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.faults.case import Case
from tests.helpers.commands import exit_code_of

REPOSITORY = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")
SMALL = "small"
_SET_CHILD_SUBREAPER, _DROP_BOUNDING_CAPABILITY = 36, 24
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_CAPABILITY_VERSION = 0x20080522
_NEW_MOUNTS, _RECURSIVE, _PRIVATE = 0x20000, 0x4000, 1 << 18
# Wait statuses of the children of this process that have ended.
_ended: dict[int, int] = {}
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    _call("prctl", _SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def can_mount() -> bool:
    return os.geteuid() == 0 and Path("/proc/self/ns/mnt").exists()


def isolate_mounts(small_disk: Path, disk_bytes: int | None) -> None:
    """Give this process its own /dev/shm, and a small disk; both end with its last child."""
    _call("unshare", _NEW_MOUNTS)
    _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
    _mount_tmpfs(SHM, 1 << 30)
    if disk_bytes is not None:
        small_disk.mkdir()
        _mount_tmpfs(small_disk, disk_bytes)


def _mount_tmpfs(where: Path, num_bytes: int) -> None:
    _call("mount", b"faults", str(where).encode(), b"tmpfs", 0, f"size={num_bytes}".encode())


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@dataclass
class Running:
    """A command that runs; what an ``Act`` works on.

    Args:
        folder: its current directory.
        scratch: its TMPDIR, standard output and standard error.
        pid: of the command, also the id of its session.
    """

    case: Case
    folder: Path
    scratch: Path
    pid: int
    exit_code: int | None = None

    def poll(self) -> int | None:
        """The exit code as a shell has it, if the command has ended."""
        _reap()
        if self.exit_code is None and self.pid in _ended:
            code = os.waitstatus_to_exitcode(_ended[self.pid])
            self.exit_code = code if code >= 0 else 128 - code
        return self.exit_code

    def wait(self, limit_s: float) -> int | None:
        """The exit code, or None if the command does not end in time."""
        until_s = time.monotonic() + limit_s
        while self.poll() is None and time.monotonic() < until_s:
            time.sleep(0.01)
        return self.exit_code

    def wait_for(self, path: str, *, lines: int = 0, limit_s: float = 90) -> None:
        """Wait until a file or a pattern of files is there, with so many lines."""
        until_s = time.monotonic() + limit_s
        while self.poll() is None and time.monotonic() < until_s:
            for found in self.folder.glob(path):
                if not lines or len(found.read_bytes().splitlines()) >= lines:
                    return
            time.sleep(0.005)

    def left(self, grace_s: float) -> list[str]:
        """The command lines of processes that outlive it by more than ``grace_s``."""
        until_s = time.monotonic() + grace_s
        while True:
            _reap()
            pids = [pid for pid in descendants(os.getpid()) if pid not in (os.getpid(), self.pid)]
            if not pids or time.monotonic() > until_s:
                return [_command(pid) for pid in pids]
            time.sleep(0.02)


def end_descendants() -> None:
    """Kill all processes below this one."""
    for _ in range(50):
        left = descendants(os.getpid())[1:]
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.02)


def _reap() -> None:
    """Note the end of every child, those that were adopted included."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _ended[pid] = status


def start(case: Case, words: str, folder: Path, scratch: Path) -> Running:
    """Start ``hotrec WORDS`` in ``folder``; its output is in ``scratch``."""
    variables = environment(case.variables, scratch)
    if (pid := os.fork()) == 0:

        def run() -> None:
            _enter(case, folder, scratch)
            sys.exit(_execute(shlex.split(words), variables, is_exec=case.is_exec))

        _leave(exit_code_of(run))
    return Running(case, folder, scratch, pid)


def _leave(code: int) -> NoReturn:
    """End as an interpreter does, but for the modules that nobody needs any more."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    os._exit(code)


def environment(changes: Mapping[str, str | None], scratch: Path) -> dict[str, str]:
    kept = ("PATH", "HOME", "LANG", "LC_ALL", "VIRTUAL_ENV")
    variables: dict[str, str | None] = {name: os.environ.get(name) for name in kept}
    variables |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    variables |= {"TMPDIR": str(scratch / "tmp"), "MPLCONFIGDIR": str(scratch), **changes}
    return {name: value for name, value in variables.items() if value is not None}


def _enter(case: Case, folder: Path, scratch: Path) -> None:
    os.setsid()
    os.chdir(folder)
    # A harness in the background ignores some, and so would its children.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor, name in enumerate((Path("/dev/null"), scratch / "out", scratch / "err")):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(name, flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    if not case.is_privileged and os.geteuid() == 0:
        _drop_capabilities()


def _drop_capabilities() -> None:
    """Keep root's name, but not its right to pass over the modes of files."""
    dropped = (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH)
    for capability in dropped:
        _call("prctl", _DROP_BOUNDING_CAPABILITY, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()
    _call("capget", header, sets)
    for position in range(3):
        sets[position] &= ~sum(1 << capability for capability in dropped)
    _call("capset", header, sets)


def _execute(words: list[str], variables: dict[str, str], *, is_exec: bool) -> int:
    if is_exec:
        os.execve(sys.executable, [sys.executable, "-m", "hotrec", *words], variables)
    from hotrec.cli import main

    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return main(words)


def children(parent: int) -> list[int]:
    """The processes whose parent is ``parent``, zombies left out."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, ppid = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if int(ppid) == parent and state != "Z":
                found.append(int(entry))
    return found


def descendants(root: int) -> list[int]:
    """``root`` and all processes below it."""
    found = [root]
    for pid in found:
        found += children(pid)
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""
