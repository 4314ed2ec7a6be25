"""Does the host offer what training needs: loadable libraries, shared memory, files, RAM, GPUs."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from hotrec.doctor.check import GIB, Check, size_text
from hotrec.doctor.packages import CPU_FBGEMM, Packages, needed_fbgemm, pair_of, swap_fbgemm

# Below these a run may still work; loader workers and many ranks are what uses them up.
ENOUGH_SHM_BYTES = GIB
ENOUGH_OPEN_FILES = 4096
ENOUGH_MEMORY_BYTES = 4 * GIB
# The one library of the driver that must be there to import fbgemm's CUDA build; torch's CUDA build
# and torchrec need none before a device is used.
DRIVER_LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class Gpu:
    """A CUDA device that torch can use."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """What the host offers.

    Args:
        shm_bytes: size of /dev/shm, None if there is none.
        open_files: soft limit of open files of this process.
        open_files_most: its hard limit.
        memory_bytes: memory this process may use (the host's, or its control group's).
        memory_free_bytes: how much of it is free now.
        host_name: this host's own name.
        host_has_address: whether that name has an address here.
        has_gpu_device: whether a GPU is attached and visible, whether torch can use it or not.
        import_error: why torch, fbgemm or torchrec could not be imported; empty if they were.
        has_gloo: whether torch has the CPU collectives.
        has_nccl: whether torch has the GPU collectives.
        gpus: the devices that torch can use.
    """

    shm_bytes: int | None
    open_files: int
    open_files_most: int
    memory_bytes: int
    memory_free_bytes: int
    host_name: str
    host_has_address: bool
    has_gpu_device: bool
    import_error: str = ""
    has_gloo: bool = True
    has_nccl: bool = False
    gpus: tuple[Gpu, ...] = ()


def has_gpu_device() -> bool:
    """Whether an NVIDIA GPU is attached and not hidden; asks neither torch nor the driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    # /dev/dxg is the GPU of a Linux that runs inside Windows.
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def read_machine() -> Machine:
    """The facts of this host; imports torch, fbgemm and torchrec."""
    open_files, open_files_most = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory_bytes, memory_free_bytes = read_memory()
    shm = Path("/dev/shm")
    shm_bytes = shutil.disk_usage(shm).total if shm.is_dir() else None
    error, has_gloo, has_nccl, gpus = _ask_torch()
    host_name = socket.gethostname()
    return Machine(
        shm_bytes=shm_bytes,
        open_files=open_files,
        open_files_most=open_files_most,
        memory_bytes=memory_bytes,
        memory_free_bytes=memory_free_bytes,
        host_name=host_name,
        host_has_address=_has_address(host_name),
        has_gpu_device=has_gpu_device(),
        import_error=error,
        has_gloo=has_gloo,
        has_nccl=has_nccl,
        gpus=gpus,
    )


def _has_address(host_name: str) -> bool:
    try:
        socket.getaddrinfo(host_name, None)
    except OSError:
        return False
    return True


def _ask_torch() -> tuple[str, bool, bool, tuple[Gpu, ...]]:
    try:
        import torch
        import torch.distributed as dist
        import torchrec  # noqa: F401  (loads fbgemm's libraries)
    except (ImportError, OSError, RuntimeError) as error:
        # What a wrong pair ends in: an undefined symbol or a library that is not there. torch says
        # only which of fbgemm's libraries it was, and names the cause behind.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return f"{type(cause).__name__}: {cause}".splitlines()[0], False, False, ()
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            gpus.append(Gpu(torch.cuda.get_device_name(index), total_bytes, free_bytes))
    return "", dist.is_gloo_available(), dist.is_nccl_available(), tuple(gpus)


def read_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """Bytes of memory this process may use, and how many are free: the host or its group."""
    kib = {
        key: int(value.split()[0])
        for key, _, value in (line.partition(":") for line in meminfo.read_text().splitlines())
    }
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    # Inside a container the files of version 2, or of version 1, state its own limit.
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit_file, used_file = cgroup / limit_name, cgroup / used_name
        limit = limit_file.read_text().strip() if limit_file.exists() else "max"
        if limit != "max" and int(limit) < total and used_file.exists():
            total = int(limit)
            free = min(free, total - int(used_file.read_text()))
    return total, free


def check_machine(machine: Machine, packages: Packages) -> list[Check]:
    """Judge the host."""
    checks = [
        _check_import(machine, packages),
        _check_shm(machine.shm_bytes),
        _check_open_files(machine),
        _check_memory(machine),
        _check_host_name(machine),
    ]
    if not machine.import_error:
        checks += [_check_gloo(machine, packages), *_check_gpus(machine, packages)]
    return checks


