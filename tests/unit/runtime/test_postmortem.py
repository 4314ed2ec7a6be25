"""What a run leaves behind; tests/e2e/test_faults.py has the ranks that are left."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotrec.runtime.postmortem import memory_snapshot, set_up_flight_recorder, write_flight_recorder
from hotrec.runtime.ranks import Ranks, process_group

NAMES = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
)
GPU = Ranks(3, 8, 1, 4, torch.device("cuda", 1))
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # to be restored
        monkeypatch.delenv(name)


def flight_recorder() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_nccl_writes_into_the_directory_of_the_run_and_what_the_user_has_set_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = set_up_flight_recorder(tmp_path / "run", "cuda")
    assert directory.is_dir()  # NCCL's watchdog opens a file in it
    assert directory.is_relative_to(tmp_path / "run")
    assert flight_recorder()["TORCH_FR_DUMP_TEMP_FILE"].startswith(str(directory))
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    theirs = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "50000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/elsewhere/rank",
    }
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    assert not set_up_flight_recorder(tmp_path, "cpu").exists()
    assert flight_recorder() == theirs


def test_the_last_collectives_are_written(tmp_path: Path) -> None:
    with process_group(device="cpu"):
        dist.all_reduce(torch.ones(3, 7))
        write_flight_recorder(tmp_path / "new", 0)
    entries = pickle.loads((tmp_path / "new" / "rank_0").read_bytes())["entries"]
    assert entries[-1]["input_sizes"] == [[3, 7]]
    assert "test_the_last_collectives_are_written" in (tmp_path / "new/threads_0.txt").read_text()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What torch.cuda.memory is asked for."""
    asked: list[tuple[Any, ...]] = []

    def record(enabled: str | None = "all", **settings: Any) -> None:
        asked.append((enabled, *settings.values()))

    def dump(path: str) -> None:
        asked.append(("dump",))
        Path(path).write_text("a snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return asked


def run_out(run_dir: Path, **settings: bool) -> None:
    with memory_snapshot(run_dir, GPU, **settings):
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def test_out_of_memory_says_where_its_snapshot_is(
    tmp_path: Path, memory: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "memory_rank_3.pickle"
    for has_stacks in (False, True):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run_out(tmp_path, has_stacks=has_stacks)
        assert str(path) in str(caught.value)
        assert str(caught.value).endswith(OUT_OF_MEMORY)
        assert ("trainer.memory_stacks=true" in str(caught.value)) is not has_stacks
    assert path.read_text() == "a snapshot"
    # Stacks are recorded on demand, and not without bound.
    assert memory == [("dump",), ("all", "state", "python", 100_000), ("dump",), (None,)]
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory"):
        run_out(tmp_path / "missing")
    assert str(tmp_path / "missing") in caplog.text


def test_other_errors_and_other_devices_leave_no_snapshot(
    tmp_path: Path, memory: list[tuple[Any, ...]]
) -> None:
    with suppress(KeyError), memory_snapshot(tmp_path, GPU):
        raise KeyError("another")
    assert memory == []
    with memory_snapshot(tmp_path, Ranks(0, 1, 0, 1, torch.device("cpu"))):
        pass
    assert memory == []
    assert list(tmp_path.iterdir()) == []
