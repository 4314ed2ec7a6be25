"""Placement -> constraints -> TorchRec's plan -> text and JSON; machine, memory, planner."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.constants import kernel_bw_lookup
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.types import CollectiveType
from torchrec.distributed.types import (
    CacheAlgorithm,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from hotrec.assemble.constraints import (
    cold_tier_for,
    hot_cold_constraints,
    offload_stats,
    placement_constraints,
    torchrec_constraints,
)
from hotrec.assemble.machine import make_machine
from hotrec.assemble.topology import topology_of
from hotrec.assemble.torchrec_plan import (
    TrainedStorageEstimator,
    host_tier_bytes,
    make_plan,
    plan_document,
    plan_text,
    shardings_of,
    state_floats,
)
from hotrec.cost_model.costs import REQUIRED, Costs, CostsError, Line, Link
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.fused import fused_params
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planner.machine import Machine
from hotrec.runtime.ranks import Ranks
from hotrec.types import (
    ColdTier,
    Exchange,
    OptimizerKind,
    Partition,
    Placement,
    Sharding,
    TablePlacement,
    Tier,
    TorchrecPlan,
)

META = torch.device("meta")
SGD = OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1)
SHARDERS: Any = [HotColdSharder(SGD)]
CACHED = ColdTier.fused_uvm_caching
NUM_ROWS = {"small": 10, "big": 1000, "owned": 700, "pooled": 60}
PARTITION = Partition(NUM_ROWS, {"small": np.arange(10), "big": np.arange(50)})
PLACEMENT = Placement(
    PARTITION,
    {
        "small": TablePlacement(),
        "big": TablePlacement(tier=Tier.HOST_CACHED, cache_load_frac=0.3),
        "owned": TablePlacement(sharding=Sharding.TABLE_WISE, tier=Tier.HOST),
        "pooled": TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE),
    },
)
ON_CPU = Placement(
    PARTITION, {name: replace(t, tier=Tier.DEVICE) for name, t in PLACEMENT.tables.items()}
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
    variant: TorchrecPlan | None, on: Machine, tier: ColdTier = ColdTier.fused
) -> dict[str, Any]:
    if variant is None:
        constraints: Any = hot_cold_constraints(tables(), PARTITION, cold_tier=tier)
        return plan_document(make_plan(Model(PARTITION), SHARDERS, on, constraints))["e"]
    sharders: Any = [EmbeddingBagCollectionSharder(fused_params(SGD))]
    constraints = torchrec_constraints(tables(), variant, batch_size=64, tier=tier)
    return plan_document(make_plan(Model(None), sharders, on, constraints))["e"]


def summary(tables: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {name: (t["sharding_type"], t["compute_kernel"]) for name, t in tables.items()}


# --- constraints


def test_a_placement_becomes_constraints_and_a_plan() -> None:
    expected = HALVES | {
        "big": ("row_wise", "fused_uvm_caching"),
        "owned": ("table_wise", "fused_uvm"),
        "pooled": ("table_wise", "fused"),
    }
    constraints = placement_constraints(PLACEMENT)
    assert {name: (c.sharding_types, c.compute_kernels) for name, c in constraints.items()} == {
        name: ([sharding], [kernel]) for name, (sharding, kernel) in expected.items()
    }
    plan = make_plan(Model(PLACEMENT), SHARDERS, machine(2, "cuda"), constraints)
    assert summary(plan_document(plan)["e"]) == expected


def test_a_cache_gets_its_size_policy_and_statistics() -> None:
    stats = offload_stats(np.array([0.0, 500.0]), np.array([1.0, 0.2]), 37.6, 1000)
    constraints = placement_constraints(PLACEMENT, {"big": stats})
    cache = constraints["big"].cache_params
    assert cache is not None
    assert (cache.algorithm, cache.load_factor) == (CacheAlgorithm.LRU, 0.3)
    assert cache.stats is not None
    assert cache.stats.expected_lookups == 38
    assert cache.stats.expected_miss_rate(0.3) == pytest.approx(1 - 0.8 * 300 / 500, abs=2e-3)
    assert constraints["owned"].cache_params is None
    plan = make_plan(Model(PLACEMENT), SHARDERS, machine(2, "cuda"), constraints)
    kept = plan.plan["e"]["big"].cache_params  # type: ignore[index]
    assert (kept.load_factor, kept.stats.expected_lookups) == (0.3, 38)


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        *(
            ("big", TablePlacement(tier=Tier.HOST_CACHED, cache_load_frac=frac), "cache_load_frac")
            for frac in (None, 0.0, 1.0)
        ),
        ("pooled", TablePlacement(Exchange.POOLED), r"pooled: .*table_wise.* got row_wise\."),
    ],
)
def test_impossible_placements_are_refused(name: str, table: TablePlacement, message: str) -> None:
    placement = Placement(PARTITION, {**PLACEMENT.tables, name: table})
    with pytest.raises(ValueError, match=f"^placement table {name}.*{message}|^.*{message}"):
        placement_constraints(placement)


@pytest.mark.parametrize("num_rows", [1, 7, 1000, 100_000])
@pytest.mark.parametrize("skew", [0.8, 1.05, 1.2])
def test_torchrec_reads_back_the_curve_that_went_in(num_rows: int, skew: float) -> None:
    shares = np.arange(1, num_rows + 1) ** -skew
    misses = 1 - shares.cumsum() / shares.sum()
    sizes = np.unique(np.geomspace(1, num_rows, 400).astype(int))
    ratios = np.clip(misses[sizes - 1], 0, 1)
    stats = offload_stats(sizes.astype(float), ratios, num_rows / 3, num_rows)
    assert stats.expected_miss_rate(0.0) == 1.0
    assert stats.expected_miss_rate(1.0) == pytest.approx(0.0, abs=1e-9)

    def curve(at: Any) -> Any:
        return np.interp(
            at, [0, *sizes[sizes < num_rows], num_rows], [1, *ratios[sizes < num_rows], 0]
        )

    bin_rows = num_rows / len(stats.hist)
    for size in sizes[:: max(1, len(sizes) // 40)]:
        found = stats.expected_miss_rate(float(size) / num_rows)
        first, last = curve(max(size - 2, 0.0)), curve(min(size + bin_rows + 2, num_rows))
        assert last - 1e-6 <= found <= first + 1e-6, size
    # Where a bin ends, exact; and over the whole curve close.
    edges = np.linspace(0, num_rows, len(stats.hist) + 1)[1::97]
    exact = np.array([stats.expected_miss_rate(float(e) / num_rows) for e in edges])
    assert np.abs(exact - curve(edges)).max() < 0.02
    at_all = curve(np.arange(num_rows + 1.0))
    assert stats.cacheability == pytest.approx((at_all[1:] + at_all[:-1]).mean() / 2, abs=0.01)


def test_all_ways_into_the_library_choose_lru() -> None:
    """FBGEMM's prefetch asserts it, and LFU keeps 8 bytes for each row behind the cache."""
    cold = TablePlacement(tier=Tier.HOST_CACHED, cache_load_frac=0.3)
    given: Any = {"cache_load_factor": 0.3}
    of_torchrec = torchrec_constraints(
        tables(), TorchrecPlan.table_wise, batch_size=64, tier=CACHED, is_prefetched=True, **given
    )
    assert of_torchrec is not None
    by_tier = hot_cold_constraints(tables(), PARTITION, cold_tier=CACHED, **given)
    placed = placement_constraints(Placement(PARTITION, dict.fromkeys(NUM_ROWS, cold)))
    for constraints in (placed, by_tier, of_torchrec):
        caches = [c.cache_params for name, c in constraints.items() if not name.endswith("_hot")]
        assert {(c.algorithm, c.load_factor) for c in caches if c} == {(CacheAlgorithm.LRU, 0.3)}
        assert all(caches)
    assert all(c.cache_params.prefetch_pipeline for c in of_torchrec.values() if c.cache_params)


