"""Plain tables out of a sharded model: what any TorchRec model can read."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from hotrec.embedding.optimizers import sharded_collections
from hotrec.routing import hot_name


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
    parts: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        names = name.split(".")
        if len(names) >= 3 and names[-3] in ("embeddings", "embedding_bags"):
            parts[names[-2]] = _whole(value).cpu()
    for _, module in sharded_collections(model):
        partition = module.partition
        for config in module.embedding_bag_configs():
            hot = torch.from_numpy(partition.hot(config.name))
            if hot.numel() == 0:
                continue
            replica = parts.pop(hot_name(config.name))
            if config.name not in parts:
                parts[config.name] = torch.empty(config.num_embeddings, config.embedding_dim)
            parts[config.name][hot] = replica
    return parts
