"""Placement -> constraints -> TorchRec's plan -> text and JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.types import CacheAlgorithm
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.config.roots import PlannerConfig
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.fused import fused_params
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planning.constraints import (
    cold_tier_for,
    hot_cold_constraints,
    placement_constraints,
    torchrec_constraints,
)
from hotrec.planning.machine import Machine
from hotrec.planning.storage import TrainedStorageEstimator, state_floats
from hotrec.planning.torchrec_plan import host_tier_bytes, make_plan, plan_document, plan_text
from hotrec.planning.unsharded import make_machine
from hotrec.runtime.ranks import Ranks
from hotrec.types import (
    ColdTier,
    OptimizerKind,
    Partition,
    Placement,
    TablePlacement,
    Tier,
    TorchrecPlan,
)

SGD = OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1)
META = torch.device("meta")
NUM_ROWS = {"small": 10, "big": 1000, "cold": 700}
PARTITION = Partition(NUM_ROWS, {"small": np.arange(10), "big": np.arange(50)})


def tables(dim: int = 8) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"]
        )
        for name, rows in NUM_ROWS.items()
    ]


def machine(
    world_size: int = 2,
    *,
    device: str = "cpu",
    device_bytes: int = 1 << 30,
    host_bytes: int = 1 << 33,
) -> Machine:
    return Machine(world_size, world_size, device, device_bytes, host_bytes, batch_size=64)


class Model(nn.Module):
    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.e = collection


def hot_cold_model() -> nn.Module:
    return Model(HotColdEmbeddingBagCollection(tables(), PARTITION, device=META))


def plain_model() -> nn.Module:
    return Model(EmbeddingBagCollection(tables=tables(), device=META))


def plan_of(
    variant: TorchrecPlan | None, on: Machine, tier: ColdTier = ColdTier.fused
) -> dict[str, Any]:
    if variant is None:
        sharders: Any = [HotColdSharder(SGD)]
        constraints: Any = hot_cold_constraints(
            tables(), PARTITION, cold_tier=tier, cache_load_factor=0.1
        )
        return plan_document(make_plan(hot_cold_model(), sharders, on, constraints))["e"]
    sharders = [EmbeddingBagCollectionSharder(fused_params(SGD))]
    constraints = torchrec_constraints(tables(), variant, batch_size=64, tier=tier)
    return plan_document(make_plan(plain_model(), sharders, on, constraints))["e"]


def summary(tables: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {name: (t["sharding_type"], t["compute_kernel"]) for name, t in tables.items()}


def test_constraints_name_the_halves() -> None:
    constraints = hot_cold_constraints(tables(), PARTITION)
    assert {
        name: (found.sharding_types, found.compute_kernels) for name, found in constraints.items()
    } == {
        "small_hot": (["data_parallel"], ["dense"]),  # wholly hot: no cold half
        "big_hot": (["data_parallel"], ["dense"]),
        "big": (["row_wise"], ["fused"]),
        "cold": (["row_wise"], ["fused"]),
    }
    cached = hot_cold_constraints(
        tables(), PARTITION, cold_tier=ColdTier.fused_uvm_caching, cache_load_factor=0.3
    )
    assert cached["cold"].compute_kernels == ["fused_uvm_caching"]
    assert cached["cold"].cache_params.load_factor == 0.3  # type: ignore[union-attr]
    assert cached["big_hot"].cache_params is None


def test_both_ways_into_the_library_choose_lru() -> None:
    """FBGEMM's prefetch asserts it, and LFU keeps 8 bytes for each row behind the cache."""
    cold = TablePlacement(tier=Tier.HOST_CACHED, cache_load_frac=0.3)
    placement = Placement(PARTITION, dict.fromkeys(NUM_ROWS, cold))
    of_torchrec = torchrec_constraints(
        tables(), TorchrecPlan.table_wise, batch_size=64, tier=ColdTier.fused_uvm_caching,
        cache_load_factor=0.3, is_prefetched=True,
    )  # fmt: skip
    assert of_torchrec is not None
    by_tier = hot_cold_constraints(
        tables(), PARTITION, cold_tier=ColdTier.fused_uvm_caching, cache_load_factor=0.3
    )
    for constraints in (placement_constraints(placement), by_tier, of_torchrec):
        caches = [c.cache_params for name, c in constraints.items() if not name.endswith("_hot")]
        assert {(c.algorithm, c.load_factor) for c in caches if c} == {(CacheAlgorithm.LRU, 0.3)}
    for name, constraint in of_torchrec.items():
        assert constraint.cache_params is not None, name
        assert constraint.cache_params.prefetch_pipeline


