"""The progress of this rank, which ``hotrec.runtime.watchdog.watchdog.Watchdog`` publishes.

It is the step and stage of each of its threads, and the line of code. ``enter`` and ``passed`` cost
less than a microsecond.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import PurePath
from threading import get_ident
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import NamedTuple

# Exit code of a process that the watchdog ends, or that ends by LostRank under ``hotrec``: the same
# command may succeed if it is restarted.
EXIT_CODE = os.EX_TEMPFAIL

MAIN = "main"
COMMUNICATION = "communication"

START = "start"
FIRST_STEP = "first step"
STEP = "step"
TRIAL = "trial"
CHECK_UP = "check-up"
ADAPTATION = "move of hot rows"
EVALUATION = "evaluation"
METRICS = "metrics"
CHECKPOINT = "checkpoint"
# Stages that may take long on one rank while the others wait, such as writing a checkpoint. Only
# the timeout of the collectives applies to them.
UNLIMITED = frozenset({START, FIRST_STEP, METRICS, CHECKPOINT})

# In the order of a step: a rank in an earlier phase than the others is behind.
PHASES = ("loader", "forward", "backward", "optimizer")
# Frames in which a thread waits for other ranks. Our exchanges end in the same library calls; the
# wait for those of a communication thread is in a future.
_WAITING = (
    "torch/distributed/distributed_c10d.py",
    "torchrec/distributed/comm_ops.py",
    "/wire.py",
    "/threading.py",
    "/concurrent/futures/",
)
_LOADERS = ("torch/utils/data/dataloader.py", "hotrec/data/loader.py")
_OPTIMIZERS = ("torch/optim/", "torchrec/optim/")
_LIBRARIES = ("/torch/", "/torchrec/", "/multiprocessing/", "/threading.py")
_MAX_FRAMES = 80


class ProgressMarks:
    """The progress of this process, written by its threads and read by the watchdog.

    Every rank has to enter the same stages in the same order, except in threads that only some
    ranks have.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew; the caller's thread is the main one."""
        self.main_thread = get_ident()
        # Stage, step and number of stages entered. Entries are replaced atomically, so a reader
        # never sees a partial one.
        self._threads: dict[str, tuple[str, int | None, int]] = {MAIN: (START, None, 1)}
        self._passed: str | None = None
        self._moved_s = time.monotonic()

    def enter(self, thread: str, stage: str, step: int | None = None) -> None:
        """Record that a thread enters a stage of a step.

        Args:
            thread: MAIN, COMMUNICATION, or the name of another thread.
            stage: one of ``hotrec.types.STAGES``, or any short words.
            step: The step.
        """
        _, _, count = self._threads.get(thread, (None, None, 0))
        self._threads[thread] = (stage, step, count + 1)
        if thread == MAIN:
            self._passed = None
        self._moved_s = time.monotonic()

    def leave(self, thread: str) -> None:
        """Record that a thread has ended on every rank."""
        self._threads.pop(thread, None)

    def passed(self, stage: str) -> None:
        """Record that the main thread has left ``stage``."""
        self._passed = stage
        self._moved_s = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the last progress of any thread."""
        return time.monotonic() - self._moved_s

    @property
    def stage(self) -> str:
        return self._threads[MAIN][0]

    @property
    def step(self) -> int | None:
        return self._threads[MAIN][1]

    @property
    def counts(self) -> dict[str, int]:
        """Stages entered by thread. Ranks enter the same ones, so the smallest count is behind."""
        return {thread: count for thread, (_, _, count) in self._threads.copy().items()}

    def describe(self, place: Place | None = None) -> str:
        """E.g. "step 41 (after row_lookup; backward, at a.py:12 f); communication: rows_exchange".

        Args:
            place: of the main thread; None to determine it.
        """
        threads, passed = self._threads.copy(), self._passed
        stage, step, _ = threads.pop(MAIN)
        text = stage
        if step is not None:
            text = f"step {step}" if stage in (STEP, FIRST_STEP) else f"{stage} of step {step}"
        details = (passed and f"after {passed}", str(place or place_of_thread(self.main_thread)))
        if any(details):
            text += f" ({'; '.join(filter(None, details))})"
        return "; ".join([text, *(f"{name}: {stage}" for name, (stage, _, _) in threads.items())])


PROGRESS = ProgressMarks()
enter, leave, passed = PROGRESS.enter, PROGRESS.leave, PROGRESS.passed


class Place(NamedTuple):
    """The place of a thread by its Python stack, at no cost for the thread.

    It covers code without marks: TorchRec's pipelines and user models.

    Args:
        phase: one of PHASES, or empty.
        line: "module.py:12 function" of the innermost frame outside libraries; empty without one.
        is_waiting: for other ranks, as far as the stack shows it; a wait inside C++ is invisible.
    """

    phase: str = ""
    line: str = ""
    is_waiting: bool = False

    def __str__(self) -> str:
        parts = (
            self.phase,
            "waiting for others" * self.is_waiting,
            self.line and f"at {self.line}",
        )
        return ", ".join(filter(None, parts))


def place_of_thread(thread: int) -> Place:
    """The place of a thread of this process, by its ``threading.get_ident()``."""
    # Python 3.11 may collect garbage while it holds its lock of thread states, and destructors may
    # switch threads: one that starts a thread or forks then hangs (CPython gh-106883).
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()
    return Place() if frame is None else _place(walk_stack(frame))


def place_of_error(error: BaseException) -> Place:
    """Where an error was raised."""
    return _place(reversed(list(walk_tb(error.__traceback__))))


def _place(frames: Iterable[tuple[FrameType, int]]) -> Place:
    """Args: frames with their lines, from the innermost outward."""
    # Text only: a stored frame would keep the thread's tensors alive.
    calls = [
        (frame.f_code.co_filename, frame.f_code.co_name, line)
        for frame, line in islice(frames, _MAX_FRAMES)
    ]
    phase = _phase(calls)
    # Only the innermost frames: code called from an exchange further out computes. In a loader the
    # thread waits for data.
    is_waiting = phase != "loader" and any(_is_in(file, _WAITING) for file, _, _ in calls[:4])
    own = (call for call in calls if not _is_in(call[0], _LIBRARIES))
    line = next((f"{PurePath(file).name}:{line} {name}" for file, name, line in own), "")
    return Place(phase, line, is_waiting)


def _phase(calls: list[tuple[str, str, int]]) -> str:
    # Autograd's own functions have a "forward" and a "backward" that the engine calls.
    is_backward = any(name == "_engine_run_backward" for _, name, _ in calls)
    for file, name, _ in calls:
        if _is_in(file, _LOADERS):
            return "loader"
        if name == "step" and _is_in(file, _OPTIMIZERS):
            return "optimizer"
        if name in ("forward", "_call_impl", "_engine_run_backward"):
            return "backward" if is_backward else "forward"
    return ""


def _is_in(file: str, parts: tuple[str, ...]) -> bool:
    return any(part in file for part in parts)
