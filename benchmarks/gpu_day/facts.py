"""Stage 0: the capabilities of the machine, in two minutes, before longer stages depend on them.

Pinning of host memory, whether host and device have it at the same address, the cost of a fork with
pinned memory, the link's rates, and one default step of each optimizer in every memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_day.kernels import check_step, default_steps
from benchmarks.gpu_day.record import OK, NotHereError, Parts, Summary, Table
from benchmarks.gpu_day.stage import Day, main
from benchmarks.gpu_day.tbe import map_host_memory
from hotrec.embedding.flat import put_rows
from hotrec.report.units import show_bytes, show_seconds
from hotrec.runtime.memory import read_memory
from hotrec.runtime.ranks import process_group
from hotrec.types import OptimizerKind

NVIDIA_SMI = (
    "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current,"
    "clocks.sm,clocks.max.sm,power.limit,ecc.mode.current,mig.mode.current"
)
PORTABLE_AND_MAPPED = 3  # as FBGEMM registers host memory
REPEATS = 5
PROGRAMS = {
    "a fork of a process with FBGEMM uses the device": """
import os, torch, fbgemm_gpu
child = os.fork()
if child == 0:
    torch.zeros(1, device="cuda").item()
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    "a process group of one rank adds": """
import torch
from hotrec.runtime.ranks import process_group
with process_group(device="cuda"):
    one = torch.ones(1, device="cuda")
    torch.distributed.all_reduce(one)
    assert one.item() == 1
""",
}
DIM = 128


def gpu() -> dict[str, Any]:
    """The output of ``nvidia-smi``.

    Raises:
        NotHereError: if there is none.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise NotHereError("nvidia-smi is not on PATH")
    said = subprocess.run(
        [program, f"--query-gpu={NVIDIA_SMI}", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    names, values = NVIDIA_SMI.split(","), said.stdout.strip().split(", ")
    return {"shown": dict(zip(names, values, strict=False)), "cuda": torch.version.cuda}


def host() -> dict[str, Any]:
    """Memory, pages, cores and limits."""
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = {
        "transparent huge pages": huge.read_text().strip() if huge.exists() else "none",
        "cores of this process": len(os.sched_getaffinity(0)),
        "cores": os.cpu_count(),
        "lockable memory": "unlimited" if locked == resource.RLIM_INFINITY else show_bytes(locked),
        "free on disk": show_bytes(shutil.disk_usage("/tmp").free),
        "free in /dev/shm": show_bytes(shutil.disk_usage("/dev/shm").free),
        "network interfaces": ", ".join(sorted(os.listdir("/sys/class/net"))),
    }
    return {"shown": shown}


def _memory() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines)}
    found = {key: kib[key] << 10 for key in ("MemTotal", "MemFree", "MemAvailable")}
    return {**found, "free for hotrec": read_memory()[1]}


def starts() -> dict[str, Any]:
    """Whether a fork of a process with FBGEMM can use the device, and one rank its NCCL.

    Raises:
        RuntimeError: if either cannot.
    """
    found = {}
    for what, program in PROGRAMS.items():
        start_s = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        )
        if done.returncode != 0:
            raise RuntimeError(f"{what}: {' / '.join(done.stderr.splitlines()[-3:])}")
        found[what] = show_seconds(time.perf_counter() - start_s)
    return {"shown": found}


def touch(num_bytes: int) -> dict[str, Any]:
    """Write to host memory once: does the machine have the reported amount, and does it grow?"""
    memory_at = {"before": _memory()}
    with _private_memory(num_bytes) as memory:
        seconds = _touch(memory)
        memory_at["while touched"] = _memory()
    memory_at["after"] = _memory()
    return {"memory": memory_at, "bytes": num_bytes, "seconds": seconds}


def _private_memory(num_bytes: int) -> mmap.mmap:
    """As malloc gives it; Python's default is shared, which a fork never copies."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _touch(memory: mmap.mmap) -> float:
    start_s = time.perf_counter()
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
    return time.perf_counter() - start_s


