"""The unsharded hot/cold embedding bag collection.

Each table becomes up to two tables of an ``EmbeddingCollection``: ``<table>_hot`` with the hot
rows, by hot slot, and ``<table>`` with all rows, in original ids; only its cold rows are used.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import nn
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from hotrec.embedding.pooling import pool_rows
from hotrec.routing.features import Column, RoutedFeatures, hot_name
from hotrec.routing.router import Router
from hotrec.types import Exchange, Partition, Placement, WireType


def check_partition(tables: Sequence[EmbeddingBagConfig], partition: Partition) -> None:
    """Raise ValueError if a table is missing, has another number of rows, or is not fp32."""
    names = {table.name for table in tables}
    for table in tables:
        found = partition.num_rows.get(table.name)
        if found != table.num_embeddings:
            raise ValueError(
                f"partition table {table.name}: expected {table.num_embeddings} rows, got {found}. "
                "Make the partition from the profile of this dataset."
            )
        if table.data_type != DataType.FP32:
            raise ValueError(
                f"table {table.name} data_type: expected FP32, got {table.data_type.name}. Other "
                "types would diverge between hot and cold rows. Use FP32."
            )
        if partition.num_hot(table.name) and hot_name(table.name) in names:
            raise ValueError(
                f"table {hot_name(table.name)}: expected no table of this name, since "
                f"{table.name} has hot rows. Rename one of them."
            )


def columns_by_dim(
    tables: Sequence[EmbeddingBagConfig], chosen: Collection[str] | None = None
) -> dict[int, list[Column]]:
    """The pooled outputs of the chosen tables by embedding dimension, in TorchRec's order."""
    groups: dict[int, list[Column]] = {}
    for table, names in zip(tables, get_embedding_names_by_table(list(tables)), strict=True):
        if chosen is not None and table.name not in chosen:
            continue
        for feature, name in zip(table.feature_names, names, strict=True):
            is_mean = table.pooling == PoolingType.MEAN
            groups.setdefault(table.embedding_dim, []).append(
                Column(name, feature, table.name, is_mean)
            )
    return groups


class PooledLayout:
    """Reorders the pooled columns of the groups and of TorchRec to the order of the keys."""

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], pooled_tables: Collection[str] = ()
    ) -> None:
        names = {table.name for table in tables}
        self.groups = columns_by_dim(tables, names - set(pooled_tables))
        self.pooled_groups = columns_by_dim(tables, set(pooled_tables))
        self.names = list(chain.from_iterable(get_embedding_names_by_table(list(tables))))
        self.lengths = [table.embedding_dim for table in tables for _ in table.feature_names]

    def assemble(
        self, pooled: Sequence[torch.Tensor], from_torchrec: KeyedTensor | None = None
    ) -> KeyedTensor:
        """Concatenate (B, F_g * D_g) of each group, and TorchRec's columns, to (B, sum of dims)."""
        if len(pooled) == 1 and from_torchrec is None:
            return KeyedTensor(self.names, self.lengths, pooled[0])
        parts: dict[str, torch.Tensor] = {}
        for (dim, columns), values in zip(self.groups.items(), pooled, strict=True):
            for column, part in zip(columns, values.split(dim, dim=1), strict=True):
                parts[column.name] = part
        if from_torchrec is not None:
            values = from_torchrec.values()
            if not parts and from_torchrec.keys() == self.names:
                return KeyedTensor(self.names, self.lengths, values)
            dims = from_torchrec.length_per_key()
            parts |= zip(from_torchrec.keys(), values.split(dims, dim=1), strict=True)
        return KeyedTensor(
            self.names, self.lengths, torch.cat([parts[name] for name in self.names], dim=1)
        )


_DATA_TYPES = {
    WireType.fp32: DataType.FP32,
    WireType.fp16: DataType.FP16,
    WireType.bf16: DataType.BF16,
}


def _type_of(placement: Placement, name: str) -> DataType:
    """The type of a table of cold rows in host memory; replicas are fp32."""
    table = placement.tables.get(name)
    return DataType.FP32 if table is None else _DATA_TYPES[table.row_type]


