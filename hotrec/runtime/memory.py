"""The host: how much memory a process may use and map, and the fingerprint of the machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

MIB, GIB = 1 << 20, 1 << 30
# The host's memory in GiB, for hosts whose memory grows as it is used and starts small.
HOST_GIB = "HOTREC_HOST_GIB"
PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")


def read_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """The total and free bytes of memory of the host, or of this process's control group.

    If ``HOTREC_HOST_GIB`` is set, it is the total; free is the total minus what is in use.

    Raises:
        ValueError: if it is not a number above 0.
    """
    kib = {
        key: int(value.split()[0])
        for key, _, value in (line.partition(":") for line in meminfo.read_text().splitlines())
    }
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    # Inside a container these files, of version 2 or version 1, state its own limit.
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit_file, used_file = cgroup / limit_name, cgroup / used_name
        limit = limit_file.read_text().strip() if limit_file.exists() else "max"
        if limit != "max" and int(limit) < total and used_file.exists():
            total = int(limit)
            free = min(free, total - int(used_file.read_text()))
    if stated := os.environ.get(HOST_GIB):
        used = total - free
        total = _stated_bytes(stated)
        free = max(0, total - used)
    return total, free


def _stated_bytes(text: str) -> int:
    try:
        num_bytes = int(float(text) * GIB)
    except (ValueError, OverflowError):
        num_bytes = 0
    if num_bytes <= 0:
        raise ValueError(
            f"environment {HOST_GIB}: expected the host's memory in GiB, a number above 0, got "
            f"{text!r}. Correct it, or unset it to use the system's value."
        )
    return num_bytes


def check_mappable(what: str, num_bytes: int, free_bytes: int) -> None:
    """Refuse to pin more host memory than is free: the process would be killed without a message.

    ``num_bytes`` are what all ranks of the host pin together, ``what`` names it in the message.

    Raises:
        ValueError: if ``num_bytes`` exceeds ``free_bytes``.
    """
    if num_bytes > free_bytes:
        raise ValueError(
            f"{what}: expected at most {free_bytes} bytes, the host's free memory, to pin and map "
            f"for its devices, got {num_bytes}. Keep fewer rows in host tiers, use more hosts, or "
            f"free memory on this one; set {HOST_GIB} if the host's memory grows on demand."
        )


def read_fingerprint(
    device: str | None = None, cpuinfo: Path = Path("/proc/cpuinfo")
) -> dict[str, Any]:
    """Processor, memory, GPUs and versions of this host, independent of its name.

    Args:
        device: "cpu" or "cuda", the device to train on; "cpu" excludes GPUs. None: cuda if
            available.
        cpuinfo: Linux's description of the processor.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    return {
        "device": device,
        "processor": _processor(cpuinfo),
        # Ranks of GPUs are bound to different subsets of the host's cores.
        "num_cores": os.cpu_count() if device == "cuda" else len(os.sched_getaffinity(0)),
        # Kernel versions differ by some megabytes in the memory that they reserve.
        "memory_gib": round(read_memory()[0] / GIB),
        "gpu": torch.cuda.get_device_name(0) if gpus else None,
        "num_gpus": gpus,
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _processor(cpuinfo: Path) -> str:
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
