"""The exchange of row ids in place of TorchRec's: two messages, and one copy of counts to the host.

TorchRec's ``KJTAllToAll`` sends the sizes of its messages in a message of their own, and asks the
device for numbers some ten times a batch. The bags that hotrec exchanges are one a table, so each
rank knows how many *lengths* it gets from each other; these tell the sizes of the ids.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.flat import cut_bags
from hotrec.host_ints import HostInts


class IdsExchange(nn.Module):
    """Sends row ids to the owners of the rows, in place of TorchRec's input dist of a sharding.

    Args:
        replaced: TorchRec's, row-wise or table-wise.
        device: of the ids.
    """

    def __init__(
        self, replaced: RwSparseFeaturesDist | TwSparseFeaturesDist, device: torch.device
    ) -> None:
        super().__init__()
        self.group: dist.ProcessGroup = replaced._dist._pg
        self.num_keys_W: list[int] = list(replaced._dist._splits)
        self.world_size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        # Rows of each table that a rank owns; None where a table is whole on one rank.
        self._block_sizes: torch.Tensor | None = None
        if isinstance(replaced, RwSparseFeaturesDist):
            self._block_sizes = replaced._feature_block_sizes_tensor.to(device)
        num_keys = self.num_keys_W[self.rank]
        ranks = range(self.world_size)
        # What arrives is ordered by rank and key; lookups want it by key and rank.
        by_key = [rank * num_keys + key for key in range(num_keys) for rank in ranks]
        self.by_key = torch.tensor(by_key, dtype=torch.int32, device=device)

    def forward(self, features: KeyedJaggedTensor) -> IdsRequest:
        """Start the exchange.

        Args:
            features: jagged (T, 1), the distinct rows of each table.
        """
        with torch.no_grad():
            if self._block_sizes is None:
                return IdsRequest(self, features, None)
            is_cuda = features.values().is_cuda
            bucketized, order = bucketize_kjt_before_all2all(
                cut_bags(features) if is_cuda else features,
                num_buckets=self.world_size,
                block_sizes=self._block_sizes,
                output_permute=True,
            )
            return IdsRequest(self, bucketized, order)


class IdsRequest(Awaitable[Awaitable[KeyedJaggedTensor]]):
    """The lengths are on their way; when they are here, the ids can be.

    Args:
        features: keys in the order of their ranks.
        order: where each asked row is among the values; None if they are in the order asked.
    """

    def __init__(
        self, exchange: IdsExchange, features: KeyedJaggedTensor, order: torch.Tensor | None
    ) -> None:
        super().__init__()
        self._exchange, self._features, self._order = exchange, features, order
        self._context: SequenceShardingContext | None = None
        lengths = features.lengths().view(len(features.keys()), -1).sum(1)
        num_here = exchange.num_keys_W[exchange.rank]
        self._sent, self._arriving = lengths, lengths.new_empty(exchange.world_size * num_here)
        self._work: Any = dist.all_to_all_single(
            self._arriving,
            lengths,
            [num_here] * exchange.world_size,
            exchange.num_keys_W,
            group=exchange.group,
            async_op=True,
        )
        self._counts: HostInts | None = None
        if lengths.is_cuda:
            self._work.wait()  # holds up the stream, not the host
            self._counts = HostInts(torch.cat([lengths, self._arriving]))

    def tell(self, context: SequenceShardingContext) -> None:
        """Tell TorchRec's context what the way back of the rows needs, as it becomes known."""
        self._context = context
        context.unbucketize_permute_tensor = self._order

    def _wait_impl(self) -> Awaitable[KeyedJaggedTensor]:
        exchange, values = self._exchange, self._features.values()
        if self._counts is None:
            self._work.wait()
            self._counts = HostInts(torch.cat([self._sent, self._arriving]))
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
        first_key = sum(exchange.num_keys_W[: exchange.rank])
        keys = self._features.keys()[first_key : first_key + num_here]
        per_key = [sum(arriving[key::num_here]) for key in range(num_here)]
        return _IdsArriving(exchange, work, keys, self._arriving, received, per_key)


def _sums(values: list[int], sizes: list[int]) -> list[int]:
    sums, begin = [], 0
    for size in sizes:
        sums.append(sum(values[begin : begin + size]))
        begin += size
    return sums


class _IdsArriving(Awaitable[KeyedJaggedTensor]):
    def __init__(
        self,
        exchange: IdsExchange,
        work: Any,
        keys: list[str],
        lengths: torch.Tensor,
        values: torch.Tensor,
        length_per_key: list[int],
    ) -> None:
        super().__init__()
        self._exchange, self._work, self._keys = exchange, work, keys
        self._lengths, self._values, self._length_per_key = lengths, values, length_per_key

    def _wait_impl(self) -> KeyedJaggedTensor:
        """The ids that all ranks ask for, jagged (keys here, W)."""
        self._work.wait()
        lengths, values = self._lengths, self._values
        if self._keys and self._exchange.world_size > 1:
            by_rank_and_key, values, _ = torch.ops.fbgemm.permute_2D_sparse_data(
                self._exchange.by_key, lengths.view(-1, 1), values, None, values.numel()
            )
            lengths = by_rank_and_key.view(-1)
        return KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            lengths=lengths,
            stride=self._exchange.world_size,
            length_per_key=self._length_per_key,
        )
