"""What the collectives mean for one process; tests/distributed has several."""

from __future__ import annotations

import os
import runpy
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import hotrec.runtime.ranks
from hotrec.runtime.ranks import (
    Group,
    Ranks,
    all_gather_object,
    barrier,
    broadcast_object,
    process_group,
    rank,
    same_verdict,
    world_size,
)
from tests.helpers.staged import NAME, StagedProcessGroup


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)


def test_without_a_group() -> None:
    assert (rank(), world_size()) == (0, 1)
    value = object()
    assert all_gather_object(value) == [value]
    assert broadcast_object(value) is value
    barrier()
    assert same_verdict(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        same_verdict(lambda: 1 / 0)


def test_plain_python_is_a_group_of_one() -> None:
    with process_group(device="cpu") as ranks:
        assert ranks == Ranks(0, 1, 0, 1, torch.device("cpu"))
        assert ranks.is_first
        assert dist.get_world_size() == 1
        barrier()
        assert all_gather_object("x") == ["x"]
    assert not dist.is_initialized()


def started_by(action: Callable[[], object]) -> set[int]:
    before = set(os.listdir("/proc/self/task"))
    action()
    return {int(thread) for thread in set(os.listdir("/proc/self/task")) - before}


def test_threads_of_gloo_do_not_preempt() -> None:
    with process_group(device="cpu"):
        groups: list[Group] = []
        threads = started_by(lambda: groups.extend([Group("all"), Group("one", [[0]])]))
        assert threads
        assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


Log = list[tuple[Any, ...]]


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> Log:
    """(collective, group, thread) of what runs while groups are made."""
    log: Log = []
    for name in ("all_reduce", "all_to_all_single"):
        plain = getattr(dist, name)

        def spy(*args: Any, group: Any, _name: str = name, _plain: Any = plain) -> None:
            log.append((_name, group, threading.current_thread()))
            _plain(*args, group=group)

        monkeypatch.setattr(dist, name, spy)
    return log


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Log:
    """A CUDA device as far as making groups goes; what is bound to which device, in order."""
    bound: Log = []
    plain = dist.init_process_group

    def spy(backend: str, *, device_id: torch.device | None = None, **kwargs: Any) -> None:
        bound.append((backend, device_id))
        plain(backend, **kwargs)

    monkeypatch.setattr(dist, "init_process_group", spy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(
        hotrec.runtime.ranks, "bind_to_gpu", lambda device: bound.append(("processors", device))
    )
    monkeypatch.setitem(hotrec.runtime.ranks.BACKENDS, "cuda", NAME)
    return bound


def first_of(group: Any) -> Log:
    here = threading.current_thread()
    return [("all_to_all_single", group, here), ("all_reduce", group, here)]


def test_ranks_are_connected_when_a_group_is_made(exchanges: Log) -> None:
    """Not at their first exchange, which may be on several threads at once."""
    with process_group(device="cpu"):
        assert exchanges == first_of(dist.group.WORLD)
        others = [Group("all").group, Group("one", [[0]]).group]
        assert exchanges[2:] == [*first_of(others[0]), *first_of(others[1])]


def test_cuda_groups_are_bound_to_their_device(exchanges: Log, cuda: Log) -> None:
    with process_group(device="cuda") as ranks:
        # The processors first: a group's threads inherit them.
        device = torch.device("cuda", 0)
        assert cuda == [("processors", device), (NAME, device)]
        assert ranks.device == device
        assert exchanges == first_of(dist.group.WORLD)


def test_a_group_that_adds_up_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: values.fill_(0.5))
    with (
        pytest.raises(RuntimeError, match=r"^process group gloo: expected sums of 1 .* got \[0\.5"),
        process_group(device="cpu"),
    ):
        raise AssertionError("the block must not begin")
    assert not dist.is_initialized()


def test_after_an_error_nobody_waits_for_other_ranks(
    monkeypatch: pytest.MonkeyPatch, cuda: Log
) -> None:
    ends: list[tuple[str, Any]] = []
    for name in ("shutdown", "abort"):
        note = lambda group, name=name: ends.append((name, group))  # noqa: E731
        monkeypatch.setattr(StagedProcessGroup, name, note)
    groups: list[Any] = []

    def fail() -> None:
        groups[:] = [Group("all").group, dist.group.WORLD]
        raise KeyError("inside")

    with pytest.raises(KeyError), process_group(device="cuda"):
        fail()
    assert ends == [("abort", group) for group in groups]
    assert not dist.is_initialized()
    ends.clear()
    with process_group(device="cuda"):  # in good order they do
        group = dist.group.WORLD
    assert ends == [("shutdown", group)]


@pytest.mark.parametrize(
    ("environment", "backends", "loading"),
    [
        ({"WORLD_SIZE": "2"}, None, "EAGER"),
        ({"WORLD_SIZE": "2", "CUDA_MODULE_LOADING": "LAZY"}, None, "LAZY"),  # the user's word
        ({"WORLD_SIZE": "1"}, None, None),
        ({}, None, None),
        # Ranks that have joined: only NCCL's wait for one another on the device.
        ({"WORLD_SIZE": "2"}, "cpu:gloo,cuda:gloo", None),
        ({"WORLD_SIZE": "2"}, "cpu:gloo,cuda:nccl", "EAGER"),
    ],
)
def test_kernels_are_loaded_before_ranks_wait_for_one_another(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    backends: str | None,
    loading: str | None,
) -> None:
    if backends is not None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")  # to be restored
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(hotrec.runtime.ranks.__file__)
    assert os.environ.get("CUDA_MODULE_LOADING") == loading


@pytest.mark.parametrize("theirs", [None, "1", "16"])
def test_streams_have_queues_of_their_own(
    monkeypatch: pytest.MonkeyPatch, theirs: str | None
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", theirs or "")  # to be restored
    if theirs is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    runpy.run_path(hotrec.runtime.ranks.__file__)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == (theirs or "32")


def test_a_broken_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with (
        pytest.raises(ValueError, match=r"^environment WORLD_SIZE: expected an integer, got 'two'"),
        process_group(device="cpu"),
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_unknown_host_of_the_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "MASTER_ADDR": "a.invalid"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(RuntimeError, match="rendezvous of rank 1: .* a.invalid:1 "),
        process_group(),
    ):
        pass


def test_cuda_without_a_device_is_refused() -> None:
    with (
        pytest.raises(RuntimeError, match=r"^trainer\.device: expected a CUDA device, got none"),
        process_group(device="cuda"),
    ):
        pass
    assert not dist.is_initialized()
    with process_group(device="auto") as ranks:
        assert ranks.device.type == "cpu"


def test_hosts_are_counted_from_ranks_per_host() -> None:
    cpu = torch.device("cpu")
    assert Ranks(5, 8, 1, 4, cpu).num_hosts == 2
    assert Ranks(2, 3, 0, 2, cpu).num_hosts == 2
    assert not Ranks(4, 8, 0, 4, cpu).is_first  # local rank 0 of the second host
