"""The communication thread: order, results, errors."""

from __future__ import annotations

import threading

import pytest
import torch

from hotrec.embedding.prefetch.lane import Lane

CPU = torch.device("cpu")
LIMIT_S = 20.0


def test_tasks_run_in_order_on_one_other_thread() -> None:
    lane, seen = Lane(CPU, "lane"), []

    def task(number: int) -> int:
        seen.append((number, threading.current_thread().name, torch.is_grad_enabled()))
        return number * number

    pending = [lane.submit(lambda number=number: task(number)) for number in range(5)]
    assert [one.wait() for one in pending] == [0, 1, 4, 9, 16]
    assert seen == [(number, "lane", False) for number in range(5)]
    lane.close()


def test_the_main_thread_goes_on_meanwhile() -> None:
    lane, go_on = Lane(CPU, "lane"), threading.Event()
    pending = lane.submit(lambda: go_on.wait(LIMIT_S))
    go_on.set()  # would never be reached if submit waited
    assert pending.wait() is True
    lane.close()


def test_an_error_reaches_who_waits_and_stops_what_follows() -> None:
    lane, ran = Lane(CPU, "lane"), []
    hold = threading.Event()
    lane.submit(lambda: hold.wait(LIMIT_S))
    failing = lane.submit(lambda: 1 // 0)
    following = lane.submit(lambda: ran.append(1))
    hold.set()
    for pending in (failing, following):
        with pytest.raises(ZeroDivisionError):
            pending.wait()
    with pytest.raises(ZeroDivisionError):
        lane.submit(lambda: None)
    with pytest.raises(ZeroDivisionError):
        lane.drain()
    assert ran == []
    lane.close()


def test_settle_waits_for_all_tasks() -> None:
    lane, done = Lane(CPU, "lane"), []
    for number in range(3):
        lane.submit(lambda number=number: done.append(number))
    lane.drain()
    assert done == [0, 1, 2]
    lane.close()


def test_close_ends_the_thread_after_its_tasks() -> None:
    lane, done = Lane(CPU, "a lane to end"), []
    lane.submit(lambda: done.append(1))
    [thread] = [one for one in threading.enumerate() if one.name == "a lane to end"]
    assert thread.daemon
    lane.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert done == [1]
