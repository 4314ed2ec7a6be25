"""Timed blocks of consecutive steps.

A pipeline may leave communication in flight when it returns from a step. If cases took turns step
by step, the traffic of one would run in the time of another, or in an untimed barrier. So a block
starts and ends with no communication in flight.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Block:
    """Times of a block on one rank, in seconds since the barrier at its start.

    Args:
        returned_s: Time at which the pipeline returned from each step.
        ended_s: Time at which no rank had communication in flight any more.
        num_skipped: Number of first steps, which refill the overlap and are not counted.
        cpu_s: CPU time of all threads of this process.
        main_cpu_s: CPU time of the main thread.
    """

    returned_s: Sequence[float]
    ended_s: float
    num_skipped: int
    cpu_s: float
    main_cpu_s: float

    def own_step_s(self) -> np.ndarray:
        """Seconds from return to return on this rank, float64 (counted steps,)."""
        return np.diff(self.returned_s, prepend=0.0)[self.num_skipped :]


def step_seconds(of_ranks: Sequence[Block]) -> np.ndarray:
    """Seconds of each counted step, float64 (counted steps,).

    A step lasts from the last rank's return from the previous step to the last rank's return from
    this one, so the steps add up to the block. The slowest rank's time of each step would not,
    because ranks do not wait for each other between steps.
    """
    returned = np.max([block.returned_s for block in of_ranks], axis=0)
    return np.diff(returned, prepend=0.0)[of_ranks[0].num_skipped :]


def whole_step_seconds(of_ranks: Sequence[Block]) -> float:
    """Time of the block divided by its steps, including first steps and last traffic."""
    return max(block.ended_s for block in of_ranks) / len(of_ranks[0].returned_s)


def cpu_seconds(blocks: Sequence[Block]) -> tuple[float, float]:
    """CPU time per step of all threads and of the main thread, mean over the blocks.

    Measured over whole blocks, because a thread may work for a step after it has returned.
    """
    num_steps = sum(len(block.returned_s) for block in blocks)
    return (
        sum(block.cpu_s for block in blocks) / num_steps,
        sum(block.main_cpu_s for block in blocks) / num_steps,
    )


class Stopwatch:
    """Times since its creation: of the host, or on CUDA of the current stream.

    On CUDA the times are those of events, since synchronizing in each step would end the overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._times: list[Any] = []
        self._cpu_start_s = (time.process_time(), time.thread_time())
        self._start = self._now()

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self) -> None:
        """Record the time."""
        self._times.append(self._now())

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time since the start: of the process, and of the calling thread."""
        process_s, thread_s = self._cpu_start_s
        return time.process_time() - process_s, time.thread_time() - thread_s

    def seconds(self) -> list[float]:
        """Seconds from the start to every lap; waits for the device."""
        if not self._is_cuda:
            return [at - self._start for at in self._times]
        torch.cuda.synchronize()
        return [self._start.elapsed_time(at) / 1000 for at in self._times]
