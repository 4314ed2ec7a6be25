"""Collects times, losses and traffic of the steps and writes metrics.jsonl and eval.jsonl."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hotrec.embedding.adapt import Decision
from hotrec.runtime.progress import Progress
from hotrec.runtime.ranks import Ranks
from hotrec.train.best import BestQuality
from hotrec.train.callbacks import Callbacks
from hotrec.train.checkpoint import Position
from hotrec.train.evaluate import Quality
from hotrec.train.measured import EXPOSED, StageTimes, Tables, compare, memory_figures, peak_bytes
from hotrec.train.pipelines import Pipeline
from hotrec.train.run_log import HOT_SET, Meter, RunLog, SegmentBatches
from hotrec.train.schedule import Cadence
from hotrec.train.trace import Tracer
from hotrec.train.watch import TrafficMeter, check_up
from hotrec.types import STAGES

# Figures of a decision that add up over a run.
_ADDED = ("num_moved", "moved_bytes", "pause_s")


@dataclass
class Records:
    """Collects the measurements of a run's steps and writes them when due; see ``train``."""

    position: Position  # after the last step made
    run_log: RunLog
    bar: Progress
    traffic: TrafficMeter
    stages: StageTimes
    tracer: Tracer
    pipeline: Pipeline
    ranks: Ranks
    cadence: Cadence
    count_tables: Callable[[], Tables] | None
    count_caches: Callable[[], Mapping[str, float]] | None
    callbacks: Callbacks

    def __post_init__(self) -> None:
        self.meter = Meter(warmup_steps=self.cadence.warmup_steps)
        self.must_stop = False  # the last check-up found a stop request on some rank
        self.must_save = False  # or that the last checkpoint is old, by rank 0's clock
        self.is_saving = False  # or a rank that still writes its share of a checkpoint
        self._loss: float | None = None
        self._traffic_means = self.traffic.means(self.traffic.sums())
        # The last quality on each split, as JSON values, and the step of each.
        self._quality: dict[str, dict[str, Any]] = {}
        self._evaluated: dict[str, int] = {}
        # Summed over all ranks, with the number of steps; empty without caches.
        self._cache: Counter[str] = Counter()
        self._line_cache: Counter[str] = Counter()  # since the last line
        # Sums over the decisions of which rows are hot, with their number; empty without any.
        self._hot_set: Counter[str] = Counter()
        self._losses: dict[int, torch.Tensor] = {}
        self._wait_s = 0.0  # since the last checkup
        self._line_wait_s = 0.0  # since the last line, mean over the ranks
        self._line_steps = 0
        self._start_s = self._saved_s = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    def restart_save_clock(self) -> None:
        """Count the seconds to the next checkpoint from now."""
        self._saved_s = time.perf_counter()

    def _is_save_due(self, is_saving: bool) -> bool:
        every_s = self.cadence.save_every_s
        is_late = 0 < every_s <= time.perf_counter() - self._saved_s
        return self.ranks.is_first and is_late and not is_saving

    @contextmanager
    def step(self, step: int, batches: SegmentBatches) -> Iterator[None]:
        """Measure the step inside the block."""
        wait_s = batches.wait_s
        index = step - batches.first_step
        is_counted = self.traffic.is_due(index, batches.num_steps)
        is_slowed = is_counted or self.tracer.is_slowed(step)
        # The pipeline fills in the first step of a segment and drains in the last.
        is_like_others = not is_slowed and 0 < index < batches.num_steps - 1
        with self.tracer.step(step), ExitStack() as stack:
            if is_counted:
                # What a thread of the pipeline still sends belongs to the step before.
                self.pipeline.drain()
                stack.enter_context(self.traffic.counting(batches))
                stack.callback(self.pipeline.drain)
            if is_like_others:
                stack.enter_context(self.stages.measuring())
            yield
        wait_s = batches.wait_s - wait_s
        num_samples = batches.num_samples(step)
        step_s = self.meter.end_step(num_samples=num_samples, wait_s=wait_s, is_slowed=is_slowed)
        if is_like_others:
            self.stages.end_step(step, step_s)
        self._wait_s += wait_s
        self.position = Position(step, self.position.num_samples + num_samples)
        self.bar.update()
        if self.tracer.end_step(step):
            self.meter.restart_clock()

    def add_loss(self, step: int, loss: torch.Tensor) -> None:
        """Keep a loss () on its device until the next checkup."""
        self._losses[step] = loss.detach()

    def must_check(self, step: int, batches: SegmentBatches) -> bool:
        """Whether the ranks check up after ``step``: at the cadence, and at a segment's end."""
        is_last = step == batches.first_step + batches.num_steps - 1
        return is_last or step % self.cadence.check_every == 0 or self._is_line_due(step)

    def _is_line_due(self, step: int) -> bool:
        return step % self.cadence.log_every == 0

    def check_up(self, step: int, *, lr: float, must_stop: bool, is_saving: bool = False) -> None:
        """Check up with the other ranks and write a line of metrics.jsonl if one is due.

        Raises:
            RuntimeError: on every rank, if a loss since the last check-up is not finite.
        """
        is_line_due = self._is_line_due(step)
        cache = {} if self.count_caches is None else self.count_caches()
        figures = {
            "must_stop": [float(must_stop)],
            "is_saving": [float(is_saving)],
            "must_save": [float(self._is_save_due(is_saving))],
            "wait_s": [self._wait_s],
            "stage_s": self.stages.end_line() if is_line_due else [],
            "cache": list(cache.values()),
            "traffic": self.traffic.sums(),
        }
        self._loss, sums = check_up(self._losses, figures, self.ranks.world_size)
        requests = ("must_stop", "is_saving", "must_save")
        self.must_stop, self.is_saving, self.must_save = (sums[key][0] > 0 for key in requests)
        self._traffic_means = self.traffic.means(sums["traffic"])
        num_steps = len(self._losses)
        self._line_steps += num_steps
        self._line_wait_s += sums["wait_s"][0] / self.ranks.world_size
        if self.count_caches is not None:
            counted: dict[str, Any] = {
                name: sum_ if name.endswith("_s") else round(sum_)
                for name, sum_ in zip(cache, sums["cache"], strict=True)
            }
            self._line_cache.update(num_steps=num_steps, **counted)
            self._cache.update(num_steps=num_steps, **counted)
        self._losses.clear()
        self._wait_s = 0.0
        self.bar.set_postfix_str(f"loss {self._loss:.4f}", refresh=False)
        if is_line_due:
            self._write_line(step, lr, [sum_ / self.ranks.world_size for sum_ in sums["stage_s"]])

    def _write_line(self, step: int, lr: float, medians: list[float]) -> None:
        # NaN where a rank measured no step.
        is_measured = all(map(math.isfinite, medians))
        line = {
            "step": step,
            "num_samples": self.position.num_samples,
            "loss": self._loss,
            "lr": lr,
            **self.meter.end_interval(),
            "stage_s": dict(zip(STAGES, medians[:EXPOSED], strict=True)) if is_measured else None,
            "exposed_communication_s": medians[EXPOSED] if is_measured else None,
            "data_wait_s": self._line_wait_s / self._line_steps,
            **self._traffic_means,
            **_cache_figures(self._line_cache),
            **peak_bytes(self.ranks.device),
            "elapsed_s": self.elapsed_s,
        }
        self.run_log.append("metrics.jsonl", "train", line)
        self.callbacks.call("on_log", line)
        self._line_wait_s, self._line_steps = 0.0, 0
        self._line_cache.clear()

    def add_quality(self, split: str, quality: Quality, **facts: Any) -> None:
        """Write a line of eval.jsonl, with more facts about it."""
        if self.count_caches is not None:
            # Discard what the evaluation did in the caches; the check-up at the end of the segment
            # has counted its steps.
            self.count_caches()
        # The last one is reported, so it comes last.
        self._quality.pop(split, None)
        self._quality[split] = quality.to_json()
        self._evaluated[split] = self.position.step
        line = {"step": self.position.step, "split": split, **facts, **quality.to_json()}
        line["elapsed_s"] = self.elapsed_s
        self.run_log.append("eval.jsonl", split, line)
        self.callbacks.call("on_evaluate", line)

    def add_decision(self, decision: Decision) -> None:
        """Write a line of hot_set.jsonl."""
        line = {"step": self.position.step, **asdict(decision)}
        self.run_log.append(HOT_SET, "hot_set", line)
        self._hot_set.update(num_decisions=1, **{k: line[k] for k in _ADDED})

    def write_summary(
        self,
        description: Mapping[str, Any],
        prediction: Mapping[str, Any] | None,
        best: BestQuality | None = None,
    ) -> dict[str, Any]:
        """Write summary.json and return its content, None where not measured; a collective."""
        sent = self._traffic_means["sent_bytes"]
        tables = None if self.count_tables is None else self.count_tables()
        figures = {
            "num_steps": self.position.step,
            "num_samples": self.position.num_samples,
            "loss": self._loss,
            **self._quality_figures(best),
            **self.meter.total(),
            **self._traffic_means,
            "sent_bytes_total": None if sent is None else sum(sent.values()),
            **_cache_figures(self._cache),
            **({"hot_set": dict(self._hot_set)} if self._hot_set else {}),
            "elapsed_s": self.elapsed_s,
            "finished": not self.must_stop,
            **self.stages.summary(),
            **memory_figures(self.ranks.device, tables),
        }
        comparison = compare(prediction, figures)
        world_size = self.ranks.world_size
        summary = {"world_size": world_size, **description, **figures, **comparison}
        self.run_log.write_summary(summary)
        return summary

    def _quality_figures(self, best: BestQuality | None) -> dict[str, Any]:
        """The quality of the checkpoint that is meant: the best where it is kept, else the last.

        The figures of the last split that was evaluated stand by themselves, all are in "quality".
        """
        step = max(self._evaluated.values(), default=None)
        of_splits = {
            split: quality
            for split, quality in self._quality.items()
            if self._evaluated[split] == step
        }
        found: dict[str, Any] = {}
        if best is not None:
            found = {"best_step": best.step, "best_log_loss": best.loss}
            if best.of_splits and best.step != step:
                found["last_quality"] = {"step": step, **of_splits}
                of_splits, step = best.of_splits, best.step
        split = list(of_splits)[-1] if of_splits else None
        reported = of_splits[split] if split is not None else {}
        return {
            **{name: reported.get(name) for name in ("auc", "log_loss", "normalized_entropy")},
            **_figures_by_label(reported),
            "eval_split": split,
            "eval_step": step,
            "num_eval_samples": reported.get("num_samples"),
            "quality": of_splits,
            **found,
        }


def _figures_by_label(quality: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """AUC and log loss of several labels, where they are known; empty with one label."""
    found = quality.get("by_label", {})
    return {
        f"{figure}_by_label": {
            name: value for name, of in found.items() if (value := of[figure]) is not None
        }
        for figure in (("auc", "log_loss") if found else ())
    }


def _cache_figures(counted: Mapping[str, int]) -> dict[str, Any]:
    """The cache entry of a document; empty without caches."""
    return {"cache": dict(counted)} if counted else {}
