"""The parts of `hotrec bench` that need no ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.bench.benchmark import measure
from hotrec.bench.cases import Case
from hotrec.bench.figures import Measured, ids_by_table, losses_apart, summarize
from hotrec.bench.job import choose_hot_rows, make_benchmark, make_cases
from hotrec.bench.machine import interface_sent_bytes
from hotrec.bench.measure import takes_part
from hotrec.bench.page import render_page, result_text
from hotrec.bench.samples import ZipfTables
from hotrec.bench.stored import StoredSamples
from hotrec.cli.store import build_config, compose_config
from hotrec.config.data import SyntheticSpec
from hotrec.config.roots import BenchCase, BenchRootConfig, HotRowsRule
from hotrec.data.batch import Batch
from hotrec.data.locality import ByOwner, ShardOwner
from hotrec.data.synthetic import write_synthetic
from hotrec.planner.plan import SplitTables, TorchrecTables
from hotrec.runtime.ranks import Ranks, process_group
from hotrec.runtime.traffic import COLLECTIVES
from hotrec.train.interleave import Block, step_seconds
from hotrec.types import STAGES, HotExchange, Tier
from tests.unit.report.golden import check_golden


def root_config(*words: str) -> BenchRootConfig:
    config: BenchRootConfig = build_config(compose_config("bench", ["bench=smoke", *words]))
    return config


def zipf_tables(rows: list[int] | None = None, seed: int = 0) -> ZipfTables:
    return ZipfTables(rows or [1000, 10], exponent=1.05, num_dense=2, seed=seed)


# The configuration.


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("cases=[]", "expected at least one value"),
        ("cases=[planner,planner]", r".* got \['planner', 'planner'\]"),
        ("cases=[planer]", "expected some of .*'look_ahead'.*, got 'planer'"),
        ("block_skip=3", "expected below bench.block_steps 3, got 3"),
        ("pipeline=look_ahead", "expected sparse_dist or base.*look_ahead"),
        ("pipeline=prefetch", "expected sparse_dist or base.*prefetch"),
        ("table_rows=[]", "expected rows of tables, or none and a prepared dataset"),
        ("table_rows=[3,0]", r"expected a value at least 1, got 0"),
        ("rounds=0", "expected a value at least 1, got 0"),
        ("rounds_of={all_hot:0}", "expected a value at least 1, got 0"),
        ("rounds_of={warm:3}", "expected one of .*, got 'warm'"),
        ("variants.planner_variant.pipeline=look_ahead", "expected another than look_ahead"),
        ("variants.planner_variant.pipeline=prefetch", "expected prefetch only .* planner and"),
        ("variants.planner_variant.pipeline=auto", "expected sparse_dist, .* got auto"),
        ("variants.planner_variant.num_hot_rows=3", "expected null .*planner, got 3"),
        ("variants.planner_variant.assign=by_owner", "expected as_read .* planner, .* by_owner"),
        ("variants.look_ahead.assign=by_tokens", "expected as_read or by_owner .* got by_tokens"),
        ("variants.planner_variant.spread_rows=true", "expected false .* planner, .* got true"),
        ("variants.look_ahead.pipeline=prefetch", "expected prefetch only .* hot_cold and the"),
        ("variants.look_ahead.depth=-1", "expected a value at least 0"),
        ("variants.look_ahead.cache_load_frac=1", "expected a value above 0 and below 1"),
        ("variants.hot_cold_base={placement:hot_cold,pipeline:base,depth:2}", "expected depth 1"),
        ("variants.planner_variant.tier=cached", "expected another than cached .* planner"),
        ("variants.hot_cold_base={placement:hot_cold,tier:cached}", "expected another than cached"),
    ],
)
def test_bad_values_are_refused_with_their_key(word: str, message: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(ValueError, match=f"bench.{key}.*: {message}"):
        root_config(f"++bench.{word}")


# Samples and hot rows.


def values_of(batch: Batch) -> torch.Tensor:
    """Everything of each sample, (B, values)."""
    ids = batch.sparse.values().view(2, -1).T
    return torch.cat([ids.double(), batch.dense.double(), batch.labels[:, None]], dim=1)


def test_samples_depend_on_seed_and_rank_alone() -> None:
    def draw(seed: int, rank: int) -> torch.Tensor:
        (batch,) = zipf_tables(seed=seed).batches(1, batch_size=50, rank=rank, world_size=2)
        return values_of(batch)

    assert torch.equal(draw(0, 0), draw(0, 0))
    assert not torch.equal(draw(0, 0), draw(0, 1))
    assert not torch.equal(draw(0, 0), draw(1, 0))


def test_rows_are_numbered_by_popularity_on_request() -> None:
    drawn = {"exponent": 1.05, "num_dense": 0, "seed": 0}
    for by_popularity in (False, True):
        tables = ZipfTables([1000], **drawn, by_popularity=by_popularity)
        counts = tables.count(100_000)["C1"]
        assert (counts[:10].sum() > counts[10:].max() * 10) == by_popularity
        assert np.argmax(counts) == 0 or not by_popularity


def test_a_variant_spreads_its_rows() -> None:
    words = ("bench.cases=[hot_cold,look_ahead]", "++bench.variants.look_ahead.spread_rows=true")
    cases = cases_of(root_config(*words))
    plain, spread = cases["hot_cold"], cases["look_ahead"]
    assert plain.placement is not None
    assert spread.placement is not None
    assert {table.is_spread for table in plain.placement.tables.values()} == {False}
    assert {table.is_spread for table in spread.placement.tables.values()} == {True}


def test_without_dense_columns_labels_follow_the_first_feature() -> None:
    tables = ZipfTables([1000, 10], exponent=1.05, num_dense=0, seed=0)
    (batch,) = tables.batches(1, batch_size=2000, rank=0, world_size=1)
    assert batch.dense.shape == (2000, 0)
    is_odd = batch.sparse.values()[:2000] % 2 == 1
    # The logistic function of -2 and of 0.
    for clicked, expected in ((batch.labels[~is_odd], 0.12), (batch.labels[is_odd], 0.5)):
        assert clicked.mean().item() == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("world_size", [1, 3])
def test_samples_by_owner_are_all_ranks_samples(world_size: int) -> None:
    tables = zipf_tables()
    by_owner = ByOwner(
        tables.schema, {"C1": [ShardOwner(rank * 400, rank) for rank in range(world_size)]}, {}
    )
    before, after = [], []
    for rank in range(world_size):
        ranks = Ranks(rank, world_size, rank, world_size, torch.device("cpu"))
        before += tables.batches(2, batch_size=40, rank=rank, world_size=world_size)
        after += tables.assigned(by_owner, 2, batch_size=40, ranks=ranks)
    assert [len(batch.labels) for batch in after] == [40] * 2 * world_size
    assert {batch.num_global_samples for batch in after} == {40 * world_size}
    for step in range(2):
        as_read, assigned = (torch.cat([*map(values_of, b[step::2])]) for b in (before, after))
        assert sorted(as_read.tolist()) == sorted(assigned.tolist())
        assert torch.equal(as_read, assigned) == (world_size == 1)


def test_samples_of_a_dataset_are_those_that_training_reads(tmp_path: Path) -> None:
    spec = SyntheticSpec([50, 8], num_dense=2, num_train=90, num_valid=9, num_test=9)
    write_synthetic(spec, tmp_path / "d")
    stored = StoredSamples(tmp_path / "d", seed=3, shuffle=False)
    assert stored.num_samples == 90
    (whole,) = stored.batches(1, batch_size=90, rank=0, world_size=1)
    counts = stored.count(90)
    for feature in stored.schema.features:
        rows, of_table = whole.sparse[feature.name].values().numpy(), counts[feature.table]
        np.testing.assert_array_equal(of_table, np.bincount(rows, minlength=of_table.size))
    assert {int(of_table.sum()) for of_table in stored.count(20).values()} == {20}
    # More batches than there are begin the split again.
    halves = [stored.batches(3, batch_size=20, rank=rank, world_size=2) for rank in range(2)]
    assert [batch.num_global_samples for batch in halves[0]] == [40] * 3
    assert torch.equal(halves[1][1].labels, whole.labels[60:80])
    assert torch.equal(halves[0][2].labels, whole.labels[:20])
    shuffled = StoredSamples(tmp_path / "d", seed=3, shuffle=True)
    (mixed,) = shuffled.batches(1, batch_size=90, rank=0, world_size=1)
    assert not torch.equal(mixed.dense, whole.dense)


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


@pytest.mark.parametrize(
    ("words", "hot"),
    [
        (["num_hot_rows=3"], {"a": [1, 3], "b": [0]}),
        # 20 samples of 100 a step: 10 lookups in the profile are 2 a step.
        (["hot_rows=break_even", "min_accesses_per_step=1.8"], {"a": [1], "b": []}),
        (["hot_rows=break_even", "min_accesses_per_step=1.6"], {"a": [1], "b": [0]}),
    ],
)
def test_hot_rows_are_the_most_looked_up(words: list[str], hot: dict[str, list[int]]) -> None:
    counts = {"a": np.array([5, 9, 0, 7]), "b": np.array([8, 1])}
    words = [*words, "table_rows=[4,2]", "batch_size=10", "profile_samples=100"]
    bench = root_config(*(f"bench.{word}" for word in words)).bench
    partition = choose_hot_rows(bench, counts, world_size=2)
    assert {table: partition.hot(table).tolist() for table in counts} == hot
    bench.hot_rows, bench.num_hot_rows = HotRowsRule.top, 7
    with pytest.raises(ValueError, match="num_hot_rows: expected at most .* 6 rows, got 7"):
        choose_hot_rows(bench, counts, world_size=2)


def cases_of(config: BenchRootConfig, device: str = "cpu") -> dict[str, Case]:
    counts = zipf_tables(list(config.bench.table_rows)).count(1000)
    cases = make_cases(config.bench, counts, world_size=2, device=device)
    return {case.name: case for case in cases}


def test_cases_are_plans() -> None:
    config = root_config("bench.num_hot_rows=1")
    cases = cases_of(config)
    assert list(cases) == [case.name for case in BenchCase]
    hot = {name: c.partition.total_hot for name, c in cases.items() if c.partition is not None}
    assert hot == {"hot_cold": 1, "all_cold": 0, "all_hot": sum(config.bench.table_rows)}
    assert {name: case.plan.num_hot for name, case in cases.items() if name in hot} == hot
    assert {case.plan.is_hotrec for name, case in cases.items() if name not in hot} == {False}


def test_a_variant_is_a_placement_and_a_pipeline() -> None:
    config = root_config(
        "bench.cases=[look_ahead,look_ahead_bf16,hot_cold_base,hot_cold]",
        "bench.variants.look_ahead.depth=3",
    )
    cases = cases_of(config)
    pipelines = {name: case.plan.pipeline for name, case in cases.items()}
    assert {n: (p.kind.name, p.depth, p.wire.name) for n, p in pipelines.items()} == {
        "look_ahead": ("look_ahead", 3, "fp32"),
        "look_ahead_bf16": ("look_ahead", 1, "bf16"),
        "hot_cold_base": ("base", 1, "fp32"),
        "hot_cold": ("sparse_dist", 1, "fp32"),
    }
    assert [name for name, case in cases.items() if not case.is_exact] == ["look_ahead_bf16"]
    base, hot_cold = cases["hot_cold_base"], cases["hot_cold"]
    assert isinstance(base.plan.tables, SplitTables)
    assert base.plan.tables.hot_exchange is HotExchange.dense
    assert base.placement is not None
    assert base.placement.is_hot_dense
    assert (base.plan.num_hot, hot_cold.plan.num_hot) == (10, 60)


def test_torchrecs_host_tiers_are_cases() -> None:
    config: BenchRootConfig = build_config(compose_config("bench", ["bench=host_tiers"]))
    cases = cases_of(config, "cuda")
    assert {name: case.plan.label for name, case in cases.items() if "planner" in name} == {
        "planner": "torchrec planner",
        "planner_uvm": "torchrec planner fused_uvm",
        "planner_cache": "torchrec planner fused_uvm_caching prefetch",
    }
    cache = cases["planner_cache"].plan.tables
    assert isinstance(cache, TorchrecTables)
    assert cache.cache_load_frac == 0.1

    def tiers(name: str) -> set[tuple[Tier, float | None]]:
        placement = cases[name].placement
        assert placement is not None
        return {(table.tier, table.cache_load_frac) for table in placement.tables.values()}

    assert tiers("all_cold_cache") == {(Tier.HOST_CACHED, 0.1)}
    assert {tier for tier, _ in tiers("all_cold_slots")} == {Tier.CACHED}
    assert all(case.is_exact for case in cases.values())
    slots = cases["all_cold_slots"].placement
    assert slots is not None
    num_popular = sum(map(len, slots.popular_rows.values()))
    # Of rank 0's and 1's 10% of the rows; rounded up.
    assert 0 < num_popular <= 0.1 * sum(config.bench.table_rows) + 2


# Measuring and adding up.


def test_rounds_of_a_slow_case_are_spread_evenly() -> None:
    assert [r for r in range(12) if takes_part(r, 12, 3)] == [3, 7, 11]
    assert all(takes_part(r, 12, 12) for r in range(12))


@pytest.mark.filterwarnings("ignore:`broadcast_buffers`:FutureWarning")
def test_one_rank_measures_every_kind_of_case() -> None:
    words = ["cases=[look_ahead_local,hot_cold,all_hot,planner]", "routing=loader", "interface=lo"]
    words += ["profile=true", "profile_steps=1", "block_steps=2"]
    config = root_config(*(f"bench.{word}" for word in words))
    with process_group(device="cpu") as ranks:
        document = measure(make_benchmark(config, ranks), ranks)
    with pytest.raises(ValueError, match="bench.interface: expected one of .*, got 'none0'"):
        interface_sent_bytes("none0")
    cases = document["cases"]
    assert document["losses_apart"] == []
    assert document["assigned"] == ["look_ahead_local"]
    assert document["pipelines"]["look_ahead_local"] == "look_ahead samples by owner"
    assert {n: (c["num_blocks"], c["num_timed_steps"]) for n, c in cases.items()} == {
        name: (1, 1) if name == "all_hot" else (2, 2) for name in cases
    }
    hot = {name: case["hot_lookups_frac"] for name, case in cases.items()}
    assert (hot["all_hot"], hot["planner"]) == (1, 0)
    assert 0 < hot["hot_cold"] == hot["look_ahead_local"] < 1
    assert {case["sent_bytes"] for case in cases.values()} == {0}  # there is no other rank
    # A case may fit into memory that a process has had before.
    assert all(case["wire_bytes"] >= 0 and case["memory_bytes"] >= 0 for case in cases.values())
    assert set(document["operators_s"]) == set(cases)
    assert all("aten::mm" in times or len(times) > 5 for times in document["operators_s"].values())
    page = render_page(document, command="hotrec bench", configuration="")
    assert result_text(cases) in page


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
        "between_hosts_bytes": sent(),
        "host": 0,
        "num_distinct": [10],
        "num_host_rows": [6],
        "num_lookups": [40],
        "num_hot_lookups": [30],
        "served": [4, 2],
        "memory_bytes": 7,
        "num_dense_values": 3,
    }
    return Measured(**{**fields, **changes})


def figures_of(**of_ranks: list[Measured]) -> dict[str, dict[str, Any]]:
    return summarize(of_ranks, global_batch_size=50, dim=2)


def test_a_step_ends_when_the_last_rank_returns() -> None:
    # The one rank is late at the second step, the other one at the third: the block takes 7 s.
    blocks = [block_of([1.0, 4.0, 5.0], 7.0, 1), block_of([1.5, 2.0, 6.0], 6.5, 1)]
    assert step_seconds(blocks).tolist() == [2.5, 2.0]
    figures = figures_of(a=[measured(blocks={0: block}) for block in blocks])["a"]
    assert figures["whole_step_s"] == pytest.approx(7 / 3)


def test_what_is_left_under_way_is_in_the_whole_blocks() -> None:
    figures = figures_of(
        hot_cold=[measured(blocks={0: block_of([1.0, 2.0], 6.0)})],
        planner=[measured(blocks={0: block_of([2.0, 4.0], 4.0)})],
    )["hot_cold"]
    assert (figures["step_p50_s"], figures["whole_step_s"]) == (1.0, 3.0)
    against = figures["against"]["planner"]
    assert (against["step_ratio"], against["whole_step_ratio"]) == (0.5, 1.5)


def test_processor_time_is_of_whole_blocks() -> None:
    idle = block_of([1.0, 2.0, 3.0], 3.0, num_skipped=1)
    busy = block_of([1.0, 2.0, 3.0], 8.0, num_skipped=1)
    blocks = ({0: idle, 1: busy}, {0: idle, 1: idle})
    figures = figures_of(a=[measured(blocks=of_rank) for of_rank in blocks])["a"]
    # 11 s of blocks over 6 steps on the one rank, 1 s a step on the other one; two threads.
    assert figures["cpu_s"] == pytest.approx((2 * 11 / 6 + 2) / 2)
    assert figures["main_cpu_s"] == pytest.approx(figures["cpu_s"] / 8)
    assert figures["core_wait_s"] is None  # not counted by this kernel


def test_waits_for_a_core_are_of_whole_blocks() -> None:
    waited = replace(block_of([1.0, 2.0], 3.0), core_wait_s=0.6, main_core_wait_s=0.2)
    figures = figures_of(a=[measured(blocks={0: waited}), measured(blocks={0: waited})])["a"]
    assert figures["core_wait_s"] == pytest.approx(0.3)
    assert figures["main_core_wait_s"] == pytest.approx(0.1)


def test_exposed_is_the_main_thread_s_waiting() -> None:
    blocks = {0: block_of([1.0, 2.0, 3.0], 3.0, 1)}
    stages = [{stage: np.full(2, s) for stage in STAGES} for s in (0.1, 0.05)]
    figures = figures_of(a=[measured(blocks=blocks, stage_s=s) for s in stages])["a"]
    # Four of the stages are exchanges: 0.4 s and 0.2 s of steps of 1 s.
    assert figures["exposed_s"] == figures["exposed_frac"] == pytest.approx(0.3)
    assert figures["exposed_frac_most"] == pytest.approx(0.4)
    assert figures["stage_s"]["dense"] == pytest.approx(0.075)


def test_stale_and_rounded_losses_are_not_held_against_the_exact_ones() -> None:
    figures = figures_of(
        stale=[measured(is_exact=False, losses=[0.9, 0.9])],
        first=[measured()],
        wrong=[measured(losses=[0.5, 0.5])],
        no_number=[measured(losses=[0.5, float("nan")])],
    )
    assert figures["stale"]["largest_loss_difference"] == pytest.approx(0.5)
    assert losses_apart(figures, 1e-3) == ["wrong", "no_number"]


def test_bytes_are_those_of_a_step() -> None:
    counted = measured(
        sent_bytes=sent(all_to_all=300), wire_bytes=330, num_distinct=[10, 12, 14],
        num_lookups=[40] * 3, num_hot_lookups=[30] * 3,
    )  # fmt: skip
    figures = figures_of(a=[counted])["a"]
    assert (figures["sent_bytes"], figures["wire_bytes"]) == (100, 110)
    assert figures["sent_bytes_by_collective"]["all_to_all"] == 100
    assert figures["num_distinct_rows"] == 12


def test_bytes_between_hosts() -> None:
    """Two hosts of two ranks: what they send to each other, and half of the distinct rows."""
    ranks = [
        measured(host=at // 2, between_hosts_bytes=sent(all_to_all=10 * at, all_reduce=20))
        for at in range(4)
    ]
    figures = figures_of(a=ranks)
    found = figures["a"]
    assert found["between_hosts_bytes"] == 35
    assert found["between_hosts_bytes_by_collective"] == sent(all_to_all=15, all_reduce=20)
    # 2 U D 4 / 2 of the rank's part of the host's rows; 2 n 4 / 2 are shared by two ranks.
    assert found["between_hosts_bound_bytes"] == 6 * 2 * 4
    assert found["between_hosts_bound_with_dense_bytes"] == 6 * 2 * 4 + 3 * 4 / 2
    assert found["between_hosts_bytes_over_bound"] == pytest.approx(35 / 54)
    page = render_page(document_of(figures), command="", configuration="").splitlines()
    [at] = [number for number, line in enumerate(page) if "| between hosts |" in line]
    assert [cell.strip() for cell in page[at + 2].split("|")][-5:-1] == [
        "35 B",
        "48 B",
        "54 B",
        "0.65x",
    ]


def test_summary() -> None:
    slow_at_first = measured(blocks={0: one_step(2.0), 1: one_step(1.0)}, losses=[0.7, 0.6])
    planner = measured(
        blocks={0: one_step(4.0), 1: one_step(12.0)},
        losses=[0.6, 0.50005],
        sent_bytes=sent(all_to_all=480),
        served=[0, 0],
    )
    figures = figures_of(hot_cold=[measured(), slow_at_first], planner=[planner] * 2)
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
    assert figures["planner"]["served_most_over_mean"] is None
    assert ours["final_loss"] == pytest.approx(0.5)
    against = ours["against"]["planner"]
    assert against["step_ratio"] == pytest.approx((2 / 4 + 3 / 12) / 2)
    assert against["bytes_ratio"] == 0.25
    assert figures["planner"]["largest_loss_difference"] == pytest.approx(5e-5)
    assert losses_apart(figures, 1e-4) == []
    assert losses_apart(figures, 1e-5) == ["planner"]


def test_ratios_are_of_rounds_that_both_made() -> None:
    blocks = {0: one_step(2.0), 3: one_step(1.0)}
    figures = figures_of(
        hot_cold=[measured(blocks=blocks)],
        planner=[measured(blocks={0: one_step(4.0), 1: one_step(9.0)})],
        hand_tuned=[measured(blocks={1: one_step(9.0)})],
    )["hot_cold"]["against"]
    assert figures["planner"]["step_ratio"] == 0.5
    assert set(figures["hand_tuned"]) == {"bytes_ratio"}


MACHINE = {
    "processor": "P", "num_cores": 2, "memory_bytes": 1, "gpu": None, "kernel": "k", "python": "3",
    "packages": {"torch": "2"}, "threads_per_rank": 1, "malloc": {}, "code": "c",
    "load_average": 0.0, "load_average_after": 0.0,
}  # fmt: skip
DATA = {
    "num_tables": 1, "num_rows": 5, "zipf_exponent": 1.0, "embedding_dim": 2, "batch_size": 3,
    "num_dense_values": 4,
}  # fmt: skip


def document_of(cases: dict[str, dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "name": "n", "world_size": 1, "num_hosts": 1, "network": "wet string", "optimizer": "sgd",
        "pipelines": dict.fromkeys(cases, "look_ahead depth 2"), "routing": "main", "rounds": 3,
        "block_steps": 12, "block_skip": 2, "warmup_rounds": 1, "counted_steps": 1,
        "loss_tolerance": 1e-4, "partitions": {}, "data": DATA, "machine": MACHINE,
        "cases": cases, "losses_apart": [], "operators_s": {}, **changes,
    }  # fmt: skip


def test_golden_page() -> None:
    stage_s = {stage: np.full(2, 0.1) for stage in STAGES}
    look_ahead, slow = measured(wire_bytes=130, stage_s=stage_s), measured(losses=[0.5, 0.5])
    cases = figures_of(look_ahead=[look_ahead], all_hot=[slow])
    facts = {"num_hot_rows": 7, "policy": "p", "hot_bytes": 9}
    document = document_of(
        cases,
        losses_apart=["all_hot"],
        operators_s={"all_hot": {"aten::mm": 0.25}},
        partitions={"all_hot": facts},
    )
    page = render_page(document, command="hotrec bench x=1", configuration="a: b\n")
    check_golden("bench.md", page)
    assert result_text(cases) in page
    quiet = render_page(document_of(cases), command="", configuration="")
    assert ("Operators" in quiet, "differ by more" in quiet) == (False, False)


def test_features_that_share_a_table_are_counted_together() -> None:
    sparse = KeyedJaggedTensor(
        ["a", "b", "c"], torch.tensor([3, 1, 1, 2]), lengths=torch.tensor([2, 1, 1])
    )
    batch = Batch(torch.zeros(1, 0), sparse, torch.zeros(1), torch.ones(1), 1)
    tables = {"a": "t", "b": "t", "c": "c"}
    runner: Any = SimpleNamespace(unrouted=[batch], table_of_feature=tables)
    found = {table: ids.tolist() for table, ids in ids_by_table(runner, 0).items()}
    assert found == {"t": [3, 1, 1], "c": [2]}
