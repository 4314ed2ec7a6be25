"""What hotrec passes to FBGEMM reaches it through TorchRec."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import shard
from hotrec.embedding.fused import fused_params
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.table_memory import fused_modules
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planning.constraints import placement_constraints, torchrec_constraints
from hotrec.planning.machine import Machine
from hotrec.planning.torchrec_plan import make_plan
from hotrec.runtime.ranks import Ranks
from hotrec.types import (
    Exchange,
    OptimizerKind,
    Partition,
    Placement,
    Sharding,
    TablePlacement,
    TorchrecPlan,
)

SPEC = OptimizerSpec(OptimizerKind.rowwise_adagrad, learning_rate=0.1)
TABLES = [
    EmbeddingBagConfig(name=name, num_embeddings=30, embedding_dim=8, feature_names=[f"f_{name}"])
    for name in ("rows", "pooled")
]
MACHINE = Machine(1, 1, "cpu", 0, 1 << 33, 8)


@pytest.mark.parametrize("kind", ["hot_cold", "torchrec"])
def test_host_tiers_are_host_memory_that_the_device_maps(one_rank: Ranks, kind: str) -> None:
    """Managed memory, FBGEMM's default, can hang a device that has not enough of it free."""
    meta = torch.device("meta")
    if kind == "hot_cold":
        placement = Placement(
            Partition({"rows": 30, "pooled": 30}),
            {
                "rows": TablePlacement(),
                "pooled": TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE),
            },
        )
        model: nn.Module = HotColdEmbeddingBagCollection(TABLES, placement, device=meta)
        sharders: Any = [HotColdSharder(SPEC)]
        constraints = placement_constraints(placement)
    else:
        model = EmbeddingBagCollection(tables=TABLES, device=meta)
        sharders = [EmbeddingBagCollectionSharder(fused_params(SPEC))]
        found = torchrec_constraints(TABLES, TorchrecPlan.table_wise, batch_size=8)
        assert found is not None
        constraints = found
    sharded = shard(
        nn.Sequential(model), make_plan(nn.Sequential(model), sharders, MACHINE, constraints),
        sharders, torch.device("cpu"),
    )  # fmt: skip
    modules = fused_modules(sharded)
    assert len(modules) == (2 if kind == "hot_cold" else 1)
    assert all(module.uvm_host_mapped for module in modules)
    assert all(module.gather_uvm_cache_stats for module in modules)
