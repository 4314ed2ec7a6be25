"""Traces of a few training steps by torch.profiler, one Chrome trace file per rank.

A mark of ``hotrec.runtime.stages`` names a stage when it ends, too late for a ``record_function``
around it, so marks are recorded as empty ranges and drawn as a lane of stages in the file.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from hotrec.runtime.ranks import Ranks, same_verdict
from hotrec.runtime.stages import RANGE_PREFIX, STAGE_END, StageClock, named_range

# The category of stages in the file, and their lane: a thread number that no system assigns.
STAGE, STAGE_LANE = "stage", 1_000_000_000
STEP_PREFIX = RANGE_PREFIX + "step "

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceWindow:
    """Which steps to record, and where the files go.

    Args:
        first_step: The first recorded step, counted from 1 at this start; at least 2, since the
            profiler warms up in the step before it.
        num_steps: The number of consecutive steps to record.
        directory: Receives ``rank0.json.gz`` and so on; each host makes its own.
        warn_of_syncs: Whether CUDA warns, in these steps, of lines that synchronize the host with
            it.
    """

    first_step: int
    num_steps: int
    directory: Path
    warn_of_syncs: bool = False


class Tracer:
    """Records the steps of a window, if there is one; the files are written after the last.

    Raises:
        ValueError: if a new run is too short for the window (a resumed run only warns), or if
            warnings of syncs are requested on a CPU.
    """

    def __init__(
        self, window: TraceWindow | None, ranks: Ranks, *, start_step: int, num_steps: int
    ) -> None:
        self._window, self._ranks = window, ranks
        self._first = self._last = -2
        self._profiler: profile | None = None
        if window is None:
            return
        is_cuda = ranks.device.type == "cuda"
        if window.warn_of_syncs and not is_cuda:
            raise ValueError(
                f"profiler.warn_of_syncs: expected a CUDA device, got {ranks.device.type}, for "
                "which the host never waits. Set profiler.warn_of_syncs=false."
            )
        first = start_step + window.first_step
        last = first + window.num_steps - 1
        if last > num_steps:
            text = (
                f"profiler.first_step: expected steps {first} to {last} to be among those of this "
                f"start, got {start_step + 1} to {num_steps}."
            )
            if start_step == 0:
                raise ValueError(f"{text} Lower profiler.first_step, or train more steps.")
            logger.warning("%s No trace is written.", text)
            return
        self._first, self._last = first, last
        self._profiler = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda,
            schedule=schedule(
                wait=window.first_step - 2, warmup=1, active=window.num_steps, repeat=1
            ),
            on_trace_ready=self._write,
            # By default only the thread that starts the profiler is recorded.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )

    def __enter__(self) -> Tracer:
        if self._profiler is not None:
            self._profiler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the steps recorded by a run that stops early; drop them after an exception."""
        if self._profiler is not None:
            if kind is not None:
                self._profiler.on_trace_ready = None
            self._profiler.stop()
            self._profiler = None

    def is_slowed(self, step: int) -> bool:
        """Whether the profiler is active in ``step``, so that its time is not representative."""
        return self._first - 1 <= step <= self._last

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Mark the block as ``step`` in the trace, if it is recorded."""
        with ExitStack() as stack:
            if self._window is not None and self._first <= step <= self._last:
                if self._window.warn_of_syncs:
                    stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
                    torch.cuda.set_sync_debug_mode("warn")
                stack.enter_context(named_range(f"step {step}"))
                # Stages are marked only where a clock runs; the clock's own times are not used.
                stack.enter_context(StageClock(self._ranks.device).step())
            yield

    def end_step(self, step: int) -> bool:
        """Advance the profiler's schedule; after the last recorded step this is a collective.

        Returns:
            Whether the trace was written, which takes time.

        Raises:
            OSError: if this rank's file cannot be written; RankError on the other ranks.
        """
        if self._profiler is None:
            return False
        if step != self._last:
            self._profiler.step()
            return False
        same_verdict(self._profiler.step)
        self.__exit__(None)
        return True

    def _write(self, recorded: profile) -> None:
        assert self._window is not None
        with tempfile.TemporaryDirectory(prefix="hotrec-trace-") as folder:
            raw = Path(folder) / "raw.json"
            recorded.export_chrome_trace(str(raw))
            document = json.loads(raw.read_text())
        add_lanes(document, f"rank {self._ranks.rank} of {self._ranks.world_size}")
        path = self._window.directory / f"rank{self._ranks.rank}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Readers must never find a partial file.
        partial = path.with_name(f".{path.name}.tmp")
        with gzip.open(partial, "wt", encoding="utf-8") as file:
            json.dump(document, file)
        partial.replace(path)
        logger.info("[rank %d] trace: %s", self._ranks.rank, path)


def add_lanes(document: dict[str, Any], process: str) -> None:
    """Add a lane of stages and the names of process and Python threads to a Chrome trace."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    names |= {threading.main_thread().native_id: "main thread", STAGE_LANE: "stages"}
    kept, boundaries = [], []
    for event in document["traceEvents"]:
        name = event.get("name", "")
        if name.startswith(STAGE_END):
            boundaries.append((event["ts"], name.removeprefix(STAGE_END)))
        elif name != "thread_name" or event["tid"] not in names:
            kept.append(event)
        if name.startswith(STEP_PREFIX) and event["ph"] == "X":
            boundaries.append((event["ts"], None))
    own = {"pid": os.getpid(), "tid": STAGE_LANE}
    kept.append({**own, "ph": "M", "name": "process_name", "args": {"name": process}})
    kept.append({**own, "ph": "M", "name": "thread_sort_index", "args": {"sort_index": -1}})
    kept += [
        {**own, "ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}
        for tid, name in names.items()
    ]
    boundaries.sort(key=lambda boundary: boundary[0])
    # A stage lasts from the mark before it, or from the start of its step, to its own mark.
    kept += [
        {**own, "ph": "X", "cat": STAGE, "name": stage, "ts": start_us, "dur": end_us - start_us}
        for (start_us, _), (end_us, stage) in pairwise(boundaries)
        if stage is not None
    ]
    document["traceEvents"] = kept