def _check_import(machine: Machine, packages: Packages) -> Check:
    if not machine.import_error:
        return Check("import torchrec", "ok", "loads")
    if DRIVER_LIBRARY in machine.import_error:
        expected = f"NVIDIA's driver, which fbgemm's CUDA build loads ({DRIVER_LIBRARY})"
        mend = "nvidia-smi (and install the driver, or let the container see it)"
        if not machine.has_gpu_device:
            mend = swap_fbgemm(CPU_FBGEMM, packages)
        return Check("import torchrec", "fail", machine.import_error, expected, mend)
    fbgemm = needed_fbgemm(packages, has_gpu=machine.has_gpu_device)
    mend = pair_of(packages).pip_line(fbgemm, force=True)
    return Check("import torchrec", "fail", machine.import_error, "it to load", mend)


def _check_shm(shm_bytes: int | None) -> Check:
    name, expected = "/dev/shm", f"at least {size_text(ENOUGH_SHM_BYTES)} for loader workers"
    if shm_bytes is not None and shm_bytes >= ENOUGH_SHM_BYTES:
        return Check(name, "ok", size_text(shm_bytes))
    found = "nothing" if shm_bytes is None else size_text(shm_bytes)
    mend = "mount -o remount,size=8G /dev/shm (in a container: docker run --shm-size=8g)"
    return Check(name, "warn", found, expected, mend)


def _check_open_files(machine: Machine) -> Check:
    name, most = "open files", machine.open_files_most
    unlimited = resource.RLIM_INFINITY
    if machine.open_files == unlimited or machine.open_files >= ENOUGH_OPEN_FILES:
        limit = "unlimited" if machine.open_files == unlimited else str(machine.open_files)
        return Check(name, "ok", limit)
    reachable = most == unlimited or most >= ENOUGH_OPEN_FILES
    mend = "ulimit -n 65536" if most == unlimited else f"ulimit -n {min(most, 65536)}"
    if not reachable:
        mend = "docker run --ulimit nofile=65536, or nofile in /etc/security/limits.conf"
    return Check(name, "warn", str(machine.open_files), f"at least {ENOUGH_OPEN_FILES}", mend)


def _check_memory(machine: Machine) -> Check:
    free, total = size_text(machine.memory_free_bytes), size_text(machine.memory_bytes)
    found = f"{free} free of {total}"
    if machine.memory_free_bytes >= ENOUGH_MEMORY_BYTES:
        return Check("host memory", "ok", found)
    expected = f"at least {size_text(ENOUGH_MEMORY_BYTES)} free"
    return Check(
        "host memory",
        "warn",
        found,
        expected,
        "ps aux --sort -rss | head, and stop what is not needed",
    )


def _check_host_name(machine: Machine) -> Check:
    name = machine.host_name
    if machine.host_has_address:
        return Check("host name", "ok", name)
    # torchrun gives this name to the ranks, which wait for minutes for it to answer.
    expected = "a name with an address, for torchrun"
    mend = f"echo '127.0.1.1 {name}' >> /etc/hosts, or launch/torchrun.sh with --local-addr"
    return Check("host name", "warn", f"{name} without one", expected, mend)


def _check_gloo(machine: Machine, packages: Packages) -> Check:
    if machine.has_gloo:
        return Check("gloo", "ok", "available")
    mend = f"pip install --force-reinstall torch=={pair_of(packages).torch}"
    return Check("gloo", "fail", "not in this build", "a torch with gloo", mend)


def _check_gpus(machine: Machine, packages: Packages) -> list[Check]:
    mend = f"pip install --force-reinstall torch=={pair_of(packages).torch}"
    if not machine.gpus:
        if not machine.has_gpu_device:
            return [Check("gpu", "ok", "none; training runs on the CPU")]
        if packages.torch_cuda is None:
            expected = "the CUDA build, or it stays unused"
            return [Check("gpu", "warn", "a GPU and the CPU build of torch", expected, mend)]
        found = f"a GPU that torch, built for CUDA {packages.torch_cuda}, cannot use"
        expected = f"a driver for CUDA {packages.torch_cuda}"
        return [Check("gpu", "fail", found, expected, "nvidia-smi (and renew the driver)")]
    checks = [
        Check(
            f"gpu {index}",
            "ok",
            f"{gpu.name}, {size_text(gpu.free_bytes)} free of {size_text(gpu.total_bytes)}",
        )
        for index, gpu in enumerate(machine.gpus)
    ]
    if machine.has_nccl:
        checks.append(Check("nccl", "ok", "available"))
    else:
        checks.append(Check("nccl", "fail", "not in this build", "a torch with NCCL", mend))
    return checks
