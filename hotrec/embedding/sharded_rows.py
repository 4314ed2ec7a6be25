"""The rows of one embedding dimension, sharded: hot tables data-parallel, cold tables on owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.codecs import wire_codecs
from hotrec.embedding.cpu_rows import use_cpu_rows
from hotrec.embedding.flat import cut_bags
from hotrec.embedding.fused import fused_params, undo_update_count
from hotrec.embedding.hot_exchange import HotCounts, HotExchange, HotReplicas
from hotrec.embedding.ids_exchange import IdsExchange, IdsRequest
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.stages import backward_point, mark, mark_backward
from hotrec.wire import WireType

HOT_SHARDINGS = (ShardingType.DATA_PARALLEL,)
COLD_SHARDINGS = (ShardingType.ROW_WISE, ShardingType.TABLE_WISE)


def check_sharding(table: str, sharding: ParameterSharding, wanted: Sequence[ShardingType]) -> None:
    """Refuse a plan that shards a table otherwise than its half can take.

    Raises:
        ValueError: if the sharding type is not among the wanted ones.
    """
    types = [kind.value for kind in wanted]
    if sharding.sharding_type not in types:
        raise ValueError(
            f"plan table {table}: expected sharding type {' or '.join(map(repr, types))}, got "
            f"{sharding.sharding_type!r}. Constrain the planner with "
            "hotrec.planner.placement_constraints."
        )


class ShardedRows(ShardedEmbeddingCollection):
    """The rows of one embedding dimension, hot and cold, exchanged unpooled.

    Args:
        module: the unsharded collection; hot tables first.
        sharding: TorchRec's sharding of each of its tables.
        env: ranks.
        device: of the shards.
        spec: update rule of the cold rows.
        exchange: of the hot gradients.
        wire_type: in which cold rows and all gradients travel.

    Raises:
        ValueError: if a cold table is not sharded row-wise or table-wise, or a hot one is not
            data-parallel.
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
        wire_type: WireType = WireType.FP32,
    ) -> None:
        for config in module.embedding_configs():
            is_hot = config.name in hot_tables
            wanted = HOT_SHARDINGS if is_hot else COLD_SHARDINGS
            check_sharding(config.name, sharding[config.name], wanted)
        codecs = wire_codecs(wire_type, [module.embedding_dim()])
        super().__init__(
            module, sharding, env, fused_params(spec), device, codecs, module_fqn=module_fqn
        )
        self.hot: HotReplicas | None = None
        self._num_hot = len(hot_tables)
        self.dim = module.embedding_dim()
        self._keys = [config.name for config in module.embedding_configs()]
        # TorchRec keeps tables by sharding, by owner if table-wise, and by compute kernel.
        self._arriving = [list(names) for names in self._embedding_names_per_sharding]
        arriving = [name for names in self._arriving for name in names]
        if sorted(arriving) != sorted(self._keys):
            raise RuntimeError(
                f"torchrec grouped tables: expected each of {self._keys} once, got {arriving}. Use "
                "the pinned torchrec (see `hotrec doctor`)."
            )
        self._is_in_order = arriving == self._keys
        self._is_cuda = device.type == "cuda"
        for lookup in self._lookups:
            if isinstance(lookup, DistributedDataParallel):
                self._hook_up(lookup, env, exchange, hot_tables, wire_type)
            elif not self._is_cuda:
                use_cpu_rows(lookup, spec)

    def _hook_up(
        self,
        lookup: DistributedDataParallel,
        env: ShardingEnv,
        exchange: HotExchange,
        hot_tables: list[str],
        wire_type: WireType,
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
            self.dim,
            env.process_group,
            exchange,
            wire_type,
        )
        kernels[0].forward = self.hot
        # FBGEMM's buffers are constants; DDP would broadcast them in every forward pass.
        lookup.broadcast_buffers = False
        lookup.register_comm_hook(None, self.hot.reduce_gradient)

    def _create_input_dist(self, *args: Any, **kwargs: Any) -> None:
        super()._create_input_dist(*args, **kwargs)
        for at, input_dist in enumerate(self._input_dists):
            if isinstance(input_dist, RwSparseFeaturesDist | TwSparseFeaturesDist):
                self._input_dists[at] = IdsExchange(input_dist, self._device)

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        """Start the exchange of ids; one awaitable and one sharding context per sharding."""
        requests = super().input_dist(ctx, features)
        num = len(requests.awaitables)
        contexts = ctx.sharding_contexts[len(ctx.sharding_contexts) - num :]
        for request, sharding_ctx in zip(requests.awaitables, contexts, strict=True):
            if isinstance(request, IdsRequest):
                request.tell(sharding_ctx)
        return requests

    def ask_hot_counts(self, asked: KeyedJaggedTensor) -> HotCounts | None:
        """Ask how many hot rows each rank touches, while ids are exchanged.

        Args:
            asked: the rows that the batch reads, hot tables first.
        """
        if self.hot is None:
            return None
        return self.hot.ask_counts(sum(asked.length_per_key()[: self._num_hot]))

    def drop_cached_rows(self) -> None:
        """Forget what a UVM cache holds, after the rows behind it were written directly."""
        for lookup in self._lookups:
            if not isinstance(lookup, DistributedDataParallel):
                lookup.purge()

    def start_lookups(
        self,
        features: list[KeyedJaggedTensor],
        contexts: list[Any],
        hot_counts: HotCounts | None,
    ) -> list[Awaitable[torch.Tensor]]:
        """Look up this rank's rows and start sending them to the ranks that asked.

        Args:
            features: the ids that arrived, one per sharding.
            contexts: TorchRec's sharding contexts, one per sharding.
            hot_counts: from ``ask_hot_counts``, of the same batch.

        Returns:
            One awaitable per sharding, of float (U_sharding, D), hot first.
        """
        if self.hot is not None:
            self.hot.expect(hot_counts)
        awaitables = []
        stages = list(zip(self._lookups, self._output_dists, features, contexts, strict=True))
        # Cold rows first: they travel while the hot ones are read, and backward, which goes the
        # other way round, sends the hot gradients before it updates the cold rows.
        for lookup, output_dist, ids, sharding_ctx in reversed(stages):
            sharding_ctx.lengths_after_input_dist = ids.lengths().view(-1, ids.stride())
            is_hot = isinstance(lookup, DistributedDataParallel)
            rows = lookup(ids) if is_hot else self._look_up_fused(lookup, ids)
            mark("row_lookup")
            awaitables.append(output_dist(rows.view(-1, self.dim), sharding_ctx))
            mark("rows_exchange")
        return awaitables[::-1]

    def _look_up_fused(self, lookup: nn.Module, ids: KeyedJaggedTensor) -> torch.Tensor:
        rows: torch.Tensor
        if self._is_cuda:
            point = backward_point("row_update", ids.values())
            rows = mark_backward(lookup(cut_bags(ids)), "grads_exchange", point)
        else:
            rows = lookup(ids)  # hotrec's own rows, which mark their update themselves
        if not torch.is_grad_enabled():
            undo_update_count(lookup)
        return rows

    def join(
        self, awaitables: list[Awaitable[torch.Tensor]], asked: KeyedJaggedTensor
    ) -> torch.Tensor:
        """Wait for the rows and put them into the order of the ids that asked for them.

        Args:
            awaitables: from ``start_lookups``.
            asked: the ids, keys in the order of this collection's tables.

        Returns:
            Float (U, D), a row per id.
        """
        parts = [awaitable.wait() for awaitable in awaitables]
        if self._is_in_order:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        lengths = dict(zip(asked.keys(), asked.length_per_key(), strict=True))
        found: dict[str, torch.Tensor] = {}
        for names, part in zip(self._arriving, parts, strict=True):
            found |= zip(names, part.split([lengths[name] for name in names]), strict=True)
        return torch.cat([found[key] for key in self._keys])
