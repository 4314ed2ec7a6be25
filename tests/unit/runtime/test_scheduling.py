"""Threads that carry messages do not preempt those that compute."""

from __future__ import annotations

import os
import threading

import pytest

from hotrec.runtime.process import batch_threads


def policy_of_a_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def test_threads_started_within_are_batch_threads() -> None:
    with batch_threads():
        assert policy_of_a_thread() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert policy_of_a_thread() == os.SCHED_OTHER


def test_the_policy_comes_back_after_an_error() -> None:
    with pytest.raises(KeyError), batch_threads():
        raise KeyError("it")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_that_somebody_chose_stays() -> None:
    def within(found: list[int]) -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with batch_threads():
            found.append(policy_of_a_thread())

    found: list[int] = []
    thread = threading.Thread(target=within, args=(found,))
    thread.start()
    thread.join()
    assert found == [os.SCHED_IDLE]


def test_a_system_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with batch_threads():
        assert policy_of_a_thread() == os.SCHED_OTHER
