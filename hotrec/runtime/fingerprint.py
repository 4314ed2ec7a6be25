"""The fingerprint of a machine: equal hardware and versions, whatever the host is called."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hotrec.runtime.memory import read_memory

GIB = 1 << 30
PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")


def read_fingerprint(
    device: str | None = None, cpuinfo: Path = Path("/proc/cpuinfo")
) -> dict[str, Any]:
    """Processor, memory, GPUs and versions of this host.

    Args:
        device: "cpu" or "cuda", the device to train on; "cpu" leaves out GPUs. None: cuda if
            available.
        cpuinfo: Linux's description of the processor.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    return {
        "device": device,
        "processor": _processor(cpuinfo),
        "num_cores": os.cpu_count(),
        # Kernels of one machine differ by some megabytes in what they keep for themselves.
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
