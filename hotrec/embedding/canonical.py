"""Weights and optimizer state of a sharded model by the unsharded model's names and row numbers.

A table is one tensor float (R, D) in original ids, named as in the model before it was sharded or
split into hot and cold rows, and so is each state tensor of its optimizer. Dense parameters and
their state keep their names. These names, shapes and values do not depend on ranks, plan or
placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardedModule, ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from hotrec.embedding.fused import update_counters
from hotrec.embedding.table_memory import fused_modules
from hotrec.embedding.tables import modules_of, sharded_collections
from hotrec.routing.features import hot_name, hot_rows
from hotrec.runtime.ranks import all_gather_object
from hotrec.types import Numbers

# Torch's names of a table's state, where FBGEMM's are used.
_STATE_NAMES = {"sum": "momentum1", "exp_avg": "momentum1", "exp_avg_sq": "momentum2"}
_UPDATES = "step"


@dataclass(frozen=True)
class TensorPart:
    """This rank's part of a canonical tensor, sharing memory with the model or optimizer.

    Args:
        name: "<parameter>", or "<parameter>/<state>" for optimizer state.
        shape: The shape of the whole tensor.
        value: The values; writing to them changes the model.
        first: The position of ``value`` in the whole tensor, by dimension.
        rows: The rows of ``value`` in the whole tensor, int64 (H,), for a replica of hot rows; None
            if they are every ``step``-th from ``first`` on.
        is_shard: Whether no other rank holds these values.
        table: Name of the embedding table; None for dense parameters and their state.
        step: The distance of rows in the whole tensor; more than 1 for a rank's share of a table
            whose rows are exchanged (``hotrec.types.RowShares``).
    """

    name: str
    shape: tuple[int, ...]
    value: torch.Tensor
    first: tuple[int, ...]
    rows: torch.Tensor | None = None
    is_shard: bool = False
    table: str | None = None
    step: int = 1

    def own_rows(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """The rows of ``value[begin:end]`` in the whole tensor, int64 (R,)."""
        if self.rows is not None:
            return self.rows[begin:end]
        last = self.value.shape[0] if end is None else min(end, self.value.shape[0])
        return torch.arange(begin, last) * self.step + self.first[0]

    def places(self, rows: Numbers) -> tuple[Numbers, Any]:
        """The places in a shard of rows of the whole tensor, and which of these it has, bool."""
        after: Any = rows - self.first[0]  # type: ignore[operator]
        places = after // self.step
        is_here = (after % self.step == 0) & (places >= 0) & (places < self.value.shape[0])
        return places, is_here


@dataclass(frozen=True)
class TensorParts:
    """The tensors of a model on this rank.

    Args:
        parts: Parts of weights and optimizer state.
        counters: Update counts, each for all rows of one or more tables.
        weights: The model's state dict, to load once its tensors have been written.
        sharded: Names of the parameters that have shards, on this rank or on others.
    """

    parts: list[TensorPart]
    counters: list[torch.Tensor]
    weights: Mapping[str, Any]
    sharded: frozenset[str]

    def has_shards(self, name: str) -> bool:
        """Whether a tensor is sharded; otherwise every rank has all of it or its hot rows."""
        return name.partition("/")[0] in self.sharded

    def set_num_updates(self, num_updates: int) -> None:
        """Set the tables' update counts, which Adam uses for bias correction."""
        for counter in self.counters:
            counter.fill_(num_updates)


@dataclass(frozen=True)
class _StoredTable:
    """The canonical name of a table; for a replica or a share, the table's rows and its own.

    They are ``hot_rows`` int64 (H,) of a replica, and those in ``share``.
    """

    name: str
    num_rows: int = 0
    hot_rows: torch.Tensor | None = None
    share: range | None = None


def canonical_parts(model: nn.Module, optimizer: KeyedOptimizer | None = None) -> TensorParts:
    """Find the parts of all tensors that this rank holds; not a collective.

    Args:
        model: A sharded model.
        optimizer: Its optimizer; None for the weights alone.

    Raises:
        RuntimeError: If a parameter of the optimizer is not one of the model.
    """
    weights = model.state_dict()
    tables = _tables(model, weights)
    parts: list[TensorPart] = []
    for key, value in weights.items():
        if isinstance(value, torch.Tensor | ShardedTensor):
            parts += _parts(tables.get(key, _StoredTable(key)), value, of_table=key in tables)
    whole = _StoredTable("")
    sharded = frozenset(
        tables.get(key, _StoredTable(key)).name
        for key, value in weights.items()
        if isinstance(value, ShardedTensor) or tables.get(key, whole).share is not None
    )
    counters: list[torch.Tensor] = []
    if optimizer is not None:
        for fused in fused_modules(model):
            counters += update_counters(fused)
        for key, state in _states(optimizer):
            param = _param_of(key, weights)
            for full_name, value in state.items():
                name = full_name.rpartition(".")[2]  # FBGEMM's are "<table>.<state>"
                if not isinstance(value, torch.Tensor | ShardedTensor):
                    continue
                if param not in tables:
                    parts += _parts(_StoredTable(param), value, state=name)
                elif name == _UPDATES:
                    assert isinstance(value, torch.Tensor)
                    counters.append(value)
                else:
                    name = _STATE_NAMES.get(name, name)
                    parts += _parts(tables[param], value, state=name, of_table=True)
    return TensorParts(parts, counters, weights, sharded)


