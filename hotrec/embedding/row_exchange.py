"""The rows of one embedding dimension, sharded, and the exchange of ids that looks them up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.cached_rows import is_cached, refresh_slots, use_cached_rows
from hotrec.embedding.cpu_rows import use_cpu_rows
from hotrec.embedding.flat import cut_bags
from hotrec.embedding.fused import fused_params, undo_update_count
from hotrec.embedding.hot_rows import HotReplicas, HotRowCounts
from hotrec.embedding.torchrec import (
    IdsRoute,
    RowCollection,
    keep_buckets,
    kernels,
    lookups,
    output_dists,
    tables_by_lookup,
)
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.codecs import wire_codecs
from hotrec.runtime.comm_thread import HostInts
from hotrec.runtime.stages import backward_point, mark, mark_backward
from hotrec.types import HotExchange, Placement, Rows, WireType


class IdsExchange(nn.Module):
    """Sends row ids to the owners of the rows, in place of TorchRec's input dist."""

    def __init__(self, route: IdsRoute) -> None:
        super().__init__()
        self.group, self.num_keys_W = route.group, route.num_keys_W
        self.world_size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self._block_sizes_T = route.block_sizes_T
        num_keys = self.num_keys_W[self.rank]
        # Ids arrive ordered by rank and key; lookups expect them by key and rank.
        by_rank = torch.arange(self.world_size * num_keys, dtype=torch.int32, device=route.device)
        self.by_key = by_rank.view(self.world_size, num_keys).t().flatten()

    def forward(self, features: KeyedJaggedTensor) -> IdsRequest:
        """Start the exchange of the distinct rows of each table, jagged (T, 1)."""
        with torch.no_grad():
            if self._block_sizes_T is None:
                return IdsRequest(self, features, None)
            is_cuda = features.values().is_cuda
            bucketized, order = bucketize_kjt_before_all2all(
                cut_bags(features) if is_cuda else features,
                num_buckets=self.world_size,
                block_sizes=self._block_sizes_T,
                output_permute=True,
            )
            return IdsRequest(self, bucketized, order)


class Permuted(torch.autograd.Function):
    """Rows (U, D) by a permutation, whose gradient is a copy too.

    Backward of ``index_select``, which TorchRec calls here, adds rows to zeros: 6 times a copy on
    CPU, and atomic additions on CUDA.
    """

    @staticmethod
    def forward(ctx: Any, rows_UD: torch.Tensor, order_U: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order_U)
        return rows_UD.index_select(0, order_U)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (order_U,) = ctx.saved_tensors
        inverse_U = torch.empty_like(order_U)
        inverse_U[order_U.long()] = torch.arange(
            order_U.numel(), dtype=order_U.dtype, device=order_U.device
        )
        return grads[0].index_select(0, inverse_U), None


