"""Memory that a sharded model's tables take on this rank, by what it holds and where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
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
