"""The sharded hot/cold collection, and the sharder that makes it.

One TorchRec ``ShardedEmbeddingCollection`` per embedding dimension holds both halves: the hot
tables data-parallel, the cold tables row-wise. This module routes in ``input_dist``, so TorchRec's
pipelines overlap routing and the exchange of ids with the previous step, also when the loader hands
over a plain ``KeyedJaggedTensor``; it pools after ``output_dist``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    ShardedEmbeddingCollection,
)
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
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hotrec.embedding.collection import HotColdEmbeddingBagCollection, PooledLayout, route
from hotrec.embedding.cpu_rows import use_cpu_rows
from hotrec.embedding.fused import check_optimizer, fused_params
from hotrec.embedding.hot_exchange import HotExchange, HotReplicas
from hotrec.embedding.pooling import pool_rows
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.routing import RoutedFeatures


@dataclass
class HotColdContext(EmbeddingCollectionContext):
    """What ``input_dist`` leaves for the later stages of the same batch."""

    routed: RoutedFeatures | None = None
    num_shardings: list[int] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        if self.routed is not None:
            self.routed.record_stream(stream)


class ShardedRows(ShardedEmbeddingCollection):
    """The rows of one embedding dimension, hot and cold, exchanged unpooled.

    Args:
        module: the unsharded collection; hot tables first.
        sharding: TorchRec's sharding of each of its tables.
        env: ranks.
        device: of the shards.
        spec: update rule of the cold rows.
        exchange: of the hot gradients.

    Raises:
        ValueError: if a cold table is not sharded row-wise or a hot one is not data-parallel.
    """

    def __init__(
        self,
        module: EmbeddingCollection,
        sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device,
        spec: OptimizerSpec,
        exchange: HotExchange,
        hot_tables: list[str],
        module_fqn: str | None,
    ) -> None:
        for config in module.embedding_configs():
            wanted = (
                ShardingType.DATA_PARALLEL if config.name in hot_tables else ShardingType.ROW_WISE
            )
            found = sharding[config.name].sharding_type
            if found != wanted.value:
                raise ValueError(
                    f"plan table {config.name}: expected sharding type {wanted.value!r}, got "
                    f"{found!r}. Constrain the planner with hotrec.planner.hot_cold_constraints."
                )
        super().__init__(module, sharding, env, fused_params(spec), device, module_fqn=module_fqn)
        self.hot: HotReplicas | None = None
        self._dim = module.embedding_dim()
        keys = [config.name for config in module.embedding_configs()]
        order = [name for names in self._embedding_names_per_sharding for name in names]
        if order != keys:
            raise RuntimeError(
                f"torchrec grouped tables: expected the order {keys}, got {order}. Use the pinned "
                "torchrec (see `hotrec doctor`)."
            )
        for lookup in self._lookups:
            if isinstance(lookup, DistributedDataParallel):
                self._hook_up(lookup, env, exchange, hot_tables)
            elif device.type == "cpu":
                use_cpu_rows(lookup, spec)

    def _hook_up(
        self,
        lookup: DistributedDataParallel,
        env: ShardingEnv,
        exchange: HotExchange,
        hot_tables: list[str],
    ) -> None:
        kernels = list(lookup.module._emb_modules)
        if len(kernels) != 1:
            raise RuntimeError(
                f"torchrec data-parallel lookup: expected 1 group of tables, got {len(kernels)}. "
                "Use the pinned torchrec (see `hotrec doctor`)."
            )
        num_rows_T = [
            config.num_embeddings for config in self._embedding_configs if config.name in hot_tables
        ]
        self.hot = HotReplicas(
            kernels[0].emb_module.weights,
            num_rows_T,
            self._dim,
            env.process_group,
            exchange,
        )
        kernels[0].forward = self.hot
        # FBGEMM's buffers are constants; DDP would broadcast them in every forward pass.
        lookup.broadcast_buffers = False
        lookup.register_comm_hook(None, self.hot.reduce_gradient)

    def drop_cached_rows(self) -> None:
        """Forget what a UVM cache holds, after the rows behind it were written directly."""
        for lookup in self._lookups:
            if not isinstance(lookup, DistributedDataParallel):
                lookup.purge()

    def start_lookups(
        self, ctx: HotColdContext, features: list[KeyedJaggedTensor], contexts: list[Any]
    ) -> list[Awaitable[torch.Tensor]]:
        """Look up this rank's rows and start sending them to the ranks that asked.

        Args:
            ctx: of the batch.
            features: the ids that arrived, one per sharding.
            contexts: TorchRec's sharding contexts, one per sharding.

        Returns:
            One awaitable per sharding, of float (U_sharding, D), hot first.
        """
        awaitables = []
        stages = list(zip(self._lookups, self._output_dists, features, contexts, strict=True))
        # Cold rows first: they travel while the hot ones are read, and backward, which goes the
        # other way round, sends the hot gradients before it updates the cold rows.
        for lookup, output_dist, ids, sharding_ctx in reversed(stages):
            sharding_ctx.lengths_after_input_dist = ids.lengths().view(-1, ids.stride())
            is_hot = isinstance(lookup, DistributedDataParallel)
            rows = lookup(ids) if is_hot else self._look_up_fused(lookup, ids)
            awaitables.append(output_dist(rows.view(-1, self._dim), sharding_ctx))
        return awaitables[::-1]

    def _look_up_fused(self, lookup: nn.Module, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Look up, without counting a forward pass that has no backward as an update.

        FBGEMM advances Adam's update count in forward, also in evaluation.
        """
        rows: torch.Tensor = lookup(ids)
        if not torch.is_grad_enabled():
            kernels: Any = lookup._emb_modules
            for kernel in kernels:
                for counter in ("iter", "iter_cpu"):
                    count = getattr(kernel.emb_module, counter, None)
                    if count is not None and int(count) > 0:
                        count.sub_(1)
        return rows


