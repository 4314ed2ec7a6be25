"""Bytes that a rank sends, by collective, and the least that exact training has to send.

A dispatch mode sees every collective on its way to the process group: those of TorchRec, those that
DDP's reducer starts from C++ during backward, and those of communication hooks. It sees its own
thread only, so the exchanges that hotrec runs in a thread of their own say what they send. What a
collective moves on the wire depends on the backend's algorithm, so the counts are those of the
standard algorithms, which gloo and NCCL use for large tensors (n bytes, W ranks):

    all_to_all      the bytes meant for other ranks: input minus the own part
    all_reduce      2 (W-1)/W n      ring: reduce-scatter, then all-gather
    all_gather      (W-1) n          n: the rank's own input; ring: each part passes every rank
    reduce_scatter  (W-1)/W n        n: the whole input
    broadcast       (W-1)/W n        mean over the ranks, of which all but one receive n
    reduce, gather, scatter          likewise, mean over the ranks
    send            n

gloo makes its reduce_scatter of an all_reduce and sends twice as much; the count is that of NCCL.
Headers and acknowledgements come on top (a few percent on TCP). The mode slows Python's dispatch,
so it is for sampled steps; the timings of such a step are not to be used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "other")
BYTES_PER_VALUE = 4  # float32, the only type that hotrec trains in


def count_sent_bytes() -> SentBytes:
    """Count what this rank sends inside the block.

    ``with count_sent_bytes() as traffic: step()``, then ``traffic.sent_bytes``. Collectives that
    are compiled into a graph (torch.compile, functional collectives) are refused with an error
    instead of being missed.
    """
    return SentBytes()


# The counts that are being made; a dispatch mode sees its own thread only.
_counting: list[SentBytes] = []


def note_sent(collective: str, num_bytes: int) -> None:
    """Count bytes that a thread sends by messages of its own, see ``hotrec.runtime.wire``."""
    for count in _counting:
        count.sent_bytes[collective] += num_bytes


@contextmanager
def counted_by_sender() -> Iterator[None]:
    """What the block sends has been counted by ``note_sent``: its collectives are not counted."""
    _local.is_noted = True
    try:
        yield
    finally:
        _local.is_noted = False


class _Local(threading.local):
    is_noted = False


_local = _Local()


class SentBytes(TorchDispatchMode):
    """A context that adds up sent bytes; ``sent_bytes`` has one entry per name of COLLECTIVES."""

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
        """Let compiled layers run inside the block; without this torch.compile refuses to."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        namespace = getattr(func, "namespace", "")
        if namespace == "c10d" and not _local.is_noted:
            collective, num_bytes = _measure(func._schema.name.split("::")[1], args)
            self.sent_bytes[collective] += num_bytes
        elif namespace == "_c10d_functional" and "wait_tensor" not in func._schema.name:
            raise RuntimeError(
                f"traffic: expected collectives of torch.distributed, got the functional "
                f"{func._schema.name}, which is not counted. Switch compilation off to measure."
            )
        return func(*args, **(kwargs or {}))


def _measure(operation: str, args: tuple[Any, ...]) -> tuple[str, int]:
    """The collective's name and the bytes that this rank sends for it."""
    if operation in _SILENT:
        return "other", 0
    if operation not in _RULES:
        raise RuntimeError(
            f"traffic: expected one of the collectives {sorted(_RULES)}, got {operation!r}. "
            "Add its byte count to hotrec/runtime/traffic.py."
        )
    collective, rule = _RULES[operation]
    group = next((_process_group(arg) for arg in args if isinstance(arg, torch.ScriptObject)), None)
    # send and recv of a pair need no group to be counted.
    size = group.size() if group is not None else dist.get_world_size()
    rank = group.rank() if group is not None else dist.get_rank()
    return collective, rule(args, rank, size) if size > 1 else 0


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


