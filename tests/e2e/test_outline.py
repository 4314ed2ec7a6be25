"""`hotrec plan` without the data, from its outline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import hotrec

pytestmark = pytest.mark.slow
TINY = (
    *("experiment=criteo_terabyte", "plan.device=cuda", "planner.costs=dgx_h100_infiniband"),
    "data.outline.num_train=100000",
    *(f"data.outline.tables.C{number}.num_rows=500" for number in (1, 10, 11, 12, 20, 21, 22, 23)),
)


def test_plan_without_the_data(tmp_path: Path) -> None:
    planned = hotrec("plan", *TINY, cwd=tmp_path)
    assert planned.figures["predicted_step_s"] > 0
    (made,) = (tmp_path / "data/criteo_terabyte").glob("outline-*")
    assert made.name in planned.stderr
    before = (made / "dataset-profile/manifest.json").stat().st_mtime_ns
    hotrec("plan", *TINY, "plan.world_size=4", cwd=tmp_path)
    assert (made / "dataset-profile/manifest.json").stat().st_mtime_ns == before
    trained = hotrec("train", *TINY, "trainer.device=cpu", cwd=tmp_path)
    assert trained.exit_code == 1
    assert "data/criteo_terabyte/dataset" in trained.stderr