class _PooledAwaitable(LazyAwaitable[KeyedTensor]):
    def __init__(
        self,
        rows: list[list[Awaitable[torch.Tensor]]],
        routed: RoutedFeatures,
        layout: PooledLayout,
    ) -> None:
        super().__init__()
        self._rows, self._routed, self._layout = rows, routed, layout

    def _wait_impl(self) -> KeyedTensor:
        pooled = []
        for awaitables, group, columns in zip(
            self._rows, self._routed.groups, self._layout.groups.values(), strict=True
        ):
            parts = [awaitable.wait() for awaitable in awaitables]
            rows_UD = parts[0] if len(parts) == 1 else torch.cat(parts)
            pooled.append(pool_rows(rows_UD, group, len(columns)))
        return self._layout.assemble(pooled)


class ShardedHotColdEmbeddingBagCollection(
    ShardedEmbeddingModule[KJTList, list[Any], KeyedTensor, HotColdContext],
    FusedOptimizerModule,
):
    """See the module docstring; made by ``HotColdSharder``."""

    def __init__(
        self,
        module: HotColdEmbeddingBagCollection,
        sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device,
        spec: OptimizerSpec,
        exchange: HotExchange,
        module_fqn: str | None,
    ) -> None:
        super().__init__()
        self._tables = module.embedding_bag_configs()
        self._is_weighted = module.is_weighted()
        self.partition = module.partition
        self.layout = module.layout
        # Pickled into loader workers; the maps used here live on the device.
        self.router = module.router
        self._device_router = module.router if device.type == "cpu" else None
        self._device = device
        self.rows = nn.ModuleDict()
        for (name, collection), group in zip(
            module.rows.items(), module.router.groups.values(), strict=True
        ):
            hot_tables = group.keys[: len(group.hot_tables)]
            self.rows[name] = ShardedRows(
                collection,
                {key: sharding[key] for key in group.keys},
                env,
                device,
                spec,
                exchange,
                hot_tables,
                module_fqn,
            )

    def embedding_bag_configs(self) -> list[Any]:
        return self._tables

    def hot_replicas(self) -> Iterator[tuple[str, HotReplicas]]:
        """The replicas of each dimension, with the prefix of their parameters' names."""
        for name, rows in self._rows().items():
            if rows.hot is not None:
                yield f"rows.{name}.embeddings.", rows.hot

    def _rows(self) -> dict[str, ShardedRows]:
        return dict(self.rows.items())  # type: ignore[arg-type]

    def drop_cached_rows(self) -> None:
        """Forget what UVM caches hold, after the rows behind them were written directly."""
        for rows in self._rows().values():
            rows.drop_cached_rows()

    def create_context(self) -> HotColdContext:
        return HotColdContext()

    def input_dist(
        self, ctx: HotColdContext, features: KeyedJaggedTensor | RoutedFeatures
    ) -> Awaitable[Awaitable[KJTList]]:
        ctx.routed = route(self._router_here(), features)
        awaitables: list[Any] = []
        for rows, group in zip(self._rows().values(), ctx.routed.groups, strict=True):
            splits = rows.input_dist(ctx, group.rows)
            ctx.num_shardings.append(len(splits.awaitables))
            awaitables += splits.awaitables
        return KJTListSplitsAwaitable(awaitables, ctx)

    def _router_here(self) -> Any:
        if self._device_router is None:
            self._device_router = type(self.router)(
                self.layout.groups, self.partition, self._is_weighted
            ).to(self._device)
        return self._device_router

    def compute(self, ctx: HotColdContext, dist_input: KJTList) -> list[Any]:
        features, contexts = list(dist_input), list(ctx.sharding_contexts)
        started = []
        for rows, num in zip(self._rows().values(), ctx.num_shardings, strict=True):
            started.append(rows.start_lookups(ctx, features[:num], contexts[:num]))
            features, contexts = features[num:], contexts[num:]
        return started

    def output_dist(self, ctx: HotColdContext, output: list[Any]) -> LazyAwaitable[KeyedTensor]:
        assert ctx.routed is not None
        return _PooledAwaitable(output, ctx.routed, self.layout)

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        return CombinedOptimizer(
            [(f"rows.{name}", rows.fused_optimizer) for name, rows in self._rows().items()]
        )

    @property
    def unsharded_module_type(self) -> type[HotColdEmbeddingBagCollection]:
        return HotColdEmbeddingBagCollection


