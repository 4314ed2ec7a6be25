"""The sharded hot/cold collections, and their sharders.

A collection routes and sends ids in ``input_dist``, which TorchRec's pipelines call one step ahead,
and reads and pools rows, or copies them to the ids, after it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import (
    BaseEmbeddingSharder,
    EmbeddingComputeKernel,
    KJTList,
    ShardedEmbeddingModule,
)
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    LazyNoWait,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from hotrec.embedding.collection import (
    HotColdCollection,
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    Out,
    route,
)
from hotrec.embedding.exchange import BatchRows
from hotrec.embedding.fused import check_optimizer, fused_params
from hotrec.embedding.hot_rows import HotReplicas
from hotrec.embedding.in_line import InLine
from hotrec.embedding.pooled import ShardedPooledBags
from hotrec.embedding.sharded_rows import ShardedRows, ShardSettings
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.routing.features import RoutedFeatures
from hotrec.routing.popularity import Popularity
from hotrec.routing.router import Router
from hotrec.runtime.hosts import TwoLevelWire, gather_hosts
from hotrec.runtime.stages import mark, named_range
from hotrec.types import Levels, Partition, Rows, WireType

logger = logging.getLogger(__name__)


class HotColdContext(EmbeddingCollectionContext):
    """The state of a batch between ``input_dist`` and the later stages."""

    def __init__(self) -> None:
        # Not a dataclass: the parent is one only since torchrec 1.7, and a dataclass does not call
        # the ``__init__`` of a plain parent.
        super().__init__()
        self.batch: BatchRows | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        if self.batch is not None:
            self.batch.record_stream(stream)


# The rows of each embedding dimension, and the columns that TorchRec pools.
Read = tuple[Sequence[torch.Tensor], LazyAwaitable[KeyedTensor] | None]


class ShardedHotColdCollection(
    ShardedEmbeddingModule[KJTList, Read, Out, HotColdContext],
    FusedOptimizerModule,
    Generic[Out],
):
    """A sharded ``HotColdCollection``; created by ``HotColdSharder``.

    One ``ShardedRows`` per embedding dimension contains both halves: replicas of the hot tables,
    and this rank's share of the cold ones. Tables pooled on their owners run in the same stages.
    """

    def __init__(
        self,
        module: HotColdCollection[Out],
        sharding: dict[str, ParameterSharding],
        settings: ShardSettings,
    ) -> None:
        super().__init__()
        self.tables = module.tables
        self.prefix = module.prefix
        self.placement = module.placement
        self.partition = module.partition
        self.layout = module.layout
        # Pickled into loader workers; ``_device_router`` has the maps on the device.
        self.router = module.router
        for group in self.router.groups.values():
            group.slots  # noqa: B018 (builds the map, which forked workers then share)
        self._device = settings.device
        self._device_router = module.router if self._device.type == "cpu" else None
        self._counters: list[Popularity] = []  # empty unless lookups are counted
        self.rows = nn.ModuleDict()
        for (name, collection), group in zip(
            module.rows.items(), module.router.groups.values(), strict=True
        ):
            of_group = {key: sharding[key] for key in group.keys}
            hot_tables = group.keys[: len(group.hot_tables)]
            self.rows[name] = ShardedRows(
                collection, of_group, hot_tables, settings, module.placement
            )
        self.pooled: ShardedPooledBags | None = None
        if module.pooled is not None:
            of_pooled = {c.name: sharding[c.name] for c in module.pooled.embedding_bag_configs()}
            self.pooled = ShardedPooledBags(module.pooled, of_pooled, settings)
        self.hosts = settings.hosts
        self._in_line = InLine(self.sharded_rows(), settings)

    def hot_replicas(self) -> Iterator[tuple[str, HotReplicas]]:
        """Iterate over the replicas, with the prefix of their parameters' names."""
        for name, rows in self._rows().items():
            if rows.hot is not None:
                yield f"rows.{name}.embeddings.", rows.hot

    def sharded_rows(self) -> list[ShardedRows]:
        """By embedding dimension, in the router's order."""
        return list(self._rows().values())

    @property
    def routers(self) -> list[Router]:
        """Its router, and the one with maps on the device once a batch has needed it."""
        both = (self.router, self._device_router)
        return [router for router in both if router is not None]

    def _rows(self) -> dict[str, ShardedRows]:
        return dict(self.rows.items())  # type: ignore[arg-type]

    def refresh_cached_rows(self, written: Mapping[str, Rows]) -> None:
        """Refetch slots after rows in host memory were written, by table, between steps."""
        for rows in self.sharded_rows():
            rows.refresh_cached_rows(written)

    def count_lookups(self) -> list[Popularity]:
        """Count the lookups of training batches from now on, by embedding dimension."""
        groups = self.router.groups.values()
        self._counters = [Popularity(group, self.partition, self._device) for group in groups]
        return self._counters

    def follow(self, partition: Partition) -> None:
        """Route by new hot rows, as many per table, after the rows have been moved."""
        self.partition = partition
        self.placement = replace(self.placement, partition=partition)
        self.router.follow(partition)
        if self._device.type != "cpu":
            self._device_router = None

    def create_context(self) -> HotColdContext:
        return HotColdContext()

    def input_dist(
        self, ctx: HotColdContext, features: KeyedJaggedTensor | RoutedFeatures
    ) -> Awaitable[Awaitable[KJTList]]:
        mark("ids_exchange")
        routed = self.route(features)
        mark("route")
        ctx.batch, awaitables = self._in_line.request(routed), []
        if self.pooled is not None:
            pooled_ctx = self.pooled.create_context()
            awaitables = self.pooled.input_dist(pooled_ctx, routed.pooled).awaitables
            # TorchRec pairs awaitables with contexts.
            ctx.sharding_contexts = pooled_ctx.sharding_contexts
        mark("ids_exchange")
        return KJTListSplitsAwaitable(awaitables, ctx)

    def route(self, features: KeyedJaggedTensor | RoutedFeatures) -> RoutedFeatures:
        """Route features on the device of the rows, unless a loader worker has routed them.

        The first batch that needs it copies the map, 4 bytes per row of all tables, to the device.
        """
        if isinstance(features, RoutedFeatures):
            return route(self.router, features)
        if self._device_router is None:
            self._device_router = self.router.to(self._device)
        routed = route(self._device_router, features)
        if self.training:
            for counter, group in zip(self._counters, routed.groups, strict=False):
                counter.add(group)
        return routed

    def compute(self, ctx: HotColdContext, dist_input: KJTList) -> Read:
        mark("ids_exchange")
        # Pooled vectors first: they are sent while rows are read. Backward runs in reverse order.
        assert ctx.batch is not None
        pooled = None
        if self.pooled is not None:
            pooled = self.pooled.start_lookups(list(dist_input), ctx.sharding_contexts)
        return self._in_line.read(ctx.batch), pooled

    def output_dist(self, ctx: HotColdContext, output: Read) -> LazyAwaitable[Out]:
        assert ctx.batch is not None
        rows, pooled = output
        [routed] = ctx.batch.routed
        return LazyNoWait(self.assemble(rows, routed, pooled))

    def assemble(
        self,
        rows: Sequence[torch.Tensor],
        routed: RoutedFeatures,
        pooled: LazyAwaitable[KeyedTensor] | None,
    ) -> Out:
        """The output, given the rows float (U, D) of each dimension."""
        parts = []
        for of_dim, columns, group in zip(
            rows, self.layout.groups.values(), routed.groups, strict=True
        ):
            with named_range("pool"):
                parts.append(self.layout.of_rows(of_dim, group, len(columns)))
            mark("pool")
        from_torchrec = None
        if pooled is not None:
            from_torchrec = pooled.wait()
            mark("rows_exchange")
        assembled = self.layout.assemble(parts, routed, from_torchrec)
        mark("pool")
        return assembled

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        parts: list[tuple[str, KeyedOptimizer]] = [
            (f"rows.{name}", rows.optimizer)
            for name, rows in self._rows().items()
            if rows.optimizer is not None
        ]
        if self.pooled is not None:
            parts.append(("pooled", self.pooled.fused_optimizer))
        return CombinedOptimizer(parts)


