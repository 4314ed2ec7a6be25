"""The check-up of all ranks every few steps: requests to stop or to save, and metrics.

A check-up is one small all-reduce of losses, requests, and counts. It is the only collective
besides the model's exchanges, and the only device synchronization besides reading the counters of
caches. Its result is the same on every rank.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hotrec.runtime import watchdog
from hotrec.runtime.figures import of_sum
from hotrec.runtime.ranks import Ranks, finish_others
from hotrec.train.metrics import Metrics
from hotrec.train.saver import Saver
from hotrec.train.segment import SegmentBatches
from hotrec.train.signals import StopRequest, stop_on_signals


class Watch:
    """Decides with the other ranks whether to stop or to save, and checks replicas.

    Args:
        ranks: The process group.
        metrics: The counts that are summed over the ranks at a check-up.
        saver: The checkpoints, which may be overdue or being written.
        every_steps: Steps between check-ups.
        check_replicas: Raises on every rank if replicated rows differ between ranks.
        check_replicas_every: Steps between these checks; also after the last step. 0 for never.
    """

    def __init__(
        self,
        ranks: Ranks,
        metrics: Metrics,
        saver: Saver,
        *,
        every_steps: int = 10,
        check_replicas: Callable[[], None] | None = None,
        check_replicas_every: int = 1000,
    ) -> None:
        self._ranks, self._metrics, self._saver = ranks, metrics, saver
        self._every_steps = every_steps
        self._check_replicas, self._replicas_every = check_replicas, check_replicas_every
        self.stop_request = StopRequest()
        self.must_stop = False  # the last check-up found a stop request on some rank
        self.must_save = False  # or that the last checkpoint is old

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record signals to stop inside the block."""
        with stop_on_signals() as self.stop_request:
            try:
                yield
            finally:
                gc.unfreeze()

    def enter(self, step: int) -> None:
        """Report the start of a step to the watchdog."""
        # The first step compiles and allocates, which may take long on one rank.
        stage = watchdog.FIRST_STEP if step == self._metrics.start_step + 1 else watchdog.STEP
        watchdog.enter(watchdog.MAIN, stage, step)

    def look(self, step: int, batches: SegmentBatches, num_steps: int) -> None:
        """Check replicas and check up after ``step``, if due; no more batches before a stop.

        Raises:
            RuntimeError: On every rank, if replicas differ, or a loss is not finite.
        """
        if step == self._metrics.start_step + 1:
            # These are the model, the optimizer and the libraries: half a million objects that a
            # collection would visit on one rank while others wait.
            gc.collect()
            gc.freeze()
        every = self._replicas_every
        if self._check_replicas and every > 0 and (step % every == 0 or step == num_steps):
            self._check_replicas()
        is_last = step == batches.first_step + batches.num_steps - 1
        if is_last or step % self._every_steps == 0 or self._metrics.is_line_due(step):
            watchdog.enter(watchdog.MAIN, watchdog.CHECK_UP, step)
            self._check_up(step)
            if self.must_stop or (self.must_save and self._saver.saves):
                batches.cut()  # the pipeline still computes its batches in flight

    def _check_up(self, step: int) -> None:
        """Check up with the other ranks, and record a line of metrics if one is due."""
        metrics, saver = self._metrics, self._saver
        own = {
            "must_stop": self.stop_request.is_set,
            "must_save": self._ranks.is_first and saver.is_late,
            **metrics.counts(step),
        }
        loss, sums = check_up(metrics.losses, own, self._ranks.world_size)
        self.must_stop = sums["must_stop"] > 0
        self.must_save = sums["must_save"] > 0
        metrics.add_counts(step, loss, sums)


def check_up(
    losses: Mapping[int, torch.Tensor], counts: Mapping[str, Any], world_size: int
) -> tuple[float, dict[str, Any]]:
    """Sum the counts of all ranks; a collective.

    Args:
        losses: This rank's loss () of each step since the last check-up, by step.
        counts: This rank's counts by name, or mappings of such; the same names on every rank.
        world_size: World size.

    Returns:
        The global batch's mean loss in the last step, and the sums instead of the counts.

    Raises:
        RuntimeError: on every rank, if the loss of a step is not finite.
    """
    own_losses = torch.stack([loss.double().reshape(()) for loss in losses.values()])
    own = torch.tensor([*_leaves(counts)], dtype=torch.double)
    values = torch.cat([own_losses, own.to(own_losses.device)])
    if world_size > 1:
        finish_others()
        dist.all_reduce(values)
    totals = iter(values.tolist())
    for step, total in zip(losses, totals, strict=False):
        loss = of_sum("loss", total, world_size)
        if not math.isfinite(loss):
            raise RuntimeError(
                f"step {step}: expected a finite loss, got {loss}. Lower the learning rate, "
                "lengthen the warm-up, or check the data for extreme dense values."
            )
    return loss, _with_leaves(counts, totals)


def _leaves(counts: Mapping[str, Any]) -> Iterator[float]:
    for count in counts.values():
        yield from _leaves(count) if isinstance(count, Mapping) else (count,)


def _with_leaves(counts: Mapping[str, Any], leaves: Iterator[float]) -> dict[str, Any]:
    return {
        name: _with_leaves(count, leaves) if isinstance(count, Mapping) else next(leaves)
        for name, count in counts.items()
    }
