"""The unsharded hot/cold collections: of embedding bags, and of sequences.

Each table becomes up to two tables of an ``EmbeddingCollection``: ``<table>_hot`` with the hot
rows, by hot slot, and ``<table>`` with all rows, in original ids; only its cold rows are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Generic, TypeVar

import torch
from torch import nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
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

from hotrec.embedding.pooling import output_rows
from hotrec.routing.features import (
    Column,
    RoutedFeatures,
    RoutedRows,
    RoutedSequences,
    hot_name,
)
from hotrec.routing.router import Router
from hotrec.types import Exchange, Partition, Placement, WireType

# Its output: pooled columns, or a ``JaggedTensor`` for each.
Out = TypeVar("Out")


def check_partition(tables: Sequence[BaseEmbeddingConfig], partition: Partition) -> None:
    """Raise ValueError if a table is missing, has another number of rows, or is not fp32."""
    names = {table.name for table in tables}
    if len(names) < len(tables):
        given = [table.name for table in tables]
        twice = next(name for name in given if given.count(name) > 1)
        raise ValueError(
            f"table {twice}: expected each name once in a collection, got it "
            f"{given.count(twice)} times. Rename one of them, or use one table for several "
            "features."
        )
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
    tables: Sequence[BaseEmbeddingConfig], chosen: Collection[str] | None = None
) -> dict[int, list[Column]]:
    """The outputs of the chosen tables by embedding dimension, in TorchRec's order."""
    groups: dict[int, list[Column]] = {}
    for table, names in zip(tables, names_by_table(tables), strict=True):
        if chosen is not None and table.name not in chosen:
            continue
        for feature, name in zip(table.feature_names, names, strict=True):
            is_mean = getattr(table, "pooling", None) == PoolingType.MEAN
            groups.setdefault(table.embedding_dim, []).append(
                Column(name, feature, table.name, is_mean)
            )
    return groups


def names_by_table(tables: Sequence[BaseEmbeddingConfig]) -> list[list[str]]:
    """The keys of the output by table, as TorchRec names them."""
    names: list[list[str]] = get_embedding_names_by_table(list(tables))
    return names


class OutputLayout(ABC, Generic[Out]):
    """Makes a collection's output of what was read for each embedding dimension."""

    groups: dict[int, list[Column]]  # of exchanged rows, by embedding dimension

    def of_rows(self, rows_UD: torch.Tensor, routed: RoutedRows, num_columns: int) -> torch.Tensor:
        """What ``assemble`` takes of one embedding dimension, see ``output_rows``."""
        return output_rows(rows_UD, routed, num_columns)

    @abstractmethod
    def assemble(
        self,
        parts: Sequence[torch.Tensor],
        routed: RoutedFeatures,
        from_torchrec: KeyedTensor | None = None,
    ) -> Out:
        """The output.

        Args:
            parts: By embedding dimension, what ``of_rows`` returned.
            routed: The routed features.
            from_torchrec: The columns that were pooled on their tables' owners.
        """


class PooledLayout(OutputLayout[KeyedTensor]):
    """Reorders the pooled columns of the groups and of TorchRec to the order of the keys."""

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], pooled_tables: Collection[str] = ()
    ) -> None:
        names = {table.name for table in tables}
        self.groups = columns_by_dim(tables, names - set(pooled_tables))
        self.pooled_groups = columns_by_dim(tables, set(pooled_tables))
        self.names = list(chain.from_iterable(names_by_table(tables)))
        self.lengths = [table.embedding_dim for table in tables for _ in table.feature_names]

    def assemble(
        self,
        parts: Sequence[torch.Tensor],
        routed: RoutedFeatures,
        from_torchrec: KeyedTensor | None = None,
    ) -> KeyedTensor:
        """Concatenate (B, F_g * D_g) of each group, and TorchRec's columns, to (B, sum of dims)."""
        if len(parts) == 1 and from_torchrec is None:
            return KeyedTensor(self.names, self.lengths, parts[0])
        of_column: dict[str, torch.Tensor] = {}
        for (dim, columns), values in zip(self.groups.items(), parts, strict=True):
            for column, part in zip(columns, values.split(dim, dim=1), strict=True):
                of_column[column.name] = part
        if from_torchrec is not None:
            values = from_torchrec.values()
            if not of_column and from_torchrec.keys() == self.names:
                return KeyedTensor(self.names, self.lengths, values)
            dims = from_torchrec.length_per_key()
            of_column |= zip(from_torchrec.keys(), values.split(dims, dim=1), strict=True)
        return KeyedTensor(
            self.names, self.lengths, torch.cat([of_column[name] for name in self.names], dim=1)
        )


