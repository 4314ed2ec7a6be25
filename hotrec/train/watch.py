"""The check-up of all ranks every few steps, stopping on SIGTERM, and sampled traffic.

A check-up is one small all-reduce of losses, stop requests, data waits, cache counters and traffic
sums. Beside the model's own exchanges it is the only one, and beside reading the counters of device
caches the only wait for the device. Its result is the same on every rank.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from hotrec.data.batch import Batch
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import COLLECTIVES, BatchFacts, count_sent_bytes, lower_bound_bytes
from hotrec.train.run_log import SegmentBatches

# The exit code of a run that stopped on SIGTERM after a complete checkpoint, as a shell reports it.
STOPPED_EXIT_CODE = 128 + signal.SIGTERM

# Counting makes a step several times slower, and the bytes of steps hardly vary.
SAMPLE_EVERY_STEPS = 500


@dataclass(frozen=True)
class TrafficMeans:
    """Means over the sampled steps and the ranks; bytes are per step and rank."""

    sent_bytes: dict[str, int]
    bound_bytes: int | None
    hot_lookup_frac: float | None

    @property
    def total_bytes(self) -> int:
        return sum(self.sent_bytes.values())


class TrafficMeter:
    """Counts the bytes sent in sampled steps, and the rows that their batches read.

    Args:
        world_size: World size.
        num_dense_values: The number of trained parameters in the dense layers.
        inspect_batch: Counts the distinct rows and lookups of a batch; None for no lower bound.
    """

    def __init__(
        self,
        world_size: int,
        num_dense_values: int,
        inspect_batch: Callable[[Batch], BatchFacts] | None,
    ) -> None:
        self._world_size = world_size
        self._num_dense_values = num_dense_values
        self._inspect_batch = inspect_batch
        self._sums = dict.fromkeys(("steps", "bound", "lookups", "hot_lookups", *COLLECTIVES), 0)

    def is_due(self, index: int, num_steps: int) -> bool:
        """Whether to count in step ``index`` (from 0) of a segment.

        A step in between is sampled, since the others fill or drain the pipeline. Where segments
        are too short for that, a whole segment is.
        """
        if num_steps >= 4:
            return index % SAMPLE_EVERY_STEPS == 2 and index < num_steps - 1
        return self._sums["steps"] <= index

    @contextmanager
    def counting(self, batches: SegmentBatches) -> Iterator[None]:
        """Count the bytes that the step inside the block sends and the rows its batch reads."""
        with count_sent_bytes() as traffic:
            yield
        self._sums["steps"] += 1
        for name, num_bytes in traffic.sent_bytes.items():
            self._sums[name] += num_bytes
        if self._inspect_batch is not None:
            assert batches.last_taken is not None, "the step took no batch"
            facts = self._inspect_batch(batches.last_taken)
            self._sums["lookups"] += facts.num_lookups
            self._sums["hot_lookups"] += facts.num_hot_lookups
            self._sums["bound"] += lower_bound_bytes(
                facts.num_distinct, self._world_size, num_dense_values=self._num_dense_values
            )

    def sums(self) -> list[float]:
        return [float(value) for value in self._sums.values()]

    def means(self, sums: list[float]) -> TrafficMeans | None:
        """The means, given ``sums()`` summed over ranks; None before the first sampled step."""
        total = dict(zip(self._sums, sums, strict=True))
        num_steps = total["steps"]  # over all ranks
        if num_steps == 0:
            return None
        is_inspected = self._inspect_batch is not None
        return TrafficMeans(
            sent_bytes={name: round(total[name] / num_steps) for name in COLLECTIVES},
            bound_bytes=round(total["bound"] / num_steps) if is_inspected else None,
            hot_lookup_frac=(total["hot_lookups"] / total["lookups"] if total["lookups"] else None),
        )


class StopRequest:
    """Whether SIGTERM has arrived."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True


@contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """Inside the block, record SIGTERM as a request to stop at the next check-up."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may set handlers
        return
    previous = signal.signal(signal.SIGTERM, request.set)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def sigterm_held_back() -> Iterator[None]:
    """Start processes in the block that ignore SIGTERM, since they inherit the signal mask.

    torchrun sends SIGTERM to the whole process group, and loader workers must outlive it while
    their rank still needs batches; they end with their rank. A SIGTERM to this process is delivered
    at the end of the block.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@dataclass(frozen=True)
class Checkup:
    """The result of a check-up, the same on every rank.

    Args:
        loss: The global batch's mean loss in the last step.
        must_stop: Whether any rank has a stop request.
        wait_s: Mean over the ranks of the time waited for data since the last check-up.
        stage_s: Mean over the ranks of their stage times; NaN where one of them is.
        cache: Counters of the device caches since the last check-up, summed over the ranks.
        traffic: The means so far; None before the first sampled step.
    """

    loss: float
    must_stop: bool
    wait_s: float
    stage_s: list[float]
    cache: dict[str, int]
    traffic: TrafficMeans | None


def check_up(
    losses: Mapping[int, torch.Tensor],
    *,
    must_stop: bool,
    wait_s: float,
    stage_s: Sequence[float],
    cache: Mapping[str, float],
    traffic: TrafficMeter,
    ranks: Ranks,
) -> Checkup:
    """Sum the figures of all ranks; a collective.

    Args:
        losses: This rank's loss () of each step since the last check-up, by step.
        must_stop: Whether this rank has a stop request.
        wait_s: The time that this rank waited for data since the last check-up.
        stage_s: This rank's seconds by stage, or none; the same number on every rank.
        cache: This rank's cache counters, or none; the same names on every rank.
        traffic: This rank's traffic counts.
        ranks: The process group.

    Raises:
        RuntimeError: on every rank, if the loss of a step is not finite.
    """
    figures = [float(must_stop), wait_s, *stage_s, *cache.values(), *traffic.sums()]
    own_losses = torch.stack([loss.double().reshape(()) for loss in losses.values()])
    others = torch.tensor(figures, dtype=torch.float64).to(own_losses.device)
    values = torch.cat([own_losses, others])
    if ranks.world_size > 1:
        dist.all_reduce(values)
    totals = values.tolist()
    mean_losses = [loss / ranks.world_size for loss in totals[: len(losses)]]
    for step, loss in zip(losses, mean_losses, strict=True):
        if not math.isfinite(loss):
            raise RuntimeError(
                f"step {step}: expected a finite loss, got {loss}. Lower the learning rate, "
                "lengthen the warm-up, or look for extreme dense values in the data."
            )
    num_stops, sum_wait_s, *sums = totals[len(losses) :]
    stage_sums, sums = sums[: len(stage_s)], sums[len(stage_s) :]
    cache_sums, traffic_sums = sums[: len(cache)], sums[len(cache) :]
    return Checkup(
        loss=mean_losses[-1],
        must_stop=num_stops > 0,
        wait_s=sum_wait_s / ranks.world_size,
        stage_s=[total / ranks.world_size for total in stage_sums],
        cache={name: round(total) for name, total in zip(cache, cache_sums, strict=True)},
        traffic=traffic.means(traffic_sums),
    )
