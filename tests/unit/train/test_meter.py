from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from hotrec.train import run_log as meter_module
from hotrec.train.run_log import Meter, SegmentBatches
from hotrec.train.schedule import Segment


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", clock)
    return clock


def run_steps(meter: Meter, clock: Clock, step_s: list[float], **values: object) -> None:
    for seconds in step_s:
        clock.now_s += seconds
        meter.end_step(**{"num_samples": 10, "wait_s": 0.25, **values})  # type: ignore[arg-type]


def test_rates_leave_out_warm_up_slowed_steps_and_pauses(clock: Clock) -> None:
    meter = Meter(warmup_steps=2)
    run_steps(meter, clock, [50.0, 60.0])
    assert meter.end_interval().step_p50_s is None
    run_steps(meter, clock, [1.0, 2.0])
    run_steps(meter, clock, [70.0], is_slowed=True)
    clock.now_s += 500.0  # an evaluation
    meter.restart_clock()
    run_steps(meter, clock, [3.0])
    interval = meter.end_interval()
    assert interval.step_p50_s == pytest.approx(2.0)
    assert interval.step_p90_s == pytest.approx(np.percentile([1.0, 2.0, 3.0], 90))
    assert interval.samples_per_s == pytest.approx(30 / 6)
    assert meter.data_wait_frac == pytest.approx(0.75 / 6)


def test_interval_starts_anew_and_total_does_not(clock: Clock) -> None:
    meter = Meter(warmup_steps=0)
    run_steps(meter, clock, [1.0])
    assert meter.end_interval().step_p50_s == pytest.approx(1.0)
    run_steps(meter, clock, [3.0])
    assert meter.end_interval().step_p50_s == pytest.approx(3.0)
    assert meter.end_interval().samples_per_s is None
    assert meter.total().step_p50_s == pytest.approx(2.0)


def numbered_batches(num_batches: int) -> Iterator[SimpleNamespace]:
    for number in range(num_batches):
        yield SimpleNamespace(number=number, num_global_samples=number + 1)


def test_segment_takes_its_batches_and_no_more() -> None:
    source = numbered_batches(10)
    batches = SegmentBatches(source, Segment(5, 7, evaluate=False, save=False))
    assert list(batches.steps()) == [5, 6, 7]
    assert [batch.number for batch in batches] == [0, 1, 2]
    assert [batches.num_samples(step) for step in (5, 6, 7)] == [1, 2, 3]
    assert next(source).number == 3


def test_cut_segment_ends_with_the_batches_taken_so_far() -> None:
    batches = SegmentBatches(numbered_batches(10), Segment(1, 8, evaluate=False, save=False))
    made = []
    for step in batches.steps():
        if step == 1:
            next(batches), next(batches)  # a pipeline fills itself first
        next(batches, None)
        made.append(step)
        if step == 3:
            batches.cut()
    # 2 ahead and one in each of the steps 1 to 3: 5 batches that have to be computed.
    assert made == [1, 2, 3, 4, 5]
    assert next(batches, None) is None


def test_waiting_for_data_is_timed() -> None:
    def slow() -> Iterator[SimpleNamespace]:
        for batch in numbered_batches(3):
            time.sleep(0.02)
            yield batch

    batches = SegmentBatches(slow(), Segment(1, 3, evaluate=False, save=False))
    list(batches)
    assert 0.06 <= batches.wait_s < 1.0
