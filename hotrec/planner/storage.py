"""Why tables do not fit, in numbers, and the nearest change that makes them fit.

Bytes are TorchRec's estimates: rows with optimizer state and what a step keeps of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingType


@dataclass(frozen=True)
class TableStorage:
    """What one table needs in the way that needs the least.

    Args:
        name: of the table.
        is_replicated: every rank holds it.
        num_shards: otherwise, over which it is spread.
        device_bytes: on one rank if replicated, else over all ranks.
        host_bytes: likewise.
    """

    name: str
    is_replicated: bool
    num_shards: int
    device_bytes: int
    host_bytes: int


def table_storage(options: Sequence[ShardingOption], *, on_device: bool) -> list[TableStorage]:
    """The least that each table needs among the options, by what counts first on the machine.

    Args:
        options: of all tables, with storage estimates.
        on_device: device memory is what is short, else host memory.
    """
    least: dict[str, TableStorage] = {}
    keys: dict[str, tuple[int, int]] = {}
    for option in options:
        is_replicated = option.sharding_type == ShardingType.DATA_PARALLEL.value
        shards = [shard.storage for shard in option.shards if shard.storage is not None]
        shards = shards[:1] if is_replicated else shards
        device = sum(int(storage.hbm) for storage in shards)
        host = sum(int(storage.ddr) for storage in shards)
        copies = len(option.shards) if is_replicated else 1
        key = (device * copies, host * copies) if on_device else (host * copies, device * copies)
        if option.name not in least or key < keys[option.name]:
            keys[option.name] = key
            least[option.name] = TableStorage(
                option.name, is_replicated, len(option.shards), device, host
            )
    return list(least.values())


@dataclass(frozen=True)
class Shortfall:
    """Tables that found no place, and the memory of a rank, after what is reserved."""

    tables: Sequence[TableStorage]
    world_size: int
    device_bytes: int
    host_bytes: int


def describe_shortfall(shortfall: Shortfall) -> str:
    """What was there, what was needed, and what to change; continues "expected ... to fit"."""
    ranks = shortfall.world_size
    memory = [("device", shortfall.device_bytes), ("host", shortfall.host_bytes)]
    for kind, capacity in memory:
        replicated = sum(_bytes(t, kind) for t in shortfall.tables if t.is_replicated)
        sharded = sum(_bytes(t, kind) for t in shortfall.tables if not t.is_replicated)
        if replicated + sharded / ranks <= capacity:
            continue
        changes = []
        room = capacity - -(-sharded // ranks)
        if room > 0 and replicated:
            changes.append(f"lower the hot rows to {room} bytes per rank")
        if capacity > replicated:
            changes.append(f"use {-(-sharded // (capacity - replicated))} ranks of this memory")
            if kind == "device":
                to_host = sharded - ranks * (capacity - replicated)
                changes.append(f"move {to_host} bytes of sharded rows to a host tier")
        if not changes:
            changes.append(f"give each rank {replicated + -(-sharded // ranks)} bytes")
        changes_text = ", or ".join(changes)
        return (
            f"{capacity} bytes of {kind} memory per rank, got {replicated} bytes of replicas on "
            f"each rank and {sharded} bytes of shards over {ranks} ranks. Nearest changes: "
            f"{changes_text}."
        )
    return _describe_largest(shortfall)


def _describe_largest(shortfall: Shortfall) -> str:
    """The sum would fit: a shard is too large for any one rank."""
    kind, capacity = (
        ("device", shortfall.device_bytes)
        if shortfall.device_bytes
        else ("host", shortfall.host_bytes)
    )
    replicated = sum(_bytes(t, kind) for t in shortfall.tables if t.is_replicated)
    sharded = [t for t in shortfall.tables if not t.is_replicated]
    largest = max(sharded, key=lambda table: _bytes(table, kind) / table.num_shards, default=None)
    if largest is None:
        return f"{capacity} bytes of {kind} memory per rank, got {replicated} bytes of replicas."
    return (
        f"{capacity - replicated} bytes of {kind} memory that replicas leave on each of "
        f"{shortfall.world_size} ranks, got shards that fit in sum but not one by one, the largest "
        f"of table {largest.name} with {_bytes(largest, kind) // largest.num_shards} bytes. "
        "Nearest change: shard that table row-wise."
    )


def _bytes(table: TableStorage, kind: str) -> int:
    return table.device_bytes if kind == "device" else table.host_bytes
