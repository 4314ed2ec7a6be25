"""Gives this process the stand-in for a CUDA device. Import before torch.

``torch.cuda`` then says that there is one device, tensors made on it are torch's own with values in
CPU memory, streams and events are objects that know their identity, and the process group "nccl" is
gloo on the values underneath. Everything that happens goes to the log of ``tests.stand_in.log``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from tests.stand_in.build import compiled, libraries

if "torch" in sys.modules:
    raise RuntimeError(
        "tests.stand_in.device: expected to be imported before torch, got torch imported already. "
        "Run it in a process of its own."
    )
# Torch would warn that a collective's kernel for CUDA is registered twice.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
for _library in libraries():
    ctypes.CDLL(os.fspath(_library), ctypes.RTLD_GLOBAL)
library = ctypes.CDLL(os.fspath(compiled()))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

# What torch itself finds out about CUDA when it is imported, it finds out without the stand-in.
import torchrec  # noqa: E402, F401

from tests.stand_in import log  # noqa: E402

log.start(library)
INDEX = int(os.environ.get("LOCAL_RANK", "0"))
NUM_DEVICES = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
CUDA = torch.device("cuda", INDEX)


class Stream(torch.Stream):
    """``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            return super().__new__(cls, **kwargs)
        stream = super().__new__(cls, device=CUDA, priority=priority)
        log.name_stream(stream.stream_id)
        return stream

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event


class Event:
    """``torch.cuda.Event``: makes torch's own, which compares times with its own kind alone."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Any:
        return torch.Event(device=CUDA, enable_timing=enable_timing)


def _stream(stream_id: int) -> Stream:
    return Stream(stream_id=stream_id, device_index=INDEX, device_type=1)


def current_stream(device: Any = None) -> Stream:
    return _stream(torch.accelerator.current_stream(CUDA).stream_id)


def default_stream(device: Any = None) -> Stream:
    return _stream(0)


def set_stream(stream: Any) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def _in_stream(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def _synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(CUDA)


@contextlib.contextmanager
def _on_device(device: Any = None) -> Iterator[None]:
    yield


PROPERTIES = SimpleNamespace(
    name="stand-in", major=9, minor=0, total_memory=1 << 36, multi_processor_count=132,
    warp_size=32, max_threads_per_multi_processor=2048, gcnArchName="",
    shared_memory_per_block_optin=232448, L2_cache_size=50 << 20, is_integrated=False,
    pci_domain_id=0xFFFF, pci_bus_id=0xFF, pci_device_id=0x1F,  # where no machine has a device
)  # fmt: skip


def _memory_stats(device: Any = None) -> dict[str, int]:
    now, most = library.stand_in_allocated(0), library.stand_in_allocated(1)
    return {
        "allocated_bytes.all.current": now,
        "allocated_bytes.all.peak": most,
        "reserved_bytes.all.current": now,
        "reserved_bytes.all.peak": most,
        "num_ooms": 0,
        "num_alloc_retries": 0,
    }


def _patch() -> None:
    library.stand_in_allocated.restype = ctypes.c_int64
    changes: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: INDEX,
        "set_device": lambda device: None,
        "device": _on_device,
        "Stream": Stream,
        "Event": Event,
        "stream": _in_stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "synchronize": _synchronize,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "mem_get_info": lambda device=None: (
            PROPERTIES.total_memory - library.stand_in_allocated(0),
            PROPERTIES.total_memory,
        ),
        "memory_allocated": lambda device=None: library.stand_in_allocated(0),
        "memory_reserved": lambda device=None: library.stand_in_allocated(0),
        "max_memory_allocated": lambda device=None: library.stand_in_allocated(1),
        "max_memory_reserved": lambda device=None: library.stand_in_allocated(1),
        "reset_peak_memory_stats": lambda device=None: library.stand_in_reset_most(),
        "memory_stats": _memory_stats,
        "default_generators": (torch.default_generator,) * 8,
        "get_rng_state": lambda device=None: torch.default_generator.get_state(),
        "set_rng_state": lambda state, device=None: torch.default_generator.set_state(state),
        "manual_seed": lambda seed: None,  # torch.manual_seed has seeded the one generator
        "manual_seed_all": lambda seed: None,
    }
    for name, value in changes.items():
        setattr(torch.cuda, name, value)
    _patch_distributed()


def _patch_distributed() -> None:
    """The process group "nccl" is gloo underneath, and says that it is nccl."""
    init, new_group, get_backend = dist.init_process_group, dist.new_group, dist.get_backend
    of_nccl: set[str] = set()  # names of the groups that are said to be

    def init_process_group(backend: str | None = None, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        is_nccl = backend in (None, "nccl")
        init("gloo" if is_nccl else backend, **kwargs)
        of_nccl.clear()
        if is_nccl:
            of_nccl.add(dist.group.WORLD.group_name)  # type: ignore[union-attr]

    def make_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any
    ) -> Any:
        for name in ("pg_options", "device_id"):
            kwargs.pop(name, None)
        is_nccl = (backend or name_backend()) == "nccl"
        made = new_group(ranks, timeout, "gloo" if is_nccl else backend, **kwargs)
        if is_nccl and made is not dist.GroupMember.NON_GROUP_MEMBER:
            of_nccl.add(made.group_name)
        return made

    def name_backend(group: Any = None) -> str:
        named = dist.group.WORLD if group is None else group
        return "nccl" if named.group_name in of_nccl else get_backend(group)

    modules = (dist, dist.distributed_c10d)
    for module in modules:
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
        module.new_group = make_group  # type: ignore[attr-defined]
    dist.get_backend = name_backend  # type: ignore[assignment]
    torch.cuda.nccl.version = lambda: (2, 27, 5)  # the logger of collectives asks


_patch()
from tests.stand_in import fbgemm as _fbgemm  # noqa: E402, F401


def seen_operators() -> set[str]:
    """FBGEMM's operators that tensors of the device have met in this process, without namespace."""
    names: set[str] = set()
    signature = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    library.stand_in_seen(signature(lambda name: names.add(name.decode().partition("::")[2])))
    return names


def close() -> None:
    """Stop asking Python for lines: it is about to end."""
    library.stand_in_log(0)
