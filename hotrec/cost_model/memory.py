"""Device and host memory of each rank for a placement or a plan.

On CPU everything is host memory. Dense layers, activations, messages and the distinct rows of a
batch hardly depend on the placement and are not counted; planners keep a reserve for them. Rows
that relays hold for batches to come do (``held_by_relay``), and sequences with a row for each id
are too large for the reserve (``expanded_bytes``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hotrec.cost_model.costs import World
from hotrec.cost_model.demand import Floats, TableDemand
from hotrec.cost_model.quantities import TableSharding, cached_rows, host_state_bytes
from hotrec.cost_model.step import BYTES_PER_FLOAT
from hotrec.types import (
    Exchange,
    Levels,
    PipelineSpec,
    Sharding,
    TableOutput,
    TablePlacement,
    Tier,
    WireType,
)

# For every row of the tables that exchange rows: on the host, shared by loader workers, and on the
# device if ids are routed there.
ROUTER_BYTES = 4
# FBGEMM's device cache with LRU (split_table_batched_embeddings_ops_training.py,
# _apply_cache_state): lxu_cache_state and lxu_state of a slot, lxu_cache_locking_counter of a slot
# with prefetch, cache_index_table_map of a row.
CACHE_TAG_BYTES = 8
CACHE_CLOCK_BYTES = 8
CACHE_LOCK_BYTES = 4
CACHE_MAP_BYTES = 4
# The map of hotrec's slots (embedding/slots.py), on the device: the place or decayed lookups and
# the known batches, of each row and slot, and the row and last reading batch of each slot.
SLOT_MAP_BYTES = 4 + 4
SLOT_BYTES = 4 + 4 + 8 + 4
# Copies of the gradient of a table that TorchRec replicates, in the first step: autograd's, which
# DDP copies into its bucket. Hot rows have none: only touched rows have a gradient.
NUM_REPLICA_GRADIENTS = 2


def shard_row_bytes(demand: TableDemand, tier: Tier) -> tuple[int, int]:
    """Device and host memory of a row of a shard, on a machine with devices.

    If FBGEMM has the row on the host, an optimizer state of one float per row stays on the device
    (its row-wise optimizers).
    """
    if tier is Tier.DEVICE:
        return demand.row_bytes, 0
    if tier is Tier.CACHED:
        return SLOT_MAP_BYTES, demand.row_bytes
    on_host = BYTES_PER_FLOAT * demand.dim + host_state_bytes(demand)
    maps = CACHE_MAP_BYTES if tier is Tier.HOST_CACHED else 0
    return demand.row_bytes - on_host + maps, on_host


def cached_row_bytes(widest: int, *, is_prefetched: bool) -> int:
    """Device memory of a row that FBGEMM's cache can hold, besides that of its shard.

    Args:
        widest: Largest D of the tables that share the cache.
        is_prefetched: Whether TorchRec's prefetch pipeline fills the cache.
    """
    num_bytes = BYTES_PER_FLOAT * widest + CACHE_TAG_BYTES + CACHE_CLOCK_BYTES
    return num_bytes + CACHE_LOCK_BYTES if is_prefetched else num_bytes


def mean_bytes(
    demand: TableDemand,
    exchange: Exchange,
    num_hot: Floats,
    num_ranks: int,
    *,
    is_one_memory: bool,
    is_routed_on_device: bool,
) -> Floats:
    """Memory of a table whose shards are in the tier DEVICE on the mean rank.

    It agrees with ``memory_by_rank``, except that entirely hot tables keep their shards, so that it
    is linear in the rows.

    Args:
        demand: The table.
        exchange: How it is exchanged.
        num_hot: Hot rows, float64 (P,).
        num_ranks: World size W.
        is_one_memory: Whether all memory is the host's, as on CPU.
        is_routed_on_device: Whether ranks route the ids, not loader workers.

    Returns:
        float64 (P, 3): of the device, of the host, and of hot rows with their optimizer state.
    """
    router = ROUTER_BYTES * demand.num_rows * (exchange is Exchange.ROWS)
    hot = num_hot * float(demand.row_bytes)
    tables = demand.num_rows * demand.row_bytes / num_ranks + hot
    if is_one_memory:
        return np.stack([0 * hot, tables + router, hot], axis=-1)
    return np.stack([tables + router * is_routed_on_device, 0 * hot + router, hot], axis=-1)


def held_by_relay(quantities: Mapping[str, float], world: World, pipeline: PipelineSpec) -> float:
    """Bytes of the rows that a rank relays for the batch of a step and ``depth`` later ones.

    In line a relay's rows are messages, which are freed within the step.
    """
    is_held = world.has_levels and pipeline.levels is Levels.two and pipeline.is_look_ahead
    return (pipeline.depth + 1) * quantities["relayed_bytes"] if is_held else 0.0


def expanded_bytes(
    demands: Sequence[TableDemand], batch_size: int, *, by_torchrec: bool = False
) -> float:
    """Bytes of the rows that unpooled features have for each id, and of their gradient.

        2 K D 4

    for the K ids of the mean batch, when backward has passed the layers above. TorchRec has no
    packed output, so that it expands all of them.

    Args:
        demands: The tables.
        batch_size: Batch B of a rank.
        by_torchrec: Whether TorchRec's collection looks the ids up.
    """
    outputs = [TableOutput.expanded] + [TableOutput.packed] * by_torchrec
    num_values = sum(d.lookups_per_sample * d.dim for d in demands if d.output in outputs)
    return 2.0 * batch_size * num_values * BYTES_PER_FLOAT


def memory_by_rank(
    demands: Sequence[TableDemand],
    num_hot: Mapping[str, int],
    tables: Mapping[str, TablePlacement] | Mapping[str, TableSharding],
    world: World,
    device: str,
    *,
    is_routed_on_device: bool = True,
) -> list[dict[str, float]]:
    """Memory of every rank.

    A placement does not assign table-wise tables to owners; here each goes to the least loaded
    rank, largest table first, essentially as in TorchRec's planner.

    Args:
        num_hot: Hot rows of each table, 0 where absent.
        tables: The placement of every table.
        device: "cpu" or "cuda".
        is_routed_on_device: Whether ranks route the ids, not loader workers.

    Returns:
        By rank {"device_bytes", "host_bytes"}; on CPU device_bytes is 0.

    Raises:
        ValueError: If a cache has no size.
    """
    bytes_W2 = np.zeros((world.num_ranks, 2))
    owned = []
    # Largest D of the tables that share each device cache: the width of its slots.
    widest: dict[tuple[str, int], int] = {}
    for demand in demands:
        sharding = tables[demand.name]
        if isinstance(sharding, TableSharding) and sharding.tier is Tier.HOST_CACHED:
            key = _cache_key(demand, sharding)
            widest[key] = max(widest.get(key, 0), demand.dim)
    for demand in demands:
        placed, hot = tables[demand.name], num_hot.get(demand.name, 0)
        owners, replica_bytes = [tuple(range(world.num_ranks))], demand.row_bytes
        if isinstance(placed, TableSharding):
            hot = demand.num_rows if placed.is_replicated else 0
            owners = placed.blocks(world)
            replica_bytes += NUM_REPLICA_GRADIENTS * BYTES_PER_FLOAT * demand.dim
        elif placed.exchange is Exchange.ROWS:
            is_on_device = is_routed_on_device and device != "cpu"
            bytes_W2 += ROUTER_BYTES * demand.num_rows * np.array([is_on_device, 1])
        bytes_W2[:, 0] += hot * replica_bytes
        if hot == demand.num_rows:
            continue  # an entirely hot table has no shards
        if getattr(placed, "sharding", None) is Sharding.TABLE_WISE:
            owned.append(_shard_bytes(demand, placed, demand.num_rows, widest))
            continue
        for ranks in owners:
            for rank, num_rows in zip(
                ranks, row_wise_rows(demand.num_rows, len(ranks)), strict=True
            ):
                bytes_W2[rank] += _shard_bytes(demand, placed, num_rows, widest) / len(owners)
    for shard_bytes in sorted(owned, key=lambda size: -float(size.sum())):
        bytes_W2[int(bytes_W2.sum(axis=1).argmin())] += shard_bytes
    if device == "cpu":
        bytes_W2 = np.stack([np.zeros(world.num_ranks), bytes_W2.sum(axis=1)], axis=1)
    return [{"device_bytes": float(d), "host_bytes": float(h)} for d, h in bytes_W2]


def row_wise_rows(num_rows: int, num_shards: int) -> list[int]:
    """Rows of each shard in TorchRec: ceil(R / W) until no rows remain."""
    size = -(-num_rows // num_shards)
    return [max(0, min(size, num_rows - size * shard)) for shard in range(num_shards)]


def _cache_key(demand: TableDemand, sharding: TableSharding) -> tuple[str, int]:
    """Key of the tables that share a device cache."""
    return sharding.kind, demand.dim if sharding.is_prefetched else 0


def _shard_bytes(
    demand: TableDemand,
    placed: TablePlacement | TableSharding,
    num_rows: int,
    widest: Mapping[tuple[str, int], int],
) -> Floats:
    """Device and host memory of a shard with these rows, float64 (2,)."""
    shard = num_rows * np.array(shard_row_bytes(demand, placed.tier), np.float64)
    if isinstance(placed, TablePlacement) and placed.row_type is not WireType.fp32:
        shard[1] -= num_rows * BYTES_PER_FLOAT // 2 * demand.dim
    if isinstance(placed, TableSharding) and placed.tier is Tier.HOST_CACHED:
        size = widest[_cache_key(demand, placed)]
        slot_bytes = cached_row_bytes(size, is_prefetched=placed.is_prefetched)
        shard[0] += num_rows * cached_rows(demand, placed) / demand.num_rows * slot_bytes
    elif placed.tier is Tier.CACHED:
        num_slots = num_rows * cached_rows(demand, placed) / demand.num_rows
        shard[0] += num_slots * (demand.row_bytes + SLOT_BYTES)
    return shard
