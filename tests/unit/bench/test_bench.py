"""The parts of `hotrec compare` that need no ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrec.bench.benchmark import measure
from hotrec.bench.figures import Measured, losses_apart, summarize
from hotrec.bench.job import choose_hot_rows, make_benchmark
from hotrec.bench.machine import interface_sent_bytes
from hotrec.bench.page import render_page, result_text
from hotrec.bench.stored import StoredSamples
from hotrec.cli.store import build_config, compose_config
from hotrec.config.data import SyntheticSpec
from hotrec.config.roots import CompareConfig
from hotrec.data.synthetic import write_synthetic
from hotrec.runtime.ranks import process_group
from hotrec.train.interleave import Block
from hotrec.types import STAGES


def root_config(*words: str) -> CompareConfig:
    config: CompareConfig = build_config(compose_config("compare", ["plans=smoke", *words]))
    return config


@pytest.mark.parametrize(
    "word",
    [
        "cases=[]",
        "cases=[planner,planner]",
        "cases=[planer]",
        "block_skip=3",
        "pipeline=look_ahead",
        "table_rows=[3,0]",
        "rounds=0",
        "zipf_exponent=inf",
        "variants.planner_variant.pipeline=look_ahead",
        "variants.planner_variant.num_hot_rows=3",
        "variants.planner_variant.assign=by_owner",
        "variants.planner_variant.cold_tier=cached",
        "variants.look_ahead.tier=fused_uvm",
        "variants.look_ahead.cache_load_frac=1",
    ],
)
def test_bad_values_are_refused_with_their_key(word: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(ValueError, match=rf"plans\.{key}.*: expected "):
        root_config(f"++plans.{word}")


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


def test_hot_rows_are_the_most_looked_up() -> None:
    counts = {"a": np.array([5, 9, 0, 7]), "b": np.array([8, 1])}
    bench = root_config("plans.num_hot_rows=3", "plans.table_rows=[4,2]").plans
    partition = choose_hot_rows(bench, counts)
    assert {table: partition.hot(table).tolist() for table in counts} == {"a": [1, 3], "b": [0]}
    bench.num_hot_rows = 7
    with pytest.raises(ValueError, match="num_hot_rows: expected at most .* 6 rows, got 7"):
        choose_hot_rows(bench, counts)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers`:FutureWarning")
def test_one_rank_measures_every_kind_of_case() -> None:
    words = ["cases=[look_ahead_local,hot_cold,all_hot,planner]", "routing=loader", "interface=lo"]
    words += ["block_steps=2"]
    config = root_config(*(f"plans.{word}" for word in words))
    with process_group(device="cpu") as ranks:
        document = measure(make_benchmark(config, ranks), ranks)
    with pytest.raises(ValueError, match="plans.interface: expected one of .*, got 'none0'"):
        interface_sent_bytes("none0")
    cases = document["cases"]
    assert document["losses_apart"] == []
    assert document["assigned"] == ["look_ahead_local"]
    assert document["pipelines"]["look_ahead_local"] == "look_ahead samples by owner"
    assert {(c["num_blocks"], c["num_timed_steps"]) for c in cases.values()} == {(2, 2)}
    hot = {name: case["hot_lookups_frac"] for name, case in cases.items()}
    assert (hot["all_hot"], hot["planner"]) == (1, 0)
    assert 0 < hot["hot_cold"] == hot["look_ahead_local"] < 1
    assert {case["sent_bytes"] for case in cases.values()} == {0}  # there is no other rank
    # A case may fit into memory that a process has had before.
    assert all(case["wire_bytes"] >= 0 and case["memory_bytes"] >= 0 for case in cases.values())
    page = render_page(document, command="hotrec compare", configuration="")
    assert result_text(cases) in page


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
        "sent_bytes": 120,
        "wire_bytes": None,
        "between_hosts_bytes": 0,
        "host": 0,
        "num_distinct": [10],
        "num_host_rows": [6],
        "num_lookups": [40],
        "num_hot_lookups": [30],
        "memory_bytes": 7,
        "num_dense_values": 3,
    }
    return Measured(**{**fields, **changes})


def figures_of(**of_ranks: list[Measured]) -> dict[str, dict[str, Any]]:
    return summarize(of_ranks, global_batch_size=50, dim=2)


TIMES = st.lists(st.floats(0.1, 9.0), min_size=3, max_size=3)


@given(st.lists(st.tuples(TIMES, TIMES, st.floats(0.1, 5.0)), min_size=1, max_size=4))
def test_figures_are_of_the_slowest_rank_and_of_whole_blocks(rounds: Any) -> None:
    """A step ends when the last rank returns; the first one of a block is not counted."""
    ends = [[np.cumsum(of_rank) for of_rank in of_ranks] for *of_ranks, _ in rounds]
    ended_s = [
        max(first[-1], second[-1]) + left_s
        for (first, second), (*_, left_s) in zip(ends, rounds, strict=True)
    ]
    ranks = [
        {at: block_of([*of[rank]], ended_s[at], 1) for at, of in enumerate(ends)}
        for rank in range(2)
    ]
    stages = [{stage: np.full(2 * len(rounds), s) for stage in STAGES} for s in (0.1, 0.05)]
    both = [measured(blocks=of, stage_s=s) for of, s in zip(ranks, stages, strict=True)]
    theirs = {at: block_of([4.0, 6.0, 8.0], 12.0, 1) for at in range(len(rounds))}
    twice = [replace(one, blocks=theirs) for one in both]
    found = figures_of(a=both, planner=twice)["a"]
    returned = [np.maximum(*both_ends) for both_ends in ends]
    steps = np.concatenate([np.diff(of) for of in returned])
    assert found["step_p50_s"] == pytest.approx(np.median(steps))
    assert found["samples_per_s"] == pytest.approx(50 / np.median(steps))
    assert found["whole_step_s"] == pytest.approx(np.median(ended_s) / 3)
    # Two threads ran all the time, the main one a quarter of it.
    assert found["cpu_s"] == pytest.approx(2 * np.mean(ended_s) / 3)
    assert found["main_cpu_s"] == pytest.approx(found["cpu_s"] / 8)
    # Four of the stages are exchanges.
    assert found["exposed_s"] == pytest.approx(0.3)
    against = found["against"]["planner"]
    medians = [np.median(np.diff(of)) for of in returned]
    assert against["step_ratio"] == pytest.approx(np.median(medians) / 2)
    assert against["whole_step_ratio"] == pytest.approx(np.median(ended_s) / 3 / 4)


def test_losses_of_exact_cases_are_those_of_the_first() -> None:
    figures = figures_of(
        stale=[measured(is_exact=False, losses=[0.9, 0.9])],
        first=[measured()],
        wrong=[measured(losses=[0.5, 0.5])],
        no_number=[measured(losses=[0.5, float("nan")])],
    )
    assert figures["stale"]["largest_loss_difference"] == pytest.approx(0.5)
    assert losses_apart(figures, 1e-3) == ["wrong", "no_number"]


def test_bytes_between_hosts() -> None:
    """Two hosts of two ranks: what they send to each other, and half of the distinct rows."""
    ranks = [measured(host=at // 2, between_hosts_bytes=10 * at + 20) for at in range(4)]
    found = figures_of(a=ranks)["a"]
    assert found["between_hosts_bytes"] == 35
    # 2 U D 4 / 2 of the rank's part of the host's rows; 2 n 4 / 2 are shared by two ranks.
    assert found["between_hosts_bound_bytes"] == 6 * 2 * 4 + 3 * 4 / 2


def test_bytes_are_those_of_a_step_beside_their_bound() -> None:
    steps = {"num_distinct": [10] * 3, "num_lookups": [40] * 3, "num_hot_lookups": [30] * 3}
    ours = measured(sent_bytes=360, wire_bytes=330, **steps)
    planner = measured(sent_bytes=480)
    figures = figures_of(hot_cold=[ours] * 2, planner=[planner] * 2)
    found = figures["hot_cold"]
    assert (found["sent_bytes"], found["wire_bytes"], found["num_distinct_rows"]) == (120, 110, 10)
    # 2 U D 4 / 2 = 80; the dense layers' 3 values add 12.
    assert found["bound_bytes"] == 92
    assert found["bytes_over_bound"] == pytest.approx(120 / 92)
    assert found["hot_lookups_frac"] == 0.75
    assert found["against"]["planner"]["bytes_ratio"] == 0.25