def test_torchrec_constraints() -> None:
    assert torchrec_constraints(tables(), TorchrecPlan.planner, batch_size=64) is None
    tiered = torchrec_constraints(tables(), TorchrecPlan.planner, batch_size=64, tier=CACHED)
    assert tiered is not None
    for constraint in tiered.values():
        assert constraint.compute_kernels == ["fused_uvm_caching"]
        assert constraint.sharding_types is None
    for batch_size, replicated in ((10, []), (11, ["small"]), (701, ["small", "owned", "pooled"])):
        found = torchrec_constraints(tables(), TorchrecPlan.hand_tuned, batch_size=batch_size)
        assert found is not None
        # Tables with fewer rows than the batch.
        assert [t for t, c in found.items() if c.sharding_types == ["data_parallel"]] == replicated


@pytest.mark.parametrize(("device", "kernel"), [("cpu", "fused"), ("cuda", "fused_uvm")])
def test_rows_behind_slots_are_in_fbgemms_host_memory(device: str, kernel: str) -> None:
    slots = TablePlacement(tier=Tier.CACHED, cache_load_frac=0.3)
    placement = Placement(PARTITION, dict.fromkeys(NUM_ROWS, slots))
    constraints = placement_constraints(placement, device=device)
    assert constraints["big"].compute_kernels == [kernel]
    plan = make_plan(Model(placement), SHARDERS, machine(2, device), constraints)
    assert summary(plan_document(plan)["e"])["big"] == ("row_wise", kernel)
    for table in (replace(slots, exchange=Exchange.POOLED), replace(slots, cache_load_frac=None)):
        with pytest.raises(ValueError, match="table owned: .* in tier cached"):
            Placement(PARTITION, {**placement.tables, "owned": table})


