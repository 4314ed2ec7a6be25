"""Where the time of a step goes: a step is the main thread's timeline.

``mark(stage)`` assigns the time since the last mark to a stage of ``hotrec.types.STAGES``. On CUDA
a mark is an event on the step's own stream, so the device's timeline is measured. Other threads and
streams have no stages: the clock shows where the step waits for them. In a trace they are shown by
``named_range``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.autograd import profiler

from hotrec.runtime.watchdog import passed
from hotrec.types import STAGES

# The stages in which a step only waits for other ranks.
EXPOSED_STAGES = ("ids_exchange", "rows_exchange", "grads_exchange", "hot_exchange")
# Prefix of the names of ``named_range`` in the profiler's events.
RANGE_PREFIX = "hotrec::"

_clock: StageClock | None = None
_NO_RANGE: AbstractContextManager[Any] = nullcontext()


def exposed_s(stage_s: Mapping[str, Any]) -> Any:
    """Exposed communication: the time that a step waits for other ranks, the sum of EXPOSED_STAGES.

    Takes and returns seconds of one step, or arrays over steps.
    """
    return sum(stage_s[stage] for stage in EXPOSED_STAGES)


def named_range(name: str) -> AbstractContextManager[Any]:
    """Name the block in a trace, on any thread.

    Costs a quarter of a microsecond without a profiler, and record_function's 10 with one.
    """
    if profiler._is_profiler_enabled:  # of the process, not of the thread
        return profiler.record_function(RANGE_PREFIX + name)
    return _NO_RANGE


def mark(stage: str) -> None:
    """Assign the time since the last mark to ``stage``; no-op if no clock runs."""
    passed(stage)
    if _clock is not None:
        _clock.mark(stage)


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stage: str, num_tensors: int, *inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.stage, ctx.num_points = stage, len(inputs) - num_tensors
        ctx.set_materialize_grads(False)
        tensors: Any = inputs[:num_tensors]
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        mark(ctx.stage)
        return None, None, *grads, *(None,) * ctx.num_points


@lru_cache
def _leaf(device: torch.device) -> torch.Tensor:
    """Gives points a gradient function; gets no gradient itself."""
    return torch.zeros((), device=device, requires_grad=True)


def backward_point(stage: str, like: torch.Tensor) -> torch.Tensor | None:
    """A point in forward, for ``mark_backward`` of something computed after it; None without clock.

    Autograd starts from the last computed tensor. When backward has finished everything that was
    computed after this point, the time since the last mark is assigned to ``stage``. ``like`` is a
    tensor on the device of that backward.
    """
    if _clock is None or not torch.is_grad_enabled():
        return None
    point = _leaf(like.device).view(())
    assert point.grad_fn is not None
    # As everywhere in autograd, a node without a gradient is still executed.
    point.grad_fn.register_prehook(lambda _: mark(stage))
    return point


def mark_backward(tensor: torch.Tensor, stage: str, *points: torch.Tensor | None) -> torch.Tensor:
    """The same tensor; when backward reaches it, the time since the last mark goes to ``stage``.

    Backward reaches ``points``, from ``backward_point``, through this tensor.
    """
    if _clock is None or not tensor.requires_grad:
        return tensor
    if not points:
        tensor.register_hook(lambda _: mark(stage))
        return tensor
    return mark_backward_of([tensor], stage, *points)[0]


def mark_backward_of(
    tensors: Sequence[torch.Tensor], stage: str, *points: torch.Tensor | None
) -> list[torch.Tensor]:
    """``mark_backward`` of several tensors: backward reaches them together."""
    if _clock is None or not any(tensor.requires_grad for tensor in tensors):
        return list(tensors)
    return list(_Boundary.apply(stage, len(tensors), *tensors, *points))


class StageClock:
    """Adds up the marks of each step on a device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._stream: Any = None
        # The marks of the running step and of those before; the first is the step's start.
        self._marks: list[tuple[str, Any]] = []
        self._steps: list[list[tuple[str, Any]]] = []

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def mark(self, stage: str) -> None:
        self._marks.append((stage, self._now()))
        with named_range(f"end of {stage}"):
            pass

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the step in the block; the time since its last mark is the optimizer's."""
        global _clock
        if self._is_cuda:
            self._stream = torch.cuda.current_stream()
        outer, _clock = _clock, self
        self._marks = [("start", self._now())]
        try:
            yield
            self.mark("optimizer")
            self._steps.append(self._marks)
        finally:
            _clock = outer
            self._marks = []

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def seconds(self) -> dict[str, np.ndarray]:
        """Float64 (steps,) by stage, in the order of STAGES; waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize()
        totals = np.zeros((len(self._steps), len(STAGES)))
        for total_s, marks in zip(totals, self._steps, strict=True):
            for (_, last), (stage, at) in pairwise(marks):
                passed_s = last.elapsed_time(at) / 1000 if self._is_cuda else at - last
                total_s[STAGES.index(stage)] += passed_s
        return dict(zip(STAGES, totals.T, strict=True))

    def medians(self) -> dict[str, float]:
        """Median seconds by stage over the steps so far; empty without steps."""
        return {stage: float(np.median(s)) for stage, s in self.seconds().items() if s.size}

    def clear(self) -> None:
        """Clear the steps so far."""
        self._steps = []
