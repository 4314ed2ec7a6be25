"""Measurements and records of a run: metrics.jsonl, eval.jsonl, hot_set.jsonl, summary.json."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hotrec.data.batch import Batch
from hotrec.embedding.adapt import HotSetDecision
from hotrec.runtime.figures import FIGURES, Unit, of_sum
from hotrec.runtime.progress import Progress
from hotrec.runtime.ranks import Ranks, same_verdict
from hotrec.runtime.run_dir import EVAL, HOT_SET, METRICS
from hotrec.runtime.traffic import BatchFacts
from hotrec.train.best import BestQuality
from hotrec.train.callbacks import Callbacks
from hotrec.train.checkpoint import Position
from hotrec.train.evaluate import QUALITIES, Quality
from hotrec.train.meters import (
    PLACES,
    Meter,
    StageTimes,
    Tables,
    TrafficMeter,
    WorkMeter,
    memory_figures,
    peak_bytes,
)
from hotrec.train.pipelines import Pipeline
from hotrec.train.run_log import Listener, RunLog
from hotrec.train.schedule import Segment
from hotrec.train.segment import SegmentBatches
from hotrec.train.trace import Tracer, TraceWindow

FIRST_COMPARED_STEP = 50
# Figures of a decision that add up over a run.
_ADDED = ("num_moved", "moved_bytes", "pause_s")


@dataclass(frozen=True)
class Counts:
    """Counters of a model and its batches; None if not counted.

    Args:
        num_dense_values: Parameters of the dense layers.
        of_batch: Finds a batch's rows for the traffic bounds and the hot-lookup fraction.
        of_tables: Measures the memory of this rank's tables.
        of_caches: Returns the counters of this rank's device caches since its last call, with the
            same names on every rank and zeros without a cache; None if no rank has a cache.
    """

    num_dense_values: int
    of_batch: Callable[[Batch], BatchFacts] | None = None
    of_tables: Callable[[], Tables] | None = None
    of_caches: Callable[[], Mapping[str, float]] | None = None


@dataclass(frozen=True)
class Record:
    """Where a run is recorded, and the other receivers of its records.

    Args:
        run_dir: Where rank 0 writes; None writes nothing.
        description: Entries to add to summary.json (name, placement, model, batch_size, ...).
        prediction: Figures to compare with the measurements, see ``compare``.
        callbacks: Import paths of callbacks, see ``hotrec.train.callbacks``.
        listeners: On rank 0, called with the lines that it writes.
        trace: The steps to record with torch.profiler; None records nothing.
        accept: Called on every rank after the checkpoint to resume from has been loaded, and before
            anything is written.
    """

    run_dir: Path | None = None
    description: Mapping[str, Any] = field(default_factory=dict)
    prediction: Mapping[str, Any] | None = None
    callbacks: Sequence[str] = ()
    listeners: Sequence[Listener] = ()
    trace: TraceWindow | None = None
    accept: Callable[[], None] | None = None


class Metrics:
    """Measures the steps of a run, and records them when due; making one is a collective.

    Args:
        ranks: The process group.
        counts: What is counted besides times.
        log_every_steps: Steps between lines of metrics.jsonl.
        warmup_steps: Steps at the start that are excluded from rates.
        first_compared_step: The first step that is compared with the prediction, counted from this
            start.
        record: Where the run is recorded, and the other receivers of its records.
    """

    position: Position  # after the last step made
    start_step: int = 0
    callbacks: Callbacks
    _log: RunLog
    _bar: Progress
    _tracer: Tracer
    _pipeline: Pipeline

    def __init__(
        self,
        ranks: Ranks,
        counts: Counts,
        *,
        log_every_steps: int = 100,
        warmup_steps: int = 10,
        first_compared_step: int = FIRST_COMPARED_STEP,
        record: Record | None = None,
    ) -> None:
        self._ranks, self._counts, self._log_every_steps = ranks, counts, log_every_steps
        self._record = record or Record()
        self._rates = Meter(warmup_steps=warmup_steps)
        self._stages = StageTimes(ranks.device, first_compared_step)
        self._traffic = TrafficMeter(ranks, counts.num_dense_values, counts.of_batch)
        self._traffic_means = self._traffic.means(self._traffic.sums())
        self._work = WorkMeter(ranks)
        self.losses: dict[int, torch.Tensor] = {}  # of this rank, since the last check-up
        self._loss: float | None = None
        self._lr: float | None = None
        # The last quality on each split, as JSON values, and the step of each.
        self._quality: dict[str, dict[str, Any]] = {}
        self._evaluated: dict[str, int] = {}
        # Summed over all ranks, with the number of steps; empty without caches.
        self._cache: Counter[str] = Counter()
        self._line_cache: Counter[str] = Counter()  # since the last line
        # Sums over the decisions on hot rows, with their number; empty without any.
        self._hot_set: Counter[str] = Counter()
        self._line_wait_s, self._line_steps = 0.0, 0  # since the last line, on this rank
        self._start_s = time.perf_counter()

    def accept(self) -> None:
        """Accept the run's record, once the run can certainly start; collective."""
        if self._record.accept is not None:
            same_verdict(self._record.accept)

    @contextmanager
    def running(self, position: Position, num_steps: int, pipeline: Pipeline) -> Iterator[None]:
        """Record inside the block, after the steps of ``position``; collective."""
        record, ranks = self._record, self._ranks
        self.position, self._pipeline, self.start_step = position, pipeline, position.step
        self._stages.compared_from_step += position.step
        with ExitStack() as stack:
            run_dir = record.run_dir if ranks.is_first else None
            log = same_verdict(
                lambda: RunLog(run_dir, start_step=position.step, listeners=record.listeners)
            )
            self._log = stack.enter_context(log)
            self._bar = stack.enter_context(
                Progress(
                    "train",
                    num_steps,
                    unit="steps",
                    initial=position.step,
                    is_shown=ranks.is_first,
                )
            )
            tracer = Tracer(record.trace, ranks, start_step=position.step, num_steps=num_steps)
            self._tracer = stack.enter_context(tracer)
            self.callbacks = Callbacks(record.callbacks, record.run_dir, record.description)
            self._start_s = time.perf_counter()
            yield

    def is_whole(self, segment: Segment) -> bool:
        """Whether all steps of a segment were completed; a check-up may have cut it."""
        return self.position.step == segment.last_step

    def is_due(self, segment: Segment, every_steps: int) -> bool:
        """Whether something with an interval of ``every_steps`` is due after a segment."""
        is_reached = every_steps > 0 and segment.last_step % every_steps == 0
        return is_reached and self.is_whole(segment)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    def restart_clock(self) -> None:
        """Exclude the time since the last step."""
        self._rates.restart_clock()

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
                # Bytes that a thread of the pipeline still sends belong to the step before.
                self._pipeline.drain()
                stack.enter_context(self._traffic.counting(step, batches))
                stack.callback(self._pipeline.drain)
            if is_like_others:
                stack.enter_context(self._stages.measuring())
            yield
        wait_s = batches.wait_s - wait_s
        num_samples = batches.num_samples(step)
        step_s = self._rates.end_step(num_samples=num_samples, wait_s=wait_s, is_slowed=is_slowed)
        if is_like_others:
            self._stages.end_step(step, step_s)
        self._work.end_step(batches.batch(step).work)
        self._line_wait_s += wait_s
        self._line_steps += 1
        self.position = Position(step, self.position.num_samples + num_samples)
        self._bar.update()
        if self._tracer.end_step(step):
            self._rates.restart_clock()

    def add(self, step: int, loss: torch.Tensor, lr: float) -> None:
        """Keep a loss () on its device until the next check-up."""
        self.losses[step] = loss.detach()
        self._lr = lr

    def is_line_due(self, step: int) -> bool:
        return step % self._log_every_steps == 0

    def counts(self, step: int) -> dict[str, Any]:
        """This rank's counts since the last check-up, to be summed over the ranks."""
        line = {}
        if self.is_line_due(step):
            line = {**self._stages.end_line(), "data_wait_s": self._line_wait_s / self._line_steps}
            self._line_wait_s, self._line_steps = 0.0, 0
        return {
            "line": line,
            "cache": {} if self._counts.of_caches is None else self._counts.of_caches(),
            "traffic": self._traffic.sums(),
            "work": self._work.counts(),
        }

    def add_counts(self, step: int, loss: float, sums: Mapping[str, Any]) -> None:
        """Add the loss and the sums of ``counts`` over all ranks; record a line if one is due."""
        num_ranks, num_steps = self._ranks.world_size, len(self.losses)
        self._loss = loss
        self._traffic_means = self._traffic.means(sums["traffic"])
        self._work.add(sums["work"])
        if self._counts.of_caches is not None:
            counted: dict[str, Any] = {
                name: value if FIGURES[f"cache.{name}"].unit is Unit.seconds else round(value)
                for name, value in of_sum("cache", sums["cache"], num_ranks).items()
            }
            self._line_cache.update(num_steps=num_steps, **counted)
            self._cache.update(num_steps=num_steps, **counted)
        self.losses.clear()
        self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        if self.is_line_due(step):
            of_line = {key: of_sum(key, sums_, num_ranks) for key, sums_ in sums["line"].items()}
            self._write_line(step, of_line)

    def _write_line(self, step: int, of_line: Mapping[str, Any]) -> None:
        # NaN if a rank measured no step.
        is_measured = math.isfinite(of_line["exposed_communication_s"])
        line = {
            "step": step,
            "num_samples": self.position.num_samples,
            "loss": self._loss,
            "lr": self._lr,
            **self._rates.end_interval(),
            "stage_s": of_line["stage_s"] if is_measured else None,
            "exposed_communication_s": of_line["exposed_communication_s"] if is_measured else None,
            "data_wait_s": of_line["data_wait_s"],
            "work_balance": self._work.end_line(),
            **self._traffic_means,
            **_if_any("cache", self._line_cache),
            **peak_bytes(self._ranks.device),
            "elapsed_s": self.elapsed_s,
        }
        self._log.append(METRICS, "train", line)
        self.callbacks.call("on_log", line)
        self._line_cache.clear()

    def add_quality(self, split: str, quality: Quality, **facts: Any) -> None:
        """Record a line of eval.jsonl, with further facts."""
        if self._counts.of_caches is not None:
            # Discard the evaluation's cache counts; the check-up at the end of the segment has
            # counted its steps.
            self._counts.of_caches()
        # The last entry is reported, so this one moves to the end.
        self._quality.pop(split, None)
        self._quality[split] = quality.to_json()
        self._evaluated[split] = self.position.step
        line = {"step": self.position.step, "split": split, **facts, **quality.to_json()}
        line["elapsed_s"] = self.elapsed_s
        self._log.append(EVAL, split, line)
        self.callbacks.call("on_evaluate", line)

    def add_decision(self, decision: HotSetDecision) -> None:
        """Record a line of hot_set.jsonl."""
        line = {"step": self.position.step, **asdict(decision)}
        self._log.append(HOT_SET, "hot_set", line)
        self._hot_set.update(num_decisions=1, **{k: line[k] for k in _ADDED})

    def summary(
        self, found: Mapping[str, Any], *, best: BestQuality | None = None, is_finished: bool = True
    ) -> dict[str, Any]:
        """Write summary.json and return its content, None if not measured; a collective.

        Args:
            found: Further entries.
            best: The best evaluation, whose quality is reported.
            is_finished: Whether all steps were completed.
        """
        sent = self._traffic_means["sent_bytes"]
        tables = None if self._counts.of_tables is None else self._counts.of_tables()
        figures = {
            "num_steps": self.position.step,
            "num_samples": self.position.num_samples,
            "loss": self._loss,
            **self._quality_figures(best),
            **self._rates.total(),
            "work_balance": self._work.total(),
            **self._traffic_means,
            "sent_bytes_total": None if sent is None else sum(sent.values()),
            **_if_any("cache", self._cache),
            **_if_any("hot_set", self._hot_set),
            "elapsed_s": self.elapsed_s,
            "finished": is_finished,
            **self._stages.summary(),
            **memory_figures(self._ranks.device, tables),
        }
        summary = {
            "world_size": self._ranks.world_size,
            **self._record.description,
            **found,
            **figures,
            **compare(self._record.prediction, figures),
        }
        self._log.write_summary(summary)
        self.callbacks.call("on_end", summary)
        return summary

    def _quality_figures(self, best: BestQuality | None) -> dict[str, Any]:
        """The quality of the reported checkpoint: the best if it is kept, else the last.

        The figures of the last evaluated split are on the top level, all are in "quality".
        """
        step = max(self._evaluated.values(), default=None)
        of_splits = {
            split: quality
            for split, quality in self._quality.items()
            if self._evaluated[split] == step
        }
        found: dict[str, Any] = {}
        if best is not None:
            found = {"best_step": best.step, f"best_{best.by}": best.value}
            if best.of_splits and best.step != step:
                found["last_quality"] = {"step": step, **of_splits}
                of_splits, step = best.of_splits, best.step
        split = list(of_splits)[-1] if of_splits else None
        reported = of_splits[split] if split is not None else {}
        return {
            **dict.fromkeys(QUALITIES),
            **{k: value for k, value in reported.items() if k not in ("num_samples", "by_label")},
            **_by_label(reported.get("by_label", {})),
            "eval_split": split,
            "eval_step": step,
            "num_eval_samples": reported.get("num_samples"),
            "quality": of_splits,
            **found,
        }


