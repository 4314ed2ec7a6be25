"""Traces: which steps are recorded, and a real trace of this process."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.autograd import profiler

from hotrec.runtime.ranks import Ranks
from hotrec.runtime.stages import mark, named_range
from hotrec.train.trace import Tracer, TraceWindow
from tests.helpers.traces import read_events


def test_the_window_counts_from_this_start(tmp_path: Path, one_rank: Ranks) -> None:
    tracer = Tracer(TraceWindow(3, tmp_path, 2), one_rank, start_step=100, num_steps=104)
    # The profiler warms up in the step before the first recorded one.
    assert [step for step in range(90, 120) if tracer.is_slowed(step)] == [102, 103, 104]
    nothing = Tracer(None, one_rank, start_step=0, num_steps=9)
    assert not any(nothing.is_slowed(step) or nothing.end_step(step) for step in range(12))


def test_a_run_too_short_for_its_window(
    tmp_path: Path, one_rank: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    window = TraceWindow(3, tmp_path, 2)
    with pytest.raises(ValueError, match=r"^trainer\.trace_step"):
        Tracer(window, one_rank, start_step=0, num_steps=3)
    with caplog.at_level(logging.WARNING):
        tracer = Tracer(window, one_rank, start_step=100, num_steps=103)
    assert not any(tracer.is_slowed(step) for step in range(90, 120))
    assert caplog.messages


def train_step(tracer: Tracer, step: int, thread: ThreadPoolExecutor) -> bool:
    def exchange() -> None:
        with named_range("late gradients"):
            torch.ones(3).sum()

    with tracer.step(step):
        mark("other")
        with named_range("forward"):
            torch.ones(3, requires_grad=True).sum().backward()
        mark("dense")
        thread.submit(exchange).result()
        mark("rows_exchange")
    return tracer.end_step(step)


def test_a_trace_of_this_process(tmp_path: Path, one_rank: Ranks) -> None:
    window = TraceWindow(2, tmp_path / "traces", 2)
    with ThreadPoolExecutor(1, "hotrec communication") as thread:
        thread.submit(int).result()  # the thread is older than the profiler, as a pipeline's is
        with Tracer(window, one_rank, start_step=0, num_steps=5) as tracer:
            written = [step for step in range(1, 6) if train_step(tracer, step, thread)]
    assert written == [3]
    assert not profiler._is_profiler_enabled
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "rank0.json.gz"
    events = read_events(path)
    assert events["step"] == ["step 2", "step 3"]
    assert events["stage"] == ["other", "dense", "rows_exchange", "optimizer"] * 2
    # Also of the other thread.
    assert events["range"] == ["forward", "late gradients"] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_stops_early_leaves_its_steps_but_not_if_it_failed(
    fails: bool, tmp_path: Path, one_rank: Ranks
) -> None:
    window = TraceWindow(2, tmp_path / "traces", 3)
    with (
        suppress(KeyError),
        ThreadPoolExecutor(1) as thread,
        Tracer(window, one_rank, start_step=0, num_steps=5) as tracer,
    ):
        assert not any(train_step(tracer, step, thread) for step in (1, 2, 3))
        if fails:
            raise KeyError("step 4")
    assert not profiler._is_profiler_enabled
    assert window.directory.exists() is not fails
    if not fails:
        events = read_events(window.directory / "rank0.json.gz")
        assert events["step"] == ["step 2", "step 3"]
