"""Measures the steps of this rank: rates, stages, traffic, and memory.

The reduction over ranks is declared in ``hotrec/runtime/figures.py``. The clock of the stages runs
in every representative step: not in those whose traffic is counted (slowed down), nor in the first
and the last of a segment, where the pipeline fills and drains. Time outside the pipeline counts as
"other", so the stages of a step add up to its time.
"""

from __future__ import annotations

import logging
import resource
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hotrec.data.batch import Batch
from hotrec.runtime.figures import of_sum, over_ranks
from hotrec.runtime.hosts import count_host_rows, gather_host_of_rank
from hotrec.runtime.ranks import Ranks, all_gather_object
from hotrec.runtime.stages import StageClock, exposed_s
from hotrec.runtime.traffic import (
    COLLECTIVES,
    BatchFacts,
    count_sent_bytes,
    lower_bound_between_hosts_bytes,
    lower_bound_bytes,
)
from hotrec.train.segment import SegmentBatches
from hotrec.types import STAGES

MAX_KEPT_STEPS = 4096
# Number of steps that the clock stores before they are added up.
MAX_PENDING_STEPS = 256
# Values kept for a step, in seconds: its stages, the exposed communication, and the whole step.
EXPOSED, STEP = len(STAGES), len(STAGES) + 1
# Counting makes a step several times slower, and bytes hardly vary between steps.
SAMPLE_EVERY_STEPS = 500
# Bytes of a table's tensors: kind of content -> "device" and "host" -> bytes.
Tables = Mapping[str, Mapping[str, int]]
PLACES = ("device", "host")

logger = logging.getLogger(__name__)


class Meter:
    """Measures the steps of this process."""

    def __init__(self, *, warmup_steps: int) -> None:
        self._warmup_left = warmup_steps
        self._step_s = array("d")
        self._samples = array("q")
        self._interval_start = 0
        self._wait_s = 0.0
        self._last = time.perf_counter()

    def restart_clock(self) -> None:
        """Exclude the time since the last step, such as an evaluation or a checkpoint."""
        self._last = time.perf_counter()

    def end_step(self, *, num_samples: int, wait_s: float, is_slowed: bool = False) -> float:
        """Measure the time since the last step, in seconds, and return it.

        ``wait_s`` of it was spent waiting for the loader. Steps with ``is_slowed`` are excluded
        from rates.
        """
        now = time.perf_counter()
        step_s, self._last = now - self._last, now
        if self._warmup_left > 0:
            self._warmup_left -= 1
        elif not is_slowed:
            self._step_s.append(step_s)
            self._samples.append(num_samples)
            self._wait_s += wait_s
        return step_s

    def end_interval(self) -> dict[str, float | None]:
        """Throughput and step times since the last call; None if no step was measured."""
        start, self._interval_start = self._interval_start, len(self._step_s)
        return _rates(self._step_s[start:], self._samples[start:])

    def total(self) -> dict[str, float | None]:
        """The same of all measured steps, and the fraction of the time spent waiting for data."""
        total_s = sum(self._step_s)
        rates = _rates(self._step_s, self._samples)
        return {**rates, "data_wait_frac": self._wait_s / total_s if total_s else None}


def _rates(step_s: array[float], samples: array[int]) -> dict[str, float | None]:
    if not step_s:
        return dict.fromkeys(("samples_per_s", "step_p50_s", "step_p90_s"))
    p50, p90 = np.percentile(np.asarray(step_s), [50, 90])
    rate = sum(samples) / sum(step_s)
    return {"samples_per_s": rate, "step_p50_s": float(p50), "step_p90_s": float(p90)}


class KeptSteps:
    """Figures of the steps, (STEP + 1,) each; every other one is dropped if there are too many."""

    def __init__(self, max_kept: int = MAX_KEPT_STEPS) -> None:
        self.rows: list[np.ndarray] = []
        self._max_kept, self._num_seen, self._stride = max_kept, 0, 1

    def add(self, row: np.ndarray) -> None:
        if self._num_seen % self._stride == 0:
            self.rows.append(row)
            if len(self.rows) > self._max_kept:
                self.rows = self.rows[::2]
                self._stride *= 2
        self._num_seen += 1

    def medians(self) -> np.ndarray:
        """Float64 (STEP + 1,); NaN without steps."""
        return np.median(self.rows, axis=0) if self.rows else np.full(STEP + 1, np.nan)


