"""`hotrec compare` on two real ranks: every case trains alike, and figures add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import Outcome, hotrec

EXACT = (
    "look_ahead", "look_ahead_local", "hot_cold", "hot_cold_base", "all_cold", "all_hot",
    "table_wise", "planner", "hand_tuned",
)  # fmt: skip
CASES = (*EXACT, "look_ahead_bf16")


def hotrec_bench(*words: str, run_dir: Path) -> Outcome:
    given = ("plans=smoke", "launch.num_ranks=2", *words)
    return hotrec("compare", *given, cwd=run_dir, HOTREC_RUN_DIR=str(run_dir))


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run_dir = tmp_path_factory.mktemp("bench")
    done = hotrec_bench(f"plans.cases=[{','.join(CASES)}]", run_dir=run_dir)
    found: dict[str, Any] = done.figures
    assert found == json.loads((run_dir / "compare.json").read_text())
    page = (run_dir / "compare.md").read_text()
    for name in CASES:
        assert f"| {name} " in page
        assert f"\n| {name} " in done.stderr  # the table on the terminal
    return found


def test_every_exact_case_trains_the_same_model(figures: dict[str, Any]) -> None:
    cases = figures["cases"]
    assert tuple(name for name, case in cases.items() if case["is_exact"]) == EXACT
    assert figures["losses_apart"] == []
    assert max(cases[name]["largest_loss_difference"] for name in EXACT) < 1e-5
    assert cases["look_ahead_bf16"]["largest_loss_difference"] > 0
    # warm-up 2, 2 blocks of 3, counted 2
    assert {case["num_steps"] for case in cases.values()} == {10}
    for name, case in cases.items():
        assert 0 < case["exposed_frac"] <= case["exposed_frac_most"] < 1, name
        assert 0 < case["main_cpu_s"] < case["cpu_s"], name
    partitions, frac = figures["partitions"], "hot_lookups_frac"
    hot = [partitions[name]["num_hot_rows"] for name in ("hot_cold", "hot_cold_base")]
    assert hot == [60, 10]
    assert cases["all_cold"][frac] == 0 < cases["hot_cold"][frac] < cases["all_hot"][frac] == 1


def test_bytes_keep_to_the_bound(figures: dict[str, Any]) -> None:
    cases = figures["cases"]
    for name, case in cases.items():
        # Replicas that every rank reads can save up to half of an exchange; nothing saves more.
        assert case["bytes_over_bound"] > (0.25 if "bf16" in name else 0.5), name
    # The full gradients of the replicated tables (40, 7 and 3 rows of 64 floats) are counted.
    assert cases["hand_tuned"]["sent_bytes"] > 2 * 4 * 64 * (40 + 7 + 3) / 2
    # Ids travel as they are in 16 bits; samples by owner are the same samples, and need fewer.
    exact, half, local = (
        cases[name] for name in ("look_ahead", "look_ahead_bf16", "look_ahead_local")
    )
    assert 0.5 <= half["sent_bytes"] / exact["sent_bytes"] < 0.6
    assert local["hot_lookups_frac"] == exact["hot_lookups_frac"]
    assert 0 < local["sent_bytes"] < exact["sent_bytes"]


def test_models_that_differ_fail_the_run_loudly(tmp_path: Path) -> None:
    # At this rate rounding grows within a few steps into what no sum in another order can avoid.
    done = hotrec_bench(
        "plans.cases=[hot_cold,table_wise]",
        "plans.loss_tolerance=1e-30",
        "optimizer.learning_rate=0.2",
        "plans.rounds=4",
        "plans.routing=loader",
        run_dir=tmp_path,
    )
    assert done.exit_code != 0
    assert done.stdout == ""
    assert "plans losses: expected" in done.stderr
    assert "1e-30: table_wise" in (tmp_path / "compare.md").read_text()
