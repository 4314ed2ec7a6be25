"""Traces: which steps, what of the profiler's file is changed, and a real one of this process."""

from __future__ import annotations

import gzip
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler

from hotrec.cli.store import build_config, compose_config
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.stages import RANGE_PREFIX, StepIntervals, mark, named_range
from hotrec.train.trace import (
    PIDS_PER_RANK,
    RANGE,
    STAGE,
    STAGE_LANE,
    STEP,
    Tracer,
    TraceWindow,
    _warning_of_syncs,
    build_trace,
    merge_traces,
    read_trace,
    write_trace,
)

SYNC = "hotrec trace clock"
CPU = torch.device("cpu")


def ranks_of(rank: int, world_size: int, device: str = "cpu") -> Ranks:
    return Ranks(rank, world_size, rank, world_size, torch.device(device))


def event(name: str, ts: float, dur: float = 1.0, **fields: Any) -> dict[str, Any]:
    own = {"ph": "X", "cat": "cpu_op", "pid": os.getpid(), "tid": 11}
    return {**own, "name": name, "ts": ts, "dur": dur, **fields}


def document(*events: dict[str, Any]) -> dict[str, Any]:
    syncs = [event(SYNC, 900.0), event(SYNC, 1000.0)]
    return {"baseTimeNanoseconds": 5_000, "traceEvents": [*syncs, *events]}


def built(*events: dict[str, Any], ranks: Ranks, steps: Any = ()) -> dict[str, Any]:
    made = document(*events)
    names = {11: "main thread", 12: "hotrec communication"}
    build_trace(made, ranks, steps, sync_s=2.0, thread_names=names)
    return made