class HotColdEmbeddingBagCollection(nn.Module):
    """Embedding bags whose hot rows are replicated and whose cold rows are sharded.

    Unsharded, it computes the same as the ``EmbeddingBagCollection`` of these tables;
    ``HotColdSharder`` makes the hot half data-parallel and the cold half model-parallel.

    Args:
        tables: Tables as for ``EmbeddingBagCollection``; fp32, sum or mean pooling.
        placement: The hot rows of each table, and how the others are exchanged; with a partition,
            all are exchanged as rows.
        is_weighted: Whether the features have per-sample weights.
        device: The device of the parameters; on "meta" sharding makes them.

    Raises:
        ValueError: if the placement does not fit the tables, or a table is not fp32.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        placement: Placement | Partition,
        *,
        is_weighted: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if isinstance(placement, Partition):
            placement = Placement.alike(placement)
        partition = placement.partition
        check_partition(tables, partition)
        pooled_tables = {
            table.name
            for table in tables
            if placement.tables[table.name].exchange is Exchange.POOLED
        }
        self._tables = list(tables)
        self._is_weighted = is_weighted
        self.placement = placement
        self.partition = partition
        self.device = device or torch.device("cpu")
        self.layout = PooledLayout(tables, pooled_tables)
        self.router = Router(self.layout.groups, partition, is_weighted, self.layout.pooled_groups)
        by_name = {table.name: table for table in tables}
        self.rows = nn.ModuleDict()
        for dim, group in self.router.groups.items():
            sizes = {hot_name(name): partition.num_hot(name) for name in group.hot_tables}
            sizes |= {name: by_name[name].num_embeddings for name in group.cold_tables}
            configs = [
                EmbeddingConfig(
                    name=name,
                    num_embeddings=size,
                    embedding_dim=dim,
                    feature_names=[name],
                    data_type=_type_of(placement, name),
                )
                for name, size in sizes.items()
            ]
            self.rows[f"dim{dim}"] = EmbeddingCollection(tables=configs, device=self.device)
        self.pooled: EmbeddingBagCollection | None = None
        if self.router.pooled is not None:
            columns = self.router.pooled.columns
            configs = [
                replace(
                    by_name[name],
                    # With weights, the router divides them for mean pooling.
                    pooling=PoolingType.SUM if is_weighted else by_name[name].pooling,
                    feature_names=[column.name for column in columns if column.table == name],
                )
                for name in self.router.pooled.tables
            ]
            self.pooled = EmbeddingBagCollection(
                tables=configs, is_weighted=is_weighted, device=self.device
            )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._tables

    def is_weighted(self) -> bool:
        return self._is_weighted

    def forward(self, features: KeyedJaggedTensor | RoutedFeatures) -> KeyedTensor:
        """Look up and pool ids, or their routed form from ``self.router``.

        Returns:
            Values float (B, sum over columns of D), keys as ``EmbeddingBagCollection`` names them.
        """
        routed = route(self.router, features)
        pooled = []
        for collection, group, router in zip(
            self.rows.values(), routed.groups, self.router.groups.values(), strict=True
        ):
            found: dict[str, JaggedTensor] = collection(group.rows)
            rows_UD = torch.cat([found[key].values() for key in router.keys])
            pooled.append(pool_rows(rows_UD, group, len(router.columns)))
        from_torchrec = None if self.pooled is None else self.pooled(routed.pooled)
        return self.layout.assemble(pooled, from_torchrec)


def route(router: Router, features: KeyedJaggedTensor | RoutedFeatures) -> RoutedFeatures:
    """Route features unless a loader worker already routed them for this collection."""
    if not isinstance(features, RoutedFeatures):
        return router(features)
    if features.fingerprint != router.fingerprint:
        raise ValueError(
            f"features: expected routing by this collection's router {router.fingerprint:08x}, got "
            f"{features.fingerprint:08x}. Pass the trained collection's router to the loader."
        )
    return features
