"""Memory of a sharded model's tables by tier, and the counters of FBGEMM's device caches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    UVMCacheStatsIndex,
)
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer

from hotrec.embedding.cached_rows import CachedRows
from hotrec.embedding.fused import leave_out_of_forks
from hotrec.embedding.sharded_rows import ShardedRows
from hotrec.embedding.tables import sharded_collections
from hotrec.embedding.torchrec import kernels

HOT_ROWS, COLD_ROWS = "hot_rows", "cold_rows"
STATE, CACHE, ROUTER = "optimizer_state", "cache", "router"
KINDS = (HOT_ROWS, COLD_ROWS, STATE, CACHE, ROUTER)
DEVICE, HOST = "device", "host"
# Suffixes of the buffers of FBGEMM's modules; managed memory is host memory.
_PLACES = {"_dev": DEVICE, "_uvm": HOST, "_host": HOST}


def memory_by_tier(model: nn.Module, optimizer: CombinedOptimizer) -> dict[str, dict[str, int]]:
    """Bytes of this rank's tables: kind -> "device" and "host" -> bytes.

    Counts tensors without reading the device: replicas and their gradient buffers ("hot_rows"),
    shards ("cold_rows"), the optimizer state of both, FBGEMM's cache of host rows with its maps,
    and the router's maps. On CPU everything is host memory.
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
    parts = dict(optimizer.optimizers)
    for name in ("hot", "tables"):
        if name in parts:
            for state in parts[name].state.values():
                for tensor in state.values():
                    if isinstance(tensor, torch.Tensor):
                        yield STATE, tensor, None
    for kernel in kernels(model):
        yield from _tensors_of(kernel.fbgemm)
    for rows in sharded_rows(model):
        if rows.hot is not None:
            yield HOT_ROWS, rows.hot.rows, None
        weights, *states = rows.owned.memory()
        yield COLD_ROWS, weights, None
        for state in states:
            yield STATE, state, None
    for cache in cached_rows(model):
        for tensor in cache.tensors():
            yield CACHE, tensor, None
    for _, collection in sharded_collections(model):
        for router in collection.routers:
            for group in router.groups.values():
                for tensor in vars(group).values():
                    if isinstance(tensor, torch.Tensor):
                        yield ROUTER, tensor, None


def _tensors_of(kernel: nn.Module) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """The tensors of an FBGEMM module; that of data-parallel tables has only "weights"."""
    for name, tensor in [*kernel.named_parameters(), *kernel.named_buffers()]:
        if name == "weights":
            yield HOT_ROWS, tensor.detach(), None
            if tensor.grad is not None:
                yield HOT_ROWS, tensor.grad, None
        elif "cache" in name or name.startswith("lxu_"):
            yield CACHE, tensor, None
        elif tensor.is_floating_point():  # FBGEMM's placeholders are integers
            for end, place in _PLACES.items():
                if name.endswith(end):
                    yield COLD_ROWS if name.startswith("weights") else STATE, tensor.detach(), place


COUNTED = (
    UVMCacheStatsIndex.num_requested_indices,
    UVMCacheStatsIndex.num_unique_indices,
    UVMCacheStatsIndex.num_unique_misses,
    UVMCacheStatsIndex.num_conflict_unique_misses,
    UVMCacheStatsIndex.num_conflict_misses,
)


@dataclass(frozen=True)
class CacheFigures:
    """Counters of device caches over some steps, summed over tables."""

    num_lookups: float = 0  # ids
    num_rows: float = 0  # distinct rows, summed over the steps
    num_hits: float = 0  # of these rows
    num_misses: float = 0  # including conflict misses
    num_conflict_misses: float = 0  # without a free way in their set; accessed in host memory
    num_evictions: float = 0  # these are written back
    read_bytes: float = 0  # from host memory over the bus
    written_bytes: float = 0  # to host memory
    wait_s: float = 0  # for which the exchange of rows waited for slots to be filled

    def __add__(self, other: CacheFigures) -> CacheFigures:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return CacheFigures(*(a + b for a, b in pairs))


def fused_modules(model: nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """FBGEMM's fused modules of a sharded model."""
    modules = (kernel.fbgemm for kernel in kernels(model))
    return [m for m in modules if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)]


def leave_tables_out_of_forks(model: nn.Module) -> None:
    """Keep a sharded model's tables in mapped host memory out of loader workers."""
    for module in fused_modules(model):
        leave_out_of_forks(module)


