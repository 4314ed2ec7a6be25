"""Bytes that a rank sends, by collective, and the lower bound of exact training.

Counted for the standard algorithms, which gloo and NCCL use for large tensors; headers and
acknowledgements add a few percent on TCP. Counting slows Python's dispatch, so it is only for
sampled steps, whose timings are invalid.

Bytes between hosts are those to ranks of other hosts. A ring passes its bytes on in the order of
ranks, so they cross the border of a host wherever the next rank is on another one; the ranks of the
ring share what crosses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "other")
BYTES_PER_VALUE = 4  # float32, the only type that hotrec trains in


def count_sent_bytes(host_of_rank: Sequence[object] = ()) -> SentBytes:
    """Count what this rank sends inside a ``with`` block.

    Args:
        host_of_rank: The host of every rank (``gather_host_of_rank``), to count what is sent to
            others; empty to not distinguish hosts.
    """
    return SentBytes(host_of_rank)


# The active counts; a dispatch mode only sees its own thread.
_counting: list[SentBytes] = []


class _Local(threading.local):
    is_counted = False


_local = _Local()


@contextmanager
def counted_by_sender(
    collective: str = "other", num_bytes: int | Sequence[int] = 0, ranks: Sequence[int] = ()
) -> Iterator[None]:
    """Count bytes for the block, on any thread, and not the collectives inside it.

    Args:
        collective: One of COLLECTIVES.
        num_bytes: Bytes to each of ``ranks``, or those of a ring.
        ranks: The ranks of the collective, by their number among all ranks.
    """
    for count in _counting:
        count.add(collective, num_bytes, ranks)
    _local.is_counted = True
    try:
        yield
    finally:
        _local.is_counted = False


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends in the block, in ``sent_bytes`` by COLLECTIVES.

    ``between_hosts_bytes`` are those to ranks of other hosts, likewise; 0 without ``host_of_rank``.
    It sees all collectives of its own thread: those of TorchRec, those that DDP's reducer starts
    from C++, those of communication hooks. Those compiled into a graph are refused with an error.
    """

    def __init__(self, host_of_rank: Sequence[object] = ()) -> None:
        super().__init__()
        self.sent_bytes: dict[str, int] = dict.fromkeys(COLLECTIVES, 0)
        self.between_hosts_bytes: dict[str, int] = dict.fromkeys(COLLECTIVES, 0)
        self._host_of_rank = host_of_rank

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

    def add(self, collective: str, num_bytes: int | Sequence[int], ranks: Sequence[int]) -> None:
        """Add what this rank sends in a collective; see ``counted_by_sender``."""
        self.sent_bytes[collective] += num_bytes if isinstance(num_bytes, int) else sum(num_bytes)
        if not self._host_of_rank or not ranks:
            return
        hosts = [self._host_of_rank[rank] for rank in ranks]
        if isinstance(num_bytes, int):
            num_borders = sum(a != b for a, b in zip(hosts, [*hosts[1:], hosts[0]], strict=True))
            self.between_hosts_bytes[collective] += num_bytes * num_borders // len(hosts)
        else:
            own = self._host_of_rank[dist.get_rank()]
            to_hosts = zip(hosts, num_bytes, strict=True)
            num_between = sum(num for host, num in to_hosts if host != own)
            self.between_hosts_bytes[collective] += num_between

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
            self.add(*_measure(func.name().split("::")[1], args))
        elif namespace == "_c10d_functional" and "wait_tensor" not in func.name():
            raise RuntimeError(
                f"traffic: expected collectives of torch.distributed, got the functional "
                f"{func.name()}, which is not counted. Switch compilation off to measure."
            )
        return func(*args, **(kwargs or {}))


