"""Placement -> constraints -> TorchRec's plan -> text and JSON; machine, memory, planner."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from hotrec.assemble.constraints import (
    placement_constraints,
    torchrec_constraints,
)
from hotrec.assemble.torchrec_plan import (
    TrainedStorageEstimator,
    make_plan,
    plan_document,
    topology_of,
)
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.fused import fused_params
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planner.machine import Machine
from hotrec.planner.plan import TorchrecTables
from hotrec.types import (
    Exchange,
    OptimizerKind,
    Partition,
    Placement,
    Sharding,
    TablePlacement,
    Tier,
    TorchrecPlan,
    TorchrecTier,
)

META = torch.device("meta")
SGD = OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1)
SHARDERS: Any = [HotColdSharder(SGD)]
DEVICE = TorchrecTier.fused
NUM_ROWS = {"small": 10, "big": 1000, "owned": 700, "pooled": 60}
PARTITION = Partition(NUM_ROWS, {"small": np.arange(10), "big": np.arange(50)})
PLACEMENT = Placement(
    PARTITION,
    {
        "small": TablePlacement(),
        "big": TablePlacement(tier=Tier.CACHED, cache_load_frac=0.3),
        "owned": TablePlacement(sharding=Sharding.TABLE_WISE),
        "pooled": TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE),
    },
)
HALVES = {
    "small_hot": ("data_parallel", "dense"),  # wholly hot: no cold half
    "big_hot": ("data_parallel", "dense"),
    "big": ("row_wise", "fused"),
    "owned": ("row_wise", "fused"),
    "pooled": ("row_wise", "fused"),
}


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=8, feature_names=[f"f_{n}"])
        for n, r in NUM_ROWS.items()
    ]


class Model(nn.Module):
    def __init__(self, placement: Placement | Partition | None) -> None:
        super().__init__()
        if placement is None:
            self.e: nn.Module = EmbeddingBagCollection(tables=tables(), device=META)
        else:
            self.e = HotColdEmbeddingBagCollection(tables(), placement, device=META)


def machine(world_size: int = 2, device: str = "cpu", **changes: Any) -> Machine:
    facts = {"device_bytes": 1 << 30, "host_bytes": 1 << 33, "batch_size": 64, **changes}
    return Machine(world_size, facts.pop("local_world_size", world_size), device, **facts)


def plan_of(
    variant: TorchrecPlan | None, on: Machine, tier: TorchrecTier = TorchrecTier.fused
) -> dict[str, Any]:
    if variant is None:
        constraints: Any = placement_constraints(Placement.alike(PARTITION))
        return plan_document(make_plan(Model(PARTITION), SHARDERS, on, constraints))["e"]
    sharders: Any = [EmbeddingBagCollectionSharder(fused_params(SGD))]
    asked = TorchrecTables(variant, tier)
    constraints = torchrec_constraints(tables(), asked, batch_size=64, device=on.device)
    return plan_document(make_plan(Model(None), sharders, on, constraints))["e"]


def summary(tables: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {name: (t["sharding_type"], t["compute_kernel"]) for name, t in tables.items()}


def test_a_placement_becomes_constraints_and_a_plan() -> None:
    expected = HALVES | {
        "big": ("row_wise", "fused_uvm"),  # the memory behind slots
        "owned": ("table_wise", "fused"),
        "pooled": ("table_wise", "fused"),
    }
    constraints = placement_constraints(PLACEMENT, "cuda")
    assert {name: (c.sharding_types, c.compute_kernels) for name, c in constraints.items()} == {
        name: ([sharding], [kernel]) for name, (sharding, kernel) in expected.items()
    }
    plan = make_plan(Model(PLACEMENT), SHARDERS, machine(2, "cuda"), constraints)
    assert summary(plan_document(plan)["e"]) == expected


def test_hot_cold_plan() -> None:
    document = plan_of(None, machine(3))
    assert summary(document) == HALVES
    # All rows, in original ids, whatever is hot.
    assert [shard["sizes"] for shard in document["big"]["shards"]] == [[334, 8], [334, 8], [332, 8]]
    assert document["small_hot"]["shards"] == []
    assert document["small_hot"]["ranks"] == [0, 1, 2]
    assert plan_of(None, machine(3)) == document  # every rank makes its own, and they must agree


def plan_of_sequences() -> dict[str, Any]:
    """Column-wise shards of one part take as long as table-wise ones, by TorchRec's estimate."""
    tables = [
        EmbeddingConfig(name=n, num_embeddings=r, embedding_dim=64, feature_names=[f"f_{n}"])
        for n, r in (("a", 10), ("b", 1000))
    ]
    model = EmbeddingCollection(tables=tables, device=META)
    sharders: Any = [EmbeddingCollectionSharder(fused_params(SGD))]
    constraints = torchrec_constraints(tables, TorchrecTables(), batch_size=64)
    return plan_document(make_plan(nn.Sequential(model), sharders, machine(), constraints))["0"]