def test_more_cache_sets_than_fbgemm_can_count_are_refused(one_rank: Ranks) -> None:
    many = 1 << 30
    config = EmbeddingBagConfig(name="t", num_embeddings=many, embedding_dim=4, feature_names=["f"])
    model = Model(EmbeddingBagCollection(tables=[config], device=META))
    sharders: Any = [EmbeddingBagCollectionSharder(fused_params(SGD))]

    def plan(load_factor: float) -> None:
        constraints = torchrec_constraints(
            [config], TorchrecPlan.table_wise, batch_size=64, tier=ColdTier.fused_uvm_caching,
            cache_load_factor=load_factor,
        )  # fmt: skip
        on = machine(1, device="cuda", device_bytes=1 << 40, host_bytes=1 << 40)
        make_plan(model, sharders, on, constraints)

    plan(0.49)
    with pytest.raises(
        ValueError, match=r"on rank 0: expected fewer than 16777215 sets .* got 16777216 for"
    ):
        plan(0.5)


def test_hot_cold_plan() -> None:
    document = plan_of(None, machine(3))
    assert summary(document) == {
        "small_hot": ("data_parallel", "dense"),
        "big_hot": ("data_parallel", "dense"),
        "big": ("row_wise", "fused"),
        "cold": ("row_wise", "fused"),
    }
    # All rows, in original ids, whatever is hot.
    assert [shard["sizes"] for shard in document["big"]["shards"]] == [[334, 8], [334, 8], [332, 8]]
    assert document["small_hot"]["shards"] == []
    assert document["small_hot"]["ranks"] == [0, 1, 2]


def test_hot_cold_plan_of_cuda_can_be_made_anywhere() -> None:
    for tier in (ColdTier.fused, ColdTier.fused_uvm, ColdTier.fused_uvm_caching):
        document = plan_of(None, machine(2, device="cuda"), tier)
        assert summary(document)["big"] == ("row_wise", tier.value)
        assert "cuda" in document["big"]["shards"][0]["placement"]


@pytest.mark.parametrize("variant", list(TorchrecPlan))
def test_torchrec_plans(one_rank: Ranks, variant: TorchrecPlan) -> None:
    found = summary(plan_of(variant, machine(2)))
    assert set(found) == set(NUM_ROWS)
    types = {name: sharding for name, (sharding, _) in found.items()}
    if variant is TorchrecPlan.table_wise:
        assert set(types.values()) == {"table_wise"}
    if variant is TorchrecPlan.hand_tuned:  # fewer rows than the batch of 64
        assert types == {"small": "data_parallel", "big": "table_wise", "cold": "table_wise"}


def test_torchrec_constraints() -> None:
    assert torchrec_constraints(tables(), TorchrecPlan.planner, batch_size=64) is None
    tiered = torchrec_constraints(
        tables(), TorchrecPlan.planner, batch_size=64, tier=ColdTier.fused_uvm_caching,
        cache_load_factor=0.2,
    )  # fmt: skip
    assert tiered is not None
    assert {c.compute_kernels[0] for c in tiered.values() if c.compute_kernels} == {
        "fused_uvm_caching"
    }
    assert {c.sharding_types is None for c in tiered.values()} == {True}


@pytest.mark.parametrize(
    ("batch_size", "replicated"), [(10, []), (11, ["small"]), (701, ["small", "cold"])]
)
def test_hand_tuned_replicates_tables_with_fewer_rows_than_the_batch(
    batch_size: int, replicated: list[str]
) -> None:
    constraints = torchrec_constraints(tables(), TorchrecPlan.hand_tuned, batch_size=batch_size)
    assert constraints is not None
    found = [t for t, c in constraints.items() if c.sharding_types == ["data_parallel"]]
    assert found == replicated


