"""Progress marks, places, heartbeats through a store, and what is concluded from them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotrec.runtime.ranks import Ranks
from hotrec.runtime.watchdog import (
    COMMUNICATION,
    EVALUATION,
    MAIN,
    Place,
    enter,
    place_of_thread,
)
from hotrec.runtime.watchdog.record import (
    Record,
    Records,
    Verdict,
    find_behind,
    started_at,
)
from hotrec.runtime.watchdog.watchdog import Watchdog, is_exchange_error


def beat(rank: int, **fields: Any) -> Record:
    known = Record(
        rank=rank,
        at_s=1000.0,
        host=f"host-{rank}",
        host_key="key",
        pid=100 + rank,
        started="1",
        age_s=61.0,
        step=41,
        where=f"place {rank}",
        counts={MAIN: 9, COMMUNICATION: 5},
        phase="forward",
        is_waiting=False,
        is_unlimited=False,
    )
    return known._replace(**fields)


def test_place_of_a_thread() -> None:
    goes_on, lock = threading.Event(), threading.Event()

    def work() -> None:
        lock.set()
        goes_on.wait()

    thread = threading.Thread(target=work)
    thread.start()
    lock.wait()
    try:
        while not (place := place_of_thread(thread.ident or 0)).is_waiting:
            pass  # it is between the two lines
        assert place.line.startswith("test_watchdog.py:")
    finally:
        goes_on.set()
        thread.join()
    assert place_of_thread(thread.ident or 0) == Place()


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


def test_which_errors_are_of_an_exchange() -> None:
    gloo = RuntimeError("[/w/gloo/transport/tcp/pair.cc:5] Connection closed by peer")
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
    stores = [Records(dist.PrefixStore("x", file), 2, "0") for _ in range(2)]
    stores[1].publish(beat(1))
    assert stores[0].read() == {1: beat(1)}
    assert stores[0].verdict() is None
    first = Verdict("rank 1 has died", is_error=True)
    assert stores[0].agree(first.text, is_error=True) == first
    assert stores[1].agree("no, rank 0") == first
    assert stores[1].verdict() == first


def test_processes_that_are_gone() -> None:
    assert started_at(os.getpid()) == started_at(os.getpid()) is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert started_at(child.pid) is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert started_at(child.pid) is None  # a zombie is gone, too
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
