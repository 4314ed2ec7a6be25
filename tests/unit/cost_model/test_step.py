"""The step's forms: what hides what, what is paid always, where measured curves become lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import CollectiveCurve, World
from hotrec.cost_model.step import Workload, predict_step
from hotrec.types import STAGES
from tests.unit.cost_model.samples import SPARSE_DIST, work_of

COSTS = replace(BUILTIN["cpu_1gbit"], overlap=0.5)
WORLD = World(2, 1)
WORKLOAD = Workload(512, 1e6, 0.2, 10_000)
MIXED = work_of(
    lookups=5e3,
    cold_rows=4e3,
    cold_groups=1,
    hot_rows=1e3,
    union_rows=1.2e3,
    hot_groups=1,
)
COLD = {name: value for name, value in MIXED.items() if not name.startswith(("hot", "union", "re"))}


@pytest.mark.parametrize("overlap", [0.0, 0.3, 1.0])
def test_a_share_of_what_travels_is_hidden(overlap: float) -> None:
    costs = replace(COSTS, overlap=overlap)
    none = predict_step(replace(COSTS, overlap=0.0), WORLD, WORKLOAD, SPARSE_DIST, MIXED)
    step = predict_step(costs, WORLD, WORKLOAD, SPARSE_DIST, MIXED)
    assert step.step_s == pytest.approx(sum(step.stage_s.values()))
    assert set(step.stage_s) == set(STAGES)
    assert min(*step.stage_s.values(), *step.hidden_s.values()) >= 0
    for stage in ("ids_exchange", "rows_exchange", "grads_exchange", "hot_exchange"):
        assert step.stage_s[stage] + step.hidden_s[stage] == pytest.approx(none.stage_s[stage])
    # Rows travel during the bottom layers' forward pass, a third of a fifth of the dense time.
    cover_s = none.stage_s["dense"] * 0.2 / 3
    wire_s = COSTS.collective("all_to_all", WORLD).seconds(num_bytes=4e3 * 256 / 2)
    assert step.hidden_s["rows_exchange"] == pytest.approx(overlap * min(wire_s, cover_s))


def test_bytes_are_those_of_the_exchanges() -> None:
    sent = predict_step(COSTS, WORLD, WORKLOAD, SPARSE_DIST, MIXED).sent_bytes
    assert sent["ids_exchange"] == pytest.approx(4e3 * 4 / 2)
    assert sent["rows_exchange"] == sent["grads_exchange"] == pytest.approx(4e3 * 256 / 2)
    assert sent["hot_exchange"] == pytest.approx(2.2e3 / 2 * 260)
    assert sent["other"] == pytest.approx(10_000 * 4)


@pytest.mark.parametrize("rows", [100, 1_000, 20_000])
def test_curves_are_exact_at_the_message_sizes_of_the_step(rows: int) -> None:
    """On a network that lets 256 kB pass at once, and then 125 MB/s, which no line says."""
    sizes = (1e3, 256e3, 1e6, 4e6)
    seconds = tuple(2e-4 + max(0.0, size - 256e3) / 125e6 for size in sizes)
    curve = CollectiveCurve("all_to_all", WORLD, sizes, seconds, (0.0,) * 4)
    costs, quantities = replace(COSTS, curves=(curve,), overlap=0.0), work_of(cold_rows=rows)
    sent = rows * 256 / 2
    wanted = 2e-4 + max(0.0, sent - 256e3) / 125e6 + sent * costs.kernels["copy"].per_byte_s
    found = predict_step(costs, WORLD, WORKLOAD, SPARSE_DIST, COLD | quantities).stage_s[
        "rows_exchange"
    ]
    assert found == pytest.approx(wanted, rel=1e-6)