def test_a_plan_depends_on_its_inputs_alone(one_rank: Ranks) -> None:
    """Every rank makes its own, and they must agree."""
    assert plan_of(None, machine(3)) == plan_of(None, machine(3))
    assert plan_of(TorchrecPlan.planner, machine(3)) == plan_of(TorchrecPlan.planner, machine(3))


def test_document_is_json_and_the_text_says_the_same() -> None:
    sharders: Any = [HotColdSharder(SGD)]
    constraints = hot_cold_constraints(tables(), PARTITION)
    plan = make_plan(hot_cold_model(), sharders, machine(2), constraints)
    document = plan_document(plan)
    assert json.loads(json.dumps(document)) == document
    text = plan_text(plan)
    lines = {line.split()[0]: line.split() for line in text.splitlines()}
    assert lines["module"] == ["module", "e"]
    assert lines["big"] == ["big", "row_wise", "fused", "500,", "500"]
    assert lines["small_hot"] == ["small_hot", "data_parallel", "dense", "all"]
    assert text.endswith("\n")


def test_a_model_that_is_itself_the_collection() -> None:
    collection = HotColdEmbeddingBagCollection(tables(), PARTITION, device=META)
    sharders: Any = [HotColdSharder(SGD)]
    plan = make_plan(collection, sharders, machine(1), hot_cold_constraints(tables(), PARTITION))
    assert list(plan_document(plan)) == [""]
    assert plan_text(plan).startswith("module (root)\n")


@pytest.mark.parametrize(
    ("on", "tier"),
    [
        (machine(2, host_bytes=10_000), ColdTier.fused),
        (machine(2, device="cuda", device_bytes=10_000), ColdTier.fused),
        (machine(2, device="cuda", host_bytes=10_000), ColdTier.fused_uvm),
    ],
)
def test_tables_that_do_not_fit(on: Machine, tier: ColdTier) -> None:
    with pytest.raises(ValueError, match=r"^plan for 2 ranks on .*: expected the tables to fit"):
        plan_of(None, on, tier)


def test_a_share_of_the_free_device_memory_is_kept_for_what_is_in_no_table() -> None:
    """NCCL, activations, messages: TorchRec's planner and the cost model keep the same."""
    with pytest.raises(ValueError, match=r"expected the tables to fit 8500 bytes of device memory"):
        plan_of(None, machine(2, device="cuda", device_bytes=10_000))


@pytest.mark.parametrize(
    ("kind", "by_element", "by_row"),
    [
        (OptimizerKind.sgd, 0, 0),
        (OptimizerKind.adagrad, 1, 0),
        (OptimizerKind.rowwise_adagrad, 0, 1),
        (OptimizerKind.adam, 2, 0),
    ],
)
@pytest.mark.parametrize("kernel", ["fused", "fused_uvm", "fused_uvm_caching"])
def test_states_and_gradients_are_counted_where_they_are(
    kind: OptimizerKind, by_element: int, by_row: int, kernel: str
) -> None:
    """TorchRec counts neither: it looks for the optimizer on the parameters."""
    topology = machine(2, device="cuda").topology()
    tier = ColdTier(kernel)
    constraints = hot_cold_constraints(tables(), PARTITION, cold_tier=tier, cache_load_factor=0.1)
    sharders: Any = [HotColdSharder(OptimizerSpec(kind, learning_rate=0.1))]

    def storages(estimator: type[EmbeddingStorageEstimator]) -> dict[str, list[Any]]:
        estimators: Any = [
            EmbeddingPerfEstimator(topology, constraints),
            estimator(topology, constraints),
        ]
        enumerator = EmbeddingEnumerator(topology, 64, constraints, estimators)
        options = enumerator.enumerate(hot_cold_model(), sharders)
        return {option.name: [shard.storage for shard in option.shards] for option in options}

    plain, found = storages(EmbeddingStorageEstimator), storages(TrainedStorageEstimator)
    beside = {
        name: [
            (f.hbm - p.hbm, f.ddr - p.ddr) for f, p in zip(found[name], plain[name], strict=True)
        ]
        for name in plain
    }
    element, row = by_element * 4 * 8, by_row * 4
    # A replica of 50 rows: its state, and gradients in two of DDP's buckets.
    assert beside["big_hot"] == [(50 * (2 * 4 * 8 + element + row), 0)] * 2
    # A shard of 350 rows: row-wise state is on the device for every row, no state is cached.
    of_element = (350 * element, 0) if tier is ColdTier.fused else (0, 350 * element)
    assert beside["cold"] == [(of_element[0] + 350 * row, of_element[1])] * 2


