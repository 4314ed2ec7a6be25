"""Pages of host memory: as a CUDA device maps them, out of forked processes, and huge ones."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_MS_ASYNC = 1  # sys/mman.h


def host_view(seen: torch.Tensor) -> torch.Tensor:
    """Host view of a device tensor in mapped host memory.

    It keeps the memory alive. FBGEMM's own ``uvm_to_cpu`` refuses mapped memory before 1.8. On
    64-bit Linux host and device share one address of memory that CUDA has registered, which is
    verified here with the first byte: call it before anything else reads or writes the memory.

    Raises:
        RuntimeError: if the address is other memory on the host.
    """
    if seen.numel() == 0:
        return torch.empty(seen.shape, dtype=seen.dtype)
    flat = seen.detach().view(-1)
    num_bytes = flat.numel() * flat.element_size()
    memory = (ctypes.c_char * num_bytes).from_address(flat.data_ptr())
    memory.owner = flat  # type: ignore[attr-defined]  # the host's tensor holds ``memory``
    if not _is_readable(flat.data_ptr(), num_bytes) or not _is_same(memory, flat):
        raise RuntimeError(
            f"host memory mapped for {seen.device}: expected the same address on host and device, "
            f"got {flat.data_ptr():#x}, which is other memory on the host. Use "
            "placement.cold_tier=fused: this system has no unified addresses."
        )
    return torch.frombuffer(memory, dtype=flat.dtype).view(seen.shape)


def _is_readable(address: int, num_bytes: int) -> bool:
    """Whether this process has mapped the whole range; reading it otherwise would crash."""
    begin = address - address % mmap.PAGESIZE
    # On Linux this only checks for holes.
    found: int = _LIBC.msync(
        ctypes.c_void_p(begin), ctypes.c_size_t(address + num_bytes - begin), _MS_ASYNC
    )
    return found == 0


def _is_same(memory: ctypes.Array[ctypes.c_char], flat: torch.Tensor) -> bool:
    """Write another first byte on the host, read it on the device, and restore the original."""
    seen = flat.view(torch.uint8)[0]
    before = int(seen)  # waits for the device's queued work
    memory[0] = bytes([before ^ 255])
    is_same = int(seen) == before ^ 255
    memory[0] = bytes([before])
    return is_same


def keep_out_of_forks(seen: torch.Tensor) -> None:
    """Exclude the device-mapped memory of a tensor from processes that are forked later.

    Linux copies pages that a device has pinned when the process forks, so that each loader worker
    would need as much memory as the tables. Only complete pages are excluded, because the first and
    the last one may contain other data. When the tensor is freed, forks get the pages again, which
    the allocator may reuse.

    Raises:
        OSError: if the memory is not mapped in this process.
    """
    begin, num_bytes = _whole_pages(seen)
    if num_bytes > 0:
        if _advise(begin, num_bytes, mmap.MADV_DONTFORK) != 0:
            error = os.strerror(ctypes.get_errno())
            raise OSError(
                f"host memory mapped for {seen.device}: expected {num_bytes} bytes at {begin:#x} "
                f"in this process, got {error}."
            )
        again = weakref.finalize(seen, _advise, begin, num_bytes, mmap.MADV_DOFORK)
        again.atexit = False


def ask_for_huge_pages(values: torch.Tensor) -> torch.Tensor:
    """Request huge pages for a tensor that has not been written yet.

    Random reads over gigabytes get faster.
    """
    begin, num_bytes = _whole_pages(values)
    if values.device.type == "cpu" and num_bytes > 0:
        _advise(begin, num_bytes, mmap.MADV_HUGEPAGE)  # fails on a kernel without them
    return values


def _whole_pages(values: torch.Tensor) -> tuple[int, int]:
    """The address of the first complete page of a tensor's memory, and the bytes of all of them."""
    begin = -(-values.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = values.data_ptr() + values.numel() * values.element_size()
    return begin, (end - begin) // mmap.PAGESIZE * mmap.PAGESIZE


def _advise(begin: int, num_bytes: int, advice: int) -> int:
    done: int = _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), advice)
    return done