# The name, the counted argument, and the part of its n bytes that each of w ranks sends on a ring
# (the mean over them if a root sends). gloo implements reduce_scatter by an all_reduce and sends
# twice as much; the count is that of NCCL.
_RINGS: Mapping[str, tuple[str, int, Callable[[int, int], int]]] = {
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
    "reduce_": ("other", 0, lambda n, w: n * (w - 1) // w),
}
# A root sends or receives a part of each rank: the argument that is one, and the mean over roots is
# counted. Of scatter_ it is the output, because only the root has the input.
_OF_ROOT = {"gather_": 1, "scatter_": 0}
_ALL_TO_ALL = ("alltoall_", "alltoall_base_")
_SILENT = ("barrier", "monitored_barrier_", "check_for_nan", "recv_", "recv_any_source_")


def _measure(
    operation: str, args: tuple[Any, ...]
) -> tuple[str, int | Sequence[int], Sequence[int]]:
    """The collective's name, the bytes that this rank sends for it, and its ranks.

    See ``counted_by_sender``.
    """
    if operation in _SILENT:
        return "other", 0, ()
    if operation not in (*_RINGS, *_OF_ROOT, *_ALL_TO_ALL, "send"):
        raise RuntimeError(
            f"traffic: expected one of the collectives {sorted(_RINGS)}, got {operation!r}. "
            "Add its byte count to hotrec/runtime/traffic.py."
        )
    group = next((_process_group(arg) for arg in args if isinstance(arg, torch.ScriptObject)), None)
    ranks = dist.get_process_group_ranks(group)
    size, rank = len(ranks), ranks.index(dist.get_rank())
    if operation in _RINGS:
        collective, index, rule = _RINGS[operation]
        return collective, rule(_num_bytes(args[index]), size) if size > 1 else 0, ranks
    if operation in _ALL_TO_ALL:
        collective = "all_to_all"
        if operation == "alltoall_":
            sizes = [_num_bytes(part) for part in args[1]]
        else:
            splits = args[4] or [1] * size
            sizes = [_num_bytes(args[1]) * split // max(sum(splits), 1) for split in splits]
    elif operation == "send":
        collective, sizes = "other", [0] * size
        sizes[args[2]] = _num_bytes(args[0])
    else:
        collective, sizes = "other", [_num_bytes(args[_OF_ROOT[operation]]) // size] * size
    sizes[rank] = 0  # not sent
    return collective, sizes, ranks


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
        rows: The distinct rows by embedding dim D, int64 (U,), see ``number_rows``.
        num_lookups: Number of ids in the batch.
        num_hot_lookups: Number of ids of hot rows among them.
    """

    rows: Mapping[int, torch.Tensor]
    num_lookups: int
    num_hot_lookups: int

    @property
    def num_distinct(self) -> dict[int, int]:
        """Number of distinct rows U by embedding dim D."""
        return {dim: rows_U.numel() for dim, rows_U in self.rows.items()}


def number_rows(rows_of_tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """One number for each row of several tables, int64 (K,), the same on every rank."""
    num_tables = len(rows_of_tables)
    return torch.cat([rows * num_tables + at for at, rows in enumerate(rows_of_tables)])


def find_distinct_rows(
    sparse: KeyedJaggedTensor, tables: Mapping[str, tuple[str, int]]
) -> dict[int, torch.Tensor]:
    """The distinct rows by embedding dim D of a batch, a row of a shared table once.

    Args:
        sparse: the unsplit ids of one rank's batch, jagged (F, B).
        tables: table name and embedding dim by feature.

    Returns:
        int64 (U,) by dim, numbered over the tables of the dim.
    """
    by_table: dict[tuple[int, str], list[torch.Tensor]] = {}
    for feature, jagged in sparse.to_dict().items():
        table, dim = tables[feature]
        by_table.setdefault((dim, table), []).append(jagged.values())
    by_dim: dict[int, list[torch.Tensor]] = {}
    for (dim, _), rows in by_table.items():
        by_dim.setdefault(dim, []).append(torch.cat(rows).unique())
    return {dim: number_rows(rows) for dim, rows in by_dim.items()}


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


def lower_bound_between_hosts_bytes(
    num_host_rows: Mapping[int, int],
    host_of_rank: Sequence[object],
    rank: int,
    *,
    num_dense_values: int = 0,
) -> int:
    """The minimum of these bytes between hosts: 2 (U D (W-G)/W + n (H-1)/(H G)) 4.

    The host with G ranks receives each row that any of them reads once, (W-G)/W of the rows from
    other hosts, and sends the sum of its gradients back; the G ranks share both, and the all-reduce
    of the host's sum of the n dense gradients. With H equal hosts (W-G)/W is (H-1)/H.

    It is the minimum for rows that have one owner, independent of who reads them: fewer cross if
    samples go to the owners of their rows. Owners that move to the hosts that read a row
    next could do with 0.73 to 0.78 of the rows' part (8 hosts of 4 or 8, popularity by Zipf's law);
    that is not built: the optimizer's state would travel with the row.

    Args:
        num_host_rows: This rank's part U of the distinct rows of its host (``count_host_rows``), by
            embedding dim D.
        host_of_rank: The host of every rank.
        rank: This rank.
        num_dense_values: n.
    """
    num_ranks, num_hosts = len(host_of_rank), len(set(host_of_rank))
    local = sum(host == host_of_rank[rank] for host in host_of_rank)
    num_values = sum(dim * num for dim, num in num_host_rows.items())
    of_rows = 2 * num_values * BYTES_PER_VALUE * (num_ranks - local) // num_ranks
    dense = 2 * num_dense_values * BYTES_PER_VALUE * (num_hosts - 1) // (num_hosts * local)
    return of_rows + dense