@pytest.mark.parametrize("tier", [ColdTier.fused_uvm, CACHED])
def test_uvm_on_cpu_is_refused(tier: ColdTier) -> None:
    with pytest.raises(ValueError, match=rf"^placement\.cold_tier: .*on CPU.* got {tier.value}\."):
        cold_tier_for("cpu", tier)
    assert cold_tier_for("cuda", tier) is tier
    assert cold_tier_for("cuda", ColdTier.auto, on_cuda=tier) is tier
    assert cold_tier_for("cpu", ColdTier.auto, on_cuda=tier) is ColdTier.fused
    with pytest.raises(ValueError, match="expected"):  # also without asking first
        plan_of(None, machine(), tier)


# --- plans


def test_hot_cold_plan() -> None:
    document = plan_of(None, machine(3))
    assert summary(document) == HALVES
    # All rows, in original ids, whatever is hot.
    assert [shard["sizes"] for shard in document["big"]["shards"]] == [[334, 8], [334, 8], [332, 8]]
    assert document["small_hot"]["shards"] == []
    assert document["small_hot"]["ranks"] == [0, 1, 2]
    assert plan_of(None, machine(3)) == document  # every rank makes its own, and they must agree


@pytest.mark.parametrize("variant", list(TorchrecPlan))
def test_torchrec_plans(one_rank: Ranks, variant: TorchrecPlan) -> None:
    found = plan_of(variant, machine())
    types = {name: sharding for name, (sharding, _) in summary(found).items()}
    by_table = dict.fromkeys(NUM_ROWS, "table_wise")
    replicated = dict.fromkeys(("small", "pooled"), "data_parallel")
    expected = {TorchrecPlan.table_wise: by_table, TorchrecPlan.hand_tuned: by_table | replicated}
    assert types == expected.get(variant, types)
    assert plan_of(variant, machine()) == found


def plan_of_sequences() -> dict[str, Any]:
    """Column-wise shards of one part take as long as table-wise ones, by TorchRec's estimate."""
    tables = [
        EmbeddingConfig(name=n, num_embeddings=r, embedding_dim=64, feature_names=[f"f_{n}"])
        for n, r in (("a", 10), ("b", 1000))
    ]
    model = EmbeddingCollection(tables=tables, device=META)
    sharders: Any = [EmbeddingCollectionSharder(fused_params(SGD))]
    constraints = torchrec_constraints(
        tables, TorchrecPlan.planner, batch_size=64, may_replicate=False
    )
    return plan_document(make_plan(nn.Sequential(model), sharders, machine(), constraints))["0"]


