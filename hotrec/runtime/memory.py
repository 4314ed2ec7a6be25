"""Memory of a host: the C allocator's settings on CPU, and what devices may map of it."""

from __future__ import annotations

import ctypes

# glibc's mallopt parameters (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_MAX_INT = 2**31 - 1


def check_mappable(what: str, num_bytes: int, free_bytes: int) -> None:
    """Refuse to pin more host memory than there is free.

    A host tier is pinned and mapped by the device whole, so it cannot be swapped or taken back;
    asking for more than is free gets the process killed, without a word on why.

    Args:
        what: whose memory, for the message.
        num_bytes: of all ranks of the host together.
        free_bytes: of the host, or of its control group.

    Raises:
        ValueError: if it is more.
    """
    if num_bytes > free_bytes:
        raise ValueError(
            f"{what}: expected at most {free_bytes} bytes, the host's free memory, to pin and map "
            f"for its devices, got {num_bytes}. Keep fewer rows in host tiers, use more hosts, or "
            "free memory on this one."
        )


def keep_freed_memory() -> bool:
    """Make glibc keep what is freed for the next step, instead of giving it back to the kernel.

    A step frees and allocates the same tens of megabytes over and over; by default glibc maps and
    unmaps them each time, and the kernel zeroes every page anew: a third of the CPU time of a step
    with 8,192 samples of 26 features of 64 floats, for TorchRec's plans as for hot/cold ones.

    Returns:
        Whether the C library has these settings; other libraries are left as they are.
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
