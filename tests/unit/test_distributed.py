"""What the collectives mean for one process; tests/distributed has several."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hotrec.distributed import (
    Ranks,
    all_gather_object,
    barrier,
    broadcast_object,
    new_group,
    process_group,
    rank,
    same_verdict,
    world_size,
)


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


def test_plain_python_is_a_group_of_one() -> None:
    with process_group(device="cpu") as ranks:
        assert ranks == Ranks(0, 1, 0, 1, torch.device("cpu"))
        assert ranks.is_first
        assert ranks.num_hosts == 1
        assert dist.get_world_size() == 1
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        barrier()
        assert all_gather_object("x") == ["x"]
    assert not dist.is_initialized()


def started_by(action: Callable[[], object]) -> set[int]:
    before = set(os.listdir("/proc/self/task"))
    action()
    return {int(thread) for thread in set(os.listdir("/proc/self/task")) - before}


def test_threads_of_gloo_do_not_preempt() -> None:
    with process_group(device="cpu"):
        threads = started_by(lambda: [new_group(), new_group([0], timeout_s=3)])
        assert threads
        assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_the_group_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), process_group(device="cpu"):
        raise KeyError("inside")
    assert not dist.is_initialized()
    with process_group(device="cpu") as ranks:  # and another can begin
        assert ranks.world_size == 1


def test_a_broken_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with (
        pytest.raises(ValueError, match=r"^environment WORLD_SIZE: expected an integer, got 'two'"),
        process_group(device="cpu"),
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
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


def test_same_verdict_of_one() -> None:
    assert same_verdict(lambda: 3) == 3
    assert same_verdict(lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        same_verdict(lambda: 1 / 0)
