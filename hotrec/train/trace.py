"""Traces of a few steps, one file per rank, for Perfetto (ui.perfetto.dev) or chrome://tracing.

torch.profiler records the operators, the named ranges and the collectives of every thread, the
communication thread's among them, and on CUDA the kernels. The stages of ``hotrec.runtime.stages``
come from a clock: a mark ends a stage, so its name is known only then, and it may cut through
operators; they are written into the file as a lane of their own. Steps that are recorded are in no
rate.

Events carry the rank instead of the process number and times since one epoch, so the files of all
ranks may be opened together or put into one by ``merge_traces``.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from hotrec.runtime.ranks import Ranks, same_verdict
from hotrec.runtime.stages import RANGE_PREFIX, StageClock, StepIntervals

# Categories of the events that are hotrec's, for those who read the file.
STEP, STAGE, RANGE = "hotrec_step", "hotrec_stage", "hotrec_range"
# A thread number that no system gives, and the lane's place above all threads.
STAGE_LANE = 1_000_000_000
# A rank's processes in the file: the host's, then its devices'.
PIDS_PER_RANK = 100
_SYNC = "hotrec trace clock"
_US = 1e6

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceWindow:
    """Which steps to record, and where the files go.

    Args:
        first_step: counted from this start, from 1; those before warm up.
        num_steps: recorded one after the other.
        directory: of ``rank0.json.gz`` and so on; made on each host.
        warn_of_syncs: let CUDA warn, in these steps, of whatever makes the host wait for it.
    """

    first_step: int
    num_steps: int
    directory: Path
    warn_of_syncs: bool = False


class Tracer:
    """Records the steps of a window, if there is one.

    Args:
        window: None to record nothing.
        start_step: updates made before this start.
        num_steps: the run's last step.

    Raises:
        ValueError: if a new run is too short for the window. In a resumed one that may be what is
            left, so a warning says that nothing is recorded. Also if a CPU is asked for syncs.
    """

    def __init__(
        self, window: TraceWindow | None, ranks: Ranks, *, start_step: int, num_steps: int
    ) -> None:
        self._window, self._ranks = window, ranks
        self._first = self._last = -1
        self._profiler: profile | None = None
        self._clock = StageClock(ranks.device)
        self._steps: list[int] = []
        self._sync_s = 0.0
        self._names: dict[int, str] = {}
        if window is None:
            return
        if window.warn_of_syncs and ranks.device.type != "cuda":
            raise ValueError(
                f"profiler.warn_of_syncs: expected a CUDA device, got {ranks.device.type}, which "
                "the host never waits for. Set profiler.warn_of_syncs=false."
            )
        first = start_step + window.first_step
        last = first + window.num_steps - 1
        if last <= num_steps:
            self._first, self._last = first, last
            return
        text = (
            f"profiler: expected steps {first} to {last} to be among this start's, got "
            f"{start_step + 1} to {num_steps}."
        )
        if start_step == 0:
            raise ValueError(f"{text} Lower profiler.first_step, or make more steps.")
        logger.warning("%s No trace is written.", text)

    def __enter__(self) -> Tracer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what a run that stops early has recorded; after an exception drop it."""
        if self._profiler is None:
            return
        if kind is None:
            self._write()
        else:
            self._profiler.stop()
            self._profiler = None

    def is_due(self, step: int) -> bool:
        return self._first <= step <= self._last

    def is_last(self, step: int) -> bool:
        return step == self._last

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the step made inside the block; the first one is a collective."""
        if self._profiler is None:
            same_verdict(self._start)
        assert self._window is not None
        with self._clock.step(), _warning_of_syncs(self._window.warn_of_syncs):
            yield
        self._steps.append(step)

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._ranks.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Without this only the thread that starts the profiler is recorded.
        config = _ExperimentalConfig(profile_all_threads=True)
        self._profiler = profile(activities=activities, experimental_config=config)
        self._profiler.start()
        self._names = _thread_names()
        # Where the profiler's clock stands at a time of ours; the first event is a slow one.
        for _ in range(3):
            with record_function(_SYNC):
                self._sync_s = time.perf_counter()

    def write(self) -> None:
        """Write this rank's file, after the last step; a collective.

        Raises:
            OSError: if it cannot be written; RankError on the other ranks.
        """
        same_verdict(self._write)

    def _write(self) -> None:
        assert self._window is not None
        assert self._profiler is not None
        ranks, recorded = self._ranks, self._profiler
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        recorded.stop()
        self._profiler = None
        names = self._names | _thread_names()
        with tempfile.TemporaryDirectory(prefix="hotrec-trace-") as folder:
            raw = Path(folder) / "raw.json"
            recorded.export_chrome_trace(str(raw))
            document = json.loads(raw.read_text())
        steps = list(zip(self._steps, self._clock.intervals(), strict=True))
        self._clock.clear()
        build_trace(document, ranks, steps, sync_s=self._sync_s, thread_names=names)
        path = self._window.directory / f"rank{ranks.rank}.json.gz"
        write_trace(document, path)
        logger.info("[rank %d] trace of %d steps: %s", ranks.rank, len(steps), path)


@contextmanager
def _warning_of_syncs(is_wanted: bool) -> Iterator[None]:
    """In the block each line of code that makes the host wait for the device is told once."""
    if not is_wanted:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _thread_names() -> dict[int, str]:
    """Python's threads by the system's number."""
    main = threading.main_thread()
    return {
        thread.native_id: "main thread" if thread is main else thread.name
        for thread in threading.enumerate()
        if thread.native_id is not None
    }


def build_trace(
    document: dict[str, Any],
    ranks: Ranks,
    steps: Sequence[tuple[int, StepIntervals]],
    *,
    sync_s: float,
    thread_names: Mapping[int, str],
) -> None:
    """Make hotrec's trace of the profiler's, in place.

    Args:
        document: Chrome's trace format, as torch exports it.
        steps: number of each step, and its stages.
        sync_s: the time of ``time.perf_counter`` at which the last clock event began.
        thread_names: by the system's number.

    Raises:
        RuntimeError: if the profiler has recorded no clock event.
    """
    found = [event["ts"] for event in document["traceEvents"] if event.get("name") == _SYNC]
    if not found:
        raise RuntimeError(
            f"trace of rank {ranks.rank}: expected events {_SYNC!r} of torch.profiler, got none "
            f"among {len(document['traceEvents'])}. Train without profiler=trace."
        )
    zero_us = max(found) - sync_s * _US
    pid = ranks.rank * PIDS_PER_RANK
    events = [
        _renumbered(event, ranks, pid, thread_names)
        for event in document["traceEvents"]
        # Of no process, such as a span over the whole recording: they hide what is below them.
        if event.get("name") != _SYNC and isinstance(event.get("pid"), int)
    ]
    is_cuda = ranks.device.type == "cuda"
    host = socket.gethostname()
    events += [
        _meta(pid, 0, "process_name", name=f"rank {ranks.rank} of {ranks.world_size} on {host}"),
        _meta(pid, 0, "process_sort_index", sort_index=pid),
        _meta(
            pid,
            STAGE_LANE,
            "thread_name",
            name="stages on the stream" if is_cuda else "stages of the main thread",
        ),
        _meta(pid, STAGE_LANE, "thread_sort_index", sort_index=-2),
        *_step_events(pid, steps, zero_us),
    ]
    events += _missing_names(events, pid, thread_names)
    document["traceEvents"] = events
    document["hotrec"] = {
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "steps": [step for step, _ in steps],
        "device": ranks.device.type,
    }


def _renumbered(
    event: dict[str, Any], ranks: Ranks, pid: int, thread_names: Mapping[int, str]
) -> dict[str, Any]:
    """The event under its rank, with the names of ranges and threads."""
    own = event["pid"]
    event["pid"] = pid if own == os.getpid() else pid + 1 + own  # else a device of CUDA
    if "id" in event:  # of an arrow between events
        event["id"] = int(event["id"]) * ranks.world_size + ranks.rank
    name = event.get("name", "")
    if name.startswith(RANGE_PREFIX):
        event["name"] = name.removeprefix(RANGE_PREFIX)
        if event.get("cat") == "user_annotation":
            event["cat"] = RANGE
    elif event["ph"] == "M" and own == os.getpid():
        thread = thread_names.get(event["tid"])
        if name == "thread_name" and thread is not None:
            event["args"] = {"name": thread}
        elif name == "thread_sort_index" and thread is not None:
            event["args"] = {"sort_index": -1 if thread == "main thread" else 0}
    elif event["ph"] == "M" and name == "process_name":
        event["args"] = {"name": f"rank {ranks.rank} of {ranks.world_size}, device {own}"}
    return event


def _missing_names(
    events: Sequence[Mapping[str, Any]], pid: int, thread_names: Mapping[int, str]
) -> Iterator[dict[str, Any]]:
    """Names of threads of which the profiler tells events and no name.

    It forgets a thread that it met just before it began to record.
    """
    own = [event for event in events if event["pid"] == pid and isinstance(event["tid"], int)]
    named = {event["tid"] for event in own if event.get("name") == "thread_name"}
    for tid in sorted({event["tid"] for event in own if event["ph"] == "X"} - named):
        yield _meta(pid, tid, "thread_name", name=thread_names.get(tid, f"thread {tid}"))


def _meta(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": kind, "args": args}


def _step_events(
    pid: int, steps: Sequence[tuple[int, StepIntervals]], zero_us: float
) -> Iterator[dict[str, Any]]:
    """A step, and its stages inside it; ends meet exactly, or viewers would pull them apart."""

    def event(name: str, kind: str, start_s: float, end_s: float) -> dict[str, Any]:
        start_us, end_us = (round(zero_us + at_s * _US, 3) for at_s in (start_s, end_s))
        return {
            "ph": "X",
            "cat": kind,
            "name": name,
            "pid": pid,
            "tid": STAGE_LANE,
            "ts": start_us,
            "dur": round(end_us - start_us, 3),
        }

    for step, intervals in steps:
        yield event(f"step {step}", STEP, intervals.start_s, intervals.end_s)
        for stage, start_s, end_s in intervals.stages:
            yield event(stage, STAGE, start_s, end_s)


def write_trace(document: Mapping[str, Any], path: Path) -> None:
    """Write a trace so that a reader finds no half of it; the directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    with gzip.open(partial, "wt", encoding="utf-8") as file:
        json.dump(document, file, allow_nan=False)
    partial.replace(path)


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace that ``write_trace`` wrote.

    Raises:
        ValueError: if it is no such file.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            document = json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"trace {path}: expected gzipped JSON, got {error}.") from error
    if not isinstance(document, dict) or "hotrec" not in document:
        raise ValueError(
            f"trace {path}: expected a trace with the field 'hotrec', got {type(document).__name__}"
            " without it. Pass a file that `hotrec train profiler=trace` wrote."
        )
    return document


def merge_traces(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The traces of several ranks as one; hosts are as far apart in it as their clocks."""
    base_ns = min(int(document["baseTimeNanoseconds"]) for document in documents)
    events = []
    for document in documents:
        shift_us = (int(document["baseTimeNanoseconds"]) - base_ns) / 1000
        for event in document["traceEvents"]:
            is_timed = event["ph"] != "M"
            events.append({**event, "ts": event["ts"] + shift_us} if is_timed else event)
    return {**documents[0], "baseTimeNanoseconds": base_ns, "traceEvents": events}