@contextmanager
def _registered(memory: mmap.mmap) -> Iterator[float]:
    """CUDA has pinned the memory inside; how long that took.

    Raises:
        NotHereError: on the stand-in, which has no CUDA runtime.
        RuntimeError: if CUDA refuses.
    """
    runtime: Any = torch.cuda.cudart()
    if runtime is None:
        raise NotHereError("cudaHostRegister: the stand-in has no CUDA runtime")
    view = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(view)
    start_s = time.perf_counter()
    code = int(runtime.cudaHostRegister(address, len(memory), PORTABLE_AND_MAPPED))
    seconds = time.perf_counter() - start_s
    if code != 0:
        del view  # else closing the mapping would hide this error
        raise RuntimeError(
            f"cudaHostRegister of {len(memory)} bytes: expected 0, got {code}. Raise the limit of "
            "locked memory, or free some."
        )
    try:
        yield seconds
    finally:
        runtime.cudaHostUnregister(address)
        del view  # else the mapping could not be closed


def register(num_bytes: int) -> dict[str, Any]:
    """Pin touched memory, in small pages and in huge ones."""
    found: dict[str, Any] = {"bytes": num_bytes}
    for pages, advice in (("small", mmap.MADV_NOHUGEPAGE), ("huge", mmap.MADV_HUGEPAGE)):
        with _private_memory(num_bytes) as memory:
            memory.madvise(advice)
            _touch(memory)
            with _registered(memory) as seconds:
                found[f"{pages}_s"] = seconds
    return found


def pointers(device: torch.device) -> dict[str, Any]:
    """Whether FBGEMM's mapped memory has one address for the host and the device.

    Raises:
        RuntimeError: if either does not find what the other wrote.
    """
    seen = map_host_memory(1 << 20, device).view(torch.float32)
    size = seen.numel() * seen.element_size()
    memory = (ctypes.c_char * size).from_address(seen.data_ptr())
    here = torch.frombuffer(memory, dtype=torch.float32)
    here[7] = 3.0
    seen[8] = 4.0
    torch.cuda.synchronize()
    read = float(seen[7]), float(here[8])
    if read != (3.0, 4.0):
        raise RuntimeError(
            f"host-mapped memory: expected device and host to read (3.0, 4.0), which the other "
            f"wrote, got {read}. Slots and calibration read such memory by the device's address."
        )
    return {"shown": {"host-mapped memory": "one address for host and device"}}


def fork(num_bytes: int) -> dict[str, Any]:
    """What a child takes of memory that its parent has pinned, and with MADV_DONTFORK."""
    found: dict[str, Any] = {"bytes": num_bytes}
    with _private_memory(num_bytes) as memory:
        _touch(memory)
        found["plain"] = _fork()
        with _registered(memory):
            found["pinned"] = _fork()
            memory.madvise(mmap.MADV_DONTFORK)
            found["pinned, MADV_DONTFORK"] = _fork()
            memory.madvise(mmap.MADV_DOFORK)
    return found


def _fork() -> dict[str, float]:
    reading, writing = os.pipe()
    start_s = time.perf_counter()
    child = os.fork()
    if child == 0:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        own = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
        os.write(writing, str(own << 10).encode())
        os._exit(0)
    seconds = time.perf_counter() - start_s
    own_bytes = int(os.read(reading, 32) or b"0")
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    return {"seconds": seconds, "own_bytes": own_bytes}


def _median_s(run: Callable[[], object]) -> float:
    """Of the calls, until the device has done what each of them started."""
    seconds = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start_s)
    return float(np.median(seconds[1:]))


def copies(num_bytes: int, device: torch.device) -> dict[str, Any]:
    """Copies between pinned memory and the device, each way and both at once."""
    here, there = (torch.ones(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(2))
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    other, beside = torch.ones_like(on_device), torch.cuda.Stream(device)

    def both() -> None:
        on_device.copy_(here, non_blocking=True)
        with torch.cuda.stream(beside):
            there.copy_(other, non_blocking=True)

    return {
        "bytes": num_bytes,
        "to the device": _median_s(lambda: on_device.copy_(here, non_blocking=True)),
        "to the host": _median_s(lambda: there.copy_(other, non_blocking=True)),
        "both ways at once, each": _median_s(both),
    }


def rows(num_rows: int, num_read: int, device: torch.device) -> dict[str, Any]:
    """Random rows of mapped host memory: read by the device, or gathered by the host and copied."""
    seen = map_host_memory(num_rows * DIM * 4, device).view(torch.float32).view(num_rows, DIM)
    memory = (ctypes.c_char * (seen.numel() * 4)).from_address(seen.data_ptr())
    here = torch.frombuffer(memory, dtype=torch.float32).view(num_rows, DIM)
    index = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))[:num_read]
    on_device = index.to(device)
    staged = torch.empty(num_read, DIM, pin_memory=True)
    arrived = torch.zeros(num_read, DIM, device=device)
    return {
        "bytes": num_read * DIM * 4,
        "the device reads them": _median_s(lambda: seen.index_select(0, on_device)),
        "the device writes them": _median_s(lambda: seen.index_copy_(0, on_device, arrived)),
        "the host gathers them": _median_s(lambda: torch.index_select(here, 0, index, out=staged)),
        "and copies them": _median_s(lambda: arrived.copy_(staged, non_blocking=True)),
        "the host writes them back": _median_s(lambda: put_rows(here, index, staged)),
    }


