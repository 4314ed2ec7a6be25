"""The files of a run, its rates, and the batches of a segment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hotrec.artifact import ArtifactError
from hotrec.train.run_log import Meter, RunLog, SegmentBatches
from hotrec.train.schedule import Segment
from tests.conftest import Time


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_and_events_are_on_disk_at_once(tmp_path: Path) -> None:
    line = {"step": 5, "loss": 0.5, "sent_bytes": {"all_reduce": 8}, "bound_bytes": None}
    with RunLog(tmp_path, start_step=0) as log:
        log.append("metrics.jsonl", "train", line)
        log.append("eval.jsonl", "valid", {"step": 5, "split": "valid", "auc": 0.75})
        # Before it is closed: a run may be killed at any moment.
        assert read_lines(tmp_path / "metrics.jsonl") == [line]
        assert read_lines(tmp_path / "eval.jsonl") == [{"step": 5, "split": "valid", "auc": 0.75}]
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
    tags = ["train/loss", "train/sent_bytes/all_reduce", "valid/auc"]
    assert sorted(events.Tags()["scalars"]) == tags
    (scalar,) = events.Scalars("valid/auc")
    assert (scalar.step, scalar.value) == (5, 0.75)


def test_resumed_run_drops_the_lines_after_its_checkpoint(tmp_path: Path) -> None:
    with RunLog(tmp_path, start_step=0) as log:
        for step in (10, 20, 30):
            log.append("metrics.jsonl", "train", {"step": step, "loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')  # killed while writing
    with RunLog(tmp_path, start_step=20) as log:
        log.append("metrics.jsonl", "train", {"step": 30, "loss": 2.0})
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in lines] == [(10, 1.0), (20, 1.0), (30, 2.0)]


@pytest.mark.parametrize(
    "damage", [b"\xff\x00\x80\n", b"[1, 2]\n", b'{"loss": 1.0}\n', b"null\n", b'{"step": "x"}\n']
)
def test_damaged_lines_are_left_out_and_said(
    damage: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "metrics.jsonl"
    with RunLog(tmp_path, start_step=0) as log:
        log.append("metrics.jsonl", "train", {"step": 10, "loss": 1.0})
    file.write_bytes(damage + file.read_bytes())
    with RunLog(tmp_path, start_step=10):
        assert read_lines(file) == [{"step": 10, "loss": 1.0}]
    assert f"{file}: 1 lines are damaged" in caplog.text


def test_a_record_without_an_end_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "eval.jsonl")
    with pytest.raises(ArtifactError, match=r"eval\.jsonl: expected a text file"):
        RunLog(tmp_path, start_step=0)


def test_summary_is_replaced_whole(tmp_path: Path) -> None:
    with RunLog(tmp_path, start_step=0) as log:
        log.write_summary({"auc": 0.5})
        log.write_summary({"auc": None})
        with pytest.raises(ValueError, match="JSON compliant"):
            log.append("metrics.jsonl", "train", {"step": 1, "loss": float("nan")})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"auc": None}
    assert not list(tmp_path.glob(".*"))


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunLog(None, start_step=0) as log:
        log.append("metrics.jsonl", "train", {"step": 1})
        log.write_summary({})
    assert list(tmp_path.iterdir()) == []


def test_a_figure_that_is_not_declared_is_refused_on_every_rank(tmp_path: Path) -> None:
    for run_dir in (tmp_path, None):
        with RunLog(run_dir, start_step=0) as log:
            for name, prefix in (("metrics.jsonl", "train"), ("hot_set.jsonl", "hot_set")):
                with pytest.raises(ValueError, match=r"^figure (hot_set\.)?rows_per_s: expected"):
                    log.append(name, prefix, {"step": 1, "rows_per_s": 3.0})
                assert not (tmp_path / name).exists()
            with pytest.raises(ValueError, match="^figure rows_per_s: expected"):
                log.write_summary({"auc": 0.5, "rows_per_s": 3.0})
    assert not (tmp_path / "summary.json").exists()


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


def numbered_batches(time: Time) -> Iterator[SimpleNamespace]:
    for number in range(10):
        time.now_s += 2.0
        yield SimpleNamespace(number=number, num_global_samples=number + 1)


def test_segment_takes_its_batches_and_no_more(time: Time) -> None:
    source = numbered_batches(time)
    batches = SegmentBatches(source, Segment(5, 7, evaluate=False, save=False))
    assert list(batches.steps()) == [5, 6, 7]
    assert [batch.number for batch in batches] == [0, 1, 2]
    assert [batches.num_samples(step) for step in (5, 6, 7)] == [1, 2, 3]
    assert batches.wait_s == 6.0
    assert next(source).number == 3


def test_cut_segment_ends_with_the_batches_taken_so_far(time: Time) -> None:
    batches = SegmentBatches(numbered_batches(time), Segment(1, 8, evaluate=False, save=False))
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
