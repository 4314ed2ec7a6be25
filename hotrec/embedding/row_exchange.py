"""The rows of one embedding dimension, sharded, and their exchange in line.

Look-ahead (``prefetch/exchange.py``) shares the owners of rows, the requests, and reads and updates
of owned rows (``owned_rows.py``). The caller differs. In line it is the module's own forward and
autograd's backward, so any training loop works: TorchRec's pipelines, which send the ids of the
next batch ahead, a loop that accumulates gradients, or a user's own loop. Messages use the model's
group and TorchRec's codecs, and backward sends gradients when it reaches the rows. Look-ahead has
its own thread and group, one message for all dimensions, and an order of messages that keeps rows
exact although they are fetched before they are final. At depth 0 it hides less: a request is sent
only when its step starts, one step later than in TorchRec's sparse_dist, and gradients are sent
only when backward has reached the rows of all dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import (
    Awaitable,
    CommOp,
    NoWait,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.cached_rows import is_cached, refresh_slots, use_cached_rows
from hotrec.embedding.cpu_rows import use_cpu_rows
from hotrec.embedding.fused import fused_params
from hotrec.embedding.hot_rows import HotReplicas
from hotrec.embedding.messages import row_counts
from hotrec.embedding.owned_rows import Joined, OwnedRows, RequestedRows, RowOwners
from hotrec.embedding.pooling import CopyRows
from hotrec.embedding.relay import Relay
from hotrec.embedding.torchrec import (
    RowCollection,
    keep_buckets,
    kernels,
    lookups,
    send_rows,
)
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.codecs import wire_codecs
from hotrec.runtime.comm_thread import HostInts
from hotrec.runtime.hosts import TwoLevelWire
from hotrec.runtime.ranks import all_gather_object
from hotrec.runtime.stages import mark
from hotrec.types import Placement, RowOrder, Rows, WireType


class IdsRequest(Awaitable[Awaitable["IdsRequest"]]):
    """The cold rows of a batch on both sides of the exchange.

    Waiting for it waits for the numbers of rows, starts the exchange of their positions, and
    returns an awaitable that completes the request. It replaces a batch's ids and their context in
    TorchRec's pipelines.
    """

    def __init__(self, requested: RequestedRows, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.order_U, self.positions_R = requested.order_U, requested.positions_U
        self.num_requested_W = self.num_served_W = [self.positions_R.numel()]
        self._group, self._num_to_W = group, requested.num_to_W
        if self._num_to_W is None:  # one rank
            return
        self._num_from_W = torch.empty_like(self._num_to_W)
        self._work: Any = dist.all_to_all_single(
            self._num_from_W, self._num_to_W, group=group, async_op=True
        )
        self._counts: HostInts | None = None
        if self._num_to_W.is_cuda:
            self._work.wait()  # blocks the stream, not the host
            self._counts = HostInts(torch.cat([self._num_to_W, self._num_from_W]))

    def _wait_impl(self) -> Awaitable[IdsRequest]:
        if self._num_to_W is None:
            return NoWait(self)
        if self._counts is None:
            self._work.wait()
            self._counts = HostInts(torch.cat([self._num_to_W, self._num_from_W]))
        counts, world_size = self._counts.wait(), self._num_to_W.numel()
        self.num_requested_W, self.num_served_W = counts[:world_size], counts[world_size:]
        requested_U = self.positions_R
        self.positions_R = requested_U.new_empty(sum(self.num_served_W))
        self._work = dist.all_to_all_single(
            self.positions_R,
            requested_U,
            self.num_served_W,
            self.num_requested_W,
            group=self._group,
            async_op=True,
        )
        return _PositionsArriving(self, self._work, requested_U)

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (self.order_U, self.positions_R):
            if tensor is not None:
                tensor.record_stream(stream)


class RelayedRequest(Awaitable[Awaitable["RelayedRequest"]]):
    """The same through a relay, see ``hotrec.embedding.relay``.

    Waiting for it completes the exchange inside the host, and starts the one on the rail.
    """

    def __init__(self, requested: RequestedRows, owners: RowOwners, hosts: TwoLevelWire) -> None:
        super().__init__()
        assert requested.num_to_W is not None
        self.order_U = requested.order_U
        self._owners, self._hosts = owners, hosts
        self._positions_U = requested.positions_U
        self._num_to_W, self._num_from_W = requested.num_to_W, torch.empty_like(requested.num_to_W)
        self._work: Any = dist.all_to_all_single(
            self._num_from_W, self._num_to_W, group=hosts.inside.group, async_op=True
        )

    def _wait_impl(self) -> Awaitable[RelayedRequest]:
        self._work.wait()
        counts = HostInts(torch.stack([self._num_to_W, self._num_from_W])).wait()
        inside, num_hosts = self._hosts.inside, self._hosts.rail.world_size
        by_host = row_counts(counts, num_hosts)
        # To and from each local rank.
        self.num_asked_G = [sum(row) for row in by_host[: inside.world_size]]
        self.num_relayed_G = [sum(row) for row in by_host[inside.world_size :]]
        positions_K = inside.all_to_all(self._positions_U, self.num_asked_G, self.num_relayed_G)
        self.relay = Relay(positions_K.long(), by_host[inside.world_size :], self._owners)
        union = RequestedRows(None, self.relay.positions_U, self.relay.num_to_H)
        return _AnsweredByRelay(self, IdsRequest(union, self._hosts.rail.group).wait())

    def take(self, on_rail: IdsRequest) -> RelayedRequest:
        """Complete it with the relay's own request."""
        self.positions_R = on_rail.positions_R
        self.num_requested_W, self.num_served_W = on_rail.num_requested_W, on_rail.num_served_W
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (self.order_U, self.positions_R, *self.relay.tensors):
            if tensor is not None:
                tensor.record_stream(stream)


