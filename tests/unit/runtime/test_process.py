"""Thread scheduling, safe forks, and which processors a rank keeps to (by a sysfs of the test)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hotrec.runtime import process
from hotrec.runtime.process import batch_threads, bind_to_gpu

DEVICE = torch.device("cuda", 1)
ALLOWED = sorted(os.sched_getaffinity(0))
need_two_processors = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two processors")


def in_thread(action: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join()
    return found[0]


def policy_of_a_thread() -> int:
    return in_thread(lambda: os.sched_getscheduler(0))


def test_threads_started_within_are_batch_threads() -> None:
    with suppress(KeyError), batch_threads():
        assert policy_of_a_thread() == os.SCHED_BATCH
        raise KeyError("it")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert policy_of_a_thread() == os.SCHED_OTHER


def test_a_fork_waits_for_threads_that_are_not_python_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they rest, or for a time."""
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += 1.0

    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    for limit_s, waited_s in ((9.0, 3.0), (2.0, 2.0)):
        now_s[0] = 0.0
        running = iter([[1], [1], [1], []])
        monkeypatch.setattr(process, "running_threads", lambda _, running=running: next(running))
        monkeypatch.setattr(process, "LIMIT_S", limit_s)
        process.wait_for_native_threads()
        assert now_s[0] == waited_s


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device at 0001:dc:00.0; gives the threads their processors back."""
    about = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    yield
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), ALLOWED)


def make_system(folder: Path, node: int, cpus: str = "") -> Path:
    for name, text in (
        ("bus/pci/devices/0001:dc:00.0/numa_node", f"{node}\n"),
        (f"devices/system/node/node{node}/cpulist", f"{cpus}\n"),
    ):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    return folder


@need_two_processors
@pytest.mark.usefixtures("gpu")
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


@need_two_processors
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("node", "cpus"),
    [(0, f"{ALLOWED[0]}-{ALLOWED[-1]}"), (-1, ""), (0, "4000-4003"), (0, ""), (None, "")],
    ids=["all", "one_node", "bound_elsewhere", "no_processors", "not_told"],
)
def test_nothing_changes_where_there_is_nothing_to_choose(
    tmp_path: Path, node: int | None, cpus: str
) -> None:
    bind_to_gpu(DEVICE, tmp_path if node is None else make_system(tmp_path, node, cpus))
    assert sorted(os.sched_getaffinity(0)) == ALLOWED
