"""What the ranks tell one another every few steps, and the traffic of sampled steps.

One small all-reduce carries everything: the losses since the last one, whether a rank has been
asked to stop, the time it waited for data, what its device caches did, and its traffic sums. It is
the only exchange beside the model's own, and with the reading of the caches' counters, where there
are caches, the only wait for the device; its outcome is the same on every rank.
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

# Exit code of a run that SIGTERM ended, as a shell would report it. The checkpoint is whole.
STOPPED_EXIT_CODE = 128 + signal.SIGTERM

# Counting slows a step down several times over; its bytes hardly vary from step to step.
SAMPLE_EVERY_STEPS = 500


@dataclass(frozen=True)
class TrafficMeans:
    """Means over the sampled steps and over the ranks; bytes are per step and rank."""

    sent_bytes: dict[str, int]
    bound_bytes: int | None
    hot_lookup_frac: float | None

    @property
    def total_bytes(self) -> int:
        return sum(self.sent_bytes.values())


class TrafficMeter:
    """Counts sent bytes in a few steps, and what their batches read.

    Args:
        world_size: W.
        num_dense_values: trained parameters of the dense layers.
        inspect_batch: distinct rows and lookups of a batch; without it there is no bound.
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

        The first steps fill the pipeline and the last one drains it, so one in between stands for
        all. In a run of segments too short for that, a whole segment does.
        """
        if num_steps >= 4:
            return index % SAMPLE_EVERY_STEPS == 2 and index < num_steps - 1
        return self._sums["steps"] <= index

    @contextmanager
    def counting(self, batches: SegmentBatches) -> Iterator[None]:
        """Count the step made inside the block, and what the batch that it took reads."""
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
        """Means from the ranks' added ``sums()``; None before the first sampled step."""
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
    """Whether SIGTERM came."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True


@contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """Take SIGTERM as a request to stop at the next occasion, inside the block."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may set handlers; the caller's stays
        return
    previous = signal.signal(signal.SIGTERM, request.set)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def sigterm_held_back() -> Iterator[None]:
    """Start processes in the block that SIGTERM does not reach.

    torchrun sends SIGTERM to the whole process group, so loader workers would die of it while
    their rank still needs batches. They inherit the signal mask; they end with their rank. What
    comes for this process meanwhile is delivered at the end of the block.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@dataclass(frozen=True)
class Checkup:
    """The outcome of one exchange, the same on every rank.

    Args:
        loss: mean over the ranks in the last step, which is the mean loss of the global batch.
        must_stop: whether any rank was asked to stop.
        wait_s: time waited for data since the last checkup, mean over the ranks.
        stage_s: mean over the ranks of what they told; NaN if one of them told so.
        cache: what the device caches did since the last checkup, added up over the ranks.
        traffic: means so far.
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
    """Exchange what there is to tell; a collective, to be called on every rank in the same step.

    Args:
        losses: this rank's loss () of each step since the last checkup, by step.
        stage_s: this rank's seconds by stage, or none; as many on every rank.
        cache: what this rank's device caches did, or nothing; the same names on every rank.

    Raises:
        RuntimeError: on every rank, if the loss of a step is not finite.
    """
    figures = [float(must_stop), wait_s, *stage_s, *cache.values(), *traffic.sums()]
    told = torch.tensor(figures, dtype=torch.float64)
    own = torch.stack([loss.double().reshape(()) for loss in losses.values()])
    values = torch.cat([own, told.to(own.device)])
    if ranks.world_size > 1:
        dist.all_reduce(values)
    added = values.tolist()
    mean_losses = [loss / ranks.world_size for loss in added[: len(losses)]]
    for step, loss in zip(losses, mean_losses, strict=True):
        if not math.isfinite(loss):
            raise RuntimeError(
                f"step {step}: expected a finite loss, got {loss}. Lower the learning rate, "
                "lengthen the warm-up, or look for extreme dense values in the data."
            )
    num_stops, sum_wait_s, *sums = added[len(losses) :]
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