@pytest.mark.slow  # two more processes that import torch
def test_ranks_with_other_hash_seeds_make_the_same_plan() -> None:
    words = [sys.executable, "-c", f"from {__name__} import *; print(plan_of_sequences())"]
    ranks = [
        subprocess.Popen(words, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE)
        for seed in ("1", "3")
    ]
    first, second = (rank.communicate()[0] for rank in ranks)
    assert first == second
    assert first.count(b"table_wise") == 2


@pytest.mark.parametrize(
    ("variant", "on", "tier"),
    [
        (None, machine(host_bytes=10_000), DEVICE),
        (None, machine(2, "cuda", device_bytes=10_000), DEVICE),
        (TorchrecPlan.planner, machine(2, "cuda", host_bytes=10_000), TorchrecTier.fused_uvm),
    ],
)
def test_tables_that_do_not_fit(
    variant: TorchrecPlan | None, on: Machine, tier: TorchrecTier
) -> None:
    with pytest.raises(ValueError, match=r"^plan for 2 ranks .*expected .*, got [^\n]*$"):
        plan_of(variant, on, tier)
    assert plan_of(variant, replace(on, device_bytes=1 << 18, host_bytes=1 << 18), tier)


@pytest.mark.parametrize(
    ("kind", "by_element", "by_row"),
    [
        (OptimizerKind.sgd, 0, 0),
        (OptimizerKind.adagrad, 1, 0),
        (OptimizerKind.rowwise_adagrad, 0, 1),
        (OptimizerKind.adam, 2, 0),
    ],
)
@pytest.mark.parametrize("tier", [None, *TorchrecTier])
def test_states_and_gradients_are_counted_where_they_are(
    kind: OptimizerKind, by_element: int, by_row: int, tier: TorchrecTier | None
) -> None:
    """TorchRec counts neither: it looks for the optimizer on the parameters."""
    topology, spec = topology_of(machine(2, "cuda")), OptimizerSpec(kind, learning_rate=0.1)
    constraints: Any = placement_constraints(Placement.alike(PARTITION))
    sharders: Any = [HotColdSharder(spec)]
    if tier is not None:
        asked = TorchrecTables(TorchrecPlan.table_wise, tier)
        constraints = torchrec_constraints(tables(), asked, batch_size=64, device="cuda")
        sharders = [EmbeddingBagCollectionSharder(fused_params(spec))]

    def storages(estimator: type[EmbeddingStorageEstimator]) -> dict[str, list[Any]]:
        estimators: Any = [
            EmbeddingPerfEstimator(topology, constraints),
            estimator(topology, constraints),
        ]
        enumerator = EmbeddingEnumerator(topology, 64, constraints, estimators)
        options = enumerator.enumerate(Model(None if tier else PARTITION), sharders)
        return {option.name: [shard.storage for shard in option.shards] for option in options}

    plain, found = storages(EmbeddingStorageEstimator), storages(TrainedStorageEstimator)
    beside = {
        name: [
            (f.hbm - p.hbm, f.ddr - p.ddr) for f, p in zip(found[name], plain[name], strict=True)
        ]
        for name in plain
    }
    element, row = by_element * 4 * 8, by_row * 4
    if tier is None:
        # Only touched rows of a replica have gradients.
        assert beside["big_hot"] == [(50 * (element + row), 0)] * 2
        assert beside["owned"] == [(350 * (element + row), 0)] * 2
    else:  # row-wise state is on the device for every row, no state is cached
        on_device, on_host = (element, 0) if tier is DEVICE else (0, element)
        assert beside["owned"] == [(700 * (on_device + row), 700 * on_host)]
