"""Placement -> constraints, measured topology, cache statistics, and a planner of our own."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.constants import kernel_bw_lookup
from torchrec.distributed.planner.types import CollectiveType
from torchrec.distributed.types import CacheAlgorithm, ShardingPlanner
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from hotrec.cost_model.costs import REQUIRED, Costs, CostsError, Line, Link
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planning.constraints import MissCurve, offload_stats, placement_constraints
from hotrec.planning.machine import Machine
from hotrec.planning.torchrec_plan import HotColdPlanner, make_plan, plan_document
from hotrec.runtime.ranks import Ranks
from hotrec.types import (
    Exchange,
    OptimizerKind,
    Partition,
    Placement,
    Sharding,
    TablePlacement,
    Tier,
)
from tests.helpers.ranks import run_ranks

META = torch.device("meta")
NUM_ROWS = {"small": 10, "big": 1000, "owned": 700, "pooled": 60}
PARTITION = Partition(NUM_ROWS, {"small": np.arange(10), "big": np.arange(50)})
POOLED = TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE)
PLACEMENT = Placement(
    PARTITION,
    {
        "small": TablePlacement(),
        "big": TablePlacement(tier=Tier.HOST_CACHED, cache_load_frac=0.3),
        "owned": TablePlacement(sharding=Sharding.TABLE_WISE, tier=Tier.HOST),
        "pooled": POOLED,
    },
)
ON_CPU = Placement(
    PARTITION, {name: replace(t, tier=Tier.DEVICE) for name, t in PLACEMENT.tables.items()}
)
SHARDERS: Any = [HotColdSharder(OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1))]


class Model(nn.Module):
    def __init__(self, placement: Placement) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=8, feature_names=[f"f_{n}"])
            for n, r in NUM_ROWS.items()
        ]
        self.e = HotColdEmbeddingBagCollection(tables, placement, device=META)


def machine(device: str = "cpu", **kwargs: Any) -> Machine:
    facts = {"device_bytes": 1 << 30, "host_bytes": 1 << 33, "batch_size": 64, **kwargs}
    return Machine(2, facts.pop("local_world_size", 2), device, **facts)


def summary(placement: Placement, on: Machine) -> dict[str, tuple[str, str]]:
    plan = make_plan(Model(placement), SHARDERS, on, placement_constraints(placement))
    return {
        name: (table["sharding_type"], table["compute_kernel"])
        for name, table in plan_document(plan)["e"].items()
    }


def test_a_placement_becomes_constraints_and_a_plan() -> None:
    expected = {
        "small_hot": ("data_parallel", "dense"),  # wholly hot
        "big_hot": ("data_parallel", "dense"),
        "big": ("row_wise", "fused_uvm_caching"),
        "owned": ("table_wise", "fused_uvm"),
        "pooled": ("table_wise", "fused"),
    }
    constraints = placement_constraints(PLACEMENT)
    assert {name: (c.sharding_types, c.compute_kernels) for name, c in constraints.items()} == {
        name: ([sharding], [kernel]) for name, (sharding, kernel) in expected.items()
    }
    assert summary(PLACEMENT, machine("cuda")) == expected
    assert summary(ON_CPU, machine())["owned"] == ("table_wise", "fused")


def test_a_cache_gets_its_size_policy_and_statistics() -> None:
    curve = MissCurve(np.array([0.0, 500.0]), np.array([1.0, 0.2]), 37.6)
    constraints = placement_constraints(PLACEMENT, {"big": curve})
    cache = constraints["big"].cache_params
    assert cache is not None
    assert (cache.algorithm, cache.load_factor) == (CacheAlgorithm.LRU, 0.3)
    assert cache.stats is not None
    assert cache.stats.expected_lookups == 38
    assert cache.stats.expected_miss_rate(0.3) == pytest.approx(1 - 0.8 * 300 / 500, abs=2e-3)
    assert constraints["owned"].cache_params is None
    plan = make_plan(Model(PLACEMENT), SHARDERS, machine("cuda"), constraints)
    kept = plan.plan["e"]["big"].cache_params  # type: ignore[index]
    assert kept.load_factor == 0.3
    assert kept.stats.expected_lookups == 38


@pytest.mark.parametrize("fraction", [None, 0.0, 1.0])
def test_a_cache_without_a_size_is_refused(fraction: float | None) -> None:
    table = TablePlacement(tier=Tier.HOST_CACHED, cache_load_frac=fraction)
    placement = Placement(PARTITION, PLACEMENT.tables | {"big": table})  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"^placement table big cache_load_frac: expected between"):
        placement_constraints(placement)


def test_pooled_row_wise_is_refused() -> None:
    table = TablePlacement(Exchange.POOLED, Sharding.ROW_WISE)
    placement = Placement(PARTITION, PLACEMENT.tables | {"pooled": table})  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"^placement table pooled: .*table_wise.* got row_wise\."):
        placement_constraints(placement)


# --- statistics of caches


@pytest.mark.parametrize("num_rows", [1, 7, 1000, 100_000])
@pytest.mark.parametrize("skew", [0.8, 1.05, 1.2])
def test_torchrec_reads_back_the_curve_that_went_in(num_rows: int, skew: float) -> None:
    shares = np.arange(1, num_rows + 1) ** -skew
    misses = 1 - shares.cumsum() / shares.sum()
    sizes = np.unique(np.geomspace(1, num_rows, 400).astype(int))
    curve = MissCurve(sizes.astype(float), np.clip(misses[sizes - 1], 0, 1), num_rows / 3)
    stats = offload_stats(curve, num_rows)
    assert stats.expected_miss_rate(0.0) == 1.0
    assert stats.expected_miss_rate(1.0) == pytest.approx(0.0, abs=1e-9)
    bin_rows = num_rows / len(stats.hist)
    for size in sizes[:: max(1, len(sizes) // 40)]:
        found = stats.expected_miss_rate(float(size) / num_rows)
        first = curve.at(np.array([max(size - 2, 0.0)]), num_rows)[0]
        last = curve.at(np.array([min(size + bin_rows + 2, num_rows)]), num_rows)[0]
        assert last - 1e-6 <= found <= first + 1e-6, size
    # Where a bin ends, exact; and over the whole curve close.
    edges = np.linspace(0, num_rows, len(stats.hist) + 1)[1:]
    exact = curve.at(edges, num_rows)
    found = np.array([stats.expected_miss_rate(float(e) / num_rows) for e in edges[::97]])
    assert np.abs(found - exact[::97]).max() < 0.02
    at_all = curve.at(np.arange(num_rows + 1.0), num_rows)
    area = (at_all[1:] + at_all[:-1]).mean() / 2
    assert stats.cacheability == pytest.approx(area, abs=0.01)


@pytest.mark.parametrize(
    ("sizes", "misses", "lookups", "message"),
    [
        ([0.0, 5.0], [1.0], 1.0, "as many ratios as sizes"),
        ([], [], 1.0, "at least one"),
        ([5.0, 5.0], [1.0, 0.5], 1.0, "rising sizes"),
        ([0.0, 5.0], [0.5, 0.6], 1.0, "do not rise"),
        ([0.0, 5.0], [1.5, 0.6], 1.0, "in 0..1"),
        ([0.0, np.nan], [1.0, 0.6], 1.0, "rising sizes"),
        ([0.0, 5.0], [1.0, 0.6], -1.0, "expected_lookups: expected at least 0"),
    ],
)
def test_what_is_no_curve_is_refused(
    sizes: list[float], misses: list[float], lookups: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MissCurve(np.array(sizes), np.array(misses), lookups)


# --- measured machines


def costs(device: str, *, inter: Link | None = None, **kernels: Line) -> Costs:
    lines = {name: Line(per_item_s=1e-9) for name in REQUIRED} | kernels
    return Costs("c", "measured", device, lines, Link(1e-5, 8e9), inter, 0, 1 << 33)


def test_bandwidths_of_a_cpu_host() -> None:
    read = Line(per_item_s=56e-9, per_byte_s=1e-9 / 1.28)  # 256 bytes in 256 ns
    on = machine(costs=costs("cpu", pooled_device=read))
    topology = on.topology()
    assert topology.ddr_mem_bw == pytest.approx(1e9 / 1000, rel=1e-9)  # bytes per ms
    assert topology.intra_host_bw == pytest.approx(8e6)
    for kind in (CollectiveType.ALL_REDUCE, CollectiveType.ALL_TO_ALL):
        assert topology.comms_bandwidths.get_bw(2, 2, kind) == pytest.approx(8e6)
    assert machine().bandwidths() == {}


def test_bandwidths_of_gpus_on_two_hosts() -> None:
    device, host = Line(per_byte_s=1e-12), Line(per_byte_s=1e-10)
    found = costs("cuda", inter=Link(1e-5, 5e9), pooled_device=device, pooled_host=host)
    topology = replace(machine("cuda"), world_size=8, local_world_size=4, costs=found).topology()
    assert topology.inter_host_bw == pytest.approx(5e9 / 4 / 1000)
    for kernel, expected in (("fused", 1e12), ("fused_uvm", 1e10)):
        bandwidth = kernel_bw_lookup(
            "cuda", kernel, topology.hbm_mem_bw, topology.ddr_mem_bw, topology.hbm_to_ddr_mem_bw
        )
        assert bandwidth == pytest.approx(expected / 1000), kernel


def test_costs_of_another_machine_are_refused() -> None:
    with pytest.raises(CostsError, match=r"device: expected costs of a cpu machine, got cuda\."):
        machine(costs=costs("cuda")).topology()
    with pytest.raises(CostsError, match="expected the link between hosts"):
        machine(costs=costs("cpu"), local_world_size=1).topology()
    free = costs("cpu", pooled_device=Line(fixed_s=1e-6))
    with pytest.raises(CostsError, match="expected above 0 seconds for a row"):
        machine(costs=free).topology()


# --- memory


def needed(message: str) -> dict[str, int]:
    return {
        "have": int(re.search(r"fit (\d+) bytes", message)[1]),  # type: ignore[index]
        "replicas": int(re.search(r"got (\d+) bytes of replicas", message)[1]),  # type: ignore[index]
        "shards": int(re.search(r"and (\d+) bytes of shards", message)[1]),  # type: ignore[index]
    }


def test_the_nearest_change_that_is_named_makes_it_fit() -> None:
    table_wise = dict.fromkeys(NUM_ROWS, TablePlacement())
    placement = Placement(Partition(NUM_ROWS, {"big": np.arange(900)}), table_wise)
    model, constraints = Model(placement), placement_constraints(placement)
    with pytest.raises(ValueError, match="expected the tables to fit") as caught:
        make_plan(model, SHARDERS, machine(host_bytes=100_000), constraints)
    message = str(caught.value)
    found = needed(message)
    assert found["have"] == 50_000
    assert found["replicas"] + found["shards"] / 2 > 50_000
    assert "Nearest changes: " in message
    enough = 2 * (found["replicas"] + found["shards"])
    assert make_plan(model, SHARDERS, machine(host_bytes=enough), constraints)


def test_a_table_too_large_for_one_rank_is_named() -> None:
    tables = dict.fromkeys(NUM_ROWS, TablePlacement())
    tables["big"] = TablePlacement(sharding=Sharding.TABLE_WISE)
    placement = Placement(Partition(NUM_ROWS), tables)
    rows_bytes = 4 * 8 * sum(NUM_ROWS.values())
    failures = 0
    for host_bytes in range(rows_bytes, 8 * rows_bytes, rows_bytes // 4):
        try:
            make_plan(
                Model(placement), SHARDERS, machine(host_bytes=host_bytes),
                placement_constraints(placement),
            )  # fmt: skip
        except ValueError as error:
            failures += "one by one, the largest of table big" in str(error)
    assert failures > 0


# --- the planner


def test_planner_stands_in_for_torchrecs(one_rank: Ranks) -> None:
    planner = HotColdPlanner(ON_CPU, machine=machine())
    assert isinstance(planner, ShardingPlanner)
    plan = planner.plan(Model(ON_CPU), SHARDERS)
    torchrecs = EmbeddingShardingPlanner(
        topology=machine().topology(), batch_size=64, constraints=planner.constraints
    )
    assert plan_document(plan) == plan_document(torchrecs.plan(Model(ON_CPU), SHARDERS))
    by_topology = HotColdPlanner(ON_CPU, topology=machine().topology(), batch_size=64)
    assert plan_document(by_topology.collective_plan(Model(ON_CPU), SHARDERS)) == plan_document(
        plan
    )
    assert "big_hot" in HotColdPlanner(PARTITION, machine=machine()).constraints
    with pytest.raises(ValueError, match="expected a list with a HotColdSharder, got None"):
        planner.collective_plan(Model(ON_CPU))


@pytest.mark.parametrize("given", [{}, {"batch_size": 3}, {"machine": machine(), "batch_size": 3}])
def test_planner_wants_one_description_of_the_machine(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected a machine alone, or a topology and a batch"):
        HotColdPlanner(ON_CPU, **given)


def plan_on_ranks() -> list[Any]:
    results: list[Any] = []
    broken: Any = [object()] if dist.get_rank() == 0 else SHARDERS
    for on, sharders in (
        (machine(), SHARDERS),
        (machine(host_bytes=10_000), SHARDERS),
        (machine(), broken),
    ):
        try:
            plan = HotColdPlanner(ON_CPU, machine=on).collective_plan(Model(ON_CPU), sharders)
            results.append(plan_document(plan))
        except Exception as error:
            results.append((isinstance(error, ValueError), str(error)))
    return results


def test_every_rank_ends_with_the_same_plan_or_the_same_error() -> None:
    first, second = run_ranks(plan_on_ranks, 2, timeout_s=60)
    assert first == second
    assert first[0]["e"]["owned"]["sharding_type"] == "table_wise"
    assert first[1][0]
    assert "expected the tables to fit" in first[1][1]
    assert first[2][1]
