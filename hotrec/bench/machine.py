"""Facts about the machine for result pages, and two counters of the operating system."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hotrec.runtime.memory import read_memory

PACKAGES = ("hotrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")


def machine_facts() -> dict[str, Any]:
    """Processor, memory, versions, threads, code version, load."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.processor(),
        "num_cores": os.cpu_count(),
        "memory_bytes": read_memory()[0],
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "threads_per_rank": torch.get_num_threads(),
        "malloc": {k: v for k, v in sorted(os.environ.items()) if k.startswith("MALLOC_")},
        "code": code_version(),
        "load_average": load_average(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def code_version() -> str:
    """The commit of the code and whether it was edited since, or "no git commit"."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "no git commit"
    return described.stdout.strip()


def load_average() -> float:
    """Load average of the last minute."""
    return os.getloadavg()[0]


def resident_bytes(device: torch.device) -> int:
    """Memory of this process: allocated on a CUDA device, otherwise resident on the host."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status: expected a line VmRSS, got none. Linux is needed.")


def interface_sent_bytes(interface: str) -> int:
    """Bytes that a network interface has sent since it came up.

    Raises:
        ValueError: If this network namespace has no such interface.
    """
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    sent = {
        line.partition(":")[0].strip(): int(line.partition(":")[2].split()[8]) for line in lines
    }
    if interface not in sent:
        raise ValueError(f"bench.interface: expected one of {sorted(sent)}, got {interface!r}.")
    return sent[interface]
