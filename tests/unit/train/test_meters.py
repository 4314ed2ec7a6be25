"""Rates, stages and memory of a run: which steps count, and errors of a prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hotrec.runtime.ranks import Ranks
from hotrec.runtime.stages import mark
from hotrec.train import meters
from hotrec.train.meters import Meter, StageTimes, WorkMeter, memory_figures
from hotrec.train.metrics import compare
from hotrec.types import STAGES
from tests.conftest import Time

CPU = torch.device("cpu")


def run_steps(meter: Meter, time: Time, step_s: list[float], is_slowed: bool = False) -> None:
    for seconds in step_s:
        time.now_s += seconds
        meter.end_step(num_samples=10, wait_s=0.25, is_slowed=is_slowed)


def test_rates_leave_out_warm_up_slowed_steps_and_pauses(time: Time) -> None:
    meter = Meter(warmup_steps=2)
    run_steps(meter, time, [50.0, 60.0])
    assert meter.end_interval()["step_p50_s"] is None
    run_steps(meter, time, [1.0, 2.0])
    run_steps(meter, time, [70.0], is_slowed=True)
    time.now_s += 500.0  # an evaluation
    meter.restart_clock()
    run_steps(meter, time, [3.0])
    rates = {
        "samples_per_s": pytest.approx(30 / 6),
        "step_p50_s": pytest.approx(2.0),
        "step_p90_s": pytest.approx(np.percentile([1.0, 2.0, 3.0], 90)),
    }
    assert meter.end_interval() == rates
    assert meter.total() == {**rates, "data_wait_frac": pytest.approx(0.75 / 6)}
    run_steps(meter, time, [10.0])
    assert meter.end_interval()["step_p50_s"] == pytest.approx(10.0)  # it starts anew
    assert meter.total()["step_p50_s"] == pytest.approx(2.5)  # the total does not


def make_step(times: StageTimes, time: Time, step: int, **stage_s: float) -> None:
    """A step of these stages, 1 s for the optimizer and 2 s outside the pipeline."""
    with times.measuring():
        for stage, seconds in stage_s.items():
            time.now_s += seconds
            mark(stage)
        time.now_s += 1.0
    time.now_s += 2.0
    times.end_step(step, sum(stage_s.values()) + 3.0)


def test_lines_begin_anew_and_the_run_from_its_step_on(one_rank: Ranks, time: Time) -> None:
    times = StageTimes(CPU, compared_from_step=4)
    for step in (1, 2, 3):
        make_step(times, time, step, dense=100.0)
    line = times.end_line()
    assert line["exposed_communication_s"] == 0.0
    stage_s = {**dict.fromkeys(STAGES, 0.0), "dense": 100.0, "optimizer": 1.0, "other": 2.0}
    assert line["stage_s"] == stage_s
    assert times.summary()["measured_step_s"] is None
    # In every step another exchange is the slow one, so each alone has a small median.
    for step, (rows_s, hot_s) in enumerate([(9, 1), (1, 9), (4, 6)], start=4):
        make_step(times, time, step, rows_exchange=rows_s, hot_exchange=hot_s, dense=7.0)
    assert times.end_line()["exposed_communication_s"] == 10.0
    assert np.isnan([*times.end_line()["stage_s"].values()]).all()
    summary = times.summary()
    assert summary["measured_step_s"] == 20.0
    assert summary["exposed_communication_frac"] == 0.5
    expected = {**stage_s, "dense": 7.0, "rows_exchange": 4.0, "hot_exchange": 6.0}
    assert summary["measured_stage_s"] == expected


def test_memory_is_that_of_the_rank_with_most(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"hot_rows": {"device": 30, "host": 0}, "cold_rows": {"device": 0, "host": 500}}
    second = {"hot_rows": {"device": 30, "host": 0}, "cold_rows": {"device": 40, "host": 100}}

    def gather(own: dict[str, Any]) -> list[Any]:
        of_ranks.append(own)
        return of_ranks

    of_ranks: list[dict[str, Any]] = []
    monkeypatch.setattr(meters, "all_gather_object", gather)
    memory_figures(CPU, second)
    of_ranks[0]["peak_resident_bytes"] = 1 << 60
    found = memory_figures(CPU, first)
    assert found["peak_resident_bytes"] == 1 << 60
    assert (found["measured_device_bytes"], found["measured_host_bytes"]) == (70, 500)


def test_errors_have_the_sign_of_the_prediction() -> None:
    prediction: dict[str, Any] = {"step_s": 0.09, "stage_s": {}, "total_sent_bytes": 220}
    prediction["memory"] = [{"device_bytes": b, "host_bytes": 1.0} for b in (56.0, 50.0)]
    measured = {"measured_step_s": 0.1, "sent_bytes_total": 200, "measured_device_bytes": 70}
    found = compare(prediction, {**measured, "measured_host_bytes": 0})
    assert found["predicted_device_bytes"] == 56.0  # of the fullest rank
    errors = {"step": -0.1, "sent_bytes": 0.1, "device_bytes": -0.2}
    for name, error in errors.items():
        assert found[f"{name}_error_frac"] == pytest.approx(error)
    # Nothing measured, nothing sent (one rank): no error to tell.
    del prediction["memory"]
    found = compare(prediction, {"measured_step_s": None, "sent_bytes_total": 0})
    assert found["step_error_frac"] is found["sent_bytes_error_frac"] is None
    assert compare(None, {}) == {}


def test_work_of_the_busiest_rank_over_the_mean() -> None:
    of_ranks = [WorkMeter(Ranks(rank, 3, rank, 3, CPU)) for rank in range(3)]

    def check_up() -> None:
        counts = [meter.counts() for meter in of_ranks]
        assert len({tuple(count) for count in counts}) == 1
        sums = {key: sum(count[key] for count in counts) for key in counts[0]}
        for meter in of_ranks:
            meter.add(sums)

    def ratios(of: str) -> list[float | None]:
        return [getattr(meter, of)() for meter in of_ranks]

    check_up()
    assert ratios("end_line") == ratios("total") == [None] * 3
    for works in ((3, 6, 0), (1, 1, 4)):
        for meter, work in zip(of_ranks, works, strict=True):
            meter.end_step(work)
    check_up()
    assert ratios("end_line") == ratios("total") == [(6 + 4) / (3 + 2)] * 3
    for meter in of_ranks:
        meter.end_step(5)
    check_up()
    assert ratios("end_line") == [1.0] * 3
    assert ratios("total") == [(6 + 4 + 5) / (3 + 2 + 5)] * 3
    of_ranks[0].end_step(None)
    assert of_ranks[0].counts() == {}