class StageTimes:
    """The stages of this rank's steps, since the last line and since ``compared_from_step``."""

    def __init__(self, device: torch.device, compared_from_step: int) -> None:
        self.compared_from_step = compared_from_step
        self._clock = StageClock(device)
        self._pending: list[tuple[int, float]] = []  # step, its seconds
        self._line, self._run = KeptSteps(), KeptSteps()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the step in the block; ``end_step`` must follow."""
        with self._clock.step():
            yield

    def end_step(self, step: int, step_s: float) -> None:
        """Record that the last measured step took ``step_s`` from the end of the one before."""
        self._pending.append((step, step_s))
        if len(self._pending) >= MAX_PENDING_STEPS:
            self._add_up()

    def _add_up(self) -> None:
        seconds = self._clock.seconds() if self._pending else {}
        self._clock.clear()
        for index, (step, step_s) in enumerate(self._pending):
            of_step = {stage: seconds[stage][index] for stage in STAGES}
            of_step["other"] += step_s - sum(of_step.values())
            row = np.array([*of_step.values(), exposed_s(of_step), step_s])
            self._line.add(row)
            if step >= self.compared_from_step:
                self._run.add(row)
        self._pending = []

    def end_line(self) -> dict[str, Any]:
        """This rank's medians since the last call; NaN without a step."""
        self._add_up()
        medians = self._line.medians().tolist()
        self._line = KeptSteps()
        stage_s = dict(zip(STAGES, medians[:EXPOSED], strict=True))
        return {"stage_s": stage_s, "exposed_communication_s": medians[EXPOSED]}

    def summary(self) -> dict[str, Any]:
        """The entries of summary.json for all ranks, None if not measured; a collective."""
        self._add_up()
        medians = self._run.medians().tolist() if self._run.rows else [None] * (STEP + 1)
        stage_s = dict(zip(STAGES, medians[:EXPOSED], strict=True)) if self._run.rows else None
        own = {
            "measured_step_s": medians[STEP],
            "measured_stage_s": stage_s,
            "slowest_rank_stage_s": stage_s,
            "exposed_communication_s": medians[EXPOSED],
            "slowest_rank_exposed_communication_s": medians[EXPOSED],
        }
        measured = over_ranks(all_gather_object(own))
        step_s, exposed = measured["measured_step_s"], measured["exposed_communication_s"]
        if step_s is None:
            logger.info(
                "no summary of stages: no step was measured from step %d on",
                self.compared_from_step,
            )
        measured["exposed_communication_frac"] = exposed / step_s if step_s else None
        return {**measured, "compared_from_step": self.compared_from_step}


