"""Every command on a log without dense columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import SMOKE, hotrec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DATA = (SMOKE, "data.synthetic.num_dense=0")
RANKS = "launch.num_ranks=2"
CALIBRATE = ("calibrate.max_bytes=65536", "calibrate.repeats=3", "calibrate.cap_mib=1")
RUNS = {
    "dlrm": ("placement=cost", "placement.may_decline=false", "pipeline=look_ahead"),
    "torchrec": ("placement=torchrec",),
    "dcnv2": ("placement=coverage", "model=dcnv2", "model.embedding_dim=16"),
}


def test_chain_without_dense_columns(tmp_path: Path) -> None:
    assert hotrec("prepare", *DATA, cwd=tmp_path).figures["num_dense"] == 0
    calibrated = hotrec("calibrate", *DATA, RANKS, *CALIBRATE, cwd=tmp_path).figures
    assert calibrated["origin"] == "measured"
    found = {
        run: hotrec(
            "train", *DATA, *words, RANKS, cwd=tmp_path, HOTREC_RUN_DIR=f"runs/{run}"
        ).figures
        for run, words in RUNS.items()
    }
    assert found["dlrm"]["predicted_step_s"] > 0
    assert found["dlrm"]["loss"] == pytest.approx(found["torchrec"]["loss"], abs=1e-5)
    evaluated = hotrec("evaluate", "run_dir=runs/dlrm", RANKS, cwd=tmp_path).figures
    assert evaluated["auc"] == pytest.approx(found["dlrm"]["auc"], abs=1e-6)
