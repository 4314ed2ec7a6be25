"""The check-up of all ranks every few steps, stopping on a signal, and sampled traffic.

A check-up is one small all-reduce of losses, requests to stop or to save, data waits, counters of
caches and traffic sums. Beside the model's own exchanges it is the only one, and beside reading
those counters the only wait for the device. Its result is the same on every rank.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hotrec.data.batch import Batch
from hotrec.runtime.ranks import finish_others
from hotrec.runtime.traffic import COLLECTIVES, BatchFacts, count_sent_bytes, lower_bound_bytes
from hotrec.train.run_log import SegmentBatches

# The exit code of a run that stopped on SIGTERM after a complete checkpoint, as a shell reports it.
# After SIGINT it is 130.
STOPPED_EXIT_CODE = 128 + signal.SIGTERM

# Counting makes a step several times slower, and the bytes of steps hardly vary.
SAMPLE_EVERY_STEPS = 500
_STOPS = (signal.SIGTERM, signal.SIGINT)


class TrafficMeter:
    """Counts the bytes sent in sampled steps, and the rows that their batches read.

    ``inspect_batch`` counts the distinct rows and lookups of a batch; None for no lower bound.
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

    def means(self, sums: Sequence[float]) -> dict[str, Any]:
        """Means by step and rank, given ``sums()`` summed over ranks; None where not counted."""
        total = dict(zip(self._sums, sums, strict=True))
        num_steps, lookups = total["steps"], total["lookups"]  # over all ranks
        sent = {name: round(total[name] / num_steps) for name in COLLECTIVES} if num_steps else None
        has_bound = num_steps and self._inspect_batch is not None
        return {
            "sent_bytes": sent,
            "bound_bytes": round(total["bound"] / num_steps) if has_bound else None,
            "hot_lookup_frac": total["hot_lookups"] / lookups if lookups else None,
        }


@dataclass
class StopRequest:
    """Whether a signal asked this rank to stop, and which."""

    number: int | None = None

    @property
    def is_set(self) -> bool:
        return self.number is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Inside the block, record SIGTERM or SIGINT as a request to stop at the next check-up.

    SIGINT after that ends the block at once, as it would without it. Where it is ignored, as in a
    job in the background, it stays so.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may set handlers
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not request.is_set:
            request.number = number
        elif number == signal.SIGINT:
            before = previous[signal.SIGINT]
            (before if callable(before) else signal.default_int_handler)(number, frame)

    previous = {
        number: signal.getsignal(number)
        for number in _STOPS
        if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        for number in previous:
            signal.signal(number, handle)
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Start processes in the block that ignore SIGTERM and SIGINT: they inherit the signal mask.

    torchrun sends them to the whole process group, as a terminal does, and loader workers must
    outlive it while their rank still needs batches. One to this process is delivered at the end of
    the block.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def check_up(
    losses: Mapping[int, torch.Tensor], figures: Mapping[str, Sequence[float]], world_size: int
) -> tuple[float, dict[str, list[float]]]:
    """Sum the figures of all ranks; a collective.

    Args:
        losses: This rank's loss () of each step since the last check-up, by step.
        figures: This rank's figures by kind; as many on every rank.
        world_size: World size.

    Returns:
        The global batch's mean loss in the last step, and the sums of the figures.

    Raises:
        RuntimeError: on every rank, if the loss of a step is not finite.
    """
    own_losses = torch.stack([loss.double().reshape(()) for loss in losses.values()])
    own = torch.tensor([one for of_kind in figures.values() for one in of_kind], dtype=torch.double)
    values = torch.cat([own_losses, own.to(own_losses.device)])
    if world_size > 1:
        finish_others()
        dist.all_reduce(values)
    totals = iter(values.tolist())
    for step, total in zip(losses, totals, strict=False):
        loss: float = total / world_size
        if not math.isfinite(loss):
            raise RuntimeError(
                f"step {step}: expected a finite loss, got {loss}. Lower the learning rate, "
                "lengthen the warm-up, or look for extreme dense values in the data."
            )
    return loss, {kind: list(islice(totals, len(own))) for kind, own in figures.items()}
