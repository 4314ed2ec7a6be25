"""Blocks of consecutive steps: what a rank notes of one, and what a step of it took.

A pipeline may leave communication under way when it returns from a step, so steps of two cases
cannot take turns one by one: the one's traffic would run in the other's time, or be waited for in a
barrier that no clock sees. A block begins when nothing is under way, and its end is noted when
nothing is.
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
    """What one rank noted of a block; seconds since the barrier that it began with.

    Args:
        returned_s: when the pipeline returned from each step.
        ended_s: when nothing of the block was under way any more on any rank.
        num_skipped: first steps that are in no figure of single steps: they refill the overlap.
        cpu_s: processor time of this process in the block, of all its threads.
        main_cpu_s: of it, the main thread's.
    """

    returned_s: Sequence[float]
    ended_s: float
    num_skipped: int
    cpu_s: float
    main_cpu_s: float

    def own_step_s(self) -> np.ndarray:
        """Float64 (counted steps,): from return to return on this rank."""
        return np.diff(self.returned_s, prepend=0.0)[self.num_skipped :]


def step_seconds(of_ranks: Sequence[Block]) -> np.ndarray:
    """What each counted step took, float64 (counted steps,).

    From when the last rank returned from the step before to when the last rank returned from this
    one. So the steps add up to the time of the block: nothing is counted twice, as it would be by
    taking the slowest rank's time of each step, where ranks do not wait for each other in between.
    """
    returned = np.max([block.returned_s for block in of_ranks], axis=0)
    return np.diff(returned, prepend=0.0)[of_ranks[0].num_skipped :]


def whole_step_seconds(of_ranks: Sequence[Block]) -> float:
    """All of the block over its steps: first steps, last traffic and all."""
    return max(block.ended_s for block in of_ranks) / len(of_ranks[0].returned_s)


def cpu_seconds(blocks: Sequence[Block]) -> tuple[float, float]:
    """Processor time of a step, of all threads and of the main one, mean over the blocks.

    Of whole blocks, not of single steps: what a thread does for a step may come after it.
    """
    num_steps = sum(len(block.returned_s) for block in blocks)
    return (
        sum(block.cpu_s for block in blocks) / num_steps,
        sum(block.main_cpu_s for block in blocks) / num_steps,
    )


class Stopwatch:
    """Times since it was made: of the host, or on CUDA of the current stream.

    On CUDA the host runs ahead of the device, and to wait for the device in each step would end
    the overlap that is to be measured; so the times are those of events.
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
        """Note the time."""
        self._times.append(self._now())

    def cpu_seconds(self) -> tuple[float, float]:
        """Processor time since the start: of the process, and of the calling thread."""
        process_s, thread_s = self._cpu_start_s
        return time.process_time() - process_s, time.thread_time() - thread_s

    def seconds(self) -> list[float]:
        """Of every lap since the start; waits for the device."""
        if not self._is_cuda:
            return [at - self._start for at in self._times]
        torch.cuda.synchronize()
        return [self._start.elapsed_time(at) / 1000 for at in self._times]
