"""`hotrec bench` on two real ranks: every case, every figure, the page; and two hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotrec.runtime.traffic import COLLECTIVES
from tests.helpers.commands import Outcome, hotrec

EXACT = (
    "look_ahead", "look_ahead_local", "hot_cold", "hot_cold_base", "all_cold", "all_hot",
    "table_wise", "planner", "hand_tuned",
)  # fmt: skip
CASES = (*EXACT, "look_ahead_bf16")


def hotrec_bench(*words: str, run_dir: Path) -> Outcome:
    given = ("bench=smoke", "launch.num_ranks=2", *words)
    return hotrec("bench", *given, cwd=run_dir, HOTREC_RUN_DIR=str(run_dir))


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run_dir = tmp_path_factory.mktemp("bench")
    done = hotrec_bench(
        f"bench.cases=[{','.join(CASES)}]",
        "bench.profile=true",
        f"bench.page={run_dir}/out/page.md",
        run_dir=run_dir,
    )
    printed = done.figures
    assert printed == json.loads((run_dir / "bench.json").read_text())
    page = (run_dir / "out" / "page.md").read_text()
    assert page == (run_dir / "bench.md").read_text()
    for name in printed["cases"]:
        assert f"| {name} " in page
        assert f"\n| {name} " in done.stderr  # the table on the terminal
    return printed


def test_every_exact_case_trains_the_same_model(figures: dict[str, Any]) -> None:
    cases = figures["cases"]
    assert tuple(cases) == CASES
    assert tuple(name for name, case in cases.items() if case["is_exact"]) == EXACT
    assert figures["losses_apart"] == []
    assert max(cases[name]["largest_loss_difference"] for name in EXACT) < 1e-5
    # warm-up 2, 2 blocks of 3 (all_hot 1), counted 2, profiled 4
    assert {name: case["num_steps"] for name, case in cases.items()} == {
        name: 11 if name == "all_hot" else 14 for name in cases
    }
    assert (cases["all_hot"]["num_blocks"], cases["all_hot"]["num_timed_steps"]) == (1, 2)
    assert (cases["planner"]["num_blocks"], cases["planner"]["num_timed_steps"]) == (2, 4)


def test_sixteen_bits_are_half_the_bytes(figures: dict[str, Any]) -> None:
    exact, half = (figures["cases"][name] for name in ("look_ahead", "look_ahead_bf16"))
    # Ids travel as they are.
    assert 0.5 <= half["sent_bytes"] / exact["sent_bytes"] < 0.6
    assert half["largest_loss_difference"] > 0


def test_samples_by_owner_are_the_same_samples_with_fewer_bytes(figures: dict[str, Any]) -> None:
    as_read, local = (figures["cases"][name] for name in ("look_ahead", "look_ahead_local"))
    assert figures["assigned"] == ["look_ahead_local"]
    assert local["hot_lookups_frac"] == as_read["hot_lookups_frac"]
    before, after = (c["sent_bytes_by_collective"]["all_to_all"] for c in (as_read, local))
    assert 0 < after < 0.9 * before


def test_waiting_is_part_of_the_step(figures: dict[str, Any]) -> None:
    for name, case in figures["cases"].items():
        assert 0 < case["exposed_frac"] <= case["exposed_frac_most"] < 1, name
        assert case["step_p50_s"] > 0
        assert case["stage_s"]["dense"] > 0
        assert 0 < case["main_cpu_s"] < case["cpu_s"], name
        assert 0 <= case["main_core_wait_s"] <= case["core_wait_s"], name


def test_bytes_add_up_and_keep_to_the_bound(figures: dict[str, Any]) -> None:
    dense = 2 * 4 * figures["data"]["num_dense_values"] / 2
    for name, case in figures["cases"].items():
        by_collective = case["sent_bytes_by_collective"]
        assert set(by_collective) == set(COLLECTIVES)
        assert sum(by_collective.values()) == pytest.approx(case["sent_bytes"])
        assert case["bound_with_dense_bytes"] == case["bound_bytes"] + dense
        # Replicas that every rank reads can save up to half of an exchange; nothing saves more.
        assert case["embedding_bytes_over_bound"] > (0.25 if "bf16" in name else 0.5), name
        # The dense layers' gradients are all-reduced in every case, in 16 bits by shares.
        if name != "look_ahead_bf16":
            assert by_collective["all_reduce"] >= dense, name
    cases = figures["cases"]
    assert cases["all_cold"]["sent_bytes_by_collective"]["all_gather"] == 0
    assert cases["all_hot"]["sent_bytes_by_collective"]["all_to_all"] == 0
    assert cases["table_wise"]["sent_bytes_by_collective"]["all_reduce"] == dense
    # The full gradients of the replicated tables (40, 7 and 3 rows of 64 floats) are counted too.
    replicated = 2 * 4 * 64 * (40 + 7 + 3) / 2
    assert cases["hand_tuned"]["sent_bytes_by_collective"]["all_reduce"] == dense + replicated


def test_the_hot_cold_case_is_hot_and_cold(figures: dict[str, Any]) -> None:
    cases = figures["cases"]
    assert figures["partitions"]["hot_cold"]["num_hot_rows"] == 60
    assert figures["partitions"]["hot_cold_base"]["num_hot_rows"] == 10
    assert 0.5 < cases["hot_cold"]["hot_lookups_frac"] < 1
    assert cases["all_cold"]["hot_lookups_frac"] == 0
    assert cases["all_hot"]["hot_lookups_frac"] == 1
    assert 1 <= cases["hot_cold"]["served_most_over_mean"] < 2
    assert set(figures["operators_s"]) == set(cases)
    assert all(0 < s < 10 for times in figures["operators_s"].values() for s in times.values())


def test_models_that_differ_fail_the_run_loudly(tmp_path: Path) -> None:
    # At this rate rounding grows within a few steps into what no sum in another order can avoid.
    done = hotrec_bench(
        "bench.cases=[hot_cold,table_wise]",
        "bench.loss_tolerance=1e-30",
        "optimizer.learning_rate=0.2",
        "bench.rounds=4",
        "bench.routing=loader",
        run_dir=tmp_path,
    )
    assert done.exit_code != 0
    assert done.stdout == ""
    assert "bench losses: expected all cases within 1e-30 of hot_cold" in done.stderr
    assert "Losses differ by more than 1e-30: table_wise" in (tmp_path / "bench.md").read_text()
