"""Bytes that a rank sends, by collective, and the lower bound of exact training.

Counted for the standard algorithms, which gloo and NCCL use for large tensors; headers and
acknowledgements add a few percent on TCP. Counting slows Python's dispatch, so it is only for
sampled steps, whose timings are invalid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "other")
BYTES_PER_VALUE = 4  # float32, the only type that hotrec trains in


def count_sent_bytes() -> SentBytes:
    """Count what this rank sends inside a ``with`` block."""
    return SentBytes()


# The active counts; a dispatch mode only sees its own thread.
_counting: list[SentBytes] = []


class _Local(threading.local):
    is_counted = False


_local = _Local()


@contextmanager
def counted_by_sender(collective: str = "other", num_bytes: int = 0) -> Iterator[None]:
    """Count ``num_bytes`` for the block, on any thread, and not the collectives inside it."""
    for count in _counting:
        count.sent_bytes[collective] += num_bytes
    _local.is_counted = True
    try:
        yield
    finally:
        _local.is_counted = False


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends in the block, in ``sent_bytes`` by COLLECTIVES.

    It sees all collectives of its own thread: those of TorchRec, those that DDP's reducer starts
    from C++, those of communication hooks. Those compiled into a graph are refused with an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes: dict[str, int] = dict.fromkeys(COLLECTIVES, 0)

    def __enter__(self) -> SentBytes:
        _counting.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        _counting.remove(self)
        super().__exit__(*exception)

    @property
    def total_bytes(self) -> int:
        return sum(self.sent_bytes.values())

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow compiled layers inside the block, which torch.compile otherwise refuses."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        namespace = getattr(func, "namespace", "")
        if namespace == "c10d" and not _local.is_counted:
            collective, num_bytes = _measure(func.name().split("::")[1], args)
            self.sent_bytes[collective] += num_bytes
        elif namespace == "_c10d_functional" and "wait_tensor" not in func.name():
            raise RuntimeError(
                f"traffic: expected collectives of torch.distributed, got the functional "
                f"{func.name()}, which is not counted. Switch compilation off to measure."
            )
        return func(*args, **(kwargs or {}))


# The name, the counted argument, and the part of its n bytes that each of w ranks sends (the mean
# over them if a root sends or receives). gloo implements reduce_scatter by an all_reduce and sends
# twice as much; the count is that of NCCL.
_RULES: Mapping[str, tuple[str, int, Callable[[int, int], int]]] = {
    # Ring: reduce-scatter, then all-gather.
    **dict.fromkeys(
        ("allreduce_", "allreduce_coalesced_"),
        ("all_reduce", 0, lambda n, w: 2 * n * (w - 1) // w),
    ),
    # Ring: each part passes every rank.
    **dict.fromkeys(
        (
            "allgather_",
            "_allgather_base_",
            "allgather_coalesced_",
            "allgather_into_tensor_coalesced_",
        ),
        ("all_gather", 1, lambda n, w: n * (w - 1)),
    ),
    **dict.fromkeys(
        ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
        ("reduce_scatter", 1, lambda n, w: n * (w - 1) // w),
    ),
    "broadcast_": ("broadcast", 0, lambda n, w: n * (w - 1) // w),
    "gather_": ("other", 1, lambda n, w: n * (w - 1) // w),
    # The argument of scatter_ is one part, the output: only the root has the input.
    **dict.fromkeys(("reduce_", "scatter_"), ("other", 0, lambda n, w: n * (w - 1) // w)),
    "send": ("other", 0, lambda n, w: n),
}
_ALL_TO_ALL = ("alltoall_", "alltoall_base_")
_SILENT = ("barrier", "monitored_barrier_", "check_for_nan", "recv_", "recv_any_source_")


def _measure(operation: str, args: tuple[Any, ...]) -> tuple[str, int]:
    """The collective's name and the bytes that this rank sends for it."""
    if operation in _SILENT:
        return "other", 0
    if operation not in (*_RULES, *_ALL_TO_ALL):
        raise RuntimeError(
            f"traffic: expected one of the collectives {sorted(_RULES)}, got {operation!r}. "
            "Add its byte count to hotrec/runtime/traffic.py."
        )
    group = next((_process_group(arg) for arg in args if isinstance(arg, torch.ScriptObject)), None)
    # send and recv of a pair need no group to be counted.
    size = group.size() if group is not None else dist.get_world_size()
    rank = group.rank() if group is not None else dist.get_rank()
    if operation in _RULES:
        collective, index, rule = _RULES[operation]
        return collective, rule(_num_bytes(args[index]), size) if size > 1 else 0
    # The bytes meant for other ranks.
    total = _num_bytes(args[1])
    if operation == "alltoall_":
        return "all_to_all", total - _num_bytes(args[1][rank])
    splits = args[4] or [1] * size
    return "all_to_all", total - total * splits[rank] // max(sum(splits), 1)


def _process_group(handle: torch.ScriptObject) -> Any:
    try:
        return dist.ProcessGroup.unbox(handle)
    except (RuntimeError, TypeError):  # another boxed argument, such as the reduce operation
        return None


def _num_bytes(tensors: Any) -> int:
    """Bytes of a tensor or of nested lists of tensors."""
    if isinstance(tensors, torch.Tensor):
        if tensors.is_sparse:
            raise RuntimeError(
                f"traffic: expected dense tensors in collectives, got a sparse one of shape "
                f"{tuple(tensors.shape)}, whose bytes on the wire are not known."
            )
        return tensors.numel() * tensors.element_size()
    return sum(_num_bytes(tensor) for tensor in tensors)


@dataclass(frozen=True)
class BatchFacts:
    """Lookup statistics of one rank's batch.

    Args:
        num_distinct: Number of distinct rows U by embedding dim D.
        num_lookups: Number of ids in the batch.
        num_hot_lookups: Number of ids of hot rows among them.
    """

    num_distinct: Mapping[int, int]
    num_lookups: int
    num_hot_lookups: int


def count_distinct_rows(
    sparse: KeyedJaggedTensor, tables: Mapping[str, tuple[str, int]]
) -> dict[int, int]:
    """Count the distinct rows U by embedding dim D of a batch, a row of a shared table once.

    Args:
        sparse: the unsplit ids of one rank's batch, jagged (F, B).
        tables: table name and embedding dim by feature.
    """
    by_table: dict[tuple[str, int], list[torch.Tensor]] = {}
    for feature, jagged in sparse.to_dict().items():
        by_table.setdefault(tables[feature], []).append(jagged.values())
    num_distinct: dict[int, int] = {}
    for (_, dim), rows in by_table.items():
        num_distinct[dim] = num_distinct.get(dim, 0) + torch.cat(rows).unique().numel()
    return num_distinct


def lower_bound_bytes(
    num_distinct_rows: Mapping[int, int], world_size: int, *, num_dense_values: int = 0
) -> int:
    """The minimum bytes that a rank sends in an exact synchronous step: 2 (U D + n) 4 (W-1)/W.

    Each of the U distinct rows of dim D in the rank's batch is sent by its owner, (W-1)/W of them
    by other ranks, and its gradient is sent back; the gradients of the n dense values are
    all-reduced. A pooled exchange sends one vector per bag, and can be below the bound for long
    bags.
    """
    num_values = sum(dim * num for dim, num in num_distinct_rows.items()) + num_dense_values
    return 2 * num_values * BYTES_PER_VALUE * (world_size - 1) // world_size