def summarize(parts: Parts) -> Summary:
    done = {name: part for name, part in parts.items() if part["status"] == OK}
    shown = [
        [name, str(value)]
        for part in done.values()
        for name, value in part.get("shown", {}).items()
    ]
    rates = [[what, show_bytes(size), show_seconds(s), f"{size / s / 1e9:.2f} GB/s"]
             for what, size, s in _rates(done)]  # fmt: skip
    forks = [
        [how, show_seconds(found["seconds"]), show_bytes(found["own_bytes"])]
        for how, found in done.get("fork", {}).items()
        if isinstance(found, Mapping)
    ]
    steps = {name: part for name, part in parts.items() if name.startswith("step ")}
    memory = done.get("touch", {}).get("memory", {})
    tables = [
        Table("Found", ["what", "found"], shown),
        Table("Memory of the host", ["when", *next(iter(memory.values()), {})],
              [[when, *map(show_bytes, of.values())] for when, of in memory.items()],
              f"{show_bytes(done['touch']['bytes'])} were touched." if memory else ""),
        Table("Rates", ["what", "bytes", "time", "rate"], rates, "Medians of five."),
        Table("A fork of a process with so much memory", ["memory", "time", "child's own"], forks),
        Table("One default step", ["step", "loss"],
              [[n.removeprefix("step "), _loss(part)] for n, part in steps.items()]),
    ]  # fmt: skip
    num_steps = sum(part["status"] == OK for part in steps.values())
    said = [f"{num_steps} of {len(steps)} default steps run"]
    said += [f"{what} {rate}" for what, _, _, rate in rates if "pinned" in what]
    return Summary(f"{'; '.join(said)}.", [table for table in tables if table.rows])


def _rates(done: Parts) -> Iterator[tuple[str, int, float]]:
    """What, how many bytes, in how many seconds."""
    if "touch" in done:
        yield "host memory touched", done["touch"]["bytes"], done["touch"]["seconds"]
    for pages in ("small", "huge") if "register" in done else ():
        part = done["register"]
        yield f"host memory pinned, {pages} pages", part["bytes"], part[f"{pages}_s"]
    for name, what in (("copies", "pinned copies"), ("rows", "random rows")):
        part = done.get(name, {})
        for way, seconds in part.items():
            if way not in ("status", "bytes", "elapsed_s"):
                yield f"{what}: {way}", part["bytes"], seconds


def _loss(part: Mapping[str, Any]) -> str:
    return f"{part['losses'][-1]:.6f}" if part["status"] == OK else part["status"]


def run(day: Day) -> None:
    def size(number: int) -> int:
        return day.pick(number << 30, number << 20)

    parts: dict[str, Callable[[], Mapping[str, Any]]] = {
        "gpu": gpu,
        "host": host,
        "starts": starts,
        "touch": lambda: touch(size(16)),
        "pointers": lambda: pointers(day.device),
        "register": lambda: register(size(4)),
        "fork": lambda: fork(size(4)),
        "copies": lambda: copies(size(1), day.device),
        "rows": lambda: rows(size(4) // (4 * DIM), day.pick(400_000, 1000), day.device),
    }
    for name, measure in parts.items():
        day.record.part(name, measure)
    with process_group(device="cuda") as ranks:
        kinds, steps = list(OptimizerKind), list(default_steps(OptimizerKind))
        num_tiers = len(steps) // len(kinds)
        # Each memory once, with the optimizers in turn.
        some = [steps[at % len(kinds) * num_tiers + at] for at in range(num_tiers)]
        for kind, name, tier in day.pick(steps, some):
            day.record.part(
                f"step {kind.value} {tier}",
                lambda k=kind, n=name, t=tier: check_step(k, n, t, ranks, num_steps=1),
            )


if __name__ == "__main__":
    sys.exit(main(run, summarize))
