"""Which updates come when, and with which learning rate: pure functions of the step.

A step is numbered by the update it makes, from 1; "after step s" means that s updates are done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

from hotrec.config.groups import Decay, ScheduleConfig


@dataclass(frozen=True)
class Cadence:
    """How often things happen, in steps; 0 for never where that makes sense.

    Args:
        eval_every: evaluations on the way; the end of the run evaluates in any case.
        save_every: checkpoints on the way; the last step saves in any case.
        save_every_s: seconds since the last checkpoint, by rank 0's clock, after which the next
            check-up ends the segment and one is saved.
        log_every: lines of metrics.jsonl.
        check_every: looks at losses, signals and the clock, one small all-reduce each.
        check_replicas_every: comparisons of the replicas of all ranks, where there are any.
        adapt_every: decisions of which rows are hot.
        warmup_steps: steps at the start of the process that are in no rate.
    """

    eval_every: int = 0
    save_every: int = 0
    save_every_s: float = 0.0
    log_every: int = 100
    check_every: int = 10
    check_replicas_every: int = 1000
    adapt_every: int = 0
    warmup_steps: int = 10

    def is_replica_check(self, step: int, num_steps: int) -> bool:
        """Whether replicas are compared after ``step``: every so often, and after the last."""
        every = self.check_replicas_every
        return every > 0 and (step % every == 0 or step == num_steps)


@dataclass(frozen=True)
class Segment:
    """Steps ``first_step`` to ``last_step``, both included, run without draining the pipeline.

    Args:
        evaluate: whether to evaluate after the last step.
        save: whether to save a checkpoint after the last step.
        adapt: whether to decide anew which rows are hot after the last step.
    """

    first_step: int
    last_step: int
    evaluate: bool
    save: bool
    adapt: bool = False

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1


def segments(
    start_step: int, num_steps: int, cadence: Cadence, ends: Collection[int] = ()
) -> Iterator[Segment]:
    """Cut the updates ``start_step + 1 .. num_steps`` where the pipeline has to be drained.

    The pipeline holds batches ahead of the update, so weights and loader position agree only at
    the end of a segment. A segment also ends with each step of ``ends``. The last step saves in any
    case; it does not evaluate, since the end of the run does.
    """
    eval_every, save_every = cadence.eval_every, cadence.save_every
    adapt_every = cadence.adapt_every
    cuts = [every for every in (eval_every, save_every, adapt_every) if every]
    step = start_step
    while step < num_steps:
        lasts = [num_steps, *(end for end in ends if end > step)]
        lasts += [step - step % every + every for every in cuts]
        last = min(lasts)
        is_final = last == num_steps
        yield Segment(
            first_step=step + 1,
            last_step=last,
            evaluate=not is_final and bool(eval_every and last % eval_every == 0),
            save=is_final or bool(save_every and last % save_every == 0),
            # After the last step too: a run that goes on from it has the hot rows of a longer one.
            adapt=bool(adapt_every and last % adapt_every == 0),
        )
        step = last


def count_steps(steps_per_epoch: int, *, epochs: int, max_steps: int | None = None) -> int:
    """Updates of a run: whole epochs, cut at ``max_steps`` where that is less.

    Raises:
        ValueError: if nothing would be trained.
    """
    num_steps = steps_per_epoch * epochs
    if max_steps is not None:
        num_steps = min(num_steps, max_steps)
    if num_steps < 1:
        raise ValueError(
            f"trainer: expected at least 1 step, got {steps_per_epoch} steps per epoch, "
            f"epochs={epochs} and max_steps={max_steps}. Give more data or more epochs."
        )
    return num_steps


@dataclass
class Schedule(ScheduleConfig):
    """Linear warm-up, a plateau, then a decay, as a factor on each part's own learning rate.

    Before ``warmup_steps`` the factor of step s is s / warmup_steps. With f the ``end_factor`` and
    p = (step - decay_start_step) / num_decay_steps, clipped to 0..1, the decays are
    constant: 1; linear: f + (1-f)(1-p); cosine: f + (1-f)(1 + cos(pi p))/2; polynomial:
    f + (1-f)(1-p)^power. MLPerf's DLRM is polynomial with power 2 and f = 0.

    Args:
        num_steps: Steps of the run, which the decay takes where ``num_decay_steps`` is 0.

    Raises:
        ValueError: if warm-up or decay do not fit the run.
    """

    num_steps: int | None = None

    def __post_init__(self) -> None:
        num_steps = self.num_steps
        of_run = () if num_steps is None else self.rules_in(num_steps)
        for holds, message in (*self.rules(), *of_run):
            if not holds:
                raise ValueError(f"optimizer.schedule.{message}")
        self.decay_start_step = self.first_decay_step
        if num_steps is not None and self.num_decay_steps == 0:
            self.num_decay_steps = num_steps - self.decay_start_step
        if self.decay is not Decay.constant and self.num_decay_steps < 1:
            raise ValueError(
                f"optimizer.schedule.num_decay_steps: expected 1 or more for {self.decay.name} "
                f"decay, got {self.num_decay_steps}. Give them, or the number of steps of the run."
            )

    def __call__(self, step: int) -> float:
        """The factor of update ``step``, counted from 1."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.decay is Decay.constant or step <= self.decay_start_step:
            return 1.0
        progress = min((step - self.decay_start_step) / self.num_decay_steps, 1.0)
        if self.decay is Decay.linear:
            shape = 1.0 - progress
        elif self.decay is Decay.cosine:
            shape = 0.5 * (1.0 + math.cos(math.pi * progress))
        else:
            shape = (1.0 - progress) ** self.power
        return self.end_factor + (1.0 - self.end_factor) * shape


def set_learning_rates(
    optimizer: torch.optim.Optimizer, lr_factor: Callable[[int], float], step: int
) -> float:
    """Give every part of the optimizer the learning rate of update ``step``; the first is returned.

    To be called before the pipeline makes the update: TorchRec's fused optimizer hands the value to
    the kernel in ``zero_grad``, before forward. Each group's own rate is kept in ``initial_lr``, as
    torch's schedulers do.
    """
    factor = lr_factor(step)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])
