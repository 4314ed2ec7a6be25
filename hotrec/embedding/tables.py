"""The modules of a sharded model that hold its embedding tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule

from hotrec.embedding.sharding import ShardedHotColdCollection
from hotrec.embedding.torchrec import is_torchrecs

T = TypeVar("T")


def modules_of(model: nn.Module, kind: type[T]) -> Iterator[tuple[str, T]]:
    """Modules, with the prefix of their parameters' names in the sharded model's state dict."""
    root = model.module if isinstance(model, DistributedModelParallel) else model
    assert isinstance(root, nn.Module), type(root)
    for path, module in root.named_modules():
        if isinstance(module, kind):
            yield f"{path}." if path else "", module


def sharded_collections(model: nn.Module) -> Iterator[tuple[str, ShardedHotColdCollection[Any]]]:
    """The hot/cold collections of a sharded model, with the prefix of their parameters' names."""
    return modules_of(model, ShardedHotColdCollection)


def torchrec_collections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """TorchRec's own collections, of bags and of sequences, likewise."""
    for path, module in modules_of(model, nn.Module):
        if is_torchrecs(module):
            yield path, module


def torchrec_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules that TorchRec shards itself, likewise."""
    for path, module in modules_of(model, ShardedModule):
        if not isinstance(module, ShardedHotColdCollection):
            yield path, module


def outermost_sharded(model: nn.Module) -> dict[str, nn.Module]:
    """The sharded modules that are not inside another one, by their names."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, ShardedModule) and not is_inside:
            found[name] = module
    return found
