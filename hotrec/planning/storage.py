"""Memory of tables in training, and why they do not fit and what to change.

Bytes are TorchRec's estimates (rows, messages, device caches) and what it does not see: optimizer
states, which it looks for on the parameters while they are in the sharder's ``fused_params``, and
the gradients of replicated tables. With R rows of D floats on a rank:

    replica         4 R D of gradients and, at the first steps, as much again: DDP makes its bucket
                    anew in iteration 3 beside the old one; the state
    element-wise    state of a shard, where its rows are: FBGEMM's device cache holds none of it
    row-wise        state of a shard, 4 R: on the device, wherever the rows are
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ShardingOption, Storage
from torchrec.distributed.types import ShardingType

BYTES_PER_FLOAT = 4
# Gradients of a replica while DDP makes its bucket anew.
NUM_REPLICA_GRADIENTS = 2
# State of FBGEMM's optimizers, floats for each of the row's, and floats for the row.
STATE_FLOATS: Mapping[str, tuple[int, int]] = {
    "SGD": (0, 0),
    "EXACT_SGD": (0, 0),
    "LARS_SGD": (1, 0),
    "EXACT_ADAGRAD": (1, 0),
    "EXACT_ROWWISE_ADAGRAD": (0, 1),
    "ADAM": (2, 0),
    "PARTIAL_ROWWISE_ADAM": (1, 1),
    "LAMB": (2, 0),
    "PARTIAL_ROWWISE_LAMB": (1, 1),
}
HOST_KERNELS = ("fused_uvm", "fused_uvm_caching")


class TrainedStorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's estimator plus the optimizer states and gradients that it leaves out."""

    def estimate(self, sharding_options: list[ShardingOption], *given: Any, **named: Any) -> None:
        """Estimates the storage of every shard of every option.

        Args:
            sharding_options: The options, whose shards are given their storage.
            *given: TorchRec's map from an option's module to its sharder (TorchRec 1.6).
            **named: The same map by keyword (TorchRec 1.8).

        Raises:
            ValueError: If a sharder's optimizer has a state of unknown size.
        """
        super().estimate(sharding_options, *given, **named)
        [sharders] = [*given, *named.values()]
        for option in sharding_options:
            params = getattr(sharders[option.module_type_key], "fused_params", None) or {}
            state = state_floats(params.get("optimizer"))
            for shard in option.shards:
                assert shard.storage is not None, option.name
                shard.storage += self._beside(option, shard.size, state)

    def _beside(self, option: ShardingOption, size: list[int], state: tuple[int, int]) -> Storage:
        num_rows, dim = size
        by_element = BYTES_PER_FLOAT * num_rows * dim
        element_wise, row_wise = state[0] * by_element, state[1] * BYTES_PER_FLOAT * num_rows
        if option.sharding_type == ShardingType.DATA_PARALLEL.value:
            row_wise += NUM_REPLICA_GRADIENTS * by_element
        if self._topology.compute_device == "cpu":
            return Storage(hbm=0, ddr=element_wise + row_wise)
        if option.compute_kernel in HOST_KERNELS:
            return Storage(hbm=row_wise, ddr=element_wise)
        return Storage(hbm=element_wise + row_wise, ddr=0)


def state_floats(optimizer: Any) -> tuple[int, int]:
    """Floats of optimizer state for each of a row's, and for the row.

    Args:
        optimizer: FBGEMM's OptimType; None is its default, SGD.

    Raises:
        ValueError: If it is not in STATE_FLOATS.
    """
    name = "EXACT_SGD" if optimizer is None else optimizer.name
    if name not in STATE_FLOATS:
        raise ValueError(
            f"sharder fused_params optimizer: expected one of {sorted(STATE_FLOATS)}, whose memory "
            f"is known, got {name}. Train with one of these."
        )
    return STATE_FLOATS[name]


@dataclass(frozen=True)
class TableStorage:
    """The memory of one table in its smallest sharding option.

    Args:
        name: Name of the table.
        is_replicated: Whether every rank holds it.
        num_shards: The number of shards otherwise.
        device_bytes: Device memory, of one rank if replicated, else of all ranks.
        host_bytes: Host memory, likewise.
    """

    name: str
    is_replicated: bool
    num_shards: int
    device_bytes: int
    host_bytes: int


def table_storage(options: Sequence[ShardingOption], *, on_device: bool) -> list[TableStorage]:
    """Returns the smallest option of each table, by the memory that is scarce.

    Args:
        options: The options of all tables, with storage estimates.
        on_device: Whether device memory is scarce, not host memory.
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
    """Tables that do not fit, and the memory of a rank without reserves."""

    tables: Sequence[TableStorage]
    world_size: int
    device_bytes: int
    host_bytes: int


def describe_shortfall(shortfall: Shortfall) -> str:
    """Describes available and needed memory and what to change, after "expected ... to fit"."""
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
    """Describes a shard that is too large for any rank, where the sum would fit."""
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