def fill_empty_tables(model: nn.Module) -> None:
    """Give a value to FBGEMM's modules on CPU that have no rows on this rank.

    Without a value on the CPU, FBGEMM would run the kernel for a GPU, and raise on this rank alone.
    """
    for module in fused_modules(model):
        if module.use_cpu and not module.weights_host.numel():
            module.weights_host.data = torch.zeros(1)


def sharded_rows(model: nn.Module) -> list[ShardedRows]:
    """The exchanged rows of a sharded model on this rank, by collection and dimension."""
    return [rows for _, part in sharded_collections(model) for rows in part.sharded_rows()]


def cached_rows(model: nn.Module) -> list[CachedRows]:
    """The rows behind slots of a sharded model, on this rank."""
    return [rows.owned for rows in sharded_rows(model) if isinstance(rows.owned, CachedRows)]


class SlotCounters:
    """Reads the counters of this rank's slots, like ``CacheCounters`` for FBGEMM."""

    def __init__(self, model: nn.Module) -> None:
        self._caches = cached_rows(model)
        self._last = CacheFigures()

    def end_line(self) -> CacheFigures:
        """Return the counts since the last call."""
        total = CacheFigures()
        for cache in self._caches:
            slots = cache.slots
            total += CacheFigures(
                num_lookups=cache.num_lookups,
                num_rows=slots.num_read,
                num_hits=slots.num_read - slots.num_misses,
                num_misses=slots.num_misses,
                num_evictions=slots.num_evictions,
                read_bytes=cache.read_bytes,
                written_bytes=cache.written_bytes,
                wait_s=cache.wait_s,
            )
        pairs = zip(astuple(total), astuple(self._last), strict=True)
        self._last = total
        return CacheFigures(*(now - before for now, before in pairs))


class CacheCounters:
    """Reads the counters of this rank's device caches, of the ``fused_modules`` that have one."""

    def __init__(self, modules: Iterable[SplitTableBatchedEmbeddingBagsCodegen]) -> None:
        self._modules = [module for module in modules if module.lxu_cache_weights.numel() > 0]
        self._last = [[0] * (len(COUNTED) + 1) for _ in self._modules]

    def end_line(self) -> CacheFigures:
        """Return the counts since the last call; waits for the device once."""
        total = CacheFigures()
        if not self._modules:
            return total
        device = self._modules[0].lxu_cache_weights.device
        if device.type == "cuda":
            # A pipeline that prefetches updates the counters on its own stream.
            torch.cuda.synchronize(device)
        # FBGEMM makes a new counter tensor each step. The host selects counters, since indices
        # would be copied to the device for each module.
        rows = [
            torch.cat([module.get_uvm_cache_stats(), (module.lxu_cache_state >= 0).sum().view(1)])
            for module in self._modules
        ]
        read: list[list[int]] = torch.stack(rows).tolist()
        now = [[*(counts[index] for index in COUNTED), counts[-1]] for counts in read]
        for module, counts, last in zip(self._modules, now, self._last, strict=True):
            total += _figures(module, [a - b for a, b in zip(counts, last, strict=True)])
        self._last = now
        return total


def _figures(module: SplitTableBatchedEmbeddingBagsCodegen, counts: list[int]) -> CacheFigures:
    num_lookups, num_rows, misses, conflicts, conflict_lookups, num_filled = counts
    row_bytes = 4 * module.max_D_cache
    state = sum(
        int(getattr(module, f"{name}_uvm").numel())
        for name in ("momentum1", "momentum2")
        if hasattr(module, f"{name}_uvm")
    )
    # The quotient drops FBGEMM's placeholder of one value for missing optimizer state.
    state_bytes = 4 * (state // int(module.total_cache_hash_size))
    inserted = misses - conflicts
    # Loading a checkpoint empties the cache, which then holds fewer rows than before.
    evicted = max(0, inserted - max(0, num_filled))
    return CacheFigures(
        num_lookups=num_lookups,
        num_rows=num_rows,
        num_hits=num_rows - misses,
        num_misses=misses,
        num_conflict_misses=conflicts,
        num_evictions=evicted,
        read_bytes=row_bytes * (inserted + conflict_lookups) + state_bytes * num_rows,
        written_bytes=row_bytes * (evicted + conflicts) + state_bytes * num_rows,
    )
