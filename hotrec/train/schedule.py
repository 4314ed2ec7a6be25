"""The order of updates and their learning rates: pure functions of the step.

A step is numbered by the update it makes, from 1; "after step s" means that s updates are done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from hotrec.config.groups import Decay


@dataclass(frozen=True)
class Segment:
    """Steps ``first_step`` to ``last_step``, both included, run without draining the pipeline.

    Args:
        first_step: Its first step.
        last_step: Its last step.
        is_last: Whether it ends the run.
    """

    first_step: int
    last_step: int
    is_last: bool

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1


def next_segment(
    start_step: int, num_steps: int, every: Collection[int] = (), ends: Collection[int] = ()
) -> Segment:
    """The segment after ``start_step`` of a run of ``num_steps``.

    The pipeline prefetches batches, so weights and loader position only agree at the end of a
    segment.

    Args:
        start_step: The steps made so far.
        num_steps: The steps of the run.
        every: A segment ends with each multiple of these numbers of steps.
        ends: A segment also ends with each of these steps.
    """
    lasts = [num_steps, *(end for end in ends if end > start_step)]
    lasts += [start_step - start_step % number + number for number in every]
    last_step = min(lasts)
    return Segment(start_step + 1, last_step, is_last=last_step == num_steps)


def count_steps(steps_per_epoch: int, *, epochs: int, max_steps: int | None = None) -> int:
    """Updates of a run: complete epochs, at most ``max_steps``.

    Raises:
        ValueError: if nothing would be trained.
    """
    num_steps = steps_per_epoch * epochs
    if max_steps is not None:
        num_steps = min(num_steps, max_steps)
    if num_steps < 1:
        raise ValueError(
            f"trainer: expected at least 1 step, got {steps_per_epoch} steps per epoch, "
            f"epochs={epochs} and max_steps={max_steps}. Use more data or more epochs."
        )
    return num_steps


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, a plateau, then a decay, as a factor on each part's own learning rate.

    Before ``warmup_steps`` the factor of step s is s / warmup_steps. With
    p = (step - decay_start_step) / num_decay_steps, clipped to 0..1, the decays are
    constant: 1; linear: 1-p; cosine: (1 + cos(pi p))/2; polynomial: (1-p)^2, as of MLPerf's DLRM.

    Args:
        decay: Shape of the decay.
        warmup_steps: Steps of the warm-up.
        decay_start_step: Last step at the full rate, not before the warm-up ends.
        num_decay_steps: Steps of the decay, at least 1 unless it is constant.
    """

    decay: Decay = Decay.constant
    warmup_steps: int = 0
    decay_start_step: int = 0
    num_decay_steps: int = 0

    def __call__(self, step: int) -> float:
        """The factor of update ``step``, counted from 1."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.decay is Decay.constant or step <= self.decay_start_step:
            return 1.0
        progress = min((step - self.decay_start_step) / self.num_decay_steps, 1.0)
        if self.decay is Decay.linear:
            return 1.0 - progress
        if self.decay is Decay.cosine:
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        return (1.0 - progress) ** 2


def set_learning_rates(
    optimizer: torch.optim.Optimizer, lr_factor: Callable[[int], float], step: int
) -> float:
    """Set the learning rate of every part for update ``step``; returns the first part's.

    Call before the pipeline's update: TorchRec's fused optimizer passes the value to the kernel in
    ``zero_grad``, before forward. Each group's own rate is kept in ``initial_lr``, as in torch's
    schedulers.
    """
    factor = lr_factor(step)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])
