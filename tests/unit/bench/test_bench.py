"""The parts of `hotrec bench` and of the benchmark scripts that need no ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import cpu_rows, networks_page, one_gpu, routing_speed
from hotrec.bench.blocks import Block, step_seconds, whole_step_seconds
from hotrec.bench.cases import case_config, choose_hot_rows, make_cases
from hotrec.bench.figures import Measured, imbalance, losses_apart, step_ratio, summarize
from hotrec.bench.machine import interface_sent_bytes
from hotrec.bench.measure import OTHER, stage_of, takes_part
from hotrec.bench.page import render_page
from hotrec.bench.samples import ZipfTables, assigned_batches
from hotrec.cli.store import build_config, compose_config
from hotrec.config.roots import BenchCase, BenchConfig, BenchRootConfig, HotRowsRule
from hotrec.data.batch import Batch
from hotrec.data.locality import ByOwner, Shard
from hotrec.planning.predict import Baseline
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import COLLECTIVES
from hotrec.types import STAGES, ColdTier, HotExchange, OptimizerKind, PipelineKind, WireType

REPOSITORY = Path(__file__).parents[3]


def root_config(*words: str) -> BenchRootConfig:
    config: BenchRootConfig = build_config(compose_config("bench", ["bench=smoke", *words]))
    return config


def bench_config(*words: str) -> BenchConfig:
    return root_config(*words).bench


def zipf_tables(rows: list[int] | None = None, seed: int = 0) -> ZipfTables:
    return ZipfTables(rows or [1000, 10], exponent=1.05, num_dense=2, seed=seed)


# The configuration.


def test_criteo_like_has_the_design_s_tables() -> None:
    bench = build_config(compose_config("bench", ["bench=criteo_like_b8192"])).bench
    assert len(bench.table_rows) == 26
    assert 4.9e6 < sum(bench.table_rows) < 5.0e6
    assert bench.batch_size == 8192
    assert bench.name == "criteo_like_b8192"
    assert bench.cases == [case.name for case in BenchCase]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("bench.cases=[]", "bench.cases: expected at least one value, got \\[\\]"),
        ("bench.cases=[planner,planner]", "got \\['planner', 'planner'\\]"),
        ("bench.cases=[planer]", "bench.cases: expected some of .*'look_ahead'.*, got 'planer'"),
        ("bench.block_skip=3", "bench.block_skip: expected below bench.block_steps 3, got 3"),
        ("bench.pipeline=look_ahead", "bench.pipeline: expected sparse_dist or base.*look_ahead"),
        (
            "bench.variants.planner_variant.pipeline=look_ahead",
            "bench.variants.planner_variant.pipeline: expected another than look_ahead",
        ),
        (
            "bench.variants.planner_variant.num_hot_rows=3",
            "bench.variants.planner_variant.num_hot_rows: expected null .*planner, got 3",
        ),
        (
            "bench.variants.hot_cold_base.depth=2",
            "bench.variants.hot_cold_base: expected depth 1 .* base, got depth 2",
        ),
        (
            "bench.variants.look_ahead.depth=-1",
            "bench.variants.look_ahead.depth: expected a value at least 0",
        ),
        (
            "bench.variants.planner_variant.assign=by_owner",
            "bench.variants.planner_variant.assign: expected as_read .* planner, .* by_owner",
        ),
        (
            "bench.variants.look_ahead.pipeline=prefetch",
            "bench.variants.look_ahead.pipeline: expected prefetch only .* hot_cold and the tier",
        ),
        (
            "bench.variants.planner_variant.pipeline=prefetch",
            "bench.variants.planner_variant.pipeline: expected prefetch only .* planner and the",
        ),
        (
            "bench.variants.planner_variant.pipeline=auto",
            "bench.variants.planner_variant.pipeline: expected sparse_dist, .* got auto",
        ),
        ("bench.pipeline=auto", "bench.pipeline: expected sparse_dist or base.*auto"),
        ("bench.pipeline=prefetch", "bench.pipeline: expected sparse_dist or base.*prefetch"),
        (
            "bench.variants.look_ahead.cache_load_frac=1",
            "bench.variants.look_ahead.cache_load_frac: expected a value above 0 and below 1",
        ),
        ("bench.table_rows=[3,0]", "bench.table_rows\\[1\\]: expected a value at least 1, got 0"),
        ("+bench.rounds_of.warm=3", "bench.rounds_of: expected one of .*, got 'warm'"),
        (
            "bench.rounds_of.all_hot=0",
            "bench.rounds_of.all_hot: expected a value at least 1, got 0",
        ),
        ("bench.rounds=0", "bench.rounds: expected a value at least 1, got 0"),
        ("model.dense_layer_sizes=[8]", "model.dense_layer_sizes: expected the last"),
    ],
)
def test_bad_values_are_refused_with_their_key(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench_config(word)


# Samples and hot rows.


def test_samples_depend_on_seed_and_rank_alone() -> None:
    def draw(seed: int, rank: int) -> torch.Tensor:
        (batch,) = zipf_tables(seed=seed).batches(1, batch_size=50, rank=rank, world_size=2)
        return torch.cat([batch.sparse.values(), batch.dense.flatten(), batch.labels])

    assert torch.equal(draw(0, 0), draw(0, 0))
    assert not torch.equal(draw(0, 0), draw(0, 1))
    assert not torch.equal(draw(0, 0), draw(1, 0))


@pytest.mark.parametrize("world_size", [1, 3])
def test_samples_by_owner_are_all_ranks_samples(world_size: int) -> None:
    tables, size = zipf_tables(), 40
    shards = {"C1": [Shard(rank * 400, rank) for rank in range(world_size)]}
    by_owner = ByOwner(tables.schema, shards, {})

    def rows(batch: Batch) -> torch.Tensor:
        """Everything of each sample, (B, values)."""
        ids = batch.sparse.values().view(2, -1).T
        return torch.cat([ids.double(), batch.dense.double(), batch.labels[:, None]], dim=1)

    for_each = [
        assigned_batches(
            tables,
            by_owner,
            2,
            batch_size=size,
            ranks=Ranks(rank, world_size, rank, world_size, torch.device("cpu")),
        )
        for rank in range(world_size)
    ]
    for step in range(2):
        as_read = [
            tables.batches(2, batch_size=size, rank=rank, world_size=world_size)[step]
            for rank in range(world_size)
        ]
        assigned = [batches[step] for batches in for_each]
        before, after = (torch.cat([rows(b) for b in each]) for each in (as_read, assigned))
        assert [len(batch.labels) for batch in assigned] == [size] * world_size
        assert sorted(before.tolist()) == sorted(after.tolist())
        assert torch.equal(before, after) == (world_size == 1)
        assert assigned[0].num_global_samples == size * world_size


def test_counts_foretell_the_samples() -> None:
    tables = zipf_tables([500])
    counts = tables.count(1_000_000)["C1"]
    assert counts.sum() == 1_000_000
    (batch,) = tables.batches(1, batch_size=100_000, rank=0, world_size=1)
    found = np.bincount(batch.sparse.values().numpy(), minlength=500)
    top = np.argsort(-counts)[:20]
    # k^-1.05 normalized: the most popular of 500 rows takes about 16% of the lookups.
    expected = np.arange(1, 501) ** -1.05
    assert counts[top[0]] / 1e6 == pytest.approx(1 / expected.sum(), rel=0.02)
    assert found[top] / 1e5 == pytest.approx(counts[top] / 1e6, rel=0.15)
    # Rows are numbered without regard to popularity: no half of the table has all popular rows.
    assert 2 < (top < 250).sum() < 18


def test_hot_rows_are_the_most_looked_up() -> None:
    counts = {"a": np.array([5, 9, 0, 7]), "b": np.array([8, 1])}
    bench = bench_config("bench.table_rows=[4,2]", "bench.num_hot_rows=3")
    partition = choose_hot_rows(bench, counts, world_size=2)
    assert partition.hot("a").tolist() == [1, 3]
    assert partition.hot("b").tolist() == [0]


def test_break_even_takes_rows_that_a_global_batch_reads_often_enough() -> None:
    counts = {"a": np.array([10, 9, 20])}
    bench = bench_config(
        "bench.hot_rows=break_even",
        "bench.min_accesses_per_step=2",
        "bench.batch_size=10",
        "bench.profile_samples=100",
        "bench.table_rows=[3]",
    )
    assert bench.hot_rows is HotRowsRule.break_even
    # 20 samples of 100 a step: 10 lookups in the profile are 2 a step.
    partition = choose_hot_rows(bench, counts, world_size=2)
    assert partition.hot("a").tolist() == [2, 0]


def test_more_hot_rows_than_rows_are_refused() -> None:
    bench = bench_config("bench.table_rows=[2]", "bench.num_hot_rows=3")
    with pytest.raises(ValueError, match="at most the tables' 2 rows, got 3"):
        choose_hot_rows(bench, {"a": np.array([1, 1])}, world_size=1)


def test_cases_are_configurations_of_train() -> None:
    bench = bench_config("bench.num_hot_rows=1")
    counts = zipf_tables(list(bench.table_rows)).count(1000)
    cases = {case.name: case for case in make_cases(bench, counts, world_size=2)}
    assert list(cases) == [case.name for case in BenchCase]
    total = sum(bench.table_rows)
    hot = {name: c.partition.total_hot for name, c in cases.items() if c.partition is not None}
    assert hot == {"hot_cold": 1, "all_cold": 0, "all_hot": total}


def test_a_variant_is_a_placement_and_a_pipeline() -> None:
    config = root_config(
        "bench.cases=[look_ahead,look_ahead_bf16,hot_cold_base,hot_cold]",
        "bench.variants.look_ahead.depth=3",
    )
    counts = zipf_tables(list(config.bench.table_rows)).count(1000)
    cases = {case.name: case for case in make_cases(config.bench, counts, world_size=2)}
    pipelines = {name: case_config(config, case).pipeline for name, case in cases.items()}
    assert {name: pipeline.kind for name, pipeline in pipelines.items()} == {
        "look_ahead": PipelineKind.look_ahead,
        "look_ahead_bf16": PipelineKind.look_ahead,
        "hot_cold_base": PipelineKind.base,
        "hot_cold": PipelineKind.sparse_dist,
    }
    assert (pipelines["look_ahead"].depth, pipelines["look_ahead_bf16"].depth) == (3, 1)
    assert pipelines["look_ahead_bf16"].wire is WireType.bf16
    assert [name for name, case in cases.items() if not case.is_exact] == ["look_ahead_bf16"]
    base: Any = cases["hot_cold_base"]
    assert base.placement.hot_exchange is HotExchange.dense
    assert (base.partition.total_hot, cases["hot_cold"].partition.total_hot) == (10, 60)


def test_torchrecs_host_tiers_are_cases() -> None:
    config: BenchRootConfig = build_config(compose_config("bench", ["bench=host_tiers"]))
    counts = zipf_tables(list(config.bench.table_rows)).count(1000)
    cases = {case.name: case for case in make_cases(config.bench, counts, world_size=1)}
    built = {name: case_config(config, case) for name, case in cases.items()}
    assert {name: Baseline.of(built[name]).name for name in cases if "planner" in name} == {
        "planner": "torchrec planner",
        "planner_uvm": "torchrec planner fused_uvm",
        "planner_cache": "torchrec planner fused_uvm_caching prefetch",
    }
    cache: Any = built["planner_cache"].placement
    cold: Any = built["all_cold_cache"].placement
    assert cache.cache_load_frac == 0.1
    assert (cold.cold_tier, cold.cache_load_frac) == (ColdTier.fused_uvm_caching, 0.1)
    assert all(case.is_exact for case in cases.values())


# Measuring and adding up.


def test_rounds_of_a_slow_case_are_spread_evenly() -> None:
    assert [r for r in range(12) if takes_part(r, 12, 3)] == [3, 7, 11]
    assert all(takes_part(r, 12, 12) for r in range(12))


def sent(**num_bytes: int) -> dict[str, int]:
    return dict.fromkeys(COLLECTIVES, 0) | num_bytes


def block_of(returned_s: list[float], ended_s: float, num_skipped: int = 0) -> Block:
    """On whose rank two threads ran all the time, the main one a quarter of it."""
    return Block(returned_s, ended_s, num_skipped, 2 * ended_s, 0.25 * ended_s)


def one_step(step_s: float) -> Block:
    return block_of([step_s], step_s)


def measured(**changes: Any) -> Measured:
    fields: dict[str, Any] = {
        "is_exact": True,
        "bytes_per_value": 4,
        "blocks": {0: one_step(1.0), 1: one_step(3.0)},
        "stage_s": dict.fromkeys(STAGES, np.empty(0)),
        "losses": [0.5, 0.4],
        "sent_bytes": sent(all_to_all=100, all_reduce=20),
        "wire_bytes": None,
        "num_distinct": [10],
        "num_lookups": [40],
        "num_hot_lookups": [30],
        "served": [4, 2],
        "memory_bytes": 7,
        "num_dense_values": 3,
    }
    return Measured(**{**fields, **changes})


def test_a_step_ends_when_the_last_rank_returns() -> None:
    # The one rank is late at the second step, the other one at the third: the block takes 7 s.
    blocks = [block_of([1.0, 4.0, 5.0], 7.0, 1), block_of([1.5, 2.0, 6.0], 6.5, 1)]
    assert step_seconds(blocks).tolist() == [2.5, 2.0]
    assert whole_step_seconds(blocks) == pytest.approx(7 / 3)
    assert blocks[0].own_step_s().tolist() == [3.0, 1.0]


def test_what_is_left_under_way_is_in_the_whole_blocks() -> None:
    figures = summarize(
        {
            "hot_cold": [measured(blocks={0: block_of([1.0, 2.0], 6.0)})],
            "planner": [measured(blocks={0: block_of([2.0, 4.0], 4.0)})],
        },
        global_batch_size=1,
        dim=2,
    )
    assert figures["hot_cold"]["step_p50_s"] == 1.0
    assert figures["hot_cold"]["whole_step_s"] == 3.0
    against = figures["hot_cold"]["against"]["planner"]
    assert (against["step_ratio"], against["whole_step_ratio"]) == (0.5, 1.5)


def test_processor_time_is_of_whole_blocks() -> None:
    idle = block_of([1.0, 2.0, 3.0], 3.0, num_skipped=1)
    busy = block_of([1.0, 2.0, 3.0], 8.0, num_skipped=1)
    figures = summarize(
        {"a": [measured(blocks={0: idle, 1: busy}), measured(blocks={0: idle, 1: idle})]},
        global_batch_size=1,
        dim=2,
    )["a"]
    # 11 s of blocks over 6 steps on the one rank, 1 s a step on the other one; two threads.
    assert figures["cpu_s"] == pytest.approx((2 * 11 / 6 + 2) / 2)
    assert figures["main_cpu_s"] == pytest.approx(figures["cpu_s"] / 8)


def test_exposed_is_the_main_thread_s_waiting() -> None:
    stages = {stage: np.full(2, 0.1) for stage in STAGES}
    others = {stage: np.full(2, 0.05) for stage in STAGES}
    blocks = {0: block_of([1.0, 2.0, 3.0], 3.0, 1)}
    figures = summarize(
        {"a": [measured(blocks=blocks, stage_s=stages), measured(blocks=blocks, stage_s=others)]},
        global_batch_size=1,
        dim=2,
    )["a"]
    # Four of the stages are exchanges: 0.4 s and 0.2 s of steps of 1 s.
    assert figures["exposed_s"] == pytest.approx(0.3)
    assert figures["exposed_frac"] == pytest.approx(0.3)
    assert figures["exposed_frac_most"] == pytest.approx(0.4)
    assert figures["stage_s"]["dense"] == pytest.approx(0.075)


def test_stale_and_rounded_losses_are_not_held_against_the_exact_ones() -> None:
    figures = summarize(
        {
            "stale": [measured(is_exact=False, losses=[0.9, 0.9])],
            "first": [measured()],
            "wrong": [measured(losses=[0.5, 0.5])],
        },
        global_batch_size=1,
        dim=2,
    )
    assert figures["stale"]["largest_loss_difference"] == pytest.approx(0.5)
    assert losses_apart(figures, 1e-3) == ["wrong"]


def test_bytes_are_those_of_a_step() -> None:
    counted = measured(
        sent_bytes=sent(all_to_all=300), wire_bytes=330, num_distinct=[10, 12, 14],
        num_lookups=[40] * 3, num_hot_lookups=[30] * 3,
    )  # fmt: skip
    figures = summarize({"a": [counted]}, global_batch_size=1, dim=2)["a"]
    assert (figures["sent_bytes"], figures["wire_bytes"]) == (100, 110)
    assert figures["sent_bytes_by_collective"]["all_to_all"] == 100
    assert figures["num_distinct_rows"] == 12


def test_summary() -> None:
    slow_at_first = measured(blocks={0: one_step(2.0), 1: one_step(1.0)}, losses=[0.7, 0.6])
    figures = summarize(
        {
            "hot_cold": [measured(), slow_at_first],
            "planner": [
                measured(
                    blocks={0: one_step(4.0), 1: one_step(12.0)},
                    losses=[0.6, 0.50005],
                    sent_bytes=sent(all_to_all=480),
                )
            ]
            * 2,
        },
        global_batch_size=50,
        dim=2,
    )
    ours = figures["hot_cold"]
    # The slowest rank needs 2 s and 3 s.
    assert ours["step_p50_s"] == 2.5
    assert ours["samples_per_s"] == 20
    assert ours["sent_bytes"] == 120
    # 2 U D 4 / 2 = 80; the dense layers' 3 values add 12.
    assert (ours["bound_bytes"], ours["bound_with_dense_bytes"]) == (80, 92)
    assert ours["bytes_over_bound"] == pytest.approx(120 / 92)
    assert ours["embedding_bytes_over_bound"] == pytest.approx(108 / 80)
    assert ours["hot_lookups_frac"] == 0.75
    assert ours["served_most_over_mean"] == pytest.approx(8 / 6)
    assert ours["final_loss"] == pytest.approx(0.5)
    against = ours["against"]["planner"]
    assert against["step_ratio"] == pytest.approx((2 / 4 + 3 / 12) / 2)
    assert against["bytes_ratio"] == 0.25
    assert figures["planner"]["largest_loss_difference"] == pytest.approx(5e-5)
    assert losses_apart(figures, 1e-4) == []
    assert losses_apart(figures, 1e-5) == ["planner"]


def test_a_loss_that_is_no_number_agrees_with_none() -> None:
    nan = float("nan")
    figures = {
        "a": {"is_exact": True, "largest_loss_difference": nan},
        "b": {"is_exact": True, "largest_loss_difference": 0.0},
    }
    assert losses_apart(figures, 1e-4) == ["a"]


def test_ratios_are_of_rounds_that_both_made() -> None:
    assert step_ratio({3: 2.0}, {0: 100.0, 3: 1.0})["step_ratio"] == 2.0
    assert step_ratio({1: 2.0}, {0: 1.0}) == {}


def test_imbalance() -> None:
    assert imbalance([30, 10]) == 1.5
    assert imbalance([0, 0]) is None


@pytest.mark.parametrize(
    ("names", "stage"),
    [
        (("aten::sort", "## start_sparse_data_dist 3 ##"), "routing"),
        (("c10d::alltoall_base_", "## start_sparse_data_dist 3 ##"), "waiting and exchange"),
        (("aten::copy_", "aten::embedding_bag", "_PoolRowsBackward"), "pooling"),
        (("aten::index_add_", "_ReadAndUpdateBackward"), "row update"),
        (("aten::mm", "AddmmBackward0"), "dense layers"),
        (("aten::cat",), OTHER),
    ],
)
def test_stages(names: tuple[str, ...], stage: str) -> None:
    assert stage_of(names) == stage


def test_interface_counter_names_what_there_is() -> None:
    with pytest.raises(ValueError, match="bench.interface: expected one of .*, got 'none0'"):
        interface_sent_bytes("none0")
    assert interface_sent_bytes("lo") >= 0


def test_the_page_says_what_happened() -> None:
    case = summarize({"all_hot": [measured(wire_bytes=130)]}, global_batch_size=1, dim=2)
    document = {
        "name": "n", "world_size": 1, "num_hosts": 1, "network": "wet string", "interface": "e0",
        "optimizer": "sgd", "pipelines": {"all_hot": "look_ahead depth 2"}, "routing": "main",
        "rounds": 9, "block_steps": 12, "block_skip": 3,
        "warmup_rounds": 1, "counted_steps": 1, "loss_tolerance": 1e-4, "partitions": {},
        "data": {"num_tables": 1, "num_rows": 5, "zipf_exponent": 1.0, "embedding_dim": 2,
                 "batch_size": 3, "num_dense_values": 4},
        "cases": case, "losses_apart": ["all_hot"], "stages_s": {"all_hot": {"routing": 0.25}},
        "machine": {"processor": "P", "num_cores": 2, "memory_bytes": 1, "gpu": None, "kernel": "k",
                    "python": "3", "packages": {"torch": "2"}, "threads_per_rank": 1, "malloc": {},
                    "code": "c", "load_average": 0.0, "load_average_after": 0.0},
    }  # fmt: skip
    page = render_page(document, command="hotrec bench x=1", configuration="a: b\n")
    for text in ("wet string", "`hotrec bench x=1`", "a: b", "all_hot (2)", "Losses differ",
                 "inside the timed step", "130 B", "250 ms", "look_ahead depth 2 (all_hot)",
                 "blocks of 12 consecutive", "of a block (3 here)"):  # fmt: skip
        assert text in page, text


# The scripts.


def test_one_gpu_refuses_a_budget_that_holds_everything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        one_gpu.parse(["--table-gib", "1", "--budget-gib", "2"])
    assert "below --table-gib 1, got 2" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_one_gpu_says_that_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert one_gpu.main([]) == 77
    assert "expected a CUDA device" in capsys.readouterr().err


def test_one_gpu_cases_cost_the_same_gpu_memory() -> None:
    options = one_gpu.parse(["--table-gib", "0.01", "--budget-gib", "0.002"])
    config = one_gpu.make_config(options)
    dim, budget = config.model.embedding_dim, 0.002 * one_gpu.GIB
    num_bytes = 4 * dim * sum(config.bench.table_rows)
    assert num_bytes == pytest.approx(0.01 * one_gpu.GIB, rel=0.01)
    counts = {
        f"C{i}": np.arange(1, rows + 1) for i, rows in enumerate(config.bench.table_rows, start=1)
    }
    choose = one_gpu.case_chooser(budget, dim)
    cases = {case.name: case for case in choose(config.bench, counts, 1)}

    def cost(name: str) -> float:
        placement: Any = cases[name].placement
        partition = cases[name].partition
        hot = 0 if partition is None else partition.total_hot * one_gpu.hot_row_bytes(dim)
        tier = getattr(placement, "cold_tier", None) or placement.tier
        cached = placement.cache_load_frac if tier.name == "fused_uvm_caching" else 0.0
        return hot + cached * num_bytes

    assert cost("uvm") == 0
    for name in ("uvm_cache", "uvm_cache_prefetch", "hot_cold_uvm", "hot_cold_cache"):
        assert cost(name) == pytest.approx(budget, rel=1e-3), name


@pytest.mark.parametrize(("place", "device_gib", "host_gib"), [("GPU", 17, 100), ("host", 40, 45)])
def test_one_gpu_refuses_tables_that_do_not_fit(place: str, device_gib: int, host_gib: int) -> None:
    one_gpu.check_memory(8.0, 1.0, device_bytes=18 * one_gpu.GIB, host_bytes=46 * one_gpu.GIB)
    with pytest.raises(ValueError, match=f"--table-gib: expected .* free {place} memory, got .* 8"):
        one_gpu.check_memory(
            8.0, 1.0, device_bytes=device_gib * one_gpu.GIB, host_bytes=host_gib * one_gpu.GIB
        )


def test_cpu_rows_measures_every_kernel() -> None:
    times = cpu_rows.measure(
        OptimizerKind.sgd, num_rows=40, num_tables=2, table_rows=100, dim=8, repeats=1
    )
    assert set(times) == {"fbgemm_unpooled", "fbgemm_pooled", "hotrec"}
    assert all(0 < t["forward_s"] < 1 for t in times.values())


def test_routing_speed_counts_every_id(capsys: pytest.CaptureFixture[str]) -> None:
    routing_speed.main(
        ["--bench", "smoke", "--batch-size", "30", "--multi-hot", "2", "--repeats", "1"]
    )
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["num_ids"] == 5 * 30 * 2
    assert result["ids_per_core_s"] > 0


def networks_document(step_s: float, exposed_frac: float) -> dict[str, Any]:
    def waiting(frac: float) -> dict[str, np.ndarray]:
        stages = {stage: np.zeros(1) for stage in STAGES}
        return {**stages, "rows_exchange": np.full(1, frac * step_s), "dense": np.ones(1)}

    cases = summarize(
        {
            "look_ahead": [measured(blocks={0: one_step(step_s)}, stage_s=waiting(exposed_frac))],
            "planner": [measured(blocks={0: one_step(4.2)}, stage_s=waiting(0.0))],
            "hand_tuned": [measured(blocks={0: one_step(2.4)}, stage_s=waiting(0.0))],
        },
        global_batch_size=1,
        dim=2,
    )
    return {
        "cases": cases, "losses_apart": [], "rounds": 3, "block_steps": 12, "block_skip": 2,
        "pipelines": dict.fromkeys(cases, "look_ahead"), "routing": "main", "optimizer": "sgd",
        "partitions": {"look_ahead": {"num_hot_rows": 77}},
        "data": {"num_tables": 1, "num_rows": 5, "zipf_exponent": 1.0, "embedding_dim": 2,
                 "num_dense_values": 4},
        "machine": {"processor": "P", "num_cores": 2, "kernel": "k", "python": "3",
                    "packages": {"torch": "2"}, "threads_per_rank": 1, "code": "c",
                    "load_average": 0.0, "load_average_after": 0.0},
    }  # fmt: skip


def test_the_page_of_networks_says_which_targets_are_reached(tmp_path: Path) -> None:
    (tmp_path / "1gbit-w2-b2048.json").write_text(json.dumps(networks_document(1.0, 0.16)))
    (tmp_path / "1gbit-w4-b8192.json").write_text(json.dumps(networks_document(0.01, 0.0)))
    networks_page.main([str(tmp_path)])
    rows = networks_page.verdicts(networks_page.read(tmp_path))
    found = {(network, case, what): rest for network, case, what, *rest in rows}
    assert found[("1gbit", "look_ahead", "faster than planner")] == ["at least 4x", "4.20x", "yes"]
    assert found[("1gbit", "look_ahead", "faster than hand_tuned")][1:] == ["2.40x", "**no**"]
    assert found[("1gbit", "look_ahead", "exposed share of the step")][1:] == ["16.0%", "**no**"]
    assert found[("loopback", "look_ahead", "faster than planner")][1:] == ["-", "not measured"]
    page = (tmp_path / "networks.md").read_text()
    for text in ("1gbit, 2 ranks, B = 2,048", "1gbit, 4 ranks, B = 8,192", "**no**", "| 77 |"):
        assert text in page, text
    assert (tmp_path / "networks.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_of_no_networks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected .*-w.*json of networks.sh, got none"):
        networks_page.main([str(tmp_path)])


def test_two_hosts_says_why_it_is_skipped(tmp_path: Path) -> None:
    script = REPOSITORY / "benchmarks" / "two_hosts.sh"
    (tmp_path / "bin").mkdir()
    for name in ("ip", "tc"):
        program = tmp_path / "bin" / name
        program.write_text('#!/bin/sh\necho "Operation not permitted" >&2\nexit 1\n')
        program.chmod(0o755)
    done = subprocess.run(
        [script],
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 77
    assert "skipped: network namespaces cannot be made here" in done.stderr
    assert "Operation not permitted" in done.stderr
