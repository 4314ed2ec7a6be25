"""Memory of a sharded model's tables by tier, and what FBGEMM's device caches of them did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    UVMCacheStatsIndex,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardedModule
from torchrec.optim.keyed import CombinedOptimizer

from hotrec.embedding.optimizers import hot_replicas
from hotrec.embedding.tables import sharded_collections

HOT_ROWS, COLD_ROWS = "hot_rows", "cold_rows"
STATE, CACHE, ROUTER = "optimizer_state", "cache", "router"
KINDS = (HOT_ROWS, COLD_ROWS, STATE, CACHE, ROUTER)
DEVICE, HOST = "device", "host"
# How FBGEMM's modules end the names of their buffers; managed memory lies on the host.
_PLACES = {"_dev": DEVICE, "_uvm": HOST, "_host": HOST}


def memory_by_tier(model: nn.Module, optimizer: CombinedOptimizer) -> dict[str, dict[str, int]]:
    """Bytes of this rank's tables; what it holds -> "device" and "host" -> bytes.

    Counted are the tensors themselves: replicas ("hot_rows", with their gradients, where they have
    a buffer), shards ("cold_rows"), the optimizer's state of both, FBGEMM's cache of host rows with
    its maps, and the router's maps. On CPU all of it is the host's. Nothing is read from a device.

    Args:
        model: sharded.
        optimizer: from ``make_optimizer``.
    """
    total = {kind: {DEVICE: 0, HOST: 0} for kind in KINDS}
    seen: set[int] = set()
    for kind, tensor, place in _tensors(model, optimizer):
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        is_host = place == HOST or tensor.device.type == "cpu"
        total[kind][HOST if is_host else DEVICE] += storage.nbytes()
    return total


def _tensors(
    model: nn.Module, optimizer: CombinedOptimizer
) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    for replica in hot_replicas(model).values():
        yield HOT_ROWS, replica.weight.detach(), None
        if replica.weight.grad is not None:
            yield HOT_ROWS, replica.weight.grad, None
    parts = dict(optimizer.optimizers)
    for name in ("hot", "tables"):
        if name in parts:
            for state in parts[name].state.values():
                for tensor in state.values():
                    if isinstance(tensor, torch.Tensor):
                        yield STATE, tensor, None
    for kernel in _kernels(model):
        yield from _tensors_of(kernel)
    for _, collection in sharded_collections(model):
        for router in (collection.router, collection._device_router):
            for group in () if router is None else router.groups.values():
                for tensor in vars(group).values():
                    if isinstance(tensor, torch.Tensor):
                        yield ROUTER, tensor, None


def _kernels(model: nn.Module) -> Iterator[nn.Module]:
    """FBGEMM's modules; TorchRec keeps its lookups in lists that no module iterator sees."""
    for module in model.modules():
        if isinstance(module, ShardedModule):
            lookups: Any = getattr(module, "_lookups", ())
            for lookup in lookups:
                for inner in lookup.modules():
                    for kernel in getattr(inner, "_emb_modules", ()):
                        yield kernel.emb_module


def _tensors_of(kernel: nn.Module) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """An FBGEMM module's tensors; a module of data-parallel tables has "weights" alone."""
    for name, tensor in [*kernel.named_parameters(), *kernel.named_buffers()]:
        if name == "weights":
            yield HOT_ROWS, tensor.detach(), None
            if tensor.grad is not None:
                yield HOT_ROWS, tensor.grad, None
        elif "cache" in name or name.startswith("lxu_"):
            yield CACHE, tensor, None
        elif tensor.is_floating_point():  # FBGEMM puts integers where there is nothing
            for end, place in _PLACES.items():
                if name.endswith(end):
                    yield COLD_ROWS if name.startswith("weights") else STATE, tensor.detach(), place


BYTES_PER_FLOAT = 4
COUNTED = (
    UVMCacheStatsIndex.num_requested_indices,
    UVMCacheStatsIndex.num_unique_indices,
    UVMCacheStatsIndex.num_unique_misses,
    UVMCacheStatsIndex.num_conflict_unique_misses,
    UVMCacheStatsIndex.num_conflict_misses,
)