class _AnsweredByRelay(Awaitable[RelayedRequest]):
    def __init__(self, request: RelayedRequest, on_rail: Awaitable[IdsRequest]) -> None:
        super().__init__()
        self._request, self._on_rail = request, on_rail

    def _wait_impl(self) -> RelayedRequest:
        return self._request.take(self._on_rail.wait())


class _PositionsArriving(Awaitable[IdsRequest]):
    def __init__(self, request: IdsRequest, work: Any, sent_U: torch.Tensor) -> None:
        super().__init__()
        self._request, self._work, self._sent_U = request, work, sent_U

    def _wait_impl(self) -> IdsRequest:
        self._work.wait()
        self._request.positions_R = self._request.positions_R.long()
        return self._request


AnyRequest = IdsRequest | RelayedRequest

# Lookups in progress: hot rows, and an awaitable of the cold ones, in the order of their owners.
StartedRows = tuple[torch.Tensor | None, Awaitable[torch.Tensor] | None]


@dataclass(frozen=True)
class ShardSettings:
    """How a collection is sharded; rows, pooled vectors and gradients are sent in ``wire_type``."""

    env: ShardingEnv
    device: torch.device
    spec: OptimizerSpec
    wire_type: WireType
    module_fqn: str | None
    hosts: TwoLevelWire | None = None  # for unpooled rows in two levels


