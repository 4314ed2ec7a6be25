"""Stages over a run: which steps count, how many are kept, and errors against a prediction."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hotrec.runtime import stages
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.stages import mark
from hotrec.train.stage_times import (
    EXPOSED,
    MEASURED,
    MOST_PENDING_STEPS,
    NUM_COLUMNS,
    KeptSteps,
    StageTimes,
    compare,
)
from hotrec.types import STAGES

CPU = torch.device("cpu")


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(stages, "time", time)
    return time


def make_step(times: StageTimes, time: Time, step: int, dense_s: float) -> None:
    """A step of ``dense_s``, 1 s for the optimizer and 2 s outside the pipeline."""
    with times.measuring():
        time.now_s += dense_s
        mark("dense")
        time.now_s += 1.0
    time.now_s += 2.0
    times.end_step(step, dense_s + 3.0)


def rows(values: list[float]) -> np.ndarray:
    return np.repeat(np.asarray(values)[:, None], NUM_COLUMNS, axis=1)


def test_an_even_choice_is_kept() -> None:
    kept = KeptSteps(most_kept=8)
    kept.add(rows([*range(8)]))
    assert kept.medians()[0] == 3.5
    assert kept.num_kept == 8
    kept.add(rows([*range(8, 1000)]))
    assert 4 <= kept.num_kept <= 8
    taken = kept._rows[: kept.num_kept, 0]
    assert taken[0] == 0
    assert len(set(np.diff(taken))) == 1
    assert taken[-1] >= 1000 - 2 * (taken[1] - taken[0])
    kept.clear()
    kept.add(rows([5.0]))
    assert kept.medians().tolist() == [5.0] * NUM_COLUMNS


def test_lines_begin_anew_and_the_run_from_its_step_on(one_rank: Ranks, time: Time) -> None:
    times = StageTimes(CPU, compared_from_step=4)
    for step, dense_s in ((1, 100.0), (2, 100.0), (3, 100.0)):
        make_step(times, time, step, dense_s)
    medians = times.end_line()
    line = dict(zip(STAGES, medians[:EXPOSED], strict=True))
    assert medians[EXPOSED:] == [0.0]
    assert line == {**dict.fromkeys(STAGES, 0.0), "dense": 100.0, "optimizer": 1.0, "other": 2.0}
    assert times.summary() == {**dict.fromkeys(MEASURED), "compared_from_step": 4}
    for step, dense_s in ((4, 10.0), (5, 30.0), (6, 20.0)):
        make_step(times, time, step, dense_s)
    assert times.end_line()[STAGES.index("dense")] == 20.0
    assert np.isnan(times.end_line()).all()
    summary = times.summary()
    assert summary["measured_stage_s"] == {**line, "dense": 20.0}
    assert summary["measured_step_s"] == 23.0
    assert summary["compared_from_step"] == 4


def test_exposed_communication_is_the_median_of_the_sums(one_rank: Ranks, time: Time) -> None:
    times = StageTimes(CPU, compared_from_step=2)
    # In every step another exchange is the slow one, so each alone has a small median.
    for step, waits in enumerate([(500, 500), (9, 1), (1, 9), (4, 6)], start=1):
        with times.measuring():
            for stage, seconds in zip(("rows_exchange", "hot_exchange"), waits, strict=True):
                time.now_s += seconds
                mark(stage)
            time.now_s += 10.0
        times.end_step(step, sum(waits) + 10.0)
        if step == 1:
            assert times.end_line()[EXPOSED] == 1000.0
    assert times.end_line()[EXPOSED] == 10.0
    summary = times.summary()
    assert summary["exposed_communication_s"] == 10.0
    assert summary["slowest_rank_exposed_communication_s"] == 10.0
    assert summary["exposed_communication_frac"] == 0.5
    assert summary["measured_stage_s"]["hot_exchange"] == 6.0


def test_the_clock_is_emptied_on_the_way(time: Time) -> None:
    times = StageTimes(CPU, compared_from_step=0)
    most = 0
    for step in range(3 * MOST_PENDING_STEPS):
        make_step(times, time, step, 1.0)
        most = max(most, times._clock.num_steps)
    assert most < MOST_PENDING_STEPS + 1
    assert times.end_line()[STAGES.index("dense")] == 1.0


def test_errors_have_the_sign_of_the_prediction() -> None:
    prediction = {"step_s": 0.09, "stage_s": {"dense": 0.09}, "total_sent_bytes": 220}
    summary = compare(prediction, {"measured_step_s": 0.1, "sent_bytes_total": 200})
    assert summary["step_error_frac"] == pytest.approx(-0.1)
    assert summary["sent_bytes_error_frac"] == pytest.approx(0.1)
    assert summary["predicted_stage_s"] == {"dense": 0.09}
    # Nothing measured, or nothing sent (one rank): no error to tell.
    summary = compare(prediction, {"measured_step_s": None, "sent_bytes_total": 0})
    assert summary["step_error_frac"] is None
    assert summary["sent_bytes_error_frac"] is None
    assert compare(None, {}) == {}
