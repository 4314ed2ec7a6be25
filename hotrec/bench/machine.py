"""Facts about the machine for result pages, and two counters of the operating system."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from hotrec.runtime.memory import read_memory

PACKAGES = ("hotrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")


def machine_facts() -> dict[str, Any]:
    """Processor, memory, versions, threads, code version, load."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    return {
        "processor": found[1] if found else platform.processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": read_memory()[0],
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: d.version for name in PACKAGES for d in distributions(name=name)},
        "threads_per_rank": torch.get_num_threads(),
        "malloc": {k: v for k, v in sorted(os.environ.items()) if k.startswith("MALLOC_")},
        "code": code_version(),
        "load_average": os.getloadavg()[0],
    }


def code_version() -> str:
    """The commit of the code and whether it was edited since, or "no git commit"."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        described = subprocess.check_output(
            command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "no git commit"
    return described.strip()


def resident_bytes(device: torch.device) -> int:
    """Memory of this process: allocated on a CUDA device, otherwise resident on the host."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def interface_sent_bytes(interface: str) -> int:
    """Bytes that a network interface has sent since it came up.

    Raises:
        ValueError: If this network namespace has no such interface.
    """
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counters = {name.strip(): rest.split() for name, _, rest in (x.partition(":") for x in lines)}
    sent = {name: int(fields[8]) for name, fields in counters.items()}
    if interface not in sent:
        raise ValueError(f"plans.interface: expected one of {sorted(sent)}, got {interface!r}.")
    return sent[interface]