def _hook_up(
    lookup: DistributedDataParallel,
    num_rows_T: list[int],
    dim: int,
    settings: ShardSettings,
) -> HotReplicas:
    """Replace the lookup's kernel and DDP's all-reduce by replicas."""
    replaced = list(kernels(lookup))
    if len(replaced) != 1:
        raise RuntimeError(
            f"torchrec data-parallel lookup: expected 1 group of tables, got {len(replaced)}. "
            "Use the pinned torchrec (see `hotrec doctor`)."
        )
    weights, group = replaced[0].fbgemm.weights, settings.env.process_group
    replicas = HotReplicas(weights, num_rows_T, dim, group, settings.wire_type)
    replaced[0].replace(replicas)
    # FBGEMM's buffers are constants; DDP would broadcast them in every forward pass.
    lookup.broadcast_buffers = False
    # DDP's only bucket here is as large as all hot rows, and would be built twice.
    keep_buckets(lookup)
    lookup.register_comm_hook(None, replicas.reduce_gradient)
    return replicas


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
        codecs = wire_codecs(settings.wire_type)
        name = settings.module_fqn
        super().__init__(module, sharding, env, fused_params(spec), device, codecs, module_fqn=name)
        self.hot: HotReplicas | None = None
        self._num_hot = len(hot_tables)
        # One rank has whole tables, whose order does not matter.
        is_alone = env.world_size == 1
        self.orders = {
            config.name: RowOrder(config.num_embeddings, is_spread=False)
            if is_alone
            else placement.row_order(config.name)
            for config in module.embedding_configs()
            if config.name not in hot_tables
        }
        self._keep_weights(module)
        self.name_weights(self.orders)
        self.dim, self.spec = module.embedding_dim(), spec
        self._keys = [config.name for config in module.embedding_configs()]
        self._group, self._device, self.hosts = env.process_group, device, settings.hosts
        self._codecs = None
        if codecs is not None:
            self._codecs = codecs[CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name]
        cold_tables = [name for name in self._keys if name not in hot_tables]
        self.is_cached = is_cached(placement, cold_tables)
        for lookup in lookups(self):
            if isinstance(lookup, DistributedDataParallel):
                tables = [c for c in module.embedding_configs() if c.name in hot_tables]
                num_rows_T = [config.num_embeddings for config in tables]
                self.hot = _hook_up(lookup, num_rows_T, self.dim, settings)
            elif self.is_cached:
                use_cached_rows(lookup, spec, placement, self.orders, device, is_distinct=is_alone)
            elif device.type == "cpu":
                use_cpu_rows(lookup, spec)
        self.owned = OwnedRows(self._cold_lookups, self.dim, spec)
        self.owners: RowOwners | None = None
        if cold_tables:
            num_rows = {config.name: config.num_embeddings for config in module.embedding_configs()}
            shards = all_gather_object(self.owned.shards)
            hosts = None if self.hosts is None else self.hosts.hosts
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

    @property
    def _cold_lookups(self) -> list[Any]:
        return [part for part in lookups(self) if not isinstance(part, DistributedDataParallel)]

    def num_hot(self, rows: KeyedJaggedTensor) -> int:
        """The number of distinct hot rows of a batch."""
        return sum(rows.length_per_key()[: self._num_hot])

    def request(self, rows: KeyedJaggedTensor) -> AnyRequest | None:
        """Start to request the cold rows of a batch from their owners; None without cold tables."""
        if self.owners is None:
            return None
        with torch.no_grad():
            requested = self.find_owners(rows)
            if self.hosts is not None:
                return RelayedRequest(requested, self.owners, self.hosts)
            return IdsRequest(requested, self._group)

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
        stored = {t: order.stored(written[t]) for t, order in self.orders.items() if t in written}
        for lookup in self._cold_lookups:
            refresh_slots(lookup, stored)

    def start_lookups(self, rows: KeyedJaggedTensor, request: AnyRequest | None) -> StartedRows:
        """Look up this rank's rows and start to send them to the ranks that requested them.

        Takes a batch's rows, hot tables first, and the result of ``request`` for them.
        """
        hot, cold = None, None
        # Cold rows first: they are sent while hot rows are read. Backward runs in reverse order,
        # so it sends hot gradients before it updates cold rows.
        if request is not None:
            served_RD = self.owned.look_up(request.positions_R)
            mark("row_lookup")
            cold = send_rows(
                served_RD,
                request.num_served_W,
                request.num_requested_W,
                self._group if self.hosts is None else self.hosts.rail.group,
                self._codecs,
            )
            mark("rows_exchange")
        if self.hot is not None:
            [lookup] = [p for p in lookups(self) if isinstance(p, DistributedDataParallel)]
            num_cold = len(self._keys) - self._num_hot
            hot = lookup(rows.split([self._num_hot, num_cold])[0]).view(-1, self.dim)
            mark("row_lookup")
        return hot, cold

    def join(self, started: StartedRows, request: AnyRequest | None) -> torch.Tensor:
        """The rows of ``start_lookups``, float (U, D), in the order of the batch's rows."""
        hot_HD, arriving = started
        if arriving is None or request is None:
            assert hot_HD is not None
            return hot_HD
        cold_CD = arriving.wait().view(-1, self.dim)
        if isinstance(request, RelayedRequest):
            cold_CD = self._distribute(cold_CD, request)
        if hot_HD is None and request.order_U is None:
            return cold_CD
        if hot_HD is None:
            hot_HD = cold_CD.detach()[:0]
        joined_UD: torch.Tensor = Joined.apply(hot_HD, cold_CD, request.order_U)
        return joined_UD

    def _distribute(self, rows_UD: torch.Tensor, request: RelayedRequest) -> torch.Tensor:
        """Send the rows of the union to the ranks of this host, and receive this rank's (C, D)."""
        assert self.hosts is not None
        relay = request.relay
        served_KD: torch.Tensor = CopyRows.apply(rows_UD, relay.index_K, relay.sums)
        nums = request.num_relayed_G, request.num_asked_G
        arriving = send_rows(served_KD, *nums, self.hosts.inside.group, None)
        return arriving.wait().view(-1, self.dim)