class IdsRequest(Awaitable[Awaitable[KeyedJaggedTensor]]):
    """Waits for the lengths, then starts the exchange of ids.

    Keys of ``features`` are in the order of their ranks; ``order`` is the position of each
    requested row among the values, None if unchanged.
    """

    def __init__(
        self, exchange: IdsExchange, features: KeyedJaggedTensor, order: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.exchange, self._features, self._order = exchange, features, order
        self._context: SequenceShardingContext | None = None
        lengths = features.lengths().view(len(features.keys()), -1).sum(1)
        num_here = exchange.num_keys_W[exchange.rank]
        self._sent, self.arriving = lengths, lengths.new_empty(exchange.world_size * num_here)
        self._work: Any = dist.all_to_all_single(
            self.arriving,
            lengths,
            [num_here] * exchange.world_size,
            exchange.num_keys_W,
            group=exchange.group,
            async_op=True,
        )
        self._counts: HostInts | None = None
        if lengths.is_cuda:
            self._work.wait()  # blocks the stream, not the host
            self._counts = HostInts(torch.cat([lengths, self.arriving]))

    def set_context(self, context: SequenceShardingContext) -> None:
        """Set TorchRec's context, which receives the order and splits that return the rows."""
        self._context = context
        context.unbucketize_permute_tensor = self._order

    def _wait_impl(self) -> Awaitable[KeyedJaggedTensor]:
        exchange, values = self.exchange, self._features.values()
        if self._counts is None:
            self._work.wait()
            self._counts = HostInts(torch.cat([self._sent, self.arriving]))
        counts = self._counts.wait()
        num_sent = _sums(counts[: self._sent.numel()], exchange.num_keys_W)
        arriving, num_here = counts[self._sent.numel() :], exchange.num_keys_W[exchange.rank]
        num_received = _sums(arriving, [num_here] * exchange.world_size)
        if self._context is not None:
            self._context.input_splits, self._context.output_splits = num_sent, num_received
        received = values.new_empty(sum(num_received))
        work: Any = dist.all_to_all_single(
            received, values, num_received, num_sent, group=exchange.group, async_op=True
        )
        per_key = [sum(arriving[key::num_here]) for key in range(num_here)]
        return _IdsArriving(self, work, received, per_key)

    def keys_here(self) -> list[str]:
        """The tables of which this rank holds rows."""
        sizes, rank = self.exchange.num_keys_W, self.exchange.rank
        return self._features.keys()[sum(sizes[:rank]) : sum(sizes[: rank + 1])]


def _sums(values: list[int], sizes: list[int]) -> list[int]:
    rest = iter(values)
    return [sum(islice(rest, size)) for size in sizes]


class _IdsArriving(Awaitable[KeyedJaggedTensor]):
    def __init__(
        self, request: IdsRequest, work: Any, values: torch.Tensor, length_per_key: list[int]
    ) -> None:
        super().__init__()
        self._request, self._work = request, work
        self._values, self._length_per_key = values, length_per_key

    def _wait_impl(self) -> KeyedJaggedTensor:
        """Wait for the ids that all ranks request, jagged (local keys, W)."""
        self._work.wait()
        exchange, keys = self._request.exchange, self._request.keys_here()
        lengths, values = self._request.arriving, self._values
        if keys and exchange.world_size > 1:
            by_rank_and_key, values, _ = torch.ops.fbgemm.permute_2D_sparse_data(
                exchange.by_key, lengths.view(-1, 1), values, None, values.numel()
            )
            lengths = by_rank_and_key.view(-1)
        return KeyedJaggedTensor(
            keys=keys,
            values=values,
            lengths=lengths,
            stride=exchange.world_size,
            length_per_key=self._length_per_key,
        )


@dataclass(frozen=True)
class ShardSettings:
    """How a collection is sharded; rows, pooled vectors and gradients are sent in ``wire_type``."""

    env: ShardingEnv
    device: torch.device
    spec: OptimizerSpec
    exchange: HotExchange
    wire_type: WireType
    module_fqn: str | None


def _hook_up(
    lookup: DistributedDataParallel,
    num_rows_T: list[int],
    dim: int,
    settings: ShardSettings,
) -> HotReplicas:
    """Put replicas into the place of the lookup's kernel and of DDP's all-reduce."""
    replaced = list(kernels(lookup))
    if len(replaced) != 1:
        raise RuntimeError(
            f"torchrec data-parallel lookup: expected 1 group of tables, got {len(replaced)}. "
            "Use the pinned torchrec (see `hotrec doctor`)."
        )
    weights, group = replaced[0].fbgemm.weights, settings.env.process_group
    replicas = HotReplicas(weights, num_rows_T, dim, group, settings.exchange, settings.wire_type)
    replaced[0].replace(replicas)
    # FBGEMM's buffers are constants; DDP would broadcast them in every forward pass.
    lookup.broadcast_buffers = False
    # DDP's only bucket here is as large as all hot rows, and would be made twice.
    keep_buckets(lookup)
    lookup.register_comm_hook(None, replicas.reduce_gradient)
    return replicas


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
        codecs = wire_codecs(settings.wire_type, [module.embedding_dim()])
        name = settings.module_fqn
        super().__init__(module, sharding, env, fused_params(spec), device, codecs, module_fqn=name)
        self.hot: HotReplicas | None = None
        self._num_hot = len(hot_tables)
        self.dim, self.spec = module.embedding_dim(), spec
        self._keys = [config.name for config in module.embedding_configs()]
        self._arriving = tables_by_lookup(self)
        arriving = [name for names in self._arriving for name in names]
        if sorted(arriving) != sorted(self._keys):
            raise RuntimeError(
                f"torchrec grouped tables: expected each of {self._keys} once, got {arriving}. Use "
                "the pinned torchrec (see `hotrec doctor`)."
            )
        self._is_in_order = arriving == self._keys
        self._is_cuda = device.type == "cuda"
        cold_tables = [name for name in self._keys if name not in hot_tables]
        has_slots = is_cached(placement, cold_tables)
        for lookup in lookups(self):
            if isinstance(lookup, DistributedDataParallel):
                tables = [c for c in module.embedding_configs() if c.name in hot_tables]
                num_rows_T = [config.num_embeddings for config in tables]
                self.hot = _hook_up(lookup, num_rows_T, self.dim, settings)
            elif has_slots:
                is_distinct = env.world_size == 1
                use_cached_rows(lookup, spec, placement, device, is_distinct=is_distinct)
            elif not self._is_cuda:
                use_cpu_rows(lookup, spec)

    def make_ids_exchange(self, route: IdsRoute) -> IdsExchange:
        return IdsExchange(route)

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        """Start the exchange of ids; one awaitable and one sharding context per sharding."""
        requests = super().input_dist(ctx, features)
        num = len(requests.awaitables)
        contexts = ctx.sharding_contexts[len(ctx.sharding_contexts) - num :]
        for request, sharding_ctx in zip(requests.awaitables, contexts, strict=True):
            if isinstance(request, IdsRequest):
                request.set_context(sharding_ctx)
        return requests

    def gather_hot_counts(self, rows: KeyedJaggedTensor) -> HotRowCounts | None:
        """``HotReplicas.gather_counts`` for the rows that the batch reads, hot tables first."""
        if self.hot is None:
            return None
        return self.hot.gather_counts(sum(rows.length_per_key()[: self._num_hot]))

    def drop_cached_rows(self) -> None:
        """Invalidate the UVM caches, after rows in host memory were written directly."""
        for lookup in lookups(self):
            if not isinstance(lookup, DistributedDataParallel):
                lookup.purge()

    def refresh_cached_rows(self, written: Mapping[str, Rows]) -> None:
        """Let caches hold what was written to rows in host memory, by table, between steps."""
        for lookup in lookups(self):
            if isinstance(lookup, DistributedDataParallel):
                continue
            if not refresh_slots(lookup, written) and self._is_cuda:
                lookup.purge()

    def start_lookups(
        self,
        features: list[KeyedJaggedTensor],
        contexts: list[Any],
        hot_counts: HotRowCounts | None,
    ) -> list[Awaitable[torch.Tensor]]:
        """Look up this rank's rows and start to send them to the ranks that requested them.

        Takes the received ids and TorchRec's context of each sharding, and ``gather_hot_counts`` of
        the same batch. Returns an awaitable per sharding, of float (U_sharding, D), hot first.
        """
        if self.hot is not None:
            self.hot.next_counts = hot_counts
        awaitables = []
        stages = list(zip(lookups(self), output_dists(self), features, contexts, strict=True))
        # Cold rows first: they are sent while hot rows are read. Backward runs in reverse order,
        # so it sends hot gradients before it updates cold rows.
        for lookup, output_dist, ids, sharding_ctx in reversed(stages):
            sharding_ctx.lengths_after_input_dist = ids.lengths().view(-1, ids.stride())
            is_hot = isinstance(lookup, DistributedDataParallel)
            rows = lookup(ids) if is_hot else self._look_up_fused(lookup, ids)
            mark("row_lookup")
            order = sharding_ctx.unbucketize_permute_tensor
            sharding_ctx.unbucketize_permute_tensor = None
            awaitable = output_dist(rows.view(-1, self.dim), sharding_ctx)
            if order is not None:
                awaitable.callbacks.append(partial(self._put_in_order, order))
            awaitables.append(awaitable)
            mark("rows_exchange")
        return awaitables[::-1]

    def _look_up_fused(self, lookup: nn.Module, ids: KeyedJaggedTensor) -> torch.Tensor:
        rows: torch.Tensor
        if self._is_cuda:
            point = backward_point("row_update", ids.values())
            rows = mark_backward(lookup(cut_bags(ids)), "grads_exchange", point)
        else:
            rows = lookup(ids)  # hotrec's own rows mark their update themselves
        if not torch.is_grad_enabled():
            undo_update_count(lookup)
        return rows

    def _put_in_order(self, order_U: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ordered: torch.Tensor = Permuted.apply(rows.view(-1, self.dim), order_U)
        return ordered

    def join(
        self, awaitables: list[Awaitable[torch.Tensor]], requested: KeyedJaggedTensor
    ) -> torch.Tensor:
        """The rows of ``start_lookups``, float (U, D), in the order of the requested ids."""
        parts = [awaitable.wait() for awaitable in awaitables]
        if self._is_in_order:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        lengths = dict(zip(requested.keys(), requested.length_per_key(), strict=True))
        found: dict[str, torch.Tensor] = {}
        for names, part in zip(self._arriving, parts, strict=True):
            found |= zip(names, part.split([lengths[name] for name in names]), strict=True)
        return torch.cat([found[key] for key in self._keys])
