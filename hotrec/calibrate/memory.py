"""Memory of a device and of a host, the least over the ranks; and memory to measure in."""

from __future__ import annotations

import torch

from hotrec.runtime.memory import read_memory
from hotrec.runtime.ranks import all_gather_object


def measure_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of a device (0 on CPU) and of a host (or its control group); collective."""
    device_bytes = 0
    if device.type == "cuda":
        device_bytes = torch.cuda.get_device_properties(device).total_memory
    of_ranks = all_gather_object((device_bytes, read_memory()[0]))
    return min(d for d, _ in of_ranks), min(h for _, h in of_ranks)


def warm_memory(device: torch.device, num_bytes: int) -> None:
    """Let a CPU process own memory that calls can then take without the kernel zeroing pages.

    Where freed memory is kept (``hotrec.runtime.memory``) a training run reaches that state after
    some steps; a call that is measured a few times would pay for its pages in half of them.

    Args:
        num_bytes: as much as the largest calls take together.
    """
    if device.type == "cpu":
        parts = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(num_bytes >> 20)]
        del parts


class CacheFiller:
    """Fills a processor's own cache with something else, as the rest of a step does.

    Between two calls of a kernel a step reads and writes tens of megabytes of activations, so what
    a kernel finds near the processor is what it touched itself, not what its last call left.

    Args:
        device: only a CPU's caches are filled: a GPU's are small against what a kernel reads.
        num_bytes: more than a core's own cache, less than what cores share.
    """

    def __init__(self, device: torch.device, num_bytes: int = 8 << 20) -> None:
        self._values = torch.zeros(num_bytes // 4) if device.type == "cpu" else None

    def fill(self) -> None:
        if self._values is not None:
            self._values.add_(1.0)