def _by_label(of_labels: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Figures of several labels, as far as known; empty with one label."""
    return {
        key: {label: of[name] for label, of in of_labels.items() if of[name] is not None}
        for name in next(iter(of_labels.values()), {})
        if (key := f"{name}_by_label") in FIGURES
    }


def _if_any(key: str, counted: Mapping[str, float]) -> dict[str, Any]:
    return {key: dict(counted)} if counted else {}


def compare(prediction: Mapping[str, Any] | None, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of summary.json for a prediction; errors are (predicted - measured) / measured.

    Args:
        prediction: "step_s", "stage_s" by stage, "total_sent_bytes" per step and rank, and
            optionally "memory" by rank {"device_bytes", "host_bytes"}; None for none.
        measured: the measured figures.
    """
    if prediction is None:
        return {}
    pairs = [
        ("step", "_s", prediction["step_s"], measured["measured_step_s"]),
        ("sent_bytes", "", prediction["total_sent_bytes"], measured["sent_bytes_total"]),
    ]
    for place in PLACES if prediction.get("memory") else ():
        most = max(rank[f"{place}_bytes"] for rank in prediction["memory"])
        pairs.append((f"{place}_bytes", "", most, measured[f"measured_{place}_bytes"]))
    compared: dict[str, Any] = {"predicted_stage_s": dict(prediction["stage_s"])}
    for name, unit, predicted, found in pairs:
        compared[f"predicted_{name}{unit}"] = float(predicted)
        compared[f"{name}_error_frac"] = (float(predicted) - found) / found if found else None
    return compared
