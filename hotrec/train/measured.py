"""What a run measured, stages of its steps and memory, and how far the prediction was off.

A clock runs in every step that is like the others: not in those whose traffic is counted (slowed
down), nor in the first and the last of a segment, where the pipeline fills and drains. What a step
takes outside the pipeline counts as "other", so the stages of a step add up to its time.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hotrec.runtime.ranks import all_gather_object
from hotrec.runtime.stages import StageClock, exposed_s
from hotrec.types import STAGES

FIRST_COMPARED_STEP = 50
MOST_KEPT_STEPS = 4096
# How many steps the clock may hold before they are added up.
MOST_PENDING_STEPS = 256
# What is kept of a step, in seconds: its stages, the exposed communication, and the whole step.
EXPOSED, STEP = len(STAGES), len(STAGES) + 1
# Fields of summary.json: medians over the compared steps, the mean over the ranks if not the
# slowest rank's. The last is exposed communication as a fraction of the measured step.
MEASURED = (
    "measured_step_s",
    "measured_stage_s",
    "slowest_rank_stage_s",
    "exposed_communication_s",
    "slowest_rank_exposed_communication_s",
    "exposed_communication_frac",
)
# Bytes of a table's tensors: what they hold -> "device" and "host" -> bytes.
Tables = Mapping[str, Mapping[str, int]]
PLACES = ("device", "host")

logger = logging.getLogger(__name__)


class KeptSteps:
    """Figures of the steps, (STEP + 1,) each; every other one is dropped when they are too many."""

    def __init__(self, most_kept: int = MOST_KEPT_STEPS) -> None:
        self.rows: list[np.ndarray] = []
        self._most_kept, self._num_seen, self._stride = most_kept, 0, 1

    def add(self, row: np.ndarray) -> None:
        if self._num_seen % self._stride == 0:
            self.rows.append(row)
            if len(self.rows) > self._most_kept:
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
        """Measure the step made inside the block; ``end_step`` must follow."""
        with self._clock.step():
            yield

    def end_step(self, step: int, step_s: float) -> None:
        """Add that the step measured last took ``step_s`` from the end of the one before."""
        self._pending.append((step, step_s))
        if len(self._pending) >= MOST_PENDING_STEPS:
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

    def end_line(self) -> list[float]:
        """This rank's medians since the last call: by stage as in STAGES, then exposed; or NaN."""
        self._add_up()
        medians: list[float] = self._line.medians()[:STEP].tolist()
        self._line = KeptSteps()
        return medians

    def summary(self) -> dict[str, Any]:
        """What summary.json says of all ranks; a collective. What was not measured is None."""
        self._add_up()
        medians_WS = np.asarray(all_gather_object(self._run.medians()))
        measured: dict[str, Any] = dict.fromkeys(MEASURED)
        if np.isfinite(medians_WS).all():
            mean, most = medians_WS.mean(axis=0).tolist(), medians_WS.max(axis=0).tolist()
            measured = {
                "measured_step_s": mean[STEP],
                "measured_stage_s": dict(zip(STAGES, mean[:EXPOSED], strict=True)),
                "slowest_rank_stage_s": dict(zip(STAGES, most[:EXPOSED], strict=True)),
                "exposed_communication_s": mean[EXPOSED],
                "slowest_rank_exposed_communication_s": most[EXPOSED],
                "exposed_communication_frac": mean[EXPOSED] / mean[STEP] if mean[STEP] else None,
            }
        else:
            logger.info(
                "the stages of the steps are not summed up: none was measured from step %d on",
                self.compared_from_step,
            )
        return {**measured, "compared_from_step": self.compared_from_step}


def peak_bytes(device: torch.device) -> dict[str, int | None]:
    """This rank's peaks since it started; None where the device keeps none. Waits for nothing.

    They hold everything: dense layers, activations, messages, and the libraries of the process.
    """
    is_cuda = device.type == "cuda"
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if is_cuda else None,
        # Linux counts it in KiB.
        "peak_resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def memory_figures(device: torch.device, tables: Tables | None) -> dict[str, Any]:
    """What summary.json says of memory: each figure that of the rank with most; a collective."""
    of_ranks: list[Any] = all_gather_object((peak_bytes(device), tables))
    figures: dict[str, Any] = {
        name: None if value is None else max(peaks[name] for peaks, _ in of_ranks)
        for name, value in of_ranks[0][0].items()
    }
    for place in PLACES:
        counted = [
            {kind: places[place] for kind, places in of_rank.items()}
            for _, of_rank in of_ranks
            if of_rank is not None
        ]
        figures[f"{place}_bytes_by_kind"] = figures[f"measured_{place}_bytes"] = None
        if counted:
            most = {kind: max(of_rank[kind] for of_rank in counted) for kind in counted[0]}
            figures[f"{place}_bytes_by_kind"] = most
            figures[f"measured_{place}_bytes"] = max(sum(one.values()) for one in counted)
    return figures


def compare(prediction: Mapping[str, Any] | None, measured: Mapping[str, Any]) -> dict[str, Any]:
    """What summary.json says of a prediction; errors are (predicted - measured) / measured.

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
