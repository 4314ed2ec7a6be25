"""Every command on a log without dense columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import SMOKE, hotrec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DATA = (SMOKE, "data.synthetic.num_dense=0")
RANKS = "launch.num_ranks=2"


def test_chain_without_dense_columns(tmp_path: Path) -> None:
    prepared = hotrec("prepare", *DATA, cwd=tmp_path).figures
    assert prepared["num_dense"] == 0
    hotrec("profile", *DATA, cwd=tmp_path)
    short = ("calibrate.max_bytes=65536", "calibrate.repeats=3", "calibrate.cap_mib=1")
    calibrated = hotrec("calibrate", *DATA, RANKS, *short, cwd=tmp_path).figures
    assert calibrated["origin"] == "measured"
    planned = hotrec("plan", *DATA, "plan.world_size=2", cwd=tmp_path).figures
    assert planned["predicted_step_s"] > 0
    losses = {}
    for run, words in {
        "dlrm": ("placement=coverage", "pipeline=look_ahead", RANKS),
        "torchrec": ("placement=torchrec", RANKS),
        "dcnv2": ("placement=coverage", "model=dcnv2", "model.embedding_dim=16", RANKS),
    }.items():
        found = hotrec("train", *DATA, *words, cwd=tmp_path, HOTREC_RUN_DIR=f"runs/{run}").figures
        assert found["finished"]
        assert found["auc"] > 0.5, run
        losses[run] = found["loss"]
    assert losses["dlrm"] == pytest.approx(losses["torchrec"], abs=1e-5)
    evaluated = hotrec("evaluate", "run_dir=runs/dlrm", RANKS, cwd=tmp_path).figures
    summary = json.loads((tmp_path / "runs/dlrm/summary.json").read_text())
    assert evaluated["auc"] == pytest.approx(summary["auc"], abs=1e-6)
    report = hotrec("report", "runs=[runs/dlrm,runs/torchrec]", cwd=tmp_path).figures
    assert len(report["runs"]) == 2


def test_bench_without_dense_columns(tmp_path: Path) -> None:
    words = ("bench=smoke", "bench.num_dense=0", "bench.cases=[hot_cold,planner]", RANKS)
    figures = hotrec("bench", *words, cwd=tmp_path).figures
    assert set(figures["cases"]) == {"hot_cold", "planner"}
    assert figures["losses_apart"] == []
