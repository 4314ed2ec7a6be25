"""Collects times, losses and traffic of the steps and writes metrics.jsonl and eval.jsonl."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from hotrec.runtime.ranks import Ranks
from hotrec.train.checkpoint import Position
from hotrec.train.evaluate import Quality
from hotrec.train.peak_memory import Tables, compare_memory, memory_figures, peak_bytes
from hotrec.train.run_log import Meter, RunLog, SegmentBatches
from hotrec.train.schedule import Cadence
from hotrec.train.stage_times import EXPOSED, StageTimes, compare
from hotrec.train.trace import Tracer
from hotrec.train.watch import Checkup, TrafficMeter, check_up
from hotrec.types import STAGES


class Records:
    """Collects the measurements of a run's steps and writes them when due.

    Args:
        run_log: Writes the run's files.
        bar: The progress bar to advance.
        traffic: Counts the traffic of sampled steps.
        ranks: The process group.
        cadence: How often the ranks check up and lines are written.
        start: The position before the first step.
        first_compared_step: See ``train``.
        tracer: Records a window of steps, which are excluded from all rates.
        drain: Waits for what the pipeline's threads still send.
        count_tables: See ``train``.
        count_caches: See ``train``.
    """

    def __init__(
        self,
        run_log: RunLog,
        bar: tqdm,
        traffic: TrafficMeter,
        ranks: Ranks,
        cadence: Cadence,
        start: Position,
        first_compared_step: int,
        tracer: Tracer,
        drain: Callable[[], None],
        count_tables: Callable[[], Tables] | None = None,
        count_caches: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self.position = start
        self._stages = StageTimes(ranks.device, start.step + first_compared_step)
        self.meter = Meter(warmup_steps=cadence.warmup_steps)
        self._checkup: Checkup | None = None
        self._quality: Quality | None = None
        self._run_log = run_log
        self._bar = bar
        self._traffic = traffic
        self._ranks = ranks
        self._cadence = cadence
        self._tracer = tracer
        self._drain = drain
        self._count_tables = count_tables
        self._count_caches = count_caches
        # Summed over all ranks, with the number of steps; empty without caches.
        self._cache: Counter[str] = Counter()
        self._line_cache: Counter[str] = Counter()  # since the last line
        self._losses: dict[int, torch.Tensor] = {}
        self._wait_s = 0.0  # since the last checkup
        self._line_wait_s = 0.0  # since the last line, mean over the ranks
        self._line_steps = 0
        self._start_s = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    @contextmanager
    def step(self, step: int, batches: SegmentBatches) -> Iterator[None]:
        """Measure the step inside the block."""
        wait_s = batches.wait_s
        index = step - batches.first_step
        is_counted = self._traffic.is_due(index, batches.num_steps)
        is_slowed = is_counted or self._tracer.is_slowed(step)
        # The pipeline fills in the first step of a segment and drains in the last.
        is_like_others = not is_slowed and 0 < index < batches.num_steps - 1
        with self._tracer.step(step), ExitStack() as stack:
            if is_counted:
                # What a thread of the pipeline still sends belongs to the step before.
                self._drain()
                stack.enter_context(self._traffic.counting(batches))
                stack.callback(self._drain)
            if is_like_others:
                stack.enter_context(self._stages.measuring())
            yield
        wait_s = batches.wait_s - wait_s
        num_samples = batches.num_samples(step)
        step_s = self.meter.end_step(num_samples=num_samples, wait_s=wait_s, is_slowed=is_slowed)
        if is_like_others:
            self._stages.end_step(step, step_s)
        self._wait_s += wait_s
        self.position = Position(step, self.position.num_samples + num_samples)
        self._bar.update()
        if self._tracer.end_step(step):
            self.meter.restart_clock()

    def add_loss(self, step: int, loss: torch.Tensor) -> None:
        """Keep a loss () on its device until the next checkup."""
        self._losses[step] = loss.detach()

    def must_check(self, step: int, batches: SegmentBatches) -> bool:
        """Whether the ranks check up after ``step``: at the cadence, and at a segment's end."""
        is_last = step == batches.first_step + batches.num_steps - 1
        cadence = self._cadence
        return is_last or step % cadence.check_every == 0 or step % cadence.log_every == 0

    @property
    def must_stop(self) -> bool:
        """Whether the last check-up found a stop request on some rank."""
        return self._checkup is not None and self._checkup.must_stop

    def check_up(self, step: int, *, lr: float, must_stop: bool) -> None:
        """Check up with the other ranks and write a line of metrics.jsonl if one is due.

        Raises:
            RuntimeError: on every rank, if a loss since the last check-up is not finite.
        """
        is_line_due = step % self._cadence.log_every == 0
        checkup = check_up(
            self._losses,
            must_stop=must_stop,
            wait_s=self._wait_s,
            stage_s=self._stages.end_line() if is_line_due else [],
            cache={} if self._count_caches is None else self._count_caches(),
            traffic=self._traffic,
            ranks=self._ranks,
        )
        self._line_steps += len(self._losses)
        self._line_wait_s += checkup.wait_s
        if self._count_caches is not None:
            self._line_cache.update(num_steps=len(self._losses), **checkup.cache)
            self._cache.update(num_steps=len(self._losses), **checkup.cache)
        self._losses.clear()
        self._wait_s = 0.0
        self._checkup = checkup
        self._bar.set_postfix(loss=f"{checkup.loss:.4f}", refresh=False)
        if is_line_due:
            self._run_log.write_metrics(self._metrics_line(step, lr, checkup))

    def _metrics_line(self, step: int, lr: float, checkup: Checkup) -> dict[str, Any]:
        traffic = checkup.traffic
        stages, exposed_s = checkup.stage_s[:EXPOSED], checkup.stage_s[EXPOSED]
        # NaN where a rank measured no step.
        is_measured = all(math.isfinite(seconds) for seconds in stages)
        line = {
            "step": step,
            "num_samples": self.position.num_samples,
            "loss": checkup.loss,
            "lr": lr,
            **asdict(self.meter.end_interval()),
            "stage_s": dict(zip(STAGES, stages, strict=True)) if is_measured else None,
            "exposed_communication_s": exposed_s if math.isfinite(exposed_s) else None,
            "data_wait_s": self._line_wait_s / self._line_steps,
            "sent_bytes": traffic.sent_bytes if traffic else None,
            "bound_bytes": traffic.bound_bytes if traffic else None,
            "hot_lookup_frac": traffic.hot_lookup_frac if traffic else None,
            **_cache_figures(self._line_cache),
            **peak_bytes(self._ranks.device),
            "elapsed_s": self.elapsed_s,
        }
        self._line_wait_s, self._line_steps = 0.0, 0
        self._line_cache.clear()
        return line

    def add_quality(self, split: str, quality: Quality) -> None:
        """Write a line of eval.jsonl."""
        if self._count_caches is not None:
            # Discard what the evaluation did in the caches; the check-up at the end of the segment
            # has counted its steps.
            self._count_caches()
        self._quality = quality
        line = {"step": self.position.step, "split": split, **asdict(quality)}
        self._run_log.write_eval({**line, "elapsed_s": self.elapsed_s})

    def write_summary(
        self, description: Mapping[str, Any], prediction: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Write summary.json and return its content, None where not measured; a collective.

        Args:
            description: Entries to add unchanged.
            prediction: See ``compare``.
        """
        tables = None if self._count_tables is None else self._count_tables()
        memory = memory_figures(self._ranks.device, tables)
        figures = {**self._figures(), **self._stages.summary(), **memory}
        summary = {
            "world_size": self._ranks.world_size,
            **description,
            **figures,
            **compare(prediction, figures),
            **compare_memory(prediction or {}, memory),
        }
        self._run_log.write_summary(summary)
        return summary

    def _figures(self) -> dict[str, Any]:
        quality, checkup = self._quality, self._checkup
        traffic = checkup.traffic if checkup else None
        return {
            "num_steps": self.position.step,
            "num_samples": self.position.num_samples,
            "loss": checkup.loss if checkup else None,
            "auc": quality.auc if quality else None,
            "log_loss": quality.log_loss if quality else None,
            "normalized_entropy": quality.normalized_entropy if quality else None,
            **asdict(self.meter.total()),
            "data_wait_frac": self.meter.data_wait_frac,
            "sent_bytes": traffic.sent_bytes if traffic else None,
            "sent_bytes_total": traffic.total_bytes if traffic else None,
            "bound_bytes": traffic.bound_bytes if traffic else None,
            "hot_lookup_frac": traffic.hot_lookup_frac if traffic else None,
            **_cache_figures(self._cache),
            "elapsed_s": self.elapsed_s,
            "finished": not self.must_stop,
        }


def _cache_figures(counted: Mapping[str, int]) -> dict[str, Any]:
    """The cache entry of a document; empty without caches."""
    return {"cache": dict(counted)} if counted else {}