class TrafficMeter:
    """Counts the bytes sent in sampled steps, and the rows that their batches read; collective.

    ``inspect_batch`` finds the distinct rows and lookups of a batch; None for no lower bound.
    """

    def __init__(
        self,
        ranks: Ranks,
        num_dense_values: int,
        inspect_batch: Callable[[Batch], BatchFacts] | None,
    ) -> None:
        self._ranks = ranks
        self._host_of_rank = gather_host_of_rank()
        self._num_dense_values = num_dense_values
        self._inspect_batch = inspect_batch
        names = ("steps", "between_hosts", "bound", "between_hosts_bound", "lookups", "hot_lookups")
        self._sums = dict.fromkeys((*names, *COLLECTIVES), 0.0)

    def is_due(self, index: int, num_steps: int) -> bool:
        """Whether to count in step ``index`` (from 0) of a segment.

        A step in the middle is sampled, since the others fill or drain the pipeline. If segments
        are too short for that, a whole segment is.
        """
        if num_steps >= 4:
            return index % SAMPLE_EVERY_STEPS == 2 and index < num_steps - 1
        return self._sums["steps"] <= index

    @contextmanager
    def counting(self, step: int, batches: SegmentBatches) -> Iterator[None]:
        """Count the bytes that the step in the block sends and the rows that its batch reads.

        A collective, as the ranks of a host count the rows that they read together.
        """
        with count_sent_bytes(self._host_of_rank) as traffic:
            yield
        self._sums["steps"] += 1
        self._sums["between_hosts"] += sum(traffic.between_hosts_bytes.values())
        for name, num_bytes in traffic.sent_bytes.items():
            self._sums[name] += num_bytes
        if self._inspect_batch is not None:
            facts = self._inspect_batch(batches.batch(step))
            self._sums["lookups"] += facts.num_lookups
            self._sums["hot_lookups"] += facts.num_hot_lookups
            self._sums["bound"] += lower_bound_bytes(
                facts.num_distinct, self._ranks.world_size, num_dense_values=self._num_dense_values
            )
            self._sums["between_hosts_bound"] += self._bound_between_hosts(facts)

    def _bound_between_hosts(self, facts: BatchFacts) -> int:
        hosts = self._host_of_rank
        if len(set(hosts)) == 1:
            return 0
        num_rows = {
            dim: count_host_rows(rows_U, hosts, self._ranks.device)
            for dim, rows_U in facts.rows.items()
        }
        return lower_bound_between_hosts_bytes(
            num_rows, hosts, self._ranks.rank, num_dense_values=self._num_dense_values
        )

    def sums(self) -> dict[str, float]:
        """This rank's counts, to be summed over the ranks."""
        return dict(self._sums)

    def means(self, total: Mapping[str, float]) -> dict[str, Any]:
        """Means by step and rank, given the ``sums()`` of all ranks; None where not counted."""
        num_steps, lookups = round(total["steps"]), total["lookups"]  # over all ranks

        def mean(key: str, name: str) -> int | None:
            return round(of_sum(key, total[name], num_steps)) if num_steps else None

        return {
            "sent_bytes": {n: mean("sent_bytes", n) for n in COLLECTIVES} if num_steps else None,
            "between_hosts_bytes": mean("between_hosts_bytes", "between_hosts"),
            "bound_bytes": mean("bound_bytes", "bound") if self._inspect_batch else None,
            "between_hosts_bound_bytes": (
                mean("between_hosts_bound_bytes", "between_hosts_bound")
                if self._inspect_batch
                else None
            ),
            "hot_lookup_frac": total["hot_lookups"] / lookups if lookups else None,
        }


class WorkMeter:
    """The work of the busiest rank over the mean, in the steps of all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own: list[int] = []  # of this rank's steps since the last check-up
        self._line = self._run = np.zeros(2)  # sums over steps: of the busiest rank, and the mean

    def end_step(self, work: int | None) -> None:
        """Record the work of this rank in a step; None if it is not counted on any rank."""
        if work is not None:
            self._own.append(work)

    def counts(self) -> dict[str, float]:
        """Work by step and rank since the last call, 0 for other ranks, to be summed over ranks."""
        own, self._own = self._own, []
        return {
            f"{step}.{rank}": float(work) if rank == self._ranks.rank else 0.0
            for step, work in enumerate(own)
            for rank in range(self._ranks.world_size)
        }

    def add(self, counted: Mapping[str, float]) -> None:
        """Add the sums of ``counts`` over all ranks."""
        work_SW = np.reshape([*counted.values()], (-1, self._ranks.world_size))
        sums = np.array([work_SW.max(axis=1).sum(), work_SW.mean(axis=1).sum()])
        self._line, self._run = self._line + sums, self._run + sums

    def end_line(self) -> float | None:
        """The ratio in the steps since the last call; None without any."""
        line, self._line = self._line, np.zeros(2)
        return _ratio_of(line)

    def total(self) -> float | None:
        """The same in all steps."""
        return _ratio_of(self._run)


def _ratio_of(sums: np.ndarray) -> float | None:
    return float(sums[0] / sums[1]) if sums[1] else None


def peak_bytes(device: torch.device) -> dict[str, int | None]:
    """This rank's peaks since it started; None if the device has no statistics.

    Does not synchronize. Includes dense layers, activations, messages, and the process's libraries.
    """
    is_cuda = device.type == "cuda"
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if is_cuda else None,
        # Linux counts it in KiB.
        "peak_resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def memory_figures(device: torch.device, tables: Tables | None) -> dict[str, Any]:
    """The entries of summary.json for memory; a collective."""
    own: dict[str, Any] = {**peak_bytes(device)}
    for place in PLACES:
        by_kind = None if tables is None else {kind: of[place] for kind, of in tables.items()}
        own[f"{place}_bytes_by_kind"] = by_kind
        own[f"measured_{place}_bytes"] = None if by_kind is None else sum(by_kind.values())
    return over_ranks(all_gather_object(own))