def _tables(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, _StoredTable]:
    """The tables of TorchRec's and our collections, by the names of their parameters."""
    paths = tuple(path for path, _ in modules_of(model, ShardedModule))
    tables = {key: _StoredTable(key) for key in weights if key.startswith(paths)} if paths else {}
    for path, collection in sharded_collections(model):
        partition = collection.partition
        for (dim, group), rows_of_dim in zip(
            collection.router.groups.items(), collection.sharded_rows(), strict=True
        ):
            prefix = f"{path}rows.dim{dim}.embeddings."
            for table, share in rows_of_dim.own_rows().items():
                name = plain_name(path, collection.prefix, table)
                tables[f"{prefix}{table}.{rows_of_dim.weight_name}"] = _StoredTable(
                    name, partition.num_rows[table], share=share
                )
            for table in group.hot_tables:
                rows = hot_rows(partition, table)
                key = f"{prefix}{hot_name(table)}.weight"
                name = plain_name(path, collection.prefix, table)
                tables[key] = _StoredTable(name, partition.num_rows[table], rows)
        pooled = collection.router.pooled
        for table in () if pooled is None else pooled.tables:
            key = f"{path}pooled.embedding_bags.{table}.weight"
            tables[key] = _StoredTable(plain_name(path, collection.prefix, table))
    return tables


def plain_name(path: str, prefix: str, table: str) -> str:
    """The name of a table's parameter in TorchRec's collection, which begins with a prefix."""
    return f"{path}{prefix}.{table}.weight"


def _states(optimizer: KeyedOptimizer) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The state of every parameter, by a name that ends with that of the parameter."""
    if isinstance(optimizer, CombinedOptimizer):
        for prefix, part in optimizer.optimizers:
            for key, state in _states(part):
                yield CombinedOptimizer.prepend_opt_key(key, prefix), state
    else:
        yield from optimizer.state_dict()["state"].items()


def _param_of(key: str, weights: Mapping[str, Any]) -> str:
    """The parameter of an optimizer's key, which may begin with names of optimizers."""
    parts = key.split(".")
    for first in range(len(parts)):
        name = ".".join(parts[first:])
        if name in weights:
            return name
    raise RuntimeError(
        f"optimizer {key}: expected the name of a parameter of the model, got none. Create the "
        "optimizer from the sharded model."
    )


def _parts(
    table: _StoredTable,
    value: torch.Tensor | ShardedTensor,
    *,
    state: str = "",
    of_table: bool = False,
) -> Iterator[TensorPart]:
    table_name = table.name.removesuffix(".weight").rpartition(".")[2] if of_table else None
    name = f"{table.name}/{state}" if state else table.name
    shape = tuple(value.metadata().size) if isinstance(value, ShardedTensor) else tuple(value.shape)
    if of_table and state and shape[1:] == (1,):
        shape = shape[:1]  # TorchRec's row-wise Adagrad has (R, 1) where FBGEMM has (R,)
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            first = tuple(shard.metadata.shard_offsets)[: len(shape)]
            held = shard.tensor.detach()
            held = held.view(-1) if len(shape) == 1 else held
            yield TensorPart(name, shape, held, first, is_shard=True, table=table_name)
        return
    held = value.detach().view(shape)
    if table.num_rows:
        shape = (table.num_rows, *shape[1:])
    if table.share is not None:
        first = (table.share.start, *(0 for _ in shape[1:]))
        step = table.share.step
        yield TensorPart(name, shape, held, first, is_shard=True, table=table_name, step=step)
        return
    yield TensorPart(name, shape, held, (0,) * len(shape), table.hot_rows, table=table_name)


@torch.no_grad()
def gather_tables(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather every embedding table of a sharded model, float (R, D) in original ids, on every rank.

    A collective for tests, small models and export: it needs memory for all tables.
    """
    shards: list[Any] = []
    whole: list[Any] = []
    for part in canonical_parts(model).parts:
        if part.table is not None:
            found = part.table, part.name, part.shape, part.own_rows(), part.first[1]
            (shards if part.is_shard else whole).append((*found, part.value.cpu()))
    tables: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    # Replicas last: the shards of a table have rows for its hot ones as well.
    for of_parts in (*all_gather_object(shards), whole):
        for table, name, shape, rows, column, value in of_parts:
            if names.setdefault(table, name) != name:
                raise ValueError(
                    f"table {table}: expected a unique table name in the model, got two tables. "
                    "Rename one of them."
                )
            target = tables.setdefault(table, torch.empty(shape))
            target[rows, column : column + value.shape[1]] = value.to(target.dtype)
    return tables
