"""Initial weights of embedding rows as a function of (seed, table, row) alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hotrec.embedding.canonical import canonical_parts
from hotrec.embedding.collection import HotColdCollection
from hotrec.embedding.random_bits import random_bits
from hotrec.embedding.tables import torchrec_collections
from hotrec.embedding.torchrec import table_configs
from hotrec.routing.features import hot_name, hot_rows
from hotrec.runtime.ranks import world_size

# The minimum and maximum initial weight of a table.
Bounds = tuple[float, float]

# Values per chunk. On CPU a chunk fits the cache; on a device it needs 320 MiB, since with
# CPU-sized chunks the launches alone would take half a minute for 1e9 rows of 128 floats.
_CHUNK_VALUES = 1 << 18
_DEVICE_CHUNK_VALUES = 1 << 24


def initial_rows(
    seed: int,
    table: str,
    rows: torch.Tensor,
    dim: int,
    num_rows: int,
    bounds: Bounds | None = None,
) -> torch.Tensor:
    """Float32 (R, D), uniform between the bounds.

    Bounds are by default +-1 / sqrt(num_rows) of the whole table, as TorchRec's.
    """
    table_key = zlib.crc32(f"{seed}/{table}".encode())
    table_key -= (table_key >> 31) << 32  # as int32
    bound = 1.0 / math.sqrt(num_rows)
    low, high = bounds or (-bound, bound)
    out = torch.empty(rows.numel(), dim, device=rows.device)
    chunk_values = _CHUNK_VALUES if rows.device.type == "cpu" else _DEVICE_CHUNK_VALUES
    step = max(1, chunk_values // dim)
    for begin in range(0, rows.numel(), step):
        bits = random_bits(table_key, rows[begin : begin + step], dim)
        # 24 bits, which a float32 represents exactly.
        out[begin : begin + step] = ((bits >> 8) & 0xFFFFFF).float()
    return out.mul_((high - low) / (1 << 24)).add_(low)


@torch.no_grad()
def initialize_embeddings(
    model: nn.Module, seed: int, bounds: Mapping[str, Bounds] | None = None
) -> None:
    """Set the initial weights of embedding rows of a sharded model, in place.

    They only depend on the seed, the table and the row, not on the partition, plan or world size.

    Args:
        model: The sharded model.
        seed: Seed of the weights.
        bounds: The tables to set, with their minimum and maximum weight; None for all, with
            TorchRec's default bounds.
    """
    for part in canonical_parts(model).parts:
        if part.table is None or not (bounds is None or part.table in bounds):
            continue
        of_table = None if bounds is None else bounds[part.table]
        value, column = part.value, part.first[1]
        end_column = column + value.shape[1]
        chunk_values = _CHUNK_VALUES if value.device.type == "cpu" else _DEVICE_CHUNK_VALUES
        step = max(1, chunk_values // end_column)
        for begin in range(0, value.shape[0], step):
            rows = part.own_rows(begin, begin + step).to(value.device)
            drawn = initial_rows(seed, part.table, rows, end_column, part.shape[0], of_table)
            value[begin : begin + step] = drawn[:, column:]


@torch.no_grad()
def set_unsplit(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Set the rows of the tables in TorchRec's own collections, by table; a collective.

    These collections do not keep the weights of the module being sharded. Shards get this rank's
    weights, replicated tables those of rank 0.

    Args:
        model: The sharded model.
        weights: Float (R, D) of each table to set.
    """
    unsplit = {
        config.name for _, bags in torchrec_collections(model) for config in table_configs(bags)
    }
    for part in canonical_parts(model).parts:
        if part.table is not None and part.table in unsplit & weights.keys():
            (row, column), (num_rows, dim) = part.first, part.value.shape
            source = weights[part.table].detach()
            part.value.copy_(source[row : row + num_rows, column : column + dim])
            if not part.is_shard and world_size() > 1:
                dist.broadcast(part.value, src=0)


@torch.no_grad()
def copy_weights(source: nn.ModuleDict, target: HotColdCollection[Any]) -> None:
    """Copy the weights of unsplit embeddings, by table, into an unsharded collection."""
    weights: dict[str, Any] = {table: module.weight for table, module in source.items()}
    for dim, group in target.router.groups.items():
        embeddings: Any = target.rows[f"dim{dim}"].embeddings
        for table in group.cold_tables:
            embeddings[table].weight.copy_(weights[table])
        for table in group.hot_tables:
            hot = hot_rows(target.partition, table).to(weights[table].device)
            embeddings[hot_name(table)].weight.copy_(weights[table][hot])
    pooled: Any = {} if target.pooled is None else target.pooled.embedding_bags
    for table, bag in pooled.items():
        bag.weight.copy_(weights[table])
