"""The step beside loader workers, on the cores that there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import Line
from hotrec.cost_model.step import StepPrediction, with_loader

# 6 ms of computation and 4 of exposed communication, 2 more of it hidden.
STEP = StepPrediction(
    10e-3, {"dense": 5e-3, "rows_exchange": 4e-3, "other": 1e-3}, {"rows_exchange": 2e-3}, {}
)


@pytest.mark.parametrize(
    ("loader_s", "on", "step_s"),  # workers, ranks, cores and the overlap
    [
        ((0.0, 3e-3), (2, 2, 8, 1.0), 10e-3),  # there are cores for the workers
        ((1e-3, 3e-3), (2, 2, 8, 1.0), 11e-3),  # but the main thread gets the batch from them
        ((0.0, 30e-3), (2, 1, 8, 1.0), 15e-3),  # too few workers
        ((0.0, 30e-3), (1, 1, 8, 1.0), 30e-3),
        ((0.0, 3e-3), (2, 2, 2, 1.0), 11.8e-3),  # workers delay a rank while it computes
        ((0.0, 3e-3), (2, 2, 2, 0.0), 13e-3),
        ((0.0, 3e-3), (2, 4, 5, 1.0), 10.3e-3),  # a spare core serves most of them
        ((0.0, 6e-3), (2, 2, 2, 0.0), 16e-3),  # and communication takes the cores as well
        ((0.0, 0.0), (2, 4, 2, 1.0), 12e-3),  # more ranks than cores
    ],
)
def test_a_step_waits_for_the_loader_and_for_the_cores(
    loader_s: tuple[float, float], on: Any, step_s: float
) -> None:
    names = ("num_workers", "ranks_per_host", "cores_per_host", "overlap")
    options: Any = dict(zip(names, on, strict=True))
    found = with_loader(STEP, loader_s=loader_s, **options)
    assert found.step_s == pytest.approx(step_s)
    assert sum(found.stage_s.values()) == pytest.approx(step_s)
    assert found.stage_s["dense"] == STEP.stage_s["dense"]
    assert found.hidden_s == STEP.hidden_s


def test_batches_are_made_in_the_main_thread_or_in_workers() -> None:
    parts = {"read": 2e-6, "work": 5e-6, "receive": 1e-6}
    lines = {name: Line(0.0, per_item_s) for name, per_item_s in parts.items()}
    costs = replace(BUILTIN["cpu_1gbit"], loader={**lines, "route": Line(0.0, 1e-7)})
    assert costs.loader_s(1000, 0, 0) == pytest.approx((2e-3, 0.0))
    assert costs.loader_s(1000, 20_000, 0) == pytest.approx((4e-3, 0.0))
    assert costs.loader_s(1000, 20_000, 2) == pytest.approx((1e-3, 7e-3))
    assert BUILTIN["cpu_1gbit"].loader_s(1000, 0, 2) is None