@dataclass(frozen=True)
class CacheFigures:
    """What caches did in some steps, added up over tables.

    Args:
        num_lookups: ids looked up.
        num_rows: distinct rows of each step.
        num_hits: of these rows, found in the cache.
        num_misses: not found, conflict misses included.
        num_conflict_misses: not found, and without a way in their set: used in host memory.
        num_evictions: rows put out, and written back, for others.
        read_bytes: from host memory over the bus.
        written_bytes: to it.
    """

    num_lookups: float = 0
    num_rows: float = 0
    num_hits: float = 0
    num_misses: float = 0
    num_conflict_misses: float = 0
    num_evictions: float = 0
    read_bytes: float = 0
    written_bytes: float = 0

    def __add__(self, other: CacheFigures) -> CacheFigures:
        return CacheFigures(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[float, ...]:
        """In the order of the fields, to be added up over ranks; ``CacheFigures(*values)``."""
        return tuple(getattr(self, item.name) for item in fields(self))


def fused_modules(model: nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """FBGEMM's modules of a sharded model; TorchRec keeps its lookups in plain lists."""
    found: list[Any] = []
    for module in model.modules():
        lookups: Iterable[Any] = getattr(module, "_lookups", [])
        for lookup in lookups:
            inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
            found += [kernel.emb_module for kernel in inner._emb_modules]
    return [m for m in found if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)]


class CacheCounters:
    """The counters of this rank's device caches.

    Args:
        modules: FBGEMM's, see ``fused_modules``; those without a cache are left out.
    """

    def __init__(self, modules: Iterable[SplitTableBatchedEmbeddingBagsCodegen]) -> None:
        self._modules = [module for module in modules if module.lxu_cache_weights.numel() > 0]
        self._last = [[0] * (len(COUNTED) + 1) for _ in self._modules]

    @property
    def num_caches(self) -> int:
        """Caches of this rank; another may have more or fewer."""
        return len(self._modules)

    def end_line(self) -> CacheFigures:
        """What the caches did since the last call; waits for the device once."""
        total = CacheFigures()
        if not self._modules:
            return total
        device = self._modules[0].lxu_cache_weights.device
        if device.type == "cuda":
            # A pipeline that prefetches counts on a stream of its own.
            torch.cuda.synchronize(device)
        # FBGEMM sums into a new tensor each step, so it is asked for anew. Indices would be copied
        # to the device for each module, so the host chooses from all counters.
        rows = [
            torch.cat([module.get_uvm_cache_stats(), (module.lxu_cache_state >= 0).sum().view(1)])
            for module in self._modules
        ]
        told: list[list[int]] = torch.stack(rows).tolist()
        now = [[*(counts[index] for index in COUNTED), counts[-1]] for counts in told]
        for module, counts, last in zip(self._modules, now, self._last, strict=True):
            total += _figures(module, [a - b for a, b in zip(counts, last, strict=True)])
        self._last = now
        return total


def _figures(module: SplitTableBatchedEmbeddingBagsCodegen, counts: list[int]) -> CacheFigures:
    num_lookups, num_rows, misses, conflicts, conflict_lookups, num_filled = counts
    row_bytes = BYTES_PER_FLOAT * module.max_D_cache
    state = sum(
        int(getattr(module, f"{name}_uvm").numel())
        for name in ("momentum1", "momentum2")
        if hasattr(module, f"{name}_uvm")
    )
    # Whole floats: FBGEMM registers a tensor of one value where an optimizer has no such state.
    state_bytes = BYTES_PER_FLOAT * (state // int(module.total_cache_hash_size))
    brought_in = misses - conflicts
    # A cache that was emptied meanwhile (a checkpoint was loaded) has fewer rows than before.
    evicted = max(0, brought_in - max(0, num_filled))
    return CacheFigures(
        num_lookups=num_lookups,
        num_rows=num_rows,
        num_hits=num_rows - misses,
        num_misses=misses,
        num_conflict_misses=conflicts,
        num_evictions=evicted,
        read_bytes=row_bytes * (brought_in + conflict_lookups) + state_bytes * num_rows,
        written_bytes=row_bytes * (evicted + conflicts) + state_bytes * num_rows,
    )
