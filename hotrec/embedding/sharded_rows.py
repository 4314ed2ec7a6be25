"""The rows of one embedding dimension on this rank: replicas, and its share of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.cached_rows import CachedRows
from hotrec.embedding.hot_rows import HotReplicas
from hotrec.embedding.owned_rows import RequestedRows, RowOwners
from hotrec.embedding.row_store import RowOptimizer, RowStore, host_rows
from hotrec.embedding.torchrec import mark_updated_in_backward
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.hosts import TwoLevelWire
from hotrec.types import POPULAR_ROW, Placement, RowFetch, Rows, TablePlacement, Tier, WireType


@dataclass(frozen=True)
class ShardSettings:
    """How a collection is sharded; rows, pooled vectors and gradients are sent in ``wire_type``."""

    env: ShardingEnv
    device: torch.device
    spec: OptimizerSpec
    wire_type: WireType
    module_fqn: str | None
    hosts: TwoLevelWire | None = None  # for unpooled rows in two levels


# Rows that are copied at once when owners take their weights.
_ROWS_AT_ONCE = 1 << 18
_TYPES = {WireType.fp32: torch.float32, WireType.bf16: torch.bfloat16}


def check_sharding(table: str, sharding: ParameterSharding, wanted: ShardingType) -> None:
    """Raise ValueError unless a plan shards a table by the wanted sharding type."""
    if sharding.sharding_type != wanted.value:
        raise ValueError(
            f"plan table {table}: expected sharding type {wanted.value!r}, got "
            f"{sharding.sharding_type!r}. Constrain the planner with "
            "hotrec.assemble.constraints.placement_constraints."
        )


class ShardedRows(nn.Module):
    """The rows of one embedding dimension, hot tables first, exchanged unpooled.

    Its parameters are ``embeddings.<table>.weight`` of hot tables, and of cold ones this rank's
    share (``RowShares``). That is named by the rank and the number of ranks, since a tensor does
    not tell which rows it has: with others, a reader finds no tensor and fails.
    """

    def __init__(
        self,
        module: EmbeddingCollection,
        sharding: Mapping[str, ParameterSharding],
        hot_tables: Sequence[str],
        settings: ShardSettings,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.dim, self._num_hot = module.embedding_dim(), len(hot_tables)
        self._rank, world_size = settings.env.rank, settings.env.world_size
        # Of the parameters of shares.
        self.weight_name = "weight" if world_size == 1 else f"weight_{self._rank}_of_{world_size}"
        self._num_rows = {c.name: c.num_embeddings for c in module.embedding_configs()}
        for table in self._num_rows:
            is_hot = table in hot_tables
            wanted = ShardingType.DATA_PARALLEL if is_hot else ShardingType.ROW_WISE
            check_sharding(table, sharding[table], wanted)
        num_cold = {t: n for t, n in self._num_rows.items() if t not in hot_tables}
        self.hot = _replicas([self._num_rows[t] for t in hot_tables], self.dim, settings)
        hosts = None if settings.hosts is None else settings.hosts.hosts
        owners = RowOwners(num_cold, world_size, settings.device, hosts)
        self.owners = owners if num_cold else None
        placed = [placement.tables[table] for table in num_cold]
        self.is_cached = _is_cached(placed)
        self._shares = owners.shares
        self._begins = owners.begins
        self.owned = self._make_store(owners.num_positions, settings, placement, num_cold)
        self.optimizer: RowOptimizer | None = None
        self._register(module, hot_tables, settings)

    def _make_store(
        self,
        num_places: int,
        settings: ShardSettings,
        placement: Placement,
        num_rows: Mapping[str, int],
    ) -> RowStore:
        spec, device = settings.spec, settings.device
        shapes = dict.fromkeys(spec.state_names, spec.state_shape(num_places, self.dim))
        if not self.is_cached:
            weights = torch.zeros(num_places, self.dim, device=device)
            states = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
            return RowStore(weights, states, spec)
        placed = [placement.tables[table] for table in num_rows]
        host, seen = host_rows((num_places, self.dim), _TYPES[placed[0].row_type], device)
        of_states = {n: host_rows(shape, torch.float32, device) for n, shape in shapes.items()}
        is_mapped = any(table.row_fetch is RowFetch.mapped for table in placed)
        popular, num_slots = [np.empty(0, POPULAR_ROW)], 0.0
        for table, num in num_rows.items():
            num_own = len(self._shares[table].rows_of(self._rank, num))
            num_slots += (placement.tables[table].cache_load_frac or 0.0) * num_own
            of_table = placement.popular_rows.get(table, popular[0])
            of_table = of_table[self._is_own(table, of_table["row"])].copy()
            of_table["row"] = self._positions(table, of_table["row"])
            popular.append(of_table)
        return CachedRows(
            (host, {name: here for name, (here, _) in of_states.items()}),
            math.ceil(num_slots),
            np.concatenate(popular),
            spec,
            device,
            [seen, *(there for _, there in of_states.values())] if is_mapped else None,
            is_distinct=settings.env.world_size == 1,
        )

    @torch.no_grad()
    def _register(
        self, module: EmbeddingCollection, hot_tables: Sequence[str], settings: ShardSettings
    ) -> None:
        """Make the parameters, with the weights of the module's rows or initial ones."""
        name = self.weight_name
        hot = [] if self.hot is None else self.hot.rows.split(self.hot.num_rows_T)
        held = dict(zip(hot_tables, hot, strict=True))
        memory, states, cold = self.owned.memory(), {}, {}
        self.embeddings = nn.ModuleDict()
        for config in module.embedding_configs():
            table, own = config.name, slice(None)
            if table not in held:
                share = self._shares[table]
                rows = share.rows_of(self._rank, config.num_embeddings)
                begin = self._begins[table] + share.places(rows.start)
                weight, *of_table = (part[begin : begin + len(rows)] for part in memory)
                held[table], own = weight, slice(rows.start, None, rows.step)
                key = f"embeddings.{table}.{name}"
                states[key] = dict(zip(self.owned.states, of_table, strict=True))
                states[key]["step"] = self.owned.update_count
            parameter = nn.Parameter(held[table])
            holder = nn.Module()
            holder.register_parameter("weight" if table in hot_tables else name, parameter)
            self.embeddings[table] = holder
            if table not in hot_tables:
                mark_updated_in_backward(parameter)
                cold[f"embeddings.{table}.{name}"] = parameter
            given = module.embeddings[table].weight
            if given.is_meta:
                assert config.init_fn is not None
                config.init_fn(parameter)
                continue
            for to, part in zip(
                parameter.split(_ROWS_AT_ONCE), given[own].split(_ROWS_AT_ONCE), strict=True
            ):
                to.copy_(part)
        if cold:
            self.optimizer = RowOptimizer(cold, states, settings.spec.learning_rate)

    def own_rows(self) -> dict[str, range]:
        """The rows of this rank's share of each cold table."""
        return {t: s.rows_of(self._rank, self._num_rows[t]) for t, s in self._shares.items()}

    def _is_own(self, table: str, rows: Rows) -> np.ndarray:
        return self._shares[table].owners(rows) == self._rank

    def _positions(self, table: str, rows: Rows) -> Rows:
        return self._begins[table] + self._shares[table].places(rows)

    @property
    def learning_rate(self) -> float:
        """The current learning rate of the owned rows; 0 without cold tables."""
        return 0.0 if self.optimizer is None else self.optimizer.learning_rate

    @property
    def num_updates(self) -> int:
        """The number of updates of the owned rows so far."""
        return int(self.owned.update_count)

    def num_hot(self, rows: KeyedJaggedTensor) -> int:
        """The number of distinct hot rows of a batch."""
        return sum(rows.length_per_key()[: self._num_hot])

    def find_owners(self, rows: KeyedJaggedTensor) -> RequestedRows:
        """Find the owners of the cold rows of a batch."""
        assert self.owners is not None
        return self.owners.find(rows, self._num_hot)

    def hot_slots(self, rows: KeyedJaggedTensor) -> torch.Tensor:
        """The slots of the hot rows of a batch in the replica, int64, distinct, in their order."""
        assert self.hot is not None
        lengths_T, num_hot = rows.lengths()[: self._num_hot], self.num_hot(rows)
        begins_U = torch.repeat_interleave(self.hot.begins_T, lengths_T, output_size=num_hot)
        return rows.values()[:num_hot] + begins_U

    def refresh_cached_rows(self, written: Mapping[str, Rows]) -> None:
        """Refetch slots after rows in host memory were written, by table, between steps."""
        own = [
            self._positions(table, rows[self._is_own(table, rows)])
            for table, rows in written.items()
            if table in self._shares
        ]
        if own:
            self.owned.refresh(np.concatenate(own))


def _replicas(num_rows_T: list[int], dim: int, settings: ShardSettings) -> HotReplicas | None:
    if not num_rows_T:
        return None
    weight = nn.Parameter(torch.empty(sum(num_rows_T) * dim, device=settings.device))
    return HotReplicas(weight, num_rows_T, dim, settings.env.process_group)


def _is_cached(placed: Sequence[TablePlacement]) -> bool:
    """Whether the cold rows of the tables of one dimension are behind slots.

    Raises:
        ValueError: if only some of them are, or their rows have different types.
    """
    kinds = sorted({(table.tier.value, table.row_type.value) for table in placed})
    if len(kinds) > 1:
        raise ValueError(
            "placement tier: expected the same tier and type of rows for all tables of one "
            f"dimension, got {' and '.join(map(str, kinds))}. Set the same ones."
        )
    return any(table.tier is Tier.CACHED for table in placed)
