"""Starts Python programs by forking them from a server that has imported torch and hotrec.

``Process`` is ``subprocess.Popen`` without the seconds of imports for command lines such as
``python -m hotrec train``. Words, environment, directory, descriptors, session, ignored signals,
parent, pid and exit code are those that an exec would give. The same holds for the programs that
such a program starts in turn, a launcher's torchrun and its ranks included: each has a server of
its own, forked before it ran, and its ``subprocess.Popen`` is ``Process``. hotrec has no hook for
it. What cannot be forked so (a shell, another program, other values of variables that are read at
the start of the interpreter or of a library) is executed as usual.

What differs: the modules have been imported already, all programs share one seed of string hashes,
a KeyboardInterrupt that a program does not handle ends it with code 1, and its modules are not
taken apart at the end. ``tests/e2e/test_cold_start.py`` therefore starts some cold.
HOTREC_TESTS_COLD=1 starts all of them so, and so does a CUDA device, which a forked process may not
be able to use.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import io
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
COLD = "HOTREC_TESTS_COLD"
# Beginnings of the variables that the interpreter or a library reads when it starts.
_READ_AT_START = ("PYTHON", "OMP_", "MKL_", "LD_", "LANG", "LC_", "HOME", "TORCH_LOGS", "CUDA_")
# By Python itself; Popen restores them for what it executes.
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37
_LIMIT_S = 240.0
# /proc shows the words and variables of a process where its exec put them: room for others.
_ROOM = "-" * 60_000
_LENGTH = struct.Struct("q")
_libc = ctypes.CDLL(None, use_errno=True)
_execute: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def environment(**variables: str) -> dict[str, str]:
    """The environment of a program that a test starts."""
    kept = {name: value for name, value in os.environ.items() if name != "HOTREC_RUN_DIR"}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables}


@dataclass(frozen=True)
class Program:
    """What is to run.

    Args:
        words: the command line, the interpreter first.
        variables: the environment.
        folder: the current directory.
        parent: pid of the process that starts it.
        has_session: whether it gets a session of its own.
        ignored: the signals that its parent ignores.
        blocked: the signals that its parent blocks.
    """

    words: tuple[str, ...]
    variables: dict[str, str]
    folder: str
    parent: int
    has_session: bool
    ignored: frozenset[int]
    blocked: frozenset[int]

    def enter(self) -> None:
        """Make this process, which has just been forked, what an exec would have made it."""
        until_s = time.monotonic() + _LIMIT_S
        while os.getppid() != self.parent:  # until the process between the two has ended
            if time.monotonic() > until_s:
                os._exit(127)
            time.sleep(0.0005)
        if self.has_session:
            os.setsid()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            is_ignored = number in self.ignored or number in _IGNORED_BY_PYTHON
            signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        if signal.SIGINT not in self.ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.variables)
        tempfile.tempdir = None
        _show(self.words, [f"{name}={value}" for name, value in self.variables.items()])

    def run(self) -> None:
        """Run it as ``__main__``."""
        is_unbuffered = self.words[1] == "-u"
        if is_unbuffered:
            raw: Any = io.FileIO(1, "w", closefd=False)
            encoding, errors = sys.stdout.encoding, sys.stdout.errors
            sys.stdout = io.TextIOWrapper(raw, encoding, errors, write_through=True)
        first, *others = self.words[1 + is_unbuffered :]
        sys.orig_argv = list(self.words)
        if first == "-m":
            sys.argv, sys.path[0] = others, os.getcwd()
            sys.modules.pop(others[0], None)  # else runpy warns that it has been imported
            runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv, sys.path[0] = ["-c", *others[1:]], ""
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(others[0], main.__dict__)
        else:
            sys.argv, sys.path[0] = [first, *others], str(Path(first).resolve().parent)
            runpy.run_path(first, run_name="__main__")


def exit_code_of(program: Callable[[], object]) -> int:
    """The exit code of an interpreter that runs this; it prints what one would."""
    try:
        program()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End as an interpreter does, but for the modules that nobody needs any more."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    os._exit(code)


def _show(*texts: Sequence[str]) -> None:
    """Put words and variables where /proc/PID/cmdline and /proc/PID/environ look for them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = list(map(int, fields[45:49]))
    for start, end, lines in zip(places[::2], places[1::2], texts, strict=True):
        content = b"".join(os.fsencode(line) + b"\0" for line in lines)[: end - start - 1]
        ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


