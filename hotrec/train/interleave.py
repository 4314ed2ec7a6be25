"""Interleaved blocks: models alternate, so that disturbances of the machine affect all of them.

A block is consecutive steps of one model with nothing in flight before and after them. If models
alternated step by step, work that a pipeline leaves in flight when it returns from a step would run
in another model's time. The first steps of a block refill the overlap and are not counted.

A trial of plans, a benchmark and the whole steps of a calibration consist of such blocks. They
choose the contenders of a round, the length of blocks, and when to stop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from hotrec.runtime.stages import StageClock

T = TypeVar("T")


class Contender(Protocol):
    """A model on this rank whose training is interleaved with that of others."""

    def step(self) -> None:
        """One training step."""

    def drain(self) -> None:
        """Wait until no rank has work of this model in flight; collective."""


@dataclass(frozen=True)
class Block:
    """Consecutive steps on one rank; times are seconds since the block's start.

    Args:
        returned_s: When the pipeline returned from each step.
        ended_s: When no rank had anything in flight any more.
        num_skipped: Number of first steps that are not counted.
        cpu_s: CPU time of all threads of this process.
        main_cpu_s: CPU time of the main thread.
    """

    returned_s: Sequence[float]
    ended_s: float
    num_skipped: int
    cpu_s: float
    main_cpu_s: float

    @property
    def mean_step_s(self) -> float:
        """Mean seconds of a counted step on this rank."""
        start_s = self.returned_s[self.num_skipped - 1] if self.num_skipped else 0.0
        return (self.returned_s[-1] - start_s) / (len(self.returned_s) - self.num_skipped)


def in_turn(contenders: Sequence[T], round_number: int) -> list[T]:
    """The contenders in the order of a round; each comes first equally often."""
    shift = round_number % len(contenders)
    return [*contenders[shift:], *contenders[:shift]]


def run_block(
    contender: Contender,
    num_steps: int,
    num_skipped: int,
    device: torch.device,
    *,
    clock: StageClock | None = None,
    drains: bool = True,
) -> Block:
    """Time consecutive steps of one contender; collective.

    Args:
        contender: The model to train; exact times need that no other has work in flight.
        num_steps: Number of steps, including those that are not counted.
        num_skipped: Number of first steps that are not counted.
        device: Device of this rank.
        clock: Adds up the stages of the counted steps.
        drains: Whether the block ends with nothing in flight. Otherwise the contender's pipeline
            stays filled, and its next block continues from there.
    """
    is_cuda = device.type == "cuda"

    def now() -> Any:
        # On CUDA an event, since synchronizing in each step would end the overlap.
        if not is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    cpu_s, main_cpu_s, start = time.process_time(), time.thread_time(), now()
    times = []
    for number in range(num_steps):
        with nullcontext() if clock is None or number < num_skipped else clock.step():
            contender.step()
        times.append(now())
    if drains:
        contender.drain()
    times.append(now())
    cpu_s, main_cpu_s = time.process_time() - cpu_s, time.thread_time() - main_cpu_s
    if is_cuda:
        torch.cuda.synchronize()
    *returned_s, ended_s = (start.elapsed_time(t) / 1e3 if is_cuda else t - start for t in times)
    return Block(returned_s, ended_s, num_skipped, cpu_s, main_cpu_s)


def step_seconds(of_ranks: Sequence[Block]) -> np.ndarray:
    """Seconds of each counted step, float64 (counted steps,); all ranks must start together.

    A step lasts from the last rank's return from the previous step to the last rank's return from
    this one, so the steps add up to the block. The slowest rank's time of each step would not,
    because ranks do not wait for each other between steps.
    """
    returned = np.max([block.returned_s for block in of_ranks], axis=0)
    return np.diff(returned, prepend=0.0)[of_ranks[0].num_skipped :]