def _all_to_all_single(args: tuple[Any, ...], rank: int, size: int) -> int:
    _, source, _, _, input_splits = args[:5]
    total = _num_bytes(source)
    if not input_splits:
        return total * (size - 1) // size
    num_rows = sum(input_splits)
    return total - (total * input_splits[rank] // num_rows if num_rows else 0)


def _all_to_all_list(args: tuple[Any, ...], rank: int, size: int) -> int:
    return sum(_num_bytes(part) for peer, part in enumerate(args[1]) if peer != rank)


def _twice_all_but_own(args: tuple[Any, ...], rank: int, size: int) -> int:
    return 2 * _num_bytes(args[0]) * (size - 1) // size


def _input_to_all_others(args: tuple[Any, ...], rank: int, size: int) -> int:
    return _num_bytes(args[1]) * (size - 1)


def _input_but_own_part(args: tuple[Any, ...], rank: int, size: int) -> int:
    return _num_bytes(args[1]) * (size - 1) // size


def _first_but_own_part(args: tuple[Any, ...], rank: int, size: int) -> int:
    return _num_bytes(args[0]) * (size - 1) // size


def _first_whole(args: tuple[Any, ...], rank: int, size: int) -> int:
    return _num_bytes(args[0])


_Rule = Callable[[tuple[Any, ...], int, int], int]
_RULES: Mapping[str, tuple[str, _Rule]] = {
    "alltoall_base_": ("all_to_all", _all_to_all_single),
    "alltoall_": ("all_to_all", _all_to_all_list),
    "allreduce_": ("all_reduce", _twice_all_but_own),
    "allreduce_coalesced_": ("all_reduce", _twice_all_but_own),
    "allgather_": ("all_gather", _input_to_all_others),
    "_allgather_base_": ("all_gather", _input_to_all_others),
    "allgather_coalesced_": ("all_gather", _input_to_all_others),
    "allgather_into_tensor_coalesced_": ("all_gather", _input_to_all_others),
    "reduce_scatter_": ("reduce_scatter", _input_but_own_part),
    "_reduce_scatter_base_": ("reduce_scatter", _input_but_own_part),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _input_but_own_part),
    "broadcast_": ("broadcast", _first_but_own_part),
    "reduce_": ("other", _first_but_own_part),
    "gather_": ("other", _input_but_own_part),
    # Only the root holds the input; each rank's output is one part, so this is the mean.
    "scatter_": ("other", _first_but_own_part),
    "send": ("other", _first_whole),
}
_SILENT = frozenset({"barrier", "monitored_barrier_", "check_for_nan", "recv_", "recv_any_source_"})


@dataclass(frozen=True)
class BatchFacts:
    """What one rank's batch reads.

    Args:
        num_distinct: Number of distinct rows U by embedding dim D.
        num_lookups: Number of ids in the batch.
        num_hot_lookups: Number of these ids that are hot rows.
    """

    num_distinct: Mapping[int, int]
    num_lookups: int
    num_hot_lookups: int


def count_dense_values(model: nn.Module) -> int:
    """Trained parameters outside of sharded modules: the dense layers, all-reduced whole by DDP."""
    dense: dict[int, int] = {}
    sharded: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule):
            sharded.append(f"{name}.")
        elif not name.startswith(tuple(sharded)):
            # Module by module: DistributedModelParallel renames what named_parameters returns.
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    dense[id(parameter)] = parameter.numel()
    return sum(dense.values())


def count_distinct_rows(
    sparse: KeyedJaggedTensor, tables: Mapping[str, tuple[str, int]]
) -> dict[int, int]:
    """Count the distinct rows that a batch reads, a row of a shared table once.

    Args:
        sparse: the unsplit ids of one rank's batch, jagged (F, B).
        tables: table name and embedding dim by feature.

    Returns:
        Number of distinct rows U by embedding dim D.
    """
    by_table: dict[tuple[str, int], list[torch.Tensor]] = {}
    for feature, jagged in sparse.to_dict().items():
        by_table.setdefault(tables[feature], []).append(jagged.values())
    num_distinct: dict[int, int] = {}
    for (_, dim), rows in by_table.items():
        num_distinct[dim] = num_distinct.get(dim, 0) + torch.cat(rows).unique().numel()
    return num_distinct


def lower_bound_bytes(
    num_distinct_rows: Mapping[int, int] | Sequence[tuple[int, int]],
    world_size: int,
    *,
    num_dense_values: int = 0,
) -> int:
    """The least bytes that a rank sends in an exact synchronous step: 2 U D 4 (W-1)/W.

    Every distinct row of the rank's batch comes from where it lives and its gradient goes back;
    with rows spread evenly over W ranks, (W-1)/W of them live elsewhere. The dense layers add the
    ring all-reduce of their gradients, 2 n 4 (W-1)/W. It bounds the exchange of rows; a pooled
    exchange sends one vector per bag, and can stay under it where bags are long.

    Args:
        num_distinct_rows: U by embedding dim D, or pairs (D, U): distinct rows in the rank's batch.
        world_size: W.
        num_dense_values: n, parameters of the dense layers; 0 for the embeddings' share alone.
    """
    pairs = (
        list(num_distinct_rows.items())
        if isinstance(num_distinct_rows, Mapping)
        else list(num_distinct_rows)
    )
    num_values = sum(dim * num_rows for dim, num_rows in pairs) + num_dense_values
    return 2 * num_values * BYTES_PER_VALUE * (world_size - 1) // world_size
