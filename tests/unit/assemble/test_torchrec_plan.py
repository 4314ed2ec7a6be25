"""Placement -> constraints -> TorchRec's plan -> text and JSON; machine, memory, planner."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
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
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
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
    shardings_by,
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
    PipelineSpec,
    Placement,
    TablePlacement,
    Tier,
    TorchrecPlan,
    TorchrecTier,
)

META = torch.device("meta")
SGD = OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1)
HOST_TIERS = (TorchrecTier.fused_uvm, TorchrecTier.fused_uvm_caching)
NUM_ROWS = {"small": 10, "big": 1000, "owned": 700, "pooled": 60}
PARTITION = Partition(NUM_ROWS, {"small": np.arange(10), "big": np.arange(50)})
PLACEMENT = Placement(
    PARTITION,
    {
        "small": TablePlacement(),
        "big": TablePlacement(tier=Tier.CACHED, cache_load_frac=0.3),
        "owned": TablePlacement(),
        "pooled": TablePlacement(Exchange.POOLED),
    },
)


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=8, feature_names=[f"f_{n}"])
        for n, r in NUM_ROWS.items()
    ]


class Model(nn.Module):
    def __init__(self, *, is_split: bool) -> None:
        super().__init__()
        self.e: nn.Module = EmbeddingBagCollection(tables=tables(), device=META)
        if is_split:
            self.e = HotColdEmbeddingBagCollection(tables(), PLACEMENT, device=META)


def machine(world_size: int = 2, device: str = "cpu", **changes: Any) -> Machine:
    facts = {"device_bytes": 1 << 30, "host_bytes": 1 << 33, "batch_size": 64, **changes}
    return Machine(world_size, world_size, device, **facts)


def plan_of(asked: TorchrecTables | None, on: Machine) -> dict[str, Any]:
    """TorchRec's plan of unsplit tables, or of split ones."""
    sharders: Any = [HotColdSharder(SGD)]
    constraints: Any = placement_constraints(PLACEMENT, on.device)
    if asked is not None:
        sharders = [EmbeddingBagCollectionSharder(fused_params(SGD))]
        constraints = torchrec_constraints(tables(), asked, batch_size=64, device=on.device)
    plan = make_plan(Model(is_split=asked is None), sharders, on, constraints)
    return plan_document(plan)["e"]


@pytest.mark.parametrize(("device", "behind_slots"), [("cpu", "fused"), ("cuda", "fused_uvm")])
def test_a_placement_becomes_a_plan(device: str, behind_slots: str) -> None:
    document = plan_of(None, machine(3, device))
    assert {n: (of["sharding_type"], of["compute_kernel"]) for n, of in document.items()} == {
        "small_hot": ("data_parallel", "dense"),  # wholly hot: no cold half
        "big_hot": ("data_parallel", "dense"),
        "big": ("row_wise", behind_slots),
        "owned": ("row_wise", "fused"),
        "pooled": ("table_wise", "fused"),
    }
    # All rows, in original ids, whatever is hot.
    assert [shard["sizes"] for shard in document["big"]["shards"]] == [[334, 8], [334, 8], [332, 8]]
    assert document["small_hot"]["shards"] == []
    assert document["small_hot"]["ranks"] == [0, 1, 2]
    assert plan_of(None, machine(3, device)) == document  # the ranks' own, which must agree


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
    ("asked", "on"),
    [
        (None, machine(host_bytes=10_000)),
        (None, machine(2, "cuda", device_bytes=10_000)),
        (TorchrecTables(tier=TorchrecTier.fused_uvm), machine(2, "cuda", host_bytes=10_000)),
    ],
)
def test_tables_that_do_not_fit(asked: TorchrecTables | None, on: Machine) -> None:
    with pytest.raises(ValueError, match=r"^plan for 2 ranks .*expected .*, got [^\n]*$"):
        plan_of(asked, on)
    assert plan_of(asked, replace(on, device_bytes=1 << 18, host_bytes=1 << 18))


@pytest.mark.parametrize("kind", [*OptimizerKind])
@pytest.mark.parametrize("tier", [None, *TorchrecTier])
def test_states_and_gradients_are_counted_where_they_are(
    kind: OptimizerKind, tier: TorchrecTier | None
) -> None:
    """TorchRec counts neither: it looks for the optimizer on the parameters."""
    topology, spec = topology_of(machine(2, "cuda")), OptimizerSpec(kind, learning_rate=0.1)
    constraints: Any = placement_constraints(PLACEMENT, "cuda")
    sharders: Any = [HotColdSharder(spec)]
    if tier is not None:
        asked = TorchrecTables(TorchrecPlan.table_wise, tier)
        constraints = torchrec_constraints(tables(), asked, batch_size=64, device="cuda")
        sharders = [EmbeddingBagCollectionSharder(fused_params(spec))]

    def bytes_of(name: str, estimator: type[EmbeddingStorageEstimator]) -> Any:
        perf = EmbeddingPerfEstimator(topology, constraints)
        estimators: Any = [perf, estimator(topology, constraints)]
        enumerator = EmbeddingEnumerator(topology, 64, constraints, estimators)
        options = enumerator.enumerate(Model(is_split=tier is None), sharders)
        [first] = [option.shards[0].storage for option in options if option.name == name]
        return np.array([first.hbm, first.ddr])

    state = spec.state_bytes_per_row(8)
    # A split table's cold rows are shared by both ranks.
    of_tables = [("owned", 700)] if tier else [("owned", 350), ("big_hot", 50)]
    for name, num_rows in of_tables:
        # Only touched rows of a replica have gradients. A state of one value is on the device for
        # every row, and no state is cached.
        is_on_host = tier in HOST_TIERS and kind is not OptimizerKind.rowwise_adagrad
        expected = np.array([0, state] if is_on_host else [state, 0]) * num_rows
        found = bytes_of(name, TrainedStorageEstimator) - bytes_of(name, EmbeddingStorageEstimator)
        assert found.tolist() == expected.tolist()


def test_plans_are_compared_where_they_train_the_same_weights() -> None:
    module = EmbeddingCollection(
        [EmbeddingConfig(name="a", num_embeddings=90, embedding_dim=8, feature_names=["f"])]
    )
    for sharding, kind, is_exact in (
        (table_wise(rank=0), OptimizerKind.rowwise_adagrad, True),
        (column_wise(ranks=[0, 1]), OptimizerKind.sgd, True),
        # A state of its own for each part of a row.
        (column_wise(ranks=[0, 1]), OptimizerKind.rowwise_adagrad, False),
    ):
        plan = construct_module_sharding_plan(
            module,
            {"a": sharding},
            sharder=EmbeddingCollectionSharder(),
            local_size=1,
            world_size=2,
            device_type="cpu",
        )
        made, rule = ShardingPlan({"": plan}), OptimizerSpec(kind, learning_rate=0.1)
        find = partial(shardings_by, lambda *_, made=made: made, ["a"], machine(), rule)
        found = find()(TorchrecTables(), PipelineSpec())
        assert isinstance(found, str) is not is_exact
        assert not isinstance(find(is_exact=False)(TorchrecTables(), PipelineSpec()), str)
