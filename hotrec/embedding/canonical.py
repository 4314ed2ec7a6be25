"""Plain tables out of a sharded model: what any TorchRec model can read."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from hotrec.embedding.tables import table_parts


def _whole(value: torch.Tensor | ShardedTensor) -> torch.Tensor:
    """All rows of a table, on every rank."""
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
        rows, columns = part.shape
        whole[first_row : first_row + rows, first_column : first_column + columns] = part
    return whole


@torch.no_grad()
def gather_tables(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every embedding table of a sharded model, in original ids, on every rank.

    For tests, small models and export: holds all tables in memory. Collective.

    Returns:
        float (R, D) per table, hot rows from their replica, cold rows from their shard.
    """
    tables: dict[str, torch.Tensor] = {}
    for part in table_parts(model):
        value = _whole(part.value).cpu()
        if part.hot_rows is None:
            if part.table in tables:
                raise ValueError(
                    f"table {part.table}: expected one table of this name in the model, got two. "
                    "Rename one of them."
                )
            tables[part.table] = value
        else:
            whole = tables.setdefault(part.table, torch.empty(part.num_rows, value.shape[1]))
            whole[part.hot_rows] = value
    return tables