def test_ranks_with_other_hash_seeds_make_the_same_plan() -> None:
    words = [sys.executable, "-c", f"from {__name__} import *; print(plan_of_sequences())"]
    ranks = [
        subprocess.Popen(words, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE)
        for seed in ("1", "3")
    ]
    first, second = (rank.communicate()[0] for rank in ranks)
    assert first == second
    assert first.count(b"table_wise") == 2


def test_document_is_json_and_the_text_says_the_same() -> None:
    constraints = hot_cold_constraints(tables(), PARTITION)
    plan = make_plan(Model(PARTITION), SHARDERS, machine(), constraints)
    document, text = plan_document(plan), plan_text(plan)
    assert json.loads(json.dumps(document)) == document
    lines = {line.split()[0]: line.split() for line in text.splitlines()}
    assert lines["module"] == ["module", "e"]
    assert lines["big"] == ["big", "row_wise", "fused", "500,", "500"]
    assert lines["small_hot"] == ["small_hot", "data_parallel", "dense", "all"]
    # A model that is itself the collection.
    plan = make_plan(Model(PARTITION).e, SHARDERS, machine(1), constraints)
    assert list(plan_document(plan)) == [""]
    assert plan_text(plan).startswith("module (root)\n")


def test_more_cache_sets_than_fbgemm_can_count_are_refused(one_rank: Ranks) -> None:
    config = EmbeddingBagConfig(
        name="t", num_embeddings=1 << 30, embedding_dim=4, feature_names=["f"]
    )
    model = EmbeddingBagCollection(tables=[config], device=META)
    sharders: Any = [EmbeddingBagCollectionSharder(fused_params(SGD))]

    def plan(load_factor: float) -> None:
        constraints = torchrec_constraints(
            [config],
            TorchrecPlan.table_wise,
            batch_size=64,
            tier=CACHED,
            cache_load_factor=load_factor,
        )
        on = machine(1, "cuda", device_bytes=1 << 40, host_bytes=1 << 40)
        make_plan(model, sharders, on, constraints)

    plan(0.49)
    with pytest.raises(
        ValueError, match=r"on rank 0: expected fewer than 16777215 sets .* got 1677"
    ):
        plan(0.5)


# --- memory


@pytest.mark.parametrize(
    ("on", "tier", "message"),
    [
        (machine(host_bytes=10_000), ColdTier.fused, "5000 bytes of host memory"),
        # A share of the free memory is kept for NCCL, activations and messages.
        (machine(2, "cuda", device_bytes=10_000), ColdTier.fused, "8500 bytes of device memory"),
        (machine(2, "cuda", host_bytes=10_000), ColdTier.fused_uvm, "5000 bytes of host memory"),
    ],
)
def test_tables_that_do_not_fit(on: Machine, tier: ColdTier, message: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^plan for 2 ranks on .*: .* to fit {message}"
    ) as caught:
        plan_of(None, on, tier)
    need = re.search(r"got (\d+) bytes on average over the ranks", str(caught.value))
    assert need is not None
    assert plan_of(
        None, replace(on, device_bytes=2 * int(need[1]), host_bytes=3 * int(need[1])), tier
    )


def test_replicas_count_against_the_memory_of_each_rank() -> None:
    """10 + 50 hot rows on each rank; the cold rows are shared out."""
    on = machine(4, host_bytes=4 * 4 * 8 * (1000 + 700 + 60))
    assert plan_of(None, on)
    all_hot = Partition(NUM_ROWS, {t: np.arange(r) for t, r in NUM_ROWS.items()})
    with pytest.raises(ValueError, match="expected the tables to fit"):
        make_plan(Model(all_hot), SHARDERS, on, hot_cold_constraints(tables(), all_hot))


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
    topology = topology_of(machine(2, "cuda"))
    tier = ColdTier(kernel)
    constraints = hot_cold_constraints(tables(), PARTITION, cold_tier=tier)
    sharders: Any = [HotColdSharder(OptimizerSpec(kind, learning_rate=0.1))]

    def storages(estimator: type[EmbeddingStorageEstimator]) -> dict[str, list[Any]]:
        estimators: Any = [
            EmbeddingPerfEstimator(topology, constraints),
            estimator(topology, constraints),
        ]
        enumerator = EmbeddingEnumerator(topology, 64, constraints, estimators)
        options = enumerator.enumerate(Model(PARTITION), sharders)
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
    assert beside["owned"] == [(of_element[0] + 350 * row, of_element[1])] * 2


