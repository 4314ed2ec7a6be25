"""The rows of one embedding dimension as TorchRec shards them: replicas, and rows of owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.cached_rows import CachedRows, cached_rows_of, is_cached
from hotrec.embedding.fused import fused_params
from hotrec.embedding.fused_rows import FusedRows
from hotrec.embedding.hot_rows import HotReplicas
from hotrec.embedding.owned_rows import OwnedRows, RequestedRows, RowOwners
from hotrec.embedding.torchrec import Kernel, RowCollection, kernels
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.hosts import TwoLevelWire
from hotrec.runtime.ranks import all_gather_object
from hotrec.types import Placement, RowOrder, Rows, WireType


@dataclass(frozen=True)
class ShardSettings:
    """How a collection is sharded; rows, pooled vectors and gradients are sent in ``wire_type``."""

    env: ShardingEnv
    device: torch.device
    spec: OptimizerSpec
    wire_type: WireType
    module_fqn: str | None
    hosts: TwoLevelWire | None = None  # for unpooled rows in two levels


# Rows that are copied at once when spread rows take their weights.
_ROWS_AT_ONCE = 1 << 18
HOT_SHARDINGS = (ShardingType.DATA_PARALLEL,)
COLD_SHARDINGS = (ShardingType.ROW_WISE, ShardingType.TABLE_WISE)


def check_sharding(table: str, sharding: ParameterSharding, wanted: Sequence[ShardingType]) -> None:
    """Raise ValueError unless a plan shards a table by one of the wanted sharding types."""
    types = [kind.value for kind in wanted]
    if sharding.sharding_type not in types:
        raise ValueError(
            f"plan table {table}: expected sharding type {' or '.join(map(repr, types))}, got "
            f"{sharding.sharding_type!r}. Constrain the planner with "
            "hotrec.assemble.constraints.placement_constraints."
        )


class ShardedRows(RowCollection):
    """The rows of one embedding dimension, hot tables first, exchanged unpooled."""

    def __init__(
        self,
        module: EmbeddingCollection,
        sharding: dict[str, ParameterSharding],
        hot_tables: list[str],
        settings: ShardSettings,
        placement: Placement,
    ) -> None:
        for config in module.embedding_configs():
            is_hot = config.name in hot_tables
            wanted = HOT_SHARDINGS if is_hot else COLD_SHARDINGS
            check_sharding(config.name, sharding[config.name], wanted)
        env, device, spec = settings.env, settings.device, settings.spec
        name = settings.module_fqn
        super().__init__(module, sharding, env, fused_params(spec), device, module_fqn=name)
        self._num_hot = len(hot_tables)
        # One rank has whole tables, whose order does not matter.
        is_alone = env.world_size == 1
        num_rows = {config.name: config.num_embeddings for config in module.embedding_configs()}
        cold_tables = [table for table in num_rows if table not in hot_tables]
        self.orders = {
            table: RowOrder(num_rows[table], is_spread=False)
            if is_alone
            else placement.row_order(table)
            for table in cold_tables
        }
        self._keep_weights(module)
        self.name_weights(self.orders)
        self.dim = module.embedding_dim()
        self.is_cached = is_cached(placement, cold_tables)
        self.hot: HotReplicas | None = None
        cold: list[tuple[Kernel, CachedRows | FusedRows]] = []
        for kernel in kernels(self):
            if kernel.tables <= set(hot_tables):
                num_rows_T = [num_rows[table] for table in hot_tables]
                weights, group = kernel.fbgemm.weights, env.process_group
                self.hot = HotReplicas(weights, num_rows_T, self.dim, group)
            elif self.is_cached:
                made = cached_rows_of(
                    kernel, spec, placement, self.orders, device, is_distinct=is_alone
                )
                cold.append((kernel, made))
            else:
                cold.append((kernel, FusedRows(kernel.fbgemm, kernel.optimizer, spec)))
        self.owned = OwnedRows(cold, self.dim)
        self.owners: RowOwners | None = None
        if cold_tables:
            shards = all_gather_object(self.owned.shards)
            hosts = None if settings.hosts is None else settings.hosts.hosts
            self.owners = RowOwners(cold_tables, num_rows, shards, device, hosts, self.orders)

    @torch.no_grad()
    def _keep_weights(self, module: EmbeddingCollection) -> None:
        """Take the module's weights of spread rows, of which TorchRec has taken the wrong ones."""
        weights_of: dict[str, Any] = {t: bag.weight for t, bag in module.embeddings.items()}
        spread = {
            table: order
            for table, order in self.orders.items()
            if order.factor != 1 and not weights_of[table].is_meta
        }
        state = self.state_dict() if spread else {}
        for table, order in spread.items():
            weights = weights_of[table]
            for shard in state[f"embeddings.{table}.weight"].local_shards():
                first_row, num_rows = shard.metadata.shard_offsets[0], shard.tensor.shape[0]
                stored = torch.arange(first_row, first_row + num_rows, device=weights.device)
                for rows, part in zip(
                    stored.split(_ROWS_AT_ONCE), shard.tensor.split(_ROWS_AT_ONCE), strict=True
                ):
                    part.copy_(weights[order.original(rows)])

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
        nothing = np.empty(0, np.int64)
        stored = {t: order.stored(written.get(t, nothing)) for t, order in self.orders.items()}
        for kernel, part in self.owned.kernels:
            if isinstance(part, CachedRows):
                for shard in kernel.shards:
                    rows = stored[shard.table]
                    part.refresh(rows[shard.holds(rows)] - shard.first_row + shard.begin)
