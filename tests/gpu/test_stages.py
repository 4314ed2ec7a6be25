"""The stage clock on the device's time line: marks of a pipelined step, some on another stream."""

from __future__ import annotations

import pytest

from hotrec.runtime.ranks import Ranks
from hotrec.runtime.stages import StageClock
from tests.exact.case import Case
from tests.exact.training import Training

pytestmark = pytest.mark.gpu
NUM_STEPS = 6
CASE = Case("0", 8, "half", "adam", pipeline="sparse_dist", steps=NUM_STEPS, device="cuda")


def test_marks_change_no_result_and_time_goes_forward(gpu: Ranks) -> None:
    with Training(CASE) as training:
        expected = training.train()
    clock, losses = StageClock(gpu.device), []
    with Training(CASE) as training:
        stream = (training.batch(step) for step in range(NUM_STEPS))
        pipeline = training.pipeline()
        pipeline.start()
        for _ in range(NUM_STEPS):
            with clock.step():
                losses.append(float(pipeline.progress(stream)[0]))
    assert losses == pytest.approx(expected, abs=1e-6)
    seconds = clock.seconds()
    assert clock.num_steps == NUM_STEPS
    assert all((stage >= 0).all() for stage in seconds.values())
    # No model of TorchRec's arches here, so what they mark is not there.
    for stage in ("ids_exchange", "row_lookup", "pool", "row_update", "optimizer"):
        assert (seconds[stage][1:-1] > 0).all(), stage
