"""Two real ranks: the stages of steps in every placement, slow ranks, and a trace."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotrec.data.batch import Batch
from hotrec.runtime import stages
from hotrec.runtime.stages import EXPOSED_STAGES, StageClock
from hotrec.train.pipelines import make_pipeline
from hotrec.train.schedule import Schedule, Segment
from hotrec.train.segment import SegmentBatches
from hotrec.train.trace import TraceWindow
from hotrec.types import STAGES, OptimizerKind, PipelineKind, PipelineSpec, TorchrecPlan
from tests.distributed.setups import PARTITIONS, batches, build, this_rank
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import TinyLoader, build_tiny
from tests.helpers.traces import read_events
from tests.helpers.training import Cadence, train_model

CPU = torch.device("cpu")
LOADING_S, NUM_STEPS = 0.05, 7
PLACEMENTS: dict[str, Any] = {**PARTITIONS, "torchrec": TorchrecPlan.hand_tuned}
ALWAYS = {"dense", "optimizer", "hot_exchange", "other"}  # dense layers are reduced as hot rows are
OF_COLD = {"ids_exchange", "rows_exchange", "grads_exchange", "row_lookup", "row_update"}
EXPECTED: dict[str, set[str]] = {
    "mixed": {*ALWAYS, *OF_COLD, "route", "pool"},
    "all_cold": {*ALWAYS, *OF_COLD, "route", "pool"},
    # Exchanges that are empty take a moment.
    "all_hot": {*ALWAYS, *OF_COLD - {"row_update"}, "route", "pool"},
    "torchrec": {*ALWAYS, *OF_COLD - {"rows_exchange"}},  # which hotrec's own models mark
}


class Ticks:
    """Stands in for the module ``time``: each look takes a second."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def perf_counter(self) -> float:
        return float(next(self._ticks))


def late(source: Iterator[Batch]) -> Iterator[Batch]:
    """Rank 1 waits for its data."""
    for batch in source:
        if dist.get_rank() == 1:
            time.sleep(LOADING_S)
        yield batch


def measure(placement: str, kind: PipelineKind, clock: Any = time) -> dict[str, np.ndarray]:
    """Seconds of each step by stage, which add up to the step."""
    made = build(OptimizerKind.rowwise_adagrad, PLACEMENTS[placement])
    pipeline = make_pipeline(PipelineSpec(kind), made.model, made.optimizer, CPU)
    segment = Segment(first_step=1, last_step=NUM_STEPS, is_last=True)
    source = batches(0, NUM_STEPS)
    ours = SegmentBatches(late(source) if clock is time else source, segment)
    pipeline.start()
    stage_clock, ticks = StageClock(CPU), []
    with mock.patch.object(stages, "time", clock):
        for _ in ours.steps():
            begin = clock.perf_counter()
            with stage_clock.step():
                pipeline.progress(ours)
            ticks.append(clock.perf_counter() - begin)
    seconds = stage_clock.seconds()
    if isinstance(clock, Ticks):  # the looks before and after
        assert sum(seconds.values()).tolist() == [of_step - 2 for of_step in ticks]
    return seconds


def stages_add_up() -> None:
    for placement, kind in itertools.product(
        PLACEMENTS, (PipelineKind.sparse_dist, PipelineKind.base)
    ):
        seconds = measure(placement, kind, Ticks())
        # DDP makes its buckets in the third step.
        booked = {name for name, of in seconds.items() if any(of[3:5])}
        assert booked == EXPECTED[placement], (placement, kind, booked ^ EXPECTED[placement])


def test_stages_of_every_placement_add_up_to_the_step() -> None:
    run_ranks(stages_add_up, 2)


def slowest_stage() -> str:
    seconds = measure("mixed", PipelineKind.sparse_dist)
    return max(seconds, key=lambda stage: float(np.median(seconds[stage])))


def test_a_slow_peer_shows_in_an_exchange() -> None:
    of_first, of_second = run_ranks(slowest_stage, 2)
    assert of_first in EXPOSED_STAGES
    assert of_second == "other"


class LateLoader(TinyLoader):
    def batch(self, index: int) -> Batch:
        return next(late(iter([super().batch(index)])))


def train(directory: Path | None) -> dict[str, Any]:
    """The summary of a short run of the loop, with a trace of all steps but the first."""
    model, optimizer = build_tiny()
    result = train_model(
        model,
        optimizer,
        LateLoader(num_batches=12),
        this_rank(),
        num_steps=4 if directory else 12,
        cadence=Cadence(log_every=4, warmup_steps=0),
        lr_factor=Schedule(),
        prediction={"step_s": 1.0, "stage_s": {"dense": 1.0}, "total_sent_bytes": 10.0},
        first_compared_step=0 if directory else 5,
        trace=TraceWindow(2, 3, directory) if directory else None,
    )
    return dict(result.summary)


def test_the_summary_is_that_of_all_ranks() -> None:
    first, second = run_ranks(train, 2, directory=None)
    for name in ("measured_stage_s", "slowest_rank_stage_s", "measured_step_s", "step_error_frac"):
        assert first[name] == second[name], name
    mean, slowest = first["measured_stage_s"], first["slowest_rank_stage_s"]
    assert all(mean[stage] <= slowest[stage] for stage in STAGES)
    assert slowest["other"] >= LOADING_S
    assert mean["other"] < slowest["other"]  # rank 0 has its data at hand
    assert first["measured_step_s"] >= LOADING_S
    assert first["step_error_frac"] == pytest.approx(1 / first["measured_step_s"] - 1)
    sent = first["sent_bytes_total"]
    assert first["sent_bytes_error_frac"] == pytest.approx((10 - sent) / sent)


def test_the_loop_traces_each_rank_and_leaves_the_steps_out(tmp_path: Path) -> None:
    for rank, summary in enumerate(run_ranks(train, 2, directory=tmp_path)):
        events = read_events(tmp_path / f"rank{rank}.json.gz")
        assert [name for _, name in events["step"]] == [f"step {step}" for step in range(2, 5)]
        assert {"gloo:all_to_all", "gloo:all_reduce"} <= {n for _, n in events["user_annotation"]}
        for name in ("step_p50_s", "samples_per_s", "measured_step_s", "exposed_communication_s"):
            assert summary[name] is None, name
        assert summary["num_steps"] == 4
