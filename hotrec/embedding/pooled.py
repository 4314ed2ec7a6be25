"""Tables pooled on their owners by TorchRec's own collection, table-wise."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    LazyAwaitable,
    ParameterSharding,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hotrec.embedding.fused import fused_params, undo_update_count
from hotrec.embedding.sharded_rows import ShardSettings, check_sharding
from hotrec.embedding.torchrec import lookups
from hotrec.runtime.codecs import wire_codecs
from hotrec.runtime.stages import backward_point, mark, mark_backward


class ShardedPooledBags(ShardedEmbeddingBagCollection):
    """Table-wise embedding bags, in FBGEMM's pooled kernels on every device."""

    def __init__(
        self,
        module: EmbeddingBagCollection,
        sharding: dict[str, ParameterSharding],
        settings: ShardSettings,
    ) -> None:
        for config in module.embedding_bag_configs():
            # Row-wise sharding sends every pooled vector once per rank; replicas are hot rows.
            check_sharding(config.name, sharding[config.name], ShardingType.TABLE_WISE)
        codecs, fused = wire_codecs(settings.wire_type), fused_params(settings.spec)
        super().__init__(
            module, sharding, settings.env, fused, settings.device, codecs, settings.module_fqn
        )

    def set_learning_rate(self) -> None:
        """Update in the next backward pass with the optimizer's learning rate of now.

        TorchRec does so in ``zero_grad``, which not every pipeline calls.
        """
        self.fused_optimizer.zero_grad()

    def start_lookups(
        self, features: list[KeyedJaggedTensor], contexts: list[Any]
    ) -> LazyAwaitable[KeyedTensor]:
        """Pool the received ids of each sharding and start to send the columns (B, sum of D)."""
        vectors = []
        for lookup, ids in zip(lookups(self), features, strict=True):
            point = backward_point("row_update", ids.values())
            vectors.append(mark_backward(lookup(ids), "grads_exchange", point))
            if not torch.is_grad_enabled():
                undo_update_count(lookup)
        mark("row_lookup")
        started = self.output_dist(EmbeddingBagCollectionContext(contexts), vectors)
        mark("rows_exchange")
        return started

    def look_up(self, features: KeyedJaggedTensor | None) -> LazyAwaitable[KeyedTensor]:
        """Run all stages for features from ``PooledRouter``; (B, sum of D)."""
        ctx = self.create_context()
        arrived = self.input_dist(ctx, features).wait().wait()
        return self.start_lookups(list(arrived), ctx.sharding_contexts)
