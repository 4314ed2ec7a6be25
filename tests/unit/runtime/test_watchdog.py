"""Progress marks, places, heartbeats through a store, and what is concluded from them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotrec.runtime.ranks import Ranks
from hotrec.runtime.stages import mark
from hotrec.runtime.watchdog import (
    CHECKPOINT,
    COMMUNICATION,
    EVALUATION,
    MAIN,
    STEP,
    Watchdog,
    enter,
    leave,
)
from hotrec.runtime.watchdog.heartbeat import (
    Heartbeat,
    Store,
    Verdict,
    dead,
    failed,
    find_behind,
    silent,
    started_at,
    stuck,
)
from hotrec.runtime.watchdog.progress import Place, place_of_error, place_of_thread, track
from hotrec.runtime.watchdog.watchdog import is_exchange_error


def beat(rank: int, **fields: Any) -> Heartbeat:
    known = Heartbeat(
        rank=rank,
        at_s=1000.0,
        host=f"host-{rank}",
        host_key="key",
        pid=100 + rank,
        age_s=61.0,
        step=41,
        where=f"place {rank}",
        counts={MAIN: 9, COMMUNICATION: 5},
        phase="forward",
        is_waiting=False,
        is_unlimited=False,
    )
    return known._replace(**fields)


def test_progress_of_stages_and_threads() -> None:
    progress = track()
    place = Place("forward", "model.py:7 forward", is_waiting=True)
    assert progress.describe(Place()) == "start"
    enter(MAIN, STEP, 41)
    mark("row_lookup")
    enter(COMMUNICATION, "rows_exchange")
    assert (progress.stage, progress.step) == (STEP, 41)
    assert progress.counts == {MAIN: 2, COMMUNICATION: 1}
    assert progress.describe(place) == (
        "step 41 (after row_lookup; forward, waiting for others, at model.py:7 forward); "
        "communication: rows_exchange"
    )
    enter(MAIN, CHECKPOINT, 40)
    assert progress.describe(Place()).startswith("checkpoint of step 40; communication")
    assert 0 <= progress.age_s < 60
    time.sleep(0.01)
    age_s = progress.age_s
    mark("dense")
    assert progress.age_s < age_s
    leave(COMMUNICATION)
    assert progress.counts == {MAIN: 3}


@pytest.mark.parametrize("is_enabled", [True, False])
def test_place_of_a_thread(is_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, collects = threading.Event(), []
    frames = sys._current_frames

    def noted() -> dict[int, Any]:
        collects.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", noted)
    thread = threading.Thread(target=lambda: goes_on.wait())
    thread.start()
    if not is_enabled:
        gc.disable()
    try:
        deadline = time.monotonic() + 10
        while not (place := place_of_thread(thread.ident or 0)).is_waiting:
            assert time.monotonic() < deadline
        assert place.line.startswith("test_watchdog.py:")
        # Garbage is not collected under the interpreter's lock of thread states.
        assert not any(collects)
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
        goes_on.set()
        thread.join()
    assert place_of_thread(thread.ident or 0) == Place()


def test_place_of_an_error() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("enough")

    loss = Broken.apply(torch.ones(1, requires_grad=True)).sum()
    with pytest.raises(ArithmeticError) as caught:
        loss.backward()
    place = place_of_error(caught.value)
    assert (place.phase, place.is_waiting) == ("backward", False)
    assert place.line.startswith("test_watchdog.py:")
    assert place.line.endswith(" backward")


@pytest.mark.parametrize(
    ("fields", "behind"),
    [
        ([{}, {"counts": {MAIN: 8, COMMUNICATION: 5}}, {}], [1]),  # an earlier stage
        ([{"is_waiting": True}, {}, {"is_waiting": True}], [1]),
        ([{}, {"phase": "loader"}], [1]),
        ([{"phase": "backward"}, {}], [1]),
        ([{"is_waiting": True}, {"is_waiting": True}], []),
        ([{}, {}], []),
        ([{}, {"phase": ""}], []),
        # Exchanges are the same on all ranks, so fewer is behind, whatever else shows.
        ([{}, {"counts": {MAIN: 9, COMMUNICATION: 4}, "is_waiting": True}], [1]),
    ],
)
def test_who_is_behind(fields: list[dict[str, Any]], behind: list[int]) -> None:
    beats = [beat(rank, **of_rank) for rank, of_rank in enumerate(fields)]
    assert [late.rank for late in find_behind(beats)] == behind


def test_messages_name_rank_step_and_place() -> None:
    seen_by = beat(0, at_s=1000.5)
    process = "rank 1 (process 101 on host-1)"
    assert dead([beat(1)], 3, seen_by) == (
        f"step 41: expected 3 ranks, got 2: {process} has died, last seen 0.5 s ago in place 1; "
        "rank 0 waits in place 0."
    )
    beats = {0: beat(0, is_waiting=True), 1: beat(1)}
    assert silent({1: 60.2}, beats, 0, "expected this") == (
        f"step 41: expected this, got no heartbeat from {process} for 60 s, last seen in place "
        "1; rank 0 waits in place 0."
    )
    assert stuck(beats, "expected this") == (
        "step 41: expected this, got rank 1 alive but not moving for 61 s in place 1; "
        "rank 0 waits in place 0."
    )
    alike = stuck({0: beat(0), 1: beat(1)}, "expected this")
    assert "all are alive at the same step: rank 0 in place 0; rank 1 in place 1." in alike
    assert failed(beat(1, step=None), "ValueError: x") == (
        "before the first step: expected all ranks to continue, got an error on rank 1 in place 1: "
        "ValueError: x."
    )


@pytest.mark.parametrize(
    ("waiting", "num_messages"),
    [
        (lambda _: [True, False], 1),
        (lambda look: [look % 2 == 0, look % 2 == 1], 0),
        (lambda look: [True, look % 4 > 0], 0),  # both wait most of the time, for the network
    ],
)
def test_a_straggler_is_reported_once(
    waiting: Any, num_messages: int, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = Watchdog(Ranks(0, 2, 0, 2, torch.device("cpu")))
    looks = iter(range(200))
    watchdog._store = SimpleNamespace(  # type: ignore[assignment]
        read=lambda: {r: beat(r, is_waiting=w) for r, w in enumerate(waiting(next(looks)))}
    )
    for look in range(200):
        if not watchdog._is_straggler_reported:
            watchdog._look_for_straggler()
        assert look >= 19 or not caplog.messages
    found = [message for message in caplog.messages if "the others wait for rank 1" in message]
    assert len(found) == len(caplog.messages) == num_messages


def test_which_errors_are_of_an_exchange() -> None:
    gloo = RuntimeError("[/w/gloo/transport/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:7")
    assert is_exchange_error(gloo)
    assert is_exchange_error(dist.DistNetworkError("x"))
    assert not is_exchange_error(ValueError("Connection closed by peer"))
    assert not is_exchange_error(RuntimeError("step 3: expected a finite loss, got nan."))
    wrapped = RuntimeError("could not save")
    wrapped.__cause__ = gloo
    assert is_exchange_error(wrapped)
    stopped = SystemExit(143)
    assert not is_exchange_error(stopped)
    stopped.__context__ = gloo
    assert is_exchange_error(stopped)


def test_store(tmp_path: Path) -> None:
    file = dist.FileStore(str(tmp_path / "store"), 2)
    stores = [Store(dist.PrefixStore("x", file), 2, "0") for _ in range(2)]
    stores[1].publish(beat(1))
    assert stores[0].read() == {1: beat(1)}
    assert stores[0].verdict() is None
    first = Verdict("rank 1 has died", is_error=True)
    assert stores[0].agree(first.text, is_error=True) == first
    assert stores[1].agree("no, rank 0") == first
    assert stores[1].verdict() == first
    assert Store(dist.PrefixStore("x", file), 2, "1").verdict() is None  # another use


def test_a_store_that_is_gone() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store = Store(dist.TCPStore("127.0.0.1", server.port, is_master=False), 1, "0")
    store.publish(beat(0))
    assert store.read() == {0: beat(0)}
    del server
    with pytest.raises(RuntimeError):
        store.read()


def test_processes_that_are_gone() -> None:
    assert started_at(os.getpid()) == started_at(os.getpid()) is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert started_at(child.pid) is not None
    child.kill()
    deadline = time.monotonic() + 10
    while started_at(child.pid) is not None:  # a zombie is gone, too
        assert time.monotonic() < deadline
    child.communicate()
    assert started_at(child.pid) is None


def test_one_rank_has_nobody_to_watch() -> None:
    ranks = Ranks(0, 1, 0, 1, torch.device("cpu"))
    threads = threading.active_count()
    with Watchdog(ranks):
        assert threading.active_count() == threads
        enter(MAIN, EVALUATION, 4)
    with pytest.raises(ValueError, match="mine"), Watchdog(ranks):
        raise ValueError("mine")