def of_kind(made: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [e for e in made["traceEvents"] if e.get("cat") == kind]


def test_every_thread_has_a_name(one_rank: Ranks) -> None:
    """Also one that the profiler tells events of and no name."""
    told = event("thread_name", 0.0, ph="M", args={"name": "thread 11 (python)"})
    events = [event("a", 1.0), event("b", 1.0, tid=12), event("c", 1.0, tid=13)]
    made = built(told, *events, ranks=one_rank)
    names = [
        (e["tid"], e["args"]["name"]) for e in made["traceEvents"] if e["name"] == "thread_name"
    ]
    assert {(11, "main thread"), (12, "hotrec communication"), (13, "thread 13")} <= set(names)
    assert len({tid for tid, _ in names}) == len(names)


def test_a_window_is_counted_from_this_start(tmp_path: Path, one_rank: Ranks) -> None:
    window = TraceWindow(3, 2, tmp_path)
    tracer = Tracer(window, one_rank, start_step=100, num_steps=104)
    assert [step for step in range(90, 120) if tracer.is_due(step)] == [103, 104]
    assert [step for step in range(90, 120) if tracer.is_last(step)] == [104]
    nothing = Tracer(None, one_rank, start_step=0, num_steps=9)
    assert not any(nothing.is_due(step) or nothing.is_last(step) for step in range(12))


def test_a_run_too_short_for_its_window(
    tmp_path: Path, one_rank: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    window = TraceWindow(3, 2, tmp_path)
    with pytest.raises(ValueError, match=r"steps 3 to 4 .* got 1 to 3\. Lower profiler.first_step"):
        Tracer(window, one_rank, start_step=0, num_steps=3)
    with caplog.at_level(logging.WARNING):
        tracer = Tracer(window, one_rank, start_step=100, num_steps=103)
    assert not any(tracer.is_due(step) for step in range(90, 120))
    assert "expected steps 103 to 104" in caplog.text


def test_syncs_are_asked_of_cuda_alone(one_rank: Ranks, tmp_path: Path) -> None:
    window = TraceWindow(1, 1, tmp_path, warn_of_syncs=True)
    with pytest.raises(ValueError, match=r"^profiler\.warn_of_syncs: expected a CUDA .*, got cpu"):
        Tracer(window, one_rank, start_step=0, num_steps=3)


def test_cuda_warns_of_syncs_in_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def fail() -> None:
        with _warning_of_syncs(True):
            assert modes == [0, "warn"]
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        fail()
    assert modes == [0, "warn", 0]
    with _warning_of_syncs(False):
        assert modes == [0, "warn", 0]


def test_events_come_under_their_rank() -> None:
    made = built(
        event("aten::mm", 1001.0),
        event("kernel", 1001.0, pid=0, tid=7, cat="kernel"),
        event("a span over everything", 1.0, pid="Spans", cat="Trace"),
        event("arrow", 1002.0, ph="s", cat="fwdbwd", id=3),
        event("thread_name", 0.0, ph="M", tid=12, args={"name": "thread 12 (python)"}),
        event("thread_name", 0.0, ph="M", tid=13, args={"name": "thread 13 (pt_gloo_runloop)"}),
        event("thread_sort_index", 0.0, ph="M", args={"sort_index": 11}),
        ranks=ranks_of(3, 4),
    )
    host = 3 * PIDS_PER_RANK
    assert {e["name"]: e["pid"] for e in made["traceEvents"] if e["ph"] != "M"} == {
        "aten::mm": host,
        "kernel": host + 1,
        "arrow": host,
    }
    assert [e["id"] for e in made["traceEvents"] if e["ph"] == "s"] == [3 * 4 + 3]
    names = {e["tid"]: e["args"]["name"] for e in made["traceEvents"] if e["name"] == "thread_name"}
    assert names == {
        11: "main thread",
        12: "hotrec communication",
        13: "thread 13 (pt_gloo_runloop)",
        STAGE_LANE: "stages of the main thread",
    }
    (process,) = (e for e in made["traceEvents"] if e["name"] == "process_name")
    assert process["args"]["name"].startswith("rank 3 of 4 on ")
    orders = [e for e in made["traceEvents"] if e["name"] == "thread_sort_index"]
    assert {e["tid"]: e["args"]["sort_index"] for e in orders} == {11: -1, STAGE_LANE: -2}
    assert made["hotrec"] == {"rank": 3, "world_size": 4, "steps": [], "device": "cpu"}


def test_ranges_lose_their_prefix() -> None:
    made = built(
        event(f"{RANGE_PREFIX}late gradients", 1001.0, tid=12, cat="user_annotation"),
        event(f"{RANGE_PREFIX}rows_exchange", 1001.0, pid=0, tid=7, cat="gpu_user_annotation"),
        event("Optimizer.step", 1001.0, cat="user_annotation"),
        ranks=ranks_of(0, 2, "cuda"),
    )
    assert [(e["name"], e["tid"]) for e in of_kind(made, RANGE)] == [("late gradients", 12)]
    assert of_kind(made, "gpu_user_annotation")[0]["name"] == "rows_exchange"
    assert [e["name"] for e in of_kind(made, "user_annotation")] == ["Optimizer.step"]


def test_stages_lie_where_they_were() -> None:
    """The last clock event began at 1000 us of the file, when perf_counter said 2 s."""
    steps = [
        (8, StepIntervals(2.001, 2.004, [("dense", 2.001, 2.003), ("optimizer", 2.003, 2.004)])),
        (9, StepIntervals(2.5, 2.5001, [("optimizer", 2.5, 2.5001)])),
    ]
    made = built(ranks=ranks_of(0, 1), steps=steps)
    found = [(e["name"], e["ts"], e["ts"] + e["dur"], e["tid"]) for e in of_kind(made, STAGE)]
    assert found == [
        ("dense", pytest.approx(2000.0), pytest.approx(4000.0), STAGE_LANE),
        ("optimizer", pytest.approx(4000.0), pytest.approx(5000.0), STAGE_LANE),
        ("optimizer", pytest.approx(501_000.0), pytest.approx(501_100.0), STAGE_LANE),
    ]
    assert [(e["name"], e["ts"], e["dur"]) for e in of_kind(made, STEP)] == [
        ("step 8", pytest.approx(2000.0), pytest.approx(3000.0)),
        ("step 9", pytest.approx(501_000.0), pytest.approx(100.0)),
    ]
    assert made["hotrec"]["steps"] == [8, 9]


def test_a_trace_without_the_clock() -> None:
    made = {"baseTimeNanoseconds": 0, "traceEvents": [event("aten::mm", 1.0)]}
    with pytest.raises(RuntimeError, match="expected events .* got none among 1"):
        build_trace(made, ranks_of(0, 1), [], sync_s=0.0, thread_names={})


def test_traces_are_merged_on_one_clock() -> None:
    first = built(event("a", 1001.0), ranks=ranks_of(0, 2))
    second = built(event("b", 1001.0), ranks=ranks_of(1, 2))
    second["baseTimeNanoseconds"] += 3_000_000
    merged = merge_traces([second, first])
    times = {e["name"]: e["ts"] for e in merged["traceEvents"] if e["ph"] == "X"}
    assert times == {"a": 1001.0, "b": 4001.0}
    assert merged["baseTimeNanoseconds"] == 5_000
    assert {e["pid"] for e in merged["traceEvents"]} == {0, PIDS_PER_RANK}


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected gzipped JSON"):
        read_trace(tmp_path / "none.json.gz")
    (tmp_path / "text.json.gz").write_bytes(gzip.compress(b"[1,"))
    with pytest.raises(ValueError, match="expected gzipped JSON"):
        read_trace(tmp_path / "text.json.gz")
    write_trace({"traceEvents": []}, tmp_path / "other.json.gz")
    with pytest.raises(ValueError, match="expected a trace with the field 'hotrec'"):
        read_trace(tmp_path / "other.json.gz")


class Communicator:
    """A thread that is older than the profiler, as a pipeline's is."""

    def __init__(self) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="hotrec communication")
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            if self._ends:
                return
            with named_range("rows_exchange"):
                torch.ones(3).sum()
            self._done.release()

    def exchange(self) -> None:
        self._go.release()
        self._done.acquire()

    def close(self) -> None:
        self._ends = True
        self._go.release()
        self._thread.join()


def step_once(communicator: Communicator) -> None:
    mark("other")
    weight = torch.ones(3, requires_grad=True)
    with named_range("dense"):
        weight.sum().backward()
    mark("dense")
    communicator.exchange()
    mark("rows_exchange")


def test_a_trace_of_this_process(tmp_path: Path, one_rank: Ranks) -> None:
    communicator = Communicator()
    window = TraceWindow(2, 2, tmp_path / "traces")
    try:
        with Tracer(window, one_rank, start_step=0, num_steps=5) as tracer:
            for step in range(1, 6):
                if tracer.is_due(step):
                    with tracer.step(step):
                        step_once(communicator)
                else:
                    step_once(communicator)
                if tracer.is_last(step):
                    tracer.write()
    finally:
        communicator.close()
    assert not profiler._is_profiler_enabled
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "rank0.json.gz"
    made = read_trace(path)
    assert made["hotrec"]["steps"] == [2, 3]
    assert [e["name"] for e in of_kind(made, STEP)] == ["step 2", "step 3"]
    stages = ["other", "dense", "rows_exchange", "optimizer"]
    assert [e["name"] for e in of_kind(made, STAGE)] == stages * 2
    names = {e["tid"]: e["args"]["name"] for e in made["traceEvents"] if e["name"] == "thread_name"}
    ranges = [(names[e["tid"]], e["name"]) for e in of_kind(made, RANGE)]
    assert sorted(ranges) == [
        ("hotrec communication", "rows_exchange"),
        ("hotrec communication", "rows_exchange"),
        ("main thread", "dense"),
        ("main thread", "dense"),
    ]
    # Inside the range of the other thread, its operators were recorded as well.
    operators = {e["name"] for e in of_kind(made, "cpu_op") if names[e["tid"]] != "main thread"}
    assert "aten::sum" in operators


def test_a_run_that_stops_early_leaves_what_it_has(tmp_path: Path, one_rank: Ranks) -> None:
    window = TraceWindow(1, 3, tmp_path)
    with Tracer(window, one_rank, start_step=0, num_steps=5) as tracer:
        for step in (1, 2):
            with tracer.step(step):
                mark("dense")
    assert read_trace(tmp_path / "rank0.json.gz")["hotrec"]["steps"] == [1, 2]
    failed = TraceWindow(1, 3, tmp_path / "failed")
    with (
        pytest.raises(ZeroDivisionError),
        Tracer(failed, one_rank, start_step=0, num_steps=5) as tracer,
        tracer.step(1),
    ):
        raise ZeroDivisionError
    assert not profiler._is_profiler_enabled
    assert not (tmp_path / "failed").exists()


def test_a_trace_that_cannot_be_written(tmp_path: Path, one_rank: Ranks) -> None:
    (tmp_path / "file").write_text("")

    def trace_one_step() -> None:
        window = TraceWindow(1, 1, tmp_path / "file")
        with Tracer(window, one_rank, start_step=0, num_steps=1) as tracer:
            with tracer.step(1):
                mark("dense")
            tracer.write()

    with pytest.raises(FileExistsError, match="file"):
        trace_one_step()
    assert not profiler._is_profiler_enabled


def test_the_configuration_chooses_the_window() -> None:
    assert build_config(compose_config("config", [])).profiler.kind.name == "none"
    words = ["profiler=trace", "profiler.first_step=7"]
    chosen = build_config(compose_config("config", words)).profiler
    assert json.dumps([chosen.kind.name, chosen.first_step, chosen.num_steps]) == '["trace", 7, 5]'
