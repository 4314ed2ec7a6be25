"""Plans by the names that a user knows."""

from __future__ import annotations

import pytest

from hotrec.planner.names import plan_name


@pytest.mark.parametrize(
    ("plan", "hot_rows", "name"),
    [
        ("hot_cold", 1650, "hotrec, 1,650 hot rows"),
        ("hot_cold", 0, "hotrec, no hot rows"),
        ("all_cold", 0, "hotrec, no hot rows"),
        ("hot_cold", None, "hotrec"),
        ("fae", 10, "FAE, 10 hot rows"),
        ("hugectr", 10, "HugeCTR's hybrid, 10 hot rows"),
        ("torchrec", 0, "TorchRec's planner"),
        ("torchrec planner", 0, "TorchRec's planner"),
        ("torchrec hand_tuned", None, "TorchRec's hand-tuned plan"),
    ],
)
def test_plan_name(plan: str, hot_rows: float | None, name: str) -> None:
    assert plan_name(plan, hot_rows) == name
