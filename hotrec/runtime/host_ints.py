"""Integers on their way between the host and a CUDA device, through pinned memory.

A plain ``tolist`` holds the host up until the device has done all it was given on that stream. Here
the copy is put into the stream like any other work, and the host waits, when it needs the values,
for no more than what stood before the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostInts:
    """Integers that a device holds, copied to the host.

    Args:
        values: int64, of any shape; not to be changed on another stream until the copy is made.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._is_here: torch.cuda.Event | None = None
        if values.is_cuda:
            here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = here.copy_(values, non_blocking=True)
            self._is_here = torch.cuda.current_stream(values.device).record_event()

    def wait(self) -> list[int]:
        """The values, flat; waits for the copy."""
        if self._is_here is not None:
            self._is_here.synchronize()
        values: list[int] = self._values.view(-1).tolist()
        return values


def ints_on(device: torch.device, values: Sequence[int]) -> torch.Tensor:
    """The values as int64 (n,) on a device; the host does not wait for the copy."""
    here = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)
