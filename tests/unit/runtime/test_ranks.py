"""What the collectives mean for one process; tests/distributed has several."""

from __future__ import annotations

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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device as far as making groups goes."""
    plain = dist.init_process_group
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, device_id=None, **of: plain(backend, **of)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(hotrec.runtime.ranks, "bind_to_gpu", Mock())
    monkeypatch.setitem(hotrec.runtime.ranks.BACKENDS, "cuda", NAME)


def test_a_group_that_adds_up_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: values.fill_(0.5))
    with pytest.raises(RuntimeError, match=r"gloo.*0\.5"), process_group(device="cpu"):
        raise AssertionError("the block must not begin")
    assert not dist.is_initialized()


@pytest.mark.usefixtures("cuda")
def test_after_an_error_nobody_waits_for_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("environment", "device", "said"),
    [
        ({"WORLD_SIZE": "two"}, "cpu", "WORLD_SIZE: .*'two'"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "MASTER_ADDR": "a.invalid"},
            "cpu",
            "rank 1: .*a.invalid:1",
        ),
        ({}, "cuda", r"^trainer\.device"),
    ],
)
def test_what_is_not_there_is_named(
    environment: dict[str, str], device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    joining = process_group(device=device, timeout_s=1)
    with pytest.raises((ValueError, RuntimeError), match=said), joining:
        raise AssertionError("the block must not begin")
    assert not dist.is_initialized()


def test_hosts_are_counted_from_ranks_per_host() -> None:
    cpu = torch.device("cpu")
    assert Ranks(5, 8, 1, 4, cpu).num_hosts == 2
    assert Ranks(2, 3, 0, 2, cpu).num_hosts == 2
    assert not Ranks(4, 8, 0, 4, cpu).is_first  # local rank 0 of the second host