@pytest.mark.parametrize(("state_bytes", "row_bytes"), [(0, 32), (4, 32), (32, 64), (64, 96)])
def test_what_host_tiers_map_is_that_of_the_fullest_host(state_bytes: int, row_bytes: int) -> None:
    """Rows with element-wise state; a state of one float and hot rows are on the device."""
    on = machine(4, "cuda", local_world_size=2)
    for tier, num_rows in ((ColdTier.fused, 0), (ColdTier.fused_uvm, 1760), (CACHED, 1760)):
        constraints = hot_cold_constraints(tables(), PARTITION, cold_tier=tier)
        plan = make_plan(Model(PARTITION), SHARDERS, on, constraints)
        assert host_tier_bytes(plan, 2, lambda dim: state_bytes) == num_rows // 2 * row_bytes


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
    assert make_machine(**shape).device_bytes == 63 << 30
    assert make_machine(hbm_gib=40, **shape).device_bytes == 40 << 30


# --- the machine


def costs(device: str, *, inter: Link | None = None, **kernels: Line) -> Costs:
    lines = {name: Line(per_item_s=1e-9) for name in REQUIRED} | kernels
    return Costs("c", "measured", device, lines, Link(1e-5, 8e9), inter, 0, 1 << 33)


def test_bandwidths_of_a_cpu_host() -> None:
    read = Line(per_item_s=56e-9, per_byte_s=1e-9 / 1.28)  # 256 bytes in 256 ns
    on = machine(costs=costs("cpu", pooled_device=read))
    topology = topology_of(on)
    assert topology.ddr_mem_bw == pytest.approx(1e9 / 1000, rel=1e-9)  # bytes per ms
    assert topology.intra_host_bw == pytest.approx(8e6)
    for kind in (CollectiveType.ALL_REDUCE, CollectiveType.ALL_TO_ALL):
        assert topology.comms_bandwidths.get_bw(2, 2, kind) == pytest.approx(8e6)


def test_bandwidths_of_gpus_on_two_hosts() -> None:
    device, host = Line(per_byte_s=1e-12), Line(per_byte_s=1e-10)
    found = costs("cuda", inter=Link(1e-5, 5e9), pooled_device=device, pooled_host=host)
    two = machine(8, "cuda", local_world_size=4, costs=found)
    topology = topology_of(two)
    assert topology.inter_host_bw == pytest.approx(5e9 / 4 / 1000)
    for kernel, expected in (("fused", 1e12), ("fused_uvm", 1e10)):
        bandwidth = kernel_bw_lookup(
            "cuda", kernel, topology.hbm_mem_bw, topology.ddr_mem_bw, topology.hbm_to_ddr_mem_bw
        )
        assert bandwidth == pytest.approx(expected / 1000), kernel


def test_a_kernel_without_a_cost_model_is_refused() -> None:
    tables = {"a": ParameterSharding("table_wise", "key_value", [0])}
    plan = ShardingPlan({"bags": EmbeddingModuleShardingPlan(tables)})
    with pytest.raises(ValueError, match=r"plan of table a: expected .*fused_uvm.* got key_value"):
        shardings_of(plan, {"a"}, None)
    assert shardings_of(plan, set(), None) == {}


def test_costs_of_another_machine_are_refused() -> None:
    with pytest.raises(CostsError, match=r"device: expected costs of a cpu machine, got cuda\."):
        topology_of(machine(costs=costs("cuda")))
    with pytest.raises(CostsError, match="expected the link between hosts"):
        topology_of(machine(costs=costs("cpu"), local_world_size=1))
    free = costs("cpu", pooled_device=Line(fixed_s=1e-6))
    with pytest.raises(CostsError, match="expected above 0 seconds for a row"):
        topology_of(machine(costs=free))
