"""The picture of traces: which bars are drawn, from traces made by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import trace_picture
from benchmarks.trace_picture import Bar, choose_colors, draw, lanes_of, without_first
from hotrec.report.style import to_png
from hotrec.train.trace import RANGE, STAGE, STAGE_LANE, STEP, read_trace, write_trace

MAIN, COMMUNICATION, GLOO = 11, 12, 13
EPOCH_US = 4.4e12
# A step of 100 ms: stage and milliseconds.
STAGES = (("route", 10), ("dense", 20), ("dense", 10), ("rows_exchange", 50), ("optimizer", 10))


def bar(kind: str, name: str, thread: int, start_ms: float, end_ms: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": 0,
        "tid": thread,
        "ts": EPOCH_US + start_ms * 1e3,
        "dur": (end_ms - start_ms) * 1e3,
    }


def make_trace(num_steps: int = 3, *more: dict[str, Any]) -> dict[str, Any]:
    """Steps of 100 ms with 10 ms in between."""
    names = ((MAIN, "main thread"), (COMMUNICATION, "hotrec communication"))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "ts": 0, "args": {"name": name}}
        for tid, name in names
    ]
    for step in range(num_steps):
        at_ms = 110.0 * step
        events.append(bar(STEP, f"step {step + 20}", STAGE_LANE, at_ms, at_ms + 100))
        for stage, took_ms in STAGES:
            events.append(bar(STAGE, stage, STAGE_LANE, at_ms, at_ms + took_ms))
            at_ms += took_ms
    return {"baseTimeNanoseconds": 0, "traceEvents": [*events, *more], "hotrec": {"rank": 0}}


def test_stages_become_bars() -> None:
    lanes = lanes_of("plain", make_trace())
    assert [step for step, _ in lanes.steps] == [20, 21, 22]
    first = [(b.name, b.start_s, b.end_s) for b in lanes.stages[:4]]
    assert first == [
        ("route", 0.0, pytest.approx(0.01)),
        ("dense", pytest.approx(0.01), pytest.approx(0.04)),  # two neighbours as one
        ("rows_exchange", pytest.approx(0.04), pytest.approx(0.09)),
        ("optimizer", pytest.approx(0.09), pytest.approx(0.1)),
    ]
    assert lanes.step_s == pytest.approx(0.11)  # to the next step's start
    assert lanes.exposed_s == pytest.approx(0.05)
    assert not lanes.communication
    assert lanes_of("one", make_trace(1)).step_s == pytest.approx(0.1)


def test_ranges_come_before_collectives() -> None:
    collectives = (
        bar("user_annotation", "gloo:all_to_all", GLOO, 40, 90),
        bar("kernel", "ncclDevKernel_AllReduce", GLOO, 91, 92),
        bar("user_annotation", "nccl:all_reduce", MAIN, 1, 2),  # only asks for it
        bar("user_annotation", "gloo:all_to_all", GLOO, 500, 600),  # after the last step
    )
    lanes = lanes_of("plain", make_trace(2, *collectives))
    assert lanes.thread == "collectives"
    assert lanes.communication == [
        Bar("collective", pytest.approx(0.04), pytest.approx(0.09)),
        Bar("collective", pytest.approx(0.091), pytest.approx(0.092)),
    ]
    ranges = (
        bar(RANGE, "inside", COMMUNICATION, 20, 30),
        bar(RANGE, "late gradients", COMMUNICATION, 20, 60),
        bar(RANGE, "dense", MAIN, 0, 10),
    )
    lanes = lanes_of("ahead", make_trace(2, *collectives, *ranges))
    assert lanes.thread == "communication thread"
    assert [b.name for b in lanes.communication] == ["late gradients", "inside"]  # drawn over
    colors = choose_colors([lanes])
    assert len({colors[name] for name in ("late gradients", "inside", "rows_exchange")}) == 3


def test_a_picture_is_drawn() -> None:
    traces = [
        lanes_of("slow", make_trace(3)),
        lanes_of("fast", make_trace(2, bar(RANGE, "ids_exchange", COMMUNICATION, 0, 50))),
    ]
    figure = draw(traces, num_steps=2)
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() == (0.0, pytest.approx(210.0))
    assert above.get_title(loc="left") == (
        "slow: 110 ms a step, of which the main thread waits 50.0 ms for other ranks (45.5%)"
    )
    assert [label.get_text() for label in below.get_yticklabels()] == [
        "main thread",
        "communication thread",
    ]
    hatched = [c for c in above.collections if c.get_hatch()]
    assert len(hatched) == 2  # the wait of each step
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "route",
        "dense",
        "optimizer",
        "ids exchange",
        "rows exchange",
        "waits (exposed)",
    ]
    assert to_png(figure).startswith(b"\x89PNG")


def test_first_steps_are_left_out() -> None:
    trace = make_trace(3)
    assert [step for step, _ in lanes_of("later", without_first(trace, 2)).steps] == [22]
    with pytest.raises(ValueError, match="expected more than 3 steps, got 3"):
        without_first(trace, 3)
    with pytest.raises(ValueError, match="trace none: expected events"):
        lanes_of("none", make_trace(0))


def test_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.json.gz", tmp_path / "b.json.gz"]
    for path in paths:
        write_trace(make_trace(), path)
    words = [f"a={paths[0]}", f"b={paths[1]}"]
    monkeypatch.setattr(sys, "argv", ["trace_picture", "-o", str(tmp_path / "p.png"), *words])
    trace_picture.main()
    figures = json.loads(capsys.readouterr().out)
    assert figures["a"] == {
        "step_s": pytest.approx(0.11),
        "exposed_communication_s": pytest.approx(0.05),
        "num_steps": 2,
    }
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    merged = tmp_path / "merged.json.gz"
    monkeypatch.setattr(sys, "argv", ["trace_picture", "--merge", "-o", str(merged), *words])
    trace_picture.main()
    num_events = len(make_trace()["traceEvents"])
    assert len(read_trace(merged)["traceEvents"]) == 2 * num_events