class Process(subprocess.Popen):  # type: ignore[type-arg]
    """``subprocess.Popen``, by a fork where that comes to the same."""

    server: ClassVar[socket.socket | None] = None
    # The environment in which the server started.
    started: ClassVar[Mapping[str, str]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def _execute_child(self, *given: Any) -> None:
        named = inspect.signature(_execute).bind(self, *given).arguments
        program = _program(named) if _is_forkable(named) else None
        if program is None:
            _execute(self, *given)
            return
        ends = (named["p2cread"], named["c2pwrite"], named["errwrite"])
        descriptors = [number if end == -1 else end for number, end in enumerate(ends)]
        with self._lock, _adopting():
            if Process.server is None:
                Process.server = start_server()
            self.pid = _fork(Process.server, program, descriptors)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*map(named.get, pipes))  # type: ignore[attr-defined]


def run(
    words: Sequence[str], *, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run(words, capture_output=True, text=True)``, by a ``Process``."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Process(words, text=True, **pipes | options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def is_forking() -> bool:
    """Whether anything is forked here: not where tests run cold, or with a device of CUDA."""
    return not (COLD in os.environ or sys.platform != "linux" or Path("/dev/nvidiactl").exists())


def _is_forkable(named: Mapping[str, Any]) -> bool:
    """Whether a call of Popen asks for nothing but what ``Program`` holds."""
    unused = ("executable", "preexec_fn", "pass_fds", "shell", "gid", "gids", "uid")
    if not is_forking():
        return False
    if any(named[name] for name in unused) or {named["umask"], named["process_group"]} != {-1}:
        return False
    if isinstance(named["args"], str | bytes | os.PathLike):
        return False
    interpreter, *words = map(os.fsdecode, named["args"])
    words = words[1:] if words[:1] == ["-u"] else words
    is_plain = bool(words) and (words[0] in ("-m", "-c") or not words[0].startswith("-"))
    variables = os.environ if named["env"] is None else named["env"]
    is_equal = _read_at_start(variables) == _read_at_start(Process.started or environment())
    folder = named["cwd"] or "."
    return interpreter == sys.executable and is_plain and is_equal and os.path.isdir(folder)


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: v for name, v in variables.items() if name.startswith(_READ_AT_START)}


def _program(named: Mapping[str, Any]) -> Program:
    ignored = {n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN}
    return Program(
        words=tuple(map(os.fsdecode, named["args"])),
        variables=dict(os.environ if named["env"] is None else named["env"]),
        folder=os.path.abspath(named["cwd"] or "."),
        parent=os.getpid(),
        has_session=bool(named["start_new_session"]),
        ignored=frozenset(map(int, ignored - _IGNORED_BY_PYTHON)),
        blocked=frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    )


@contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of what the server forks twice: of a process whose own parent ends."""
    before = ctypes.c_int()
    _libc.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _fork(server: socket.socket, program: Program, descriptors: Sequence[int]) -> int:
    """Have the server fork the program; its pid, once it is what an exec would have made it."""
    content = pickle.dumps(program)
    socket.send_fds(server, [_LENGTH.pack(len(content))], descriptors)
    server.sendall(content)
    return int(_LENGTH.unpack(_receive(server, _LENGTH.size))[0])


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    content = b""
    while len(content) < num_bytes:
        received = connection.recv(num_bytes - len(content))
        if not received:
            raise EOFError("server of forked programs: expected an answer, got its end.")
        content += received
    return content


def start_server() -> socket.socket:
    """Start the server of this process, with which it ends."""
    Process.started = environment()
    ours, theirs = socket.socketpair()
    ours.settimeout(_LIMIT_S)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.fork_server", str(theirs.fileno()), _ROOM],
        cwd=REPOSITORY,
        env={**Process.started, "HOTREC_TESTS_ROOM": _ROOM},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def serve(connection: socket.socket) -> Program:
    """Fork a process for each program that is asked for; returns in such a process only."""
    while True:
        length, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
        if not length:
            os._exit(0)  # the process that this serves has ended
        program: Program = pickle.loads(_receive(connection, _LENGTH.unpack(length)[0]))
        if between := os.fork():
            os.waitpid(between, 0)
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        if os.fork():
            os._exit(0)
        program.enter()
        Process.server, theirs = socket.socketpair()
        Process.server.settimeout(_LIMIT_S)
        if not os.fork():  # this one serves the program, from here on
            connection.close()
            Process.server.close()
            connection = theirs
            _leave_terminal_and_pipes(descriptors)
            continue
        theirs.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        connection.sendall(_LENGTH.pack(os.getpid()))
        connection.close()
        return program


def _leave_terminal_and_pipes(descriptors: Sequence[int]) -> None:
    """Keep a server out of what is meant for its program: signals, and readers of its output."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    for descriptor in (null, *descriptors):
        os.close(descriptor)