class ShardedHotColdEmbeddingBagCollection(ShardedHotColdCollection[KeyedTensor]):
    """The sharded ``HotColdEmbeddingBagCollection``."""

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.tables

    @property
    def unsharded_module_type(self) -> type[HotColdEmbeddingBagCollection]:
        return HotColdEmbeddingBagCollection


class ShardedHotColdEmbeddingCollection(ShardedHotColdCollection[dict[str, JaggedTensor]]):
    """The sharded ``HotColdEmbeddingCollection``."""

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self.tables

    @property
    def unsharded_module_type(self) -> type[HotColdEmbeddingCollection]:
        return HotColdEmbeddingCollection


class HotColdSharder(BaseEmbeddingSharder[HotColdCollection[Any]]):
    """Shards ``HotColdEmbeddingBagCollection`` under ``DistributedModelParallel``.

    Args:
        spec: The update rule of both halves.
        wire_type: The type in which rows, pooled vectors and their gradients are sent.
        levels: How unpooled rows travel between hosts; where two do not apply, in one.
    """

    _sharded_type: type[ShardedHotColdCollection[Any]] = ShardedHotColdEmbeddingBagCollection

    def __init__(
        self,
        spec: OptimizerSpec,
        wire_type: WireType = WireType.fp32,
        levels: Levels = Levels.one,
    ) -> None:
        super().__init__(fused_params(spec))
        self._spec = spec
        self._wire_type = wire_type
        self._levels = levels

    def shard(
        self,
        module: HotColdCollection[Any],
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedHotColdCollection[Any]:
        """Shard by a plan.

        Raises:
            ValueError: if the device has no exact kernel for the optimizer, or the plan's sharding
                type does not fit a table.
        """
        device = device or torch.device("cpu")
        has_cold = any(group.cold_tables for group in module.router.groups.values())
        check_optimizer(self._spec, device, has_tables=module.pooled is not None)
        hosts = None
        if has_cold and self._levels is Levels.two:
            found = gather_hosts()
            if found.hosts is not None:
                hosts = TwoLevelWire(found.hosts, self._wire_type, "rows")
            if env.rank == 0:
                logger.info("pipeline.levels=two: rows travel %s", found.why)
        settings = ShardSettings(env, device, self._spec, self._wire_type, module_fqn, hosts)
        sharded = self._sharded_type(module, params, settings)
        if hosts is not None:
            weakref.finalize(sharded, hosts.close)
        return sharded

    def shardable_parameters(self, module: HotColdCollection[Any]) -> dict[str, nn.Parameter]:
        named = list(module.rows.named_parameters())
        if module.pooled is not None:
            named += module.pooled.named_parameters()
        return {name.split(".")[-2]: parameter for name, parameter in named}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        kinds = ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE, ShardingType.TABLE_WISE
        return [kind.value for kind in kinds]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return [EmbeddingComputeKernel.DENSE.value]
        kernels = [EmbeddingComputeKernel.FUSED]
        if compute_device_type == "cuda":  # behind slots
            kernels.append(EmbeddingComputeKernel.FUSED_UVM)
        return [kernel.value for kernel in kernels]

    @property
    def module_type(self) -> type[HotColdCollection[Any]]:
        return HotColdEmbeddingBagCollection


class HotColdSequenceSharder(HotColdSharder):
    """The same for ``HotColdEmbeddingCollection``: TorchRec asks for a sharder by module type."""

    _sharded_type = ShardedHotColdEmbeddingCollection

    @property
    def module_type(self) -> type[HotColdCollection[Any]]:
        return HotColdEmbeddingCollection
