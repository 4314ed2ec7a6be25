"""A fork waits for threads that Python does not know of."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator

import pytest

from hotrec.runtime import process as forks


class Busy(threading.Thread):
    """Computes without the interpreter's lock, as threads of C++ do, for tenths of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Event()
        self.ended_s = 0.0

    def run(self) -> None:
        self.began.set()
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 1_000_000)
        self.ended_s = time.monotonic()


@pytest.fixture
def busy() -> Iterator[Busy]:
    thread = Busy()
    thread.start()
    thread.began.wait()
    time.sleep(0.05)
    yield thread
    thread.join()


def test_a_thread_that_computes_is_running(busy: Busy) -> None:
    assert busy.native_id in forks.running_threads()
    assert busy.native_id not in forks.running_threads({busy.native_id})


def test_a_fork_waits_for_threads_that_are_not_python_s(
    busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.main_thread()
    monkeypatch.setattr(threading, "enumerate", lambda: [main])
    monkeypatch.setattr(forks, "LIMIT_S", 60.0)
    forks.wait_for_native_threads()
    returned_s = time.monotonic()
    busy.join()
    assert returned_s > busy.ended_s - 0.05


def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "running_threads", lambda _: [1])
    monkeypatch.setattr(forks, "LIMIT_S", 0.05)
    forks.wait_for_native_threads()


def test_only_pythons_that_need_it_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda before: registered.append(before))
    monkeypatch.setattr(forks.sys, "version_info", (3, 11, 10, "final", 0))
    forks.make_forks_safe.__wrapped__()
    assert registered == []
    monkeypatch.setattr(forks.sys, "version_info", (3, 11, 9, "final", 0))
    forks.make_forks_safe.__wrapped__()
    assert registered == [forks.wait_for_native_threads]
