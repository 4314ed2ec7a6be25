"""The hot/cold embedding bag collection, before sharding.

Takes the place of TorchRec's ``EmbeddingBagCollection``: same tables, same keys, same output. Each
table becomes up to two tables of an ``EmbeddingCollection``: ``<table>_hot`` with the hot rows, by
hot slot, and ``<table>`` with all rows, in original ids, of which the cold ones are live. Both are
read by the distinct rows of the batch; pooling is local.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from hotrec.embedding.pooling import pool_rows
from hotrec.routing import Column, RoutedFeatures, Router, hot_name
from hotrec.types import Partition


def check_partition(tables: Sequence[EmbeddingBagConfig], partition: Partition) -> None:
    """Refuse a partition that is not of these tables.

    Raises:
        ValueError: if a table is missing, has another number of rows, or is not fp32.
    """
    for table in tables:
        found = partition.num_rows.get(table.name)
        if found != table.num_embeddings:
            raise ValueError(
                f"partition table {table.name}: expected {table.num_embeddings} rows, got {found}. "
                "Make the partition from the profile of this dataset."
            )
        if table.data_type != DataType.FP32:
            raise ValueError(
                f"table {table.name} data_type: expected FP32, got {table.data_type.name}. "
                "Other types cannot be kept equal on both halves."
            )
    names = {table.name for table in tables}
    for table in tables:
        if partition.num_hot(table.name) and hot_name(table.name) in names:
            raise ValueError(
                f"table {hot_name(table.name)}: expected no table of this name, since "
                f"{table.name} has hot rows. Rename one of them."
            )


def columns_by_dim(tables: Sequence[EmbeddingBagConfig]) -> dict[int, list[Column]]:
    """The pooled outputs of the tables, grouped by embedding dimension, in TorchRec's order."""
    groups: dict[int, list[Column]] = {}
    for table, names in zip(tables, get_embedding_names_by_table(list(tables)), strict=True):
        for feature, name in zip(table.feature_names, names, strict=True):
            is_mean = table.pooling == PoolingType.MEAN
            groups.setdefault(table.embedding_dim, []).append(
                Column(name, feature, table.name, is_mean)
            )
    return groups


class PooledLayout:
    """Puts the pooled columns of the groups into the order of the collection's keys.

    Args:
        tables: the collection's tables, in its order.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig]) -> None:
        self.groups = columns_by_dim(tables)
        self.names = [
            name for names in get_embedding_names_by_table(list(tables)) for name in names
        ]
        dims = {column.name: dim for dim, columns in self.groups.items() for column in columns}
        self.lengths = [dims[name] for name in self.names]

    def assemble(self, pooled: Sequence[torch.Tensor]) -> KeyedTensor:
        """One (B, F_g * D_g) per group -> KeyedTensor of (B, sum of dims), keys in order."""
        if len(pooled) == 1:
            return KeyedTensor(self.names, self.lengths, pooled[0])
        parts: dict[str, torch.Tensor] = {}
        for (dim, columns), values in zip(self.groups.items(), pooled, strict=True):
            for column, part in zip(columns, values.split(dim, dim=1), strict=True):
                parts[column.name] = part
        return KeyedTensor(
            self.names, self.lengths, torch.cat([parts[name] for name in self.names], dim=1)
        )


class HotColdEmbeddingBagCollection(nn.Module):
    """Embedding bags whose hot rows are replicated and whose cold rows are sharded.

    Unsharded, it computes what the ``EmbeddingBagCollection`` of the same tables computes; its
    sharder (``hotrec.embedding.sharding.HotColdSharder``) makes the hot half data-parallel and the
    cold half model-parallel.

    Args:
        tables: as for ``EmbeddingBagCollection``; fp32, sum or mean pooling.
        partition: which rows of each table are hot.
        is_weighted: whether the features carry per-sample weights.
        device: of the parameters; "meta" leaves them to be made by sharding.

    Raises:
        ValueError: if the partition is of other tables, or a table is not fp32.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        partition: Partition,
        *,
        is_weighted: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        check_partition(tables, partition)
        self._tables = list(tables)
        self._is_weighted = is_weighted
        self._partition = partition
        self._device = device or torch.device("cpu")
        self._layout = PooledLayout(tables)
        self.router = Router(self._layout.groups, partition, is_weighted)
        by_name = {table.name: table for table in tables}
        self.rows = nn.ModuleDict()
        for dim, group in self.router.groups.items():
            configs = [
                EmbeddingConfig(
                    name=hot_name(name),
                    num_embeddings=partition.num_hot(name),
                    embedding_dim=dim,
                    feature_names=[hot_name(name)],
                )
                for name in group.hot_tables
            ]
            configs += [
                EmbeddingConfig(
                    name=name,
                    num_embeddings=by_name[name].num_embeddings,
                    embedding_dim=dim,
                    feature_names=[name],
                )
                for name in group.cold_tables
            ]
            self.rows[f"dim{dim}"] = EmbeddingCollection(tables=configs, device=self._device)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._tables

    def is_weighted(self) -> bool:
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def partition(self) -> Partition:
        return self._partition

    @property
    def layout(self) -> PooledLayout:
        return self._layout

    def forward(self, features: KeyedJaggedTensor | RoutedFeatures) -> KeyedTensor:
        """Look up and pool.

        Args:
            features: ids as a ``KeyedJaggedTensor``, or already routed by ``self.router``.

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
        return self._layout.assemble(pooled)


def route(router: Router, features: KeyedJaggedTensor | RoutedFeatures) -> RoutedFeatures:
    """Route features unless a loader worker has done it.

    Raises:
        ValueError: if they were routed for another collection or partition.
    """
    if not isinstance(features, RoutedFeatures):
        return router(features)
    if features.fingerprint != router.fingerprint:
        raise ValueError(
            f"features: expected them routed by this collection's router "
            f"{router.fingerprint:08x}, got {features.fingerprint:08x}. Give the loader the "
            "router of the collection that is trained."
        )
    return features
