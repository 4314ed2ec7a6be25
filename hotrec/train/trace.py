"""Traces of a few training steps by torch.profiler, one Chrome trace file per rank.

A mark of ``hotrec.runtime.stages`` names a stage when it ends, too late for a ``record_function``
around it, so marks are empty ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from hotrec.runtime.ranks import Ranks, same_verdict
from hotrec.runtime.stages import StageClock, named_range

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceWindow:
    """Which steps to record, and where the files go.

    Args:
        first_step: The first recorded step, counted from 1 at this start; at least 2, since the
            profiler warms up in the step before it.
        directory: Receives ``rank0.json.gz`` and so on; each host makes its own.
        num_steps: The number of consecutive steps to record.
    """

    first_step: int
    directory: Path
    num_steps: int = 5


class Tracer:
    """Records the steps of a window, if there is one; the files are written after the last.

    Raises:
        ValueError: if a new run is too short for the window (a resumed run only warns).
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
        first = start_step + window.first_step
        last = first + window.num_steps - 1
        if last > num_steps:
            text = (
                f"trainer.trace_step: expected steps {first} to {last} to be among those of this "
                f"start, got {start_step + 1} to {num_steps}."
            )
            if start_step == 0:
                raise ValueError(f"{text} Lower trainer.trace_step, or train more steps.")
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
            if self._first <= step <= self._last:
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
        path = self._window.directory / f"rank{self._ranks.rank}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Readers must never find a partial file.
        partial = path.with_name(f".{path.name}")
        recorded.export_chrome_trace(str(partial))
        partial.replace(path)
        logger.info("[rank %d] trace: %s", self._ranks.rank, path)
