"""Two real ranks: the stages of steps, slow ranks, and a trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotrec.data.batch import Batch
from hotrec.runtime.stages import EXPOSED_STAGES, StageClock
from hotrec.train.schedule import Schedule, Segment
from hotrec.train.segment import SegmentBatches
from hotrec.train.trace import TraceWindow
from hotrec.types import STAGES
from tests.distributed.setups import this_rank
from tests.exact.case import Case
from tests.exact.training import Training
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import TinyLoader, build_tiny
from tests.helpers.traces import read_events
from tests.helpers.training import Cadence, train_model

CPU = torch.device("cpu")
LOADING_S, NUM_STEPS = 0.05, 7
CASE = Case("00", 8, "half", "rowwise_adagrad", pipeline="sparse_dist", steps=NUM_STEPS)


def late(source: Iterator[Batch]) -> Iterator[Batch]:
    """Rank 1 waits for its data."""
    for batch in source:
        if dist.get_rank() == 1:
            time.sleep(LOADING_S)
        yield batch


def stages() -> dict[str, float]:
    """Median seconds by stage, which add up to the step."""
    training = Training(CASE)
    pipeline = training.pipeline()
    segment = Segment(first_step=1, last_step=NUM_STEPS, is_last=True)
    source = (training.batch(step) for step in range(NUM_STEPS))
    ours = SegmentBatches(late(source), segment)
    pipeline.start()
    clock, steps_s = StageClock(CPU), []
    for _ in ours.steps():
        begin = time.perf_counter()
        with clock.step():
            pipeline.progress(ours)
        steps_s.append(time.perf_counter() - begin)
    np.testing.assert_allclose(sum(clock.seconds().values()), steps_s, atol=1e-3)
    return clock.medians()


def test_a_slow_peer_shows_in_an_exchange() -> None:
    of_first, of_second = run_ranks(stages, 2)
    assert max(of_first, key=of_first.__getitem__) in EXPOSED_STAGES
    assert max(of_second, key=of_second.__getitem__) == "other"
    assert all(seconds > 0 for stage, seconds in of_first.items())


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
        trace=TraceWindow(2, directory, 3) if directory else None,
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
        assert events["step"] == [f"step {step}" for step in range(2, 5)]
        assert {"row_lookup", "optimizer"} <= {*events["stage"]}
        for name in ("step_p50_s", "samples_per_s", "measured_step_s", "exposed_communication_s"):
            assert summary[name] is None, name
        assert summary["num_steps"] == 4
