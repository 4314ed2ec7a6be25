"""Host memory: how much a process may use and a device may map, and the C allocator's settings."""

from __future__ import annotations

import ctypes
from pathlib import Path

# glibc's mallopt parameters (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_MAX_INT = 2**31 - 1


def read_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """The total and free bytes of memory of the host, or of this process's control group."""
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
    return total, free


def check_mappable(what: str, num_bytes: int, free_bytes: int) -> None:
    """Refuse to pin more host memory than is free.

    The device pins and maps a host tier as a whole, so it cannot be swapped. A process that pins
    more than is free is killed without a message.

    Args:
        what: The name of the memory in the error message.
        num_bytes: The bytes that all ranks of the host pin together.
        free_bytes: The free bytes of the host, or of its control group.

    Raises:
        ValueError: if ``num_bytes`` exceeds ``free_bytes``.
    """
    if num_bytes > free_bytes:
        raise ValueError(
            f"{what}: expected at most {free_bytes} bytes, the host's free memory, to pin and map "
            f"for its devices, got {num_bytes}. Keep fewer rows in host tiers, use more hosts, or "
            "free memory on this one."
        )


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next step instead of returning it to the kernel.

    Every step frees and allocates the same tens of megabytes. By default glibc unmaps and maps them
    each time and the kernel zeroes every page: a third of the CPU time of a step with 8,192 samples
    of 26 features of 64 floats, for TorchRec's plans as for hot/cold ones.

    Returns:
        Whether the C library has these settings; other C libraries are left alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {
        _MMAP_THRESHOLD: _MAX_INT,
        _TRIM_THRESHOLD: _MAX_INT,
        _TOP_PAD: 64 << 20,
    }
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
