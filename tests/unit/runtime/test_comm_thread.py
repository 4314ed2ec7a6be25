"""The communication thread: order, results, errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from hotrec.runtime.comm_thread import CommunicationThread

NAME = "a communication thread"
LIMIT_S = 20.0


@pytest.fixture
def thread() -> Iterator[CommunicationThread]:
    thread = CommunicationThread(torch.device("cpu"), NAME)
    yield thread
    thread.close()


def test_tasks_run_in_order_on_one_other_thread(thread: CommunicationThread) -> None:
    seen = []

    def task(number: int) -> int:
        seen.append((number, threading.current_thread().name, torch.is_grad_enabled()))
        return number * number

    thread.drain()  # nothing is there to wait for
    futures = [thread.submit(lambda number=number: task(number)) for number in range(5)]
    assert [future.wait() for future in futures] == [0, 1, 4, 9, 16]
    assert seen == [(number, NAME, False) for number in range(5)]


def test_an_error_reaches_who_waits_and_stops_what_follows(thread: CommunicationThread) -> None:
    ran, hold = [], threading.Event()
    thread.submit(lambda: hold.wait(LIMIT_S))
    failing = thread.submit(lambda: 1 // 0)
    following = thread.submit(lambda: ran.append(1))
    hold.set()
    for call in (failing.wait, following.wait, lambda: thread.submit(dict), thread.drain):
        with pytest.raises(ZeroDivisionError):
            call()
    assert ran == []
