"""The records of a run directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hotrec.train.ahead import NEXT_DAY, read_evaluated
from hotrec.train.run_log import RunLog


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


@pytest.mark.parametrize("damage", [b"\xff\x00\x80\n", b'{"loss": 1.0}\n', b"null\n"])
def test_damaged_lines_are_left_out_and_said(
    damage: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "metrics.jsonl"
    with RunLog(tmp_path, start_step=0) as log:
        log.append("metrics.jsonl", "train", {"step": 10, "loss": 1.0})
    file.write_bytes(damage + file.read_bytes())
    with RunLog(tmp_path, start_step=10):
        assert read_lines(file) == [{"step": 10, "loss": 1.0}]
    assert str(file) in caplog.text


def test_a_new_run_takes_nothing_of_the_run_before(tmp_path: Path) -> None:
    file = tmp_path / "eval.jsonl"
    file.write_text(json.dumps({"step": 0, "split": NEXT_DAY, "day": "1", "auc": 0.5}) + "\n")
    assert len(read_evaluated(file, 1)) == 1
    assert read_evaluated(file, 0) == []
    with RunLog(tmp_path, start_step=0):
        assert file.read_text() == ""


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
