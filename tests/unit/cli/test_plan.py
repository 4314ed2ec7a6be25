"""Of ``hotrec plan``: the machine that is planned for."""

from __future__ import annotations

import pytest

from hotrec.cli.plan import _memory_of
from hotrec.config.roots import PlannerConfig


@pytest.mark.parametrize(
    ("planner", "hbm_gib", "host_gib"),
    [
        (PlannerConfig(), None, None),
        (PlannerConfig(costs="measured"), None, None),
        (PlannerConfig(costs="dgx_h100_infiniband"), 80, 2048),
        (PlannerConfig(costs="one_gpu_pcie", host_gib=64), 80, 64),
        (PlannerConfig(costs="cpu_1gbit", hbm_gib=10), 10, 32),
        (PlannerConfig(costs="cpu_1gbit"), None, 32),
    ],
)
def test_memory_is_that_of_the_machine_of_built_in_costs(
    planner: PlannerConfig, hbm_gib: float | None, host_gib: float | None
) -> None:
    assert _memory_of(planner) == (hbm_gib, host_gib)
