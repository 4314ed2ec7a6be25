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
    """A tensor of a device, in host memory that it maps, as a tensor of the host.

    It keeps the memory. FBGEMM's own ``uvm_to_cpu`` refuses mapped memory before 1.8. On 64-bit
    Linux host and device know memory that CUDA has registered by one address, which is tried here
    with the first byte: call it before anything else reads or writes the memory.

    Raises:
        RuntimeError: if the address is not that of the same memory for the host.
    """
    if seen.numel() == 0:
        return torch.empty(seen.shape, dtype=seen.dtype)
    flat = seen.detach().view(-1)
    num_bytes = flat.numel() * flat.element_size()
    memory = (ctypes.c_char * num_bytes).from_address(flat.data_ptr())
    memory.owner = flat  # type: ignore[attr-defined]  # the host's tensor holds ``memory``
    if not _is_readable(flat.data_ptr(), num_bytes) or not _is_same(memory, flat):
        raise RuntimeError(
            f"host memory mapped for {seen.device}: expected one address for the host and the "
            f"device, got {flat.data_ptr():#x}, under which the host finds other memory. Use "
            "placement.cold_tier=fused or fused_uvm: this system has no unified addresses."
        )
    return torch.frombuffer(memory, dtype=flat.dtype).view(seen.shape)


def _is_readable(address: int, num_bytes: int) -> bool:
    """Whether this process has mapped the whole range; to read it otherwise would end it."""
    begin = address - address % mmap.PAGESIZE
    # On Linux this does nothing but look for holes.
    found: int = _LIBC.msync(
        ctypes.c_void_p(begin), ctypes.c_size_t(address + num_bytes - begin), _MS_ASYNC
    )
    return found == 0


def _is_same(memory: ctypes.Array[ctypes.c_char], flat: torch.Tensor) -> bool:
    """Write another first byte on the host, read it on the device, and put the first one back."""
    seen = flat.view(torch.uint8)[0]
    before = int(seen)  # waits for what the device was given
    memory[0] = bytes([before ^ 255])
    is_same = int(seen) == before ^ 255
    memory[0] = bytes([before])
    return is_same


def keep_out_of_forks(seen: torch.Tensor) -> None:
    """Leave the memory of a tensor, which a device maps, out of processes forked from now on.

    Linux copies the pages that a device holds as soon as the process forks, so that each loader
    worker would take as much memory as the tables. Only whole pages are left out: what else lies on
    the first and the last one stays. When the tensor goes, forks have the pages again, which
    the allocator may give to others.

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
    """Let Linux give huge pages, where it has them, to a tensor that nothing was written to yet.

    Numbers that are read all over gigabytes are found in less time.
    """
    begin, num_bytes = _whole_pages(values)
    if values.device.type == "cpu" and num_bytes > 0:
        _advise(begin, num_bytes, mmap.MADV_HUGEPAGE)  # a kernel without them refuses
    return values


def _whole_pages(values: torch.Tensor) -> tuple[int, int]:
    """Where the first whole page of a tensor's memory begins, and the bytes of all of them."""
    begin = -(-values.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = values.data_ptr() + values.numel() * values.element_size()
    return begin, (end - begin) // mmap.PAGESIZE * mmap.PAGESIZE


def _advise(begin: int, num_bytes: int, advice: int) -> int:
    done: int = _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), advice)
    return done
