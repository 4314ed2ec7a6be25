"""Which processors a rank keeps to, by a sysfs made for the test."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hotrec.runtime.process import bind_to_gpu

DEVICE = torch.device("cuda", 1)
ALLOWED = sorted(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two processors")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device at 0001:dc:00.0; gives the threads their processors back."""
    about = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    yield
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), ALLOWED)


def make_system(folder: Path, node: int, cpus: str = "") -> Path:
    device = folder / "bus/pci/devices/0001:dc:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    of_node = folder / f"devices/system/node/node{node}"
    of_node.mkdir(parents=True)
    (of_node / "cpulist").write_text(f"{cpus}\n")
    return folder


def test_all_threads_keep_to_the_node_of_the_gpu(tmp_path: Path) -> None:
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        # Processors that the launcher does not allow are not taken.
        bind_to_gpu(DEVICE, make_system(tmp_path, 3, f"{ALLOWED[1]},4000-4003"))
        threads = {int(thread) for thread in os.listdir("/proc/self/task")}
        assert {other.native_id, threading.get_native_id()} <= threads
        assert {frozenset(os.sched_getaffinity(t)) for t in threads} == {frozenset({ALLOWED[1]})}
    finally:
        stop.set()
        other.join()


def test_ranges_of_processors(tmp_path: Path) -> None:
    bind_to_gpu(DEVICE, make_system(tmp_path, 0, f"{ALLOWED[0]}-{ALLOWED[-1]}"))
    assert sorted(os.sched_getaffinity(0)) == ALLOWED


@pytest.mark.parametrize(
    ("node", "cpus", "said"),
    [
        (-1, "", "its NUMA node is not known"),
        (0, "4000-4003", r"cuda:1: expected processors of its NUMA node 0, got \["),
        (0, "", "expected processors of its NUMA node 0"),  # a node of memory alone
    ],
    ids=["one_node", "bound_elsewhere", "no_processors"],
)
def test_nothing_changes_where_there_is_nothing_to_choose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, node: int, cpus: str, said: str
) -> None:
    caplog.set_level(logging.DEBUG, "hotrec.runtime.process")
    bind_to_gpu(DEVICE, make_system(tmp_path, node, cpus))
    assert sorted(os.sched_getaffinity(0)) == ALLOWED
    assert re.search(said, caplog.text)


def test_a_system_that_does_not_tell_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hotrec.runtime.process")
    bind_to_gpu(DEVICE, tmp_path)
    assert "cuda:1: not bound to the processors beside it: " in caplog.text
