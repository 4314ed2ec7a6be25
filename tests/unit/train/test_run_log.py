from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hotrec.train.run_log import RunLog


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_and_events_are_on_disk_at_once(tmp_path: Path) -> None:
    with RunLog(tmp_path, start_step=0) as log:
        log.write_metrics(
            {"step": 5, "loss": 0.5, "sent_bytes": {"all_reduce": 8}, "bound_bytes": None}
        )
        log.write_eval({"step": 5, "split": "valid", "auc": 0.75})
        # Before it is closed: a run may be killed at any moment.
        (metrics,) = read_lines(tmp_path / "metrics.jsonl")
        (evaluation,) = read_lines(tmp_path / "eval.jsonl")
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
    assert metrics["sent_bytes"] == {"all_reduce": 8}
    assert evaluation == {"step": 5, "split": "valid", "auc": 0.75}
    assert sorted(events.Tags()["scalars"]) == [
        "train/loss",
        "train/sent_bytes/all_reduce",
        "valid/auc",
    ]
    (scalar,) = events.Scalars("valid/auc")
    assert (scalar.step, scalar.value) == (5, 0.75)


def test_resumed_run_drops_the_lines_after_its_checkpoint(tmp_path: Path) -> None:
    with RunLog(tmp_path, start_step=0) as log:
        for step in (10, 20, 30):
            log.write_metrics({"step": step, "loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')  # killed while writing
    with RunLog(tmp_path, start_step=20) as log:
        log.write_metrics({"step": 30, "loss": 2.0})
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in lines] == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_summary_is_replaced_whole(tmp_path: Path) -> None:
    with RunLog(tmp_path, start_step=0) as log:
        log.write_summary({"auc": 0.5})
        log.write_summary({"auc": None})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"auc": None}
    assert not list(tmp_path.glob(".*"))


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with RunLog(None, start_step=0) as log:
        log.write_metrics({"step": 1})
        log.write_eval({"step": 1, "split": "valid"})
        log.write_summary({})
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_json_is_refused(tmp_path: Path) -> None:
    with RunLog(tmp_path, start_step=0) as log, pytest.raises(ValueError, match="JSON compliant"):
        log.write_metrics({"step": 1, "loss": float("nan")})