class SequenceLayout(OutputLayout[dict[str, JaggedTensor]]):
    """Cuts the rows of each embedding dimension into the jagged output of each feature."""

    def __init__(self, tables: Sequence[BaseEmbeddingConfig]) -> None:
        self.groups = columns_by_dim(tables)
        self.names = list(chain.from_iterable(names_by_table(tables)))

    def assemble(
        self,
        parts: Sequence[torch.Tensor],
        routed: RoutedFeatures,
        from_torchrec: KeyedTensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Split (K, D) of each group by feature; keys by table, then by feature."""
        found: dict[str, JaggedTensor] = {}
        for columns, values, group in zip(self.groups.values(), parts, routed.groups, strict=True):
            assert isinstance(group, RoutedSequences), type(group)
            ids = None if group.ids_K is None else group.ids_K.split(group.num_ids_F)
            for at, (column, make) in enumerate(
                zip(columns, self.of_columns(values, group, columns), strict=True)
            ):
                found[column.name] = make(
                    lengths=group.lengths_FB[at], weights=None if ids is None else ids[at]
                )
        return {name: found[name] for name in self.names}

    def of_columns(
        self, values: torch.Tensor, group: RoutedSequences, columns: Sequence[Column]
    ) -> list[Callable[..., JaggedTensor]]:
        """What makes the output of each column, given its lengths and weights."""
        return [partial(JaggedTensor, rows) for rows in values.split(group.num_ids_F)]


_DATA_TYPES = {
    WireType.fp32: DataType.FP32,
    WireType.bf16: DataType.BF16,
}


def _type_of(placement: Placement, name: str) -> DataType:
    """The type of a table of cold rows in host memory; replicas are fp32."""
    table = placement.tables.get(name)
    return DataType.FP32 if table is None else _DATA_TYPES[table.row_type]


class HotColdCollection(nn.Module, Generic[Out]):
    """What the hot/cold collections have in common: everything except their output.

    Args:
        tables: The tables; fp32.
        placement: The hot rows of each table, and how the others are exchanged.
        layout: Makes the output.
        router: Routes the features to the rows of ``layout.groups``.
        device: The device of the parameters; None for the CPU.
    """

    # Of the tables' parameters in TorchRec's collection.
    prefix: str

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        placement: Placement,
        layout: OutputLayout[Out],
        router: Router,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.tables = list(tables)
        self.placement = placement
        self.partition = placement.partition
        self.device = device or torch.device("cpu")
        self.layout = layout
        self.router = router
        by_name = {table.name: table for table in tables}
        self.rows = nn.ModuleDict()
        for dim, group in self.router.groups.items():
            halves = [
                (hot_name(t), by_name[t], self.partition.num_hot(t)) for t in group.hot_tables
            ]
            halves += [(t, by_name[t], by_name[t].num_embeddings) for t in group.cold_tables]
            configs = [
                EmbeddingConfig(
                    name=name,
                    num_embeddings=num_rows,
                    embedding_dim=dim,
                    feature_names=[name],
                    data_type=_type_of(placement, name),
                    init_fn=self._init_fn_of(table),
                )
                for name, table, num_rows in halves
            ]
            self.rows[f"dim{dim}"] = EmbeddingCollection(tables=configs, device=self.device)
        self.pooled: EmbeddingBagCollection | None = None

    def _init_fn_of(
        self, table: BaseEmbeddingConfig
    ) -> Callable[[torch.Tensor], torch.Tensor | None] | None:
        """Draws the initial weights of both halves; None for uniform ones by their own sizes."""
        return None

    def forward(self, features: KeyedJaggedTensor | RoutedFeatures) -> Out:
        """Look up ids, or their routed form from ``self.router``."""
        routed = route(self.router, features)
        parts = []
        for collection, group, router in zip(
            self.rows.values(), routed.groups, self.router.groups.values(), strict=True
        ):
            found: dict[str, JaggedTensor] = collection(group.rows)
            rows_UD = torch.cat([found[key].values() for key in router.keys])
            parts.append(self.layout.of_rows(rows_UD, group, len(router.columns)))
        from_torchrec = None if self.pooled is None else self.pooled(routed.pooled)
        return self.layout.assemble(parts, routed, from_torchrec)


class HotColdEmbeddingBagCollection(HotColdCollection[KeyedTensor]):
    """Embedding bags whose hot rows are replicated and whose cold rows are sharded.

    Unsharded, it computes the same as the ``EmbeddingBagCollection`` of these tables: values float
    (B, sum over columns of D), with the same keys. ``HotColdSharder`` makes the hot half
    data-parallel and the cold half model-parallel.

    Args:
        tables: Tables as for ``EmbeddingBagCollection``; fp32, sum or mean pooling.
        placement: The hot rows of each table, and how the others are exchanged; with a partition,
            all are exchanged as rows.
        is_weighted: Whether the features have per-sample weights.
        device: The device of the parameters; on "meta" sharding makes them.

    Raises:
        ValueError: if the placement does not fit the tables, or a table is not fp32.
    """

    prefix = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        placement: Placement | Partition,
        *,
        is_weighted: bool = False,
        device: torch.device | None = None,
    ) -> None:
        placement = _placement_of(placement)
        partition = placement.partition
        check_partition(tables, partition)
        pooled_tables = {
            table.name
            for table in tables
            if placement.tables[table.name].exchange is Exchange.POOLED
        }
        layout = PooledLayout(tables, pooled_tables)
        router = Router(layout.groups, partition, is_weighted, layout.pooled_groups)
        super().__init__(tables, placement, layout, router, device)
        self._is_weighted = is_weighted
        if self.router.pooled is not None:
            by_name = {table.name: table for table in tables}
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
        return self.tables

    def is_weighted(self) -> bool:
        return self._is_weighted


class HotColdEmbeddingCollection(HotColdCollection[dict[str, JaggedTensor]]):
    """Sequences of embeddings whose hot rows are replicated and whose cold rows are sharded.

    Unsharded, it computes the same as the ``EmbeddingCollection`` of these tables: a
    ``JaggedTensor`` for each key, in the same order. Tables may have different dimensions. Every
    distinct row of a batch is exchanged once. ``HotColdSequenceSharder`` shards it.

    Args:
        tables: Tables as for ``EmbeddingCollection``; fp32.
        placement: The hot rows of each table, and the place of the others.
        device: The device of the parameters; on "meta" sharding makes them.
        need_indices: Whether the ids are the weights of the output.
        use_gather_select: Ignored, like the next: rows are always selected by one gather.
        use_gather_select_per_sharding: Ignored.
        layout: The form of the output; ``PackedLayout`` for packed jagged tensors.

    Raises:
        ValueError: if the placement does not fit the tables, a table is not fp32, or one is to be
            exchanged pooled.
    """

    prefix = "embeddings"

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        placement: Placement | Partition,
        device: torch.device | None = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: Mapping[str, bool] | None = None,
        *,
        layout: type[SequenceLayout] = SequenceLayout,
    ) -> None:
        placement = _placement_of(placement)
        tables = [t if t.feature_names else replace(t, feature_names=[t.name]) for t in tables]
        check_partition(tables, placement.partition)
        for table in tables:
            if placement.tables[table.name].exchange is Exchange.POOLED:
                raise ValueError(
                    f"table {table.name} exchange: expected rows, since the table's features are "
                    "not pooled, got pooled. Use Exchange.ROWS."
                )
        made = layout(tables)
        router = Router(made.groups, placement.partition, False, need_indices=need_indices)
        super().__init__(tables, placement, made, router, device)
        self._need_indices = need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self.tables

    def need_indices(self) -> bool:
        return self._need_indices

    def embedding_dim(self) -> int:
        """The dimension of all tables.

        Raises:
            ValueError: if they have several.
        """
        dims = sorted({table.embedding_dim for table in self.tables})
        if len(dims) != 1:
            raise ValueError(
                f"embedding_dim: expected tables of one dimension, got {dims}. Read those of "
                "embedding_configs()."
            )
        return dims[0]

    def embedding_names_by_table(self) -> list[list[str]]:
        return names_by_table(self.tables)

    def reset_parameters(self) -> None:
        """Draw the initial weights of every table by its ``init_fn``."""
        for collection in self.rows.values():
            collection.reset_parameters()  # type: ignore[operator]

    def _init_fn_of(
        self, table: BaseEmbeddingConfig
    ) -> Callable[[torch.Tensor], torch.Tensor | None] | None:
        return table.init_fn


def _placement_of(placement: Placement | Partition) -> Placement:
    return Placement.alike(placement) if isinstance(placement, Partition) else placement


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
