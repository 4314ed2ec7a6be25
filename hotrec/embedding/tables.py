"""The embedding tables of a sharded model, and plain copies of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule, ShardedTensor

from hotrec.embedding.sharding import ShardedHotColdCollection
from hotrec.embedding.torchrec import is_torchrecs
from hotrec.routing.features import hot_name, hot_rows
from hotrec.types import RowOrder

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


@dataclass(frozen=True)
class TablePart:
    """A table, or the replica of its hot rows."""

    table: str
    num_rows: int  # of the whole table
    hot_rows: torch.Tensor | None  # the replica's rows in order, int64 (H,); None for a table
    value: torch.Tensor | ShardedTensor  # float (R, D) or (H, D)
    order: RowOrder  # of a table's rows in its shards


def table_parts(model: nn.Module) -> Iterator[TablePart]:
    """Every embedding table of a sharded model; a table's replica comes after the table."""
    for _, collection in torchrec_collections(model):
        for name, value in collection.state_dict().items():
            is_sharded = isinstance(value, ShardedTensor)
            num_rows = value.metadata().size[0] if is_sharded else value.shape[0]
            table = name.removesuffix(".weight").partition(".")[2]  # after the dictionary's name
            yield TablePart(table, num_rows, None, value, RowOrder(num_rows, is_spread=False))
    for _, hot_cold in sharded_collections(model):
        state = hot_cold.state_dict()
        num_rows, orders = hot_cold.partition.num_rows, hot_cold.row_orders()
        for dim, group in hot_cold.router.groups.items():
            prefix = f"rows.dim{dim}.embeddings."
            for table in group.cold_tables:
                order = orders[table]
                value = state[f"{prefix}{table}.{order.weight_name}"]
                yield TablePart(table, num_rows[table], None, value, order)
            for table in group.hot_tables:
                rows = hot_rows(hot_cold.partition, table)
                value = state[f"{prefix}{hot_name(table)}.weight"]
                order = RowOrder(num_rows[table], is_spread=False)
                yield TablePart(table, num_rows[table], rows, value, order)


def _whole(value: torch.Tensor | ShardedTensor, order: RowOrder) -> torch.Tensor:
    """All rows of a table in original ids, on every rank."""
    if not isinstance(value, ShardedTensor):
        return value.detach().clone()
    shards = [
        (shard.metadata.shard_offsets, shard.tensor.detach().cpu())
        for shard in value.local_shards()
    ]
    gathered: list[list[tuple[list[int], torch.Tensor]]] = [
        [] for _ in range(dist.get_world_size())
    ]
    dist.all_gather_object(gathered, shards)
    whole = torch.empty(tuple(value.metadata().size))
    for (first_row, first_column), part in (shard for rank in gathered for shard in rank):
        num_rows, num_columns = part.shape
        rows = order.original(torch.arange(first_row, first_row + num_rows))
        whole[rows, first_column : first_column + num_columns] = part.to(whole.dtype)
    return whole


@torch.no_grad()
def gather_tables(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather every embedding table of a sharded model, float (R, D) in original ids, on every rank.

    A collective for tests, small models and export: it needs memory for all tables.
    """
    tables: dict[str, torch.Tensor] = {}
    for part in table_parts(model):
        value = _whole(part.value, part.order).cpu()
        if part.hot_rows is None:
            if part.table in tables:
                raise ValueError(
                    f"table {part.table}: expected a unique table name in the model, got two "
                    "tables. Rename one of them."
                )
            tables[part.table] = value
        else:
            whole = tables.setdefault(part.table, torch.empty(part.num_rows, value.shape[1]))
            whole[part.hot_rows] = value
    return tables
