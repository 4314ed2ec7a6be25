"""What calibration measures on: tables within memory, sizes, and the text it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.calibrate.fit import fit_from_run
from hotrec.calibrate.measure import costs_table
from hotrec.calibrate.workload import cut_tables
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import CostsError
from hotrec.types import STAGES


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=30), st.integers(1, 100_000))
def test_tables_are_cut_to_one_height(rows: list[int], most: int) -> None:
    cut = cut_tables(rows, most)
    assert all(1 <= after <= before for after, before in zip(cut, rows, strict=True))
    assert sum(cut) <= max(most, len(rows))
    height = max(cut)
    assert all(after in (before, height) for after, before in zip(cut, rows, strict=True))
    if sum(rows) <= most:
        assert cut == rows
    else:
        assert sum(cut) > most - len(rows) or max(cut) == 1  # no memory is left idle


def test_the_table_names_every_kernel_and_link() -> None:
    for costs in BUILTIN.values():
        text = costs_table(costs)
        assert all(f"\n{name} " in text for name in costs.kernels)
        assert "link inside a host: " in text
        assert ("link between hosts: " in text) == (costs.inter is not None)
    assert "118 MB/s" in costs_table(BUILTIN["cpu_1gbit"])


def write_run(run_dir: Path, costs: Any = "cpu_1gbit", **summary: Any) -> Path:
    times = dict.fromkeys(STAGES, 0.002)
    document = {
        "predicted_stage_s": dict.fromkeys(STAGES, 0.001),
        "measured_stage_s": times,
        **summary,
    }
    (run_dir / "summary.json").write_text(json.dumps(document))
    (run_dir / "prediction.json").write_text(json.dumps({"costs": {"name": costs}}))
    return run_dir


def test_costs_are_fitted_from_a_run(tmp_path: Path) -> None:
    fitted = fit_from_run(write_run(tmp_path), "cpu_1gbit")
    assert fitted.origin == "fitted"
    assert fitted.correction("pool") == pytest.approx(2.0)
    assert fitted.facts["fitted_from"] == str(tmp_path)


def test_a_run_planned_with_other_costs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostsError, match="planned with the costs 'cpu_1gbit' .* with 'elsewhere'"):
        fit_from_run(write_run(tmp_path, "elsewhere"), "cpu_1gbit")


def test_a_run_that_looked_ahead_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostsError, match="pipeline: expected sparse_dist or base"):
        fit_from_run(write_run(tmp_path, pipeline="look_ahead"), "cpu_1gbit")


@pytest.mark.parametrize("missing", [None, {}, 3])
def test_a_run_that_measured_nothing_is_refused(tmp_path: Path, missing: Any) -> None:
    with pytest.raises(CostsError, match="summary.json measured_stage_s: expected seconds by"):
        fit_from_run(write_run(tmp_path, measured_stage_s=missing), "cpu_1gbit")


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(CostsError, match="expected what `hotrec train` writes"):
        fit_from_run(tmp_path, "cpu_1gbit")
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(CostsError, match="expected a JSON object, got list"):
        fit_from_run(tmp_path, "cpu_1gbit")
