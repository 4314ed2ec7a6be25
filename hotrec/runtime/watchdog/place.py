"""Where a thread stands by its Python stack: what no mark can tell, at no cost to the thread.

TorchRec's pipelines are not ours to mark in every step, and a model's own code has no marks.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType

# In the order of a step; a rank in an earlier phase than the others is behind.
PHASES = ("loader", "forward", "backward", "optimizer")
# Frames in which a thread waits for other ranks. Those of ours end in the same library calls.
_WAITING = (
    "torch/distributed/distributed_c10d.py",
    "torchrec/distributed/comm_ops.py",
    "hotrec/runtime/wire.py",
    # For a thread of its own that exchanges; in a loader it is data that is waited for.
    "/threading.py",
    "/concurrent/futures/",
)
_LOADERS = ("torch/utils/data/dataloader.py", "torchdata/", "hotrec/data/loader.py")
_OPTIMIZERS = ("torch/optim/", "torchrec/optim/")
_LIBRARIES = ("/torch/", "/torchrec/", "/torchdata/", "/multiprocessing/", "/threading.py")
_DEPTH = 80


@dataclass(frozen=True)
class Place:
    """A place in the program.

    Args:
        phase: one of PHASES, or empty.
        line: "module.py:12 function" of the innermost frame outside libraries; empty without one.
        is_waiting: for other ranks, as far as the stack shows; a wait inside C++ does not show.
    """

    phase: str
    line: str
    is_waiting: bool

    def __str__(self) -> str:
        phase = f"{self.phase}, waiting for others" if self.is_waiting else self.phase
        line = f"at {self.line}" if self.line else ""
        return ", ".join(part for part in (phase.removeprefix(", "), line) if part)


NOWHERE = Place("", "", False)


def place_of(thread: int) -> Place:
    """Where a thread of this process stands.

    Args:
        thread: its ``threading.get_ident()``.
    """
    frame = _frame_of(thread)
    frames: list[FrameType] = []
    while frame is not None and len(frames) < _DEPTH:
        frames.append(frame)
        frame = frame.f_back
    try:
        return _place(frames)
    finally:
        frames.clear()  # a frame that is held keeps alive what the thread had in hand


def _frame_of(thread: int) -> FrameType | None:
    # Python 3.11 may collect garbage while it holds its lock of thread states, and what it collects
    # may let other threads run: one that starts a thread or forks then hangs (CPython gh-106883).
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()


def place_of_error(error: BaseException) -> Place:
    """Where an error was raised."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return _place(frames[::-1][:_DEPTH])


def _place(frames: list[FrameType]) -> Place:
    """Args: frames from the innermost outward."""
    files = [frame.f_code.co_filename.replace("\\", "/") for frame in frames]
    names = [frame.f_code.co_name for frame in frames]
    phase = _phase(files, names)
    # The innermost few frames: what is called from within an exchange further out computes.
    is_waiting = phase != "loader" and any(w in file for file in files[:4] for w in _WAITING)
    own = next(
        (i for i, file in enumerate(files) if not any(part in file for part in _LIBRARIES)), None
    )
    line = ""
    if own is not None:
        line = f"{PurePath(files[own]).name}:{frames[own].f_lineno} {names[own]}"
    return Place(phase, line, is_waiting)


def _phase(files: list[str], names: list[str]) -> str:
    for file, name in zip(files, names, strict=True):
        if any(part in file for part in _LOADERS):
            return "loader"
        if name == "_engine_run_backward":
            return "backward"
        if name == "step" and any(part in file for part in _OPTIMIZERS):
            return "optimizer"
        if name in ("forward", "_call_impl"):
            # Autograd's own functions have a "backward" that is called from further out.
            return "backward" if "_engine_run_backward" in names else "forward"
    return ""