@pytest.mark.parametrize(("state_bytes", "row_bytes"), [(0, 32), (4, 32), (32, 64), (64, 96)])
def test_what_host_tiers_map_is_that_of_the_fullest_host(state_bytes: int, row_bytes: int) -> None:
    """Rows with element-wise state; a state of one float and hot rows are on the device."""
    sharders: Any = [HotColdSharder(SGD)]
    on = Machine(4, 2, "cuda", 1 << 30, 1 << 33, batch_size=64)
    for tier in (ColdTier.fused_uvm, ColdTier.fused_uvm_caching):
        constraints = hot_cold_constraints(
            tables(), PARTITION, cold_tier=tier, cache_load_factor=0.1
        )
        plan = make_plan(hot_cold_model(), sharders, on, constraints)
        found = host_tier_bytes(plan, 2, lambda dim: state_bytes)
        assert found == (1000 + 700) // 2 * row_bytes
    constraints = hot_cold_constraints(tables(), PARTITION)
    plan = make_plan(hot_cold_model(), sharders, on, constraints)
    assert host_tier_bytes(plan, 2, lambda dim: state_bytes) == 0


def test_an_optimizer_of_unknown_size_is_refused() -> None:
    assert state_floats(None) == (0, 0)
    with pytest.raises(ValueError, match=r"fused_params optimizer: expected one of .* got SHAMPOO"):
        state_floats(SimpleNamespace(name="SHAMPOO"))


def test_the_memory_of_a_device_is_what_is_free_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free, and what torch holds in reserve; a given size goes before."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2 << 30)
    shape: Any = {"world_size": 2, "ranks_per_host": 2, "device": "cuda", "batch_size": 8}
    assert make_machine(PlannerConfig(), **shape).device_bytes == 63 << 30
    assert make_machine(PlannerConfig(hbm_gib=40), **shape).device_bytes == 40 << 30


def test_replicas_count_against_the_memory_of_each_rank() -> None:
    """10 + 50 hot rows on each rank; the cold rows are shared out."""
    num_bytes = 4 * 8 * (1000 + 700)
    assert plan_of(None, machine(4, host_bytes=4 * num_bytes))
    all_hot = Partition(NUM_ROWS, {t: np.arange(r) for t, r in NUM_ROWS.items()})
    model = Model(HotColdEmbeddingBagCollection(tables(), all_hot, device=META))
    sharders: Any = [HotColdSharder(SGD)]
    with pytest.raises(ValueError, match="expected the tables to fit"):
        make_plan(
            model, sharders, machine(4, host_bytes=4 * num_bytes),
            hot_cold_constraints(tables(), all_hot),
        )  # fmt: skip


@pytest.mark.parametrize("tier", [ColdTier.fused_uvm, ColdTier.fused_uvm_caching])
def test_uvm_on_cpu_is_refused(tier: ColdTier) -> None:
    with pytest.raises(ValueError, match=rf"^placement\.cold_tier: .*on CPU.* got {tier.value}\."):
        cold_tier_for("cpu", tier)
    assert cold_tier_for("cuda", tier) is tier
    with pytest.raises(ValueError, match="expected"):  # also without asking first
        plan_of(None, machine(2), tier)


def test_fused_on_cpu_is_fine() -> None:
    assert cold_tier_for("cpu", ColdTier.fused) is ColdTier.fused