class HotColdSharder(BaseEmbeddingSharder[HotColdEmbeddingBagCollection]):
    """Shards ``HotColdEmbeddingBagCollection`` under ``DistributedModelParallel``.

    Args:
        spec: update rule of both halves.
        exchange: how gradients of hot rows travel.
    """

    def __init__(
        self, spec: OptimizerSpec, exchange: HotExchange = HotExchange.TOUCHED_ROWS
    ) -> None:
        super().__init__(fused_params(spec))
        self._spec = spec
        self._exchange = exchange

    def shard(
        self,
        module: HotColdEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedHotColdEmbeddingBagCollection:
        """Shard by a plan.

        Raises:
            ValueError: if the device has no exact kernel for the optimizer, or the plan shards a
                table otherwise than its half demands.
        """
        device = device or torch.device("cpu")
        check_optimizer(self._spec, device, has_cold=_has_cold(module))
        return ShardedHotColdEmbeddingBagCollection(
            module, params, env, device, self._spec, self._exchange, module_fqn
        )

    def shardable_parameters(
        self, module: HotColdEmbeddingBagCollection
    ) -> dict[str, nn.Parameter]:
        return {
            name.split(".")[-2]: parameter for name, parameter in module.rows.named_parameters()
        }

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.DATA_PARALLEL.value, ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return [EmbeddingComputeKernel.DENSE.value]
        kernels = [EmbeddingComputeKernel.FUSED]
        if compute_device_type == "cuda":
            kernels += [
                EmbeddingComputeKernel.FUSED_UVM,
                EmbeddingComputeKernel.FUSED_UVM_CACHING,
            ]
        return [kernel.value for kernel in kernels]

    @property
    def module_type(self) -> type[HotColdEmbeddingBagCollection]:
        return HotColdEmbeddingBagCollection


def _has_cold(module: HotColdEmbeddingBagCollection) -> bool:
    return any(group.cold_tables for group in module.router.groups.values())
