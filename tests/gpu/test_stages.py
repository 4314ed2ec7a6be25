"""The stage clock on the device's time line: marks of a pipelined step, some on another stream."""

from __future__ import annotations

import pytest

from hotrec.runtime.ranks import Ranks
from hotrec.runtime.stages import StageClock
from hotrec.train.pipelines import make_pipeline
from hotrec.types import OptimizerKind, PipelineKind, PipelineSpec
from tests.distributed.setups import PARTITIONS, batches, build

pytestmark = pytest.mark.gpu
NUM_STEPS = 6


def test_marks_change_no_result_and_time_goes_forward(gpu: Ranks) -> None:
    losses = []
    clock = StageClock(gpu.device)
    for is_measured in (False, True):
        setup = build(OptimizerKind.adam, PARTITIONS["mixed"], device="cuda")
        pipeline = make_pipeline(
            PipelineSpec(PipelineKind.sparse_dist), setup.model, setup.optimizer, gpu.device
        )
        pipeline.start()
        stream = batches(0, NUM_STEPS)
        losses.append([])
        for _ in range(NUM_STEPS):
            if is_measured:
                with clock.step():
                    loss, _, _ = pipeline.progress(stream)
            else:
                loss, _, _ = pipeline.progress(stream)
            losses[-1].append(float(loss))
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    seconds = clock.seconds()
    assert clock.num_steps == NUM_STEPS
    assert all((stage >= 0).all() for stage in seconds.values())
    # No model of TorchRec's arches here, so what they mark is not there.
    for stage in ("ids_exchange", "row_lookup", "pool", "row_update", "optimizer"):
        assert (seconds[stage][1:-1] > 0).all(), stage
