"""The log of what the stand-in's device was given, in one order for all threads."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
MAIN_STREAM = 0


class Kind(IntEnum):
    """As in device.cpp."""

    OPERATOR = 0
    ALLOCATE = 1
    FREE = 2
    RECORD_STREAM = 3
    RECORD_EVENT = 4
    WAIT_EVENT = 5
    SYNC = 6
    COLLECTIVE = 7
    PAGEABLE_COPY = 8


@dataclass(frozen=True)
class Entry:
    """One thing that happened.

    Args:
        kind: what.
        stream: the stream it was issued on; of record_stream, the stream that is named.
        thread: name of the thread.
        place: the line of hotrec that was running, else of what called torch; "" if not asked.
        value: bytes of a block; the longest bag or segment of a kernel.
        name: of an operator; of a sync, what made the host wait.
        ids: blocks of memory; of an event's record and waits, the event.
    """

    kind: Kind
    stream: int
    thread: str
    place: str
    value: int
    name: str
    ids: tuple[int, ...]


@dataclass
class Log:
    """What ``recording`` fills when it ends."""

    entries: list[Entry] = field(default_factory=list)


_library: Any = None
_places: list[str] = []
_place_of: dict[tuple[tuple[str, int], ...], int] = {}
_threads: dict[int, str] = {}
_streams: dict[int, str] = {MAIN_STREAM: "main"}
_kept: list[Any] = []  # callbacks, which ctypes does not keep alive

_HOTREC, _LIBRARY, _TESTS, _OTHER, _OWN = range(5)
_LIBRARIES = (f"{os.sep}torchrec{os.sep}", f"{os.sep}fbgemm_gpu{os.sep}")
_OWN_FILES = tuple(
    os.fspath(Path(__file__).with_name(name)) for name in ("log.py", "device.py", "fbgemm.py")
)
_rank_of_file: dict[str, int] = {}


def _rank(filename: str) -> int:
    """Whose line it is."""
    rank = _rank_of_file.get(filename)
    if rank is None:
        is_installed = "site-packages" in filename
        if filename in _OWN_FILES:
            rank = _OWN
        elif is_installed:
            rank = _LIBRARY if any(part in filename for part in _LIBRARIES) else _OTHER
        elif filename.startswith(os.fspath(REPOSITORY / "hotrec") + os.sep):
            rank = _HOTREC
        else:
            rank = _TESTS if filename.startswith(os.fspath(REPOSITORY) + os.sep) else _OTHER
        _rank_of_file[filename] = rank
    return rank


def _shown(filename: str) -> str:
    for mark in ("site-packages" + os.sep, os.fspath(REPOSITORY) + os.sep):
        if mark in filename:
            return filename.split(mark)[-1]
    return filename


def _find_place() -> int:
    ident = threading.get_ident()
    # The system gives the number of a thread that ended to a new one.
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    _threads[ident] = thread.name if thread is not None else "autograd"
    # The innermost line of hotrec, and before it that of the library which hotrec called.
    found: dict[int, Any] = {}
    frame: Any = sys._getframe(0).f_back
    while frame is not None:
        rank = _rank(frame.f_code.co_filename)
        found.setdefault(rank, frame)
        if rank == _HOTREC:
            break
        frame = frame.f_back
    chosen = [found[_HOTREC]] if _HOTREC in found else []
    if _LIBRARY in found:
        chosen.append(found[_LIBRARY])
    elif not chosen:
        chosen = [found[rank] for rank in (_TESTS, _OTHER) if rank in found][:1]
    key = tuple((frame.f_code.co_filename, frame.f_lineno) for frame in chosen)
    number = _place_of.get(key)
    if number is None:
        number = _place_of[key] = len(_places)
        texts = [f"{_shown(f.f_code.co_filename)}:{f.f_lineno} {f.f_code.co_name}" for f in chosen]
        _places.append(", in ".join(texts) or "backward of torch")
    return number


def start(library: Any) -> None:
    """Connect the log with the compiled device."""
    global _library
    _library = library
    place = ctypes.CFUNCTYPE(ctypes.c_int64)(_find_place)
    _kept.append(place)
    library.stand_in_start(place)


def name_stream(stream: int) -> None:
    """Call a stream by the line that makes it."""
    _streams[stream] = f"stream of {_places[_find_place()].split(', in ')[-1]}"


def stream_name(stream: int) -> str:
    return _streams.get(stream, f"stream {stream}")


def _drain() -> list[Entry]:
    taken: list[Entry] = []
    signature = ctypes.CFUNCTYPE(
        None, *[ctypes.c_int64] * 5, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64
    )

    def take(
        kind: int, stream: int, thread: int, place: int, value: int, name: bytes, ids: Any, num: int
    ) -> None:
        taken.append(
            Entry(
                Kind(kind),
                stream,
                _threads.get(thread, "other"),
                _places[place] if place >= 0 else "",
                value,
                name.decode(),
                tuple(ids[:num]),
            )
        )

    _library.stand_in_drain(signature(take))
    return taken


STEP = "-- step"


def note_step() -> None:
    """Mark where a step ends."""
    _library.stand_in_note(STEP.encode(), 0)


def steps_of(entries: list[Entry]) -> list[list[Entry]]:
    """The entries of each step; what comes after the last mark is left out."""
    steps: list[list[Entry]] = [[]]
    for entry in entries:
        if entry.name == STEP:
            steps.append([])
        else:
            steps[-1].append(entry)
    return steps[:-1]


@contextmanager
def recording() -> Iterator[Log]:
    """Write a log of what happens inside; to be read after."""
    log = Log()
    _drain()
    _library.stand_in_log(1)
    try:
        yield log
    finally:
        _library.stand_in_log(0)
        log.entries = _drain()
