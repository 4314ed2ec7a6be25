"""The picture of traces: which bars are drawn, from traces made by hand."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import trace_picture
from benchmarks.trace_picture import Bar, Trace, draw, read_trace
from hotrec.runtime.stages import RANGE_PREFIX
from hotrec.train.trace import STAGE, STAGE_LANE, STEP_PREFIX

MAIN, COMMUNICATION, GLOO = 11, 12, 13
EPOCH_US = 4.4e12
# A step of 100 ms: stage and milliseconds.
STAGES = (("route", 10), ("dense", 20), ("dense", 10), ("rows_exchange", 50), ("optimizer", 10))


def event(cat: str, name: str, tid: int, start_ms: float, end_ms: float) -> dict[str, Any]:
    times = {"ts": EPOCH_US + start_ms * 1e3, "dur": (end_ms - start_ms) * 1e3}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, **times}


def ranged(name: str, tid: int, start_ms: float, end_ms: float) -> dict[str, Any]:
    return event("user_annotation", RANGE_PREFIX + name, tid, start_ms, end_ms)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank0.json.gz"


def write(path: Path, num_steps: int, *more: dict[str, Any]) -> None:
    """Write a trace of steps of 100 ms, 10 ms apart."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {}}]
    for step in range(num_steps):
        at_ms = 110.0 * step
        name = f"{STEP_PREFIX}{step + 20}"
        events.append(event("user_annotation", name, MAIN, at_ms, at_ms + 100))
        for stage, took_ms in STAGES:
            events.append(event(STAGE, stage, STAGE_LANE, at_ms, at_ms + took_ms))
            at_ms += took_ms
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, *more]}).encode()))


def bars(found: list[Bar]) -> list[tuple[str, int, int]]:
    return [(bar.name, round(bar.start_ms), round(bar.end_ms)) for bar in found]


def test_stages_become_bars(path: Path) -> None:
    write(path, 4)
    trace = read_trace("plain", path, skip=1)
    assert bars(trace.steps) == [
        ("step 21", 0, 100),
        ("step 22", 110, 210),
        ("step 23", 220, 320),
    ]
    assert bars(trace.stages[:5]) == [
        ("route", 0, 10),
        ("dense", 10, 30),
        ("dense", 30, 40),
        ("rows_exchange", 40, 90),
        ("optimizer", 90, 100),
    ]
    assert trace.step_s == pytest.approx(0.11)
    assert trace.exposed_s == pytest.approx(0.05)
    assert not trace.communication
    with pytest.raises(ValueError, match=r"rank0.*: expected at least 5 steps, got 4\."):
        read_trace("plain", path, skip=3)


def test_named_ranges_hide_collectives(path: Path) -> None:
    collectives = (
        event("user_annotation", "gloo:all_to_all", GLOO, 40, 90),
        event("kernel", "ncclDevKernel_AllReduce", GLOO, 91, 92),
        event("kernel", "gemm", GLOO, 93, 94),
        event("user_annotation", "nccl:all_reduce", MAIN, 1, 2),  # only starts it
        event("user_annotation", "gloo:all_to_all", GLOO, 500, 600),  # after the last step
    )
    write(path, 2, *collectives)
    found = bars(read_trace("plain", path).communication)
    assert found == [("collective", 40, 90), ("collective", 91, 92)]
    ranges = (
        ranged("inside", COMMUNICATION, 20, 30),
        ranged("late gradients", COMMUNICATION, 20, 60),
        ranged("dense", MAIN, 0, 10),
    )
    write(path, 2, *collectives, *ranges)
    found = bars(read_trace("ahead", path).communication)
    assert found == [("late gradients", 20, 60), ("inside", 20, 30)]  # the nested one on top


def test_the_program_draws_all_traces_on_one_scale(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(path, 3, ranged("late gradients", COMMUNICATION, 0, 50))
    picture = path.with_name("picture.png")
    words = ["--skip=0", f"a={path}", f"b={path}", "-o", str(picture)]
    monkeypatch.setattr(sys, "argv", ["trace_picture", *words])
    trace_picture.main()
    figures = {"step_s": pytest.approx(0.11), "exposed_s": pytest.approx(0.05)}
    assert json.loads(capsys.readouterr().out) == {"a": figures, "b": figures}
    assert picture.read_bytes().startswith(b"\x89PNG")

    slow = read_trace("slow", path)
    fast = Trace("fast", slow.steps[:2], slow.stages[:10], [])
    figure = draw([slow, fast], num_steps=2)
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim()
    assert above.get_xlim()[1] == pytest.approx(210.0)
    assert "110 ms a step, of which the main thread waits 50.0 ms" in above.get_title(loc="left")
    assert len([c for c in above.collections if c.get_hatch()]) == 2  # the wait of each step
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    stages = ["route", "dense", "optimizer", "rows exchange"]
    assert names == [*stages, "late gradients", "waits (exposed)"]
