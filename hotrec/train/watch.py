"""The check-up of all ranks every few steps: requests to stop or to save, and metrics.

A check-up is one small all-reduce of losses, requests, and what is counted. Beside the model's own
exchanges it is the only one, and beside reading the counters of caches the only wait for the
device. Its result is the same on every rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hotrec.runtime.figures import of_sum
from hotrec.runtime.ranks import Ranks, finish_others
from hotrec.train.metrics import Metrics
from hotrec.train.segment import SegmentBatches
from hotrec.train.signals import StopRequest


class Watch:
    """Finds out every few steps, with the other ranks, whether to stop or to save.

    Args:
        ranks: The process group.
        stop_request: Whether this rank got a signal to stop.
        every_steps: How often to check up.
        save_every_s: Seconds since the last checkpoint, by rank 0's clock, after which the next
            check-up asks for one; 0 for never.
    """

    def __init__(
        self, ranks: Ranks, stop_request: StopRequest, *, every_steps: int, save_every_s: float
    ) -> None:
        self._ranks, self._stop_request = ranks, stop_request
        self._every_steps, self._save_every_s = every_steps, save_every_s
        self.must_stop = False  # the last check-up found a stop request on some rank
        self.must_save = False  # or that the last checkpoint is old
        self.is_saving = False  # or a rank that still writes its share of a checkpoint
        self.restart_save_clock()

    def restart_save_clock(self) -> None:
        """Count the seconds to the next checkpoint from now."""
        self._saved_s = time.perf_counter()

    def is_due(self, step: int, batches: SegmentBatches, metrics: Metrics) -> bool:
        """Whether to check up after ``step``: at a segment's end, for a line, every few steps."""
        is_last = step == batches.first_step + batches.num_steps - 1
        return is_last or step % self._every_steps == 0 or metrics.is_line_due(step)

    def check(self, step: int, metrics: Metrics, *, is_saving: bool = False) -> None:
        """Check up with the other ranks, and record a line of metrics if one is due.

        Raises:
            RuntimeError: On every rank, if a loss since the last check-up is not finite.
        """
        is_late = 0 < self._save_every_s <= time.perf_counter() - self._saved_s
        own = {
            "must_stop": self._stop_request.is_set,
            "must_save": self._ranks.is_first and is_late and not is_saving,
            "is_saving": is_saving,
            **metrics.counts(step),
        }
        loss, sums = check_up(metrics.losses, own, self._ranks.world_size)
        self.must_stop = sums["must_stop"] > 0
        self.must_save = sums["must_save"] > 0
        self.is_saving = sums["is_saving"] > 0
        metrics.add_counts(step, loss, sums)


def check_up(
    losses: Mapping[int, torch.Tensor], counts: Mapping[str, Any], world_size: int
) -> tuple[float, dict[str, Any]]:
    """Sum what all ranks have counted; a collective.

    Args:
        losses: This rank's loss () of each step since the last check-up, by step.
        counts: This rank's counts by name, or mappings of such; the same names on every rank.
        world_size: World size.

    Returns:
        The global batch's mean loss in the last step, and the sums in place of the counts.

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
                "lengthen the warm-up, or look for extreme dense values in the data."
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
