"""The step with look-ahead: what is on the critical path, what the link can carry, what is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import Line, Link, World
from hotrec.cost_model.step import Workload, predict_step
from hotrec.types import STAGES, PipelineKind, PipelineSpec, WireType
from tests.unit.cost_model.samples import LOOK_AHEAD, work_of

COSTS = replace(BUILTIN["cpu_1gbit"], overlap=1.0)
WORLD = World(2, 1)
WORKLOAD = Workload(2048, 1e6, 0.2, 100_000)
MIXED = work_of(
    lookups=5e4,
    cold_rows=12e3,
    cold_groups=1,
    urgent_rows=2e3,
    hot_rows=3e3,
    union_rows=4e3,
    hot_groups=1,
)
CALM = MIXED | work_of(urgent_rows=0.0)


def predict(quantities=MIXED, *, costs=COSTS, world=WORLD, workload=WORKLOAD, pipeline=LOOK_AHEAD):
    return predict_step(costs, world, workload, pipeline, quantities)


def with_link(bytes_per_s, latency_s=3e-4, **changes):
    intra = Link(0.0, 1e18)
    return replace(COSTS, intra=intra, inter=Link(latency_s, bytes_per_s), **changes)


def message_s(num_bytes, num_messages=1, costs=COSTS, world=WORLD):
    return num_messages * costs.message_s("all_to_all", world, num_bytes / num_messages)


@pytest.mark.parametrize(("wire", "value"), [("fp32", 4), ("bf16", 2)])
def test_bytes_are_those_of_the_exchanges(wire, value):
    pipeline = PipelineSpec(PipelineKind.look_ahead, WireType(wire))
    sent = predict(pipeline=pipeline).sent_bytes
    row_bytes = 64 * value
    expected = {
        "ids_exchange": 12e3 / 2 * 6,
        "rows_exchange": 12e3 * row_bytes / 2,
        # The dense layers' gradients are exchanged by hotrec as well, with those of the rows.
        "grads_exchange": 12e3 * row_bytes / 2 + 100_000 * value,
        # To owners, and their sums back.
        "hot_exchange": (3e3 + 4e3) / 2 * (row_bytes + 4),
    }
    assert sent == pytest.approx({**dict.fromkeys(STAGES, 0.0), **expected})
    step_s = predict(costs=with_link(3e7), pipeline=pipeline).step_s
    assert value == 4 or step_s < 0.6 * predict(costs=with_link(3e7)).step_s


def test_urgent_rows_travel_both_ways_in_line():
    costs = with_link(1e9)
    workload = replace(WORKLOAD, dense_flops=0.0)
    steps = [predict(q, costs=costs, workload=workload) for q in (CALM, MIXED)]
    both_s = 2 * message_s(2e3 * 256 / 2, costs=costs)
    assert steps[1].step_s - steps[0].step_s == pytest.approx(both_s, rel=1e-6)


RATES = st.floats(1e6, 1e11)


@given(
    rates=st.tuples(RATES, RATES),
    latency_s=st.floats(0, 1e-2),
    overlap=st.floats(0, 1),
    urgent_frac=st.floats(0, 1),
    hot=st.floats(0, 1e5),
    ranks=st.sampled_from([2, 3, 8]),
    wire=st.sampled_from(["fp32", "bf16"]),
)
def test_more_network_never_makes_a_longer_step(
    rates, latency_s, overlap, urgent_frac, hot, ranks, wire
):
    work = work_of(hot_rows=hot, union_rows=1.5 * hot, urgent_rows=urgent_frac * 12e3)
    pipeline = PipelineSpec(PipelineKind.look_ahead, WireType(wire))
    steps = [
        predict(
            MIXED | work,
            costs=with_link(rate, latency_s, overlap=overlap),
            world=World(ranks, 1),
            pipeline=pipeline,
        )
        for rate in sorted(rates)
    ]
    assert steps[1].step_s <= steps[0].step_s * (1 + 1e-9)
    assert steps[1].total_sent_bytes == pytest.approx(steps[0].total_sent_bytes)
    assert overlap or not any(steps[0].hidden_s.values())
    # Nothing hides longer than what hides it.
    for step in steps:
        assert sum(step.hidden_s.values()) <= step.step_s * (1 + 1e-9)
        assert step.step_s == pytest.approx(sum(step.stage_s.values()))
        assert set(step.stage_s) == set(STAGES)
        assert min(*step.stage_s.values(), *step.hidden_s.values()) >= -1e-15


@given(st.floats(0, 1), st.floats(0, 1), RATES)
def test_more_conflicts_never_make_a_shorter_step(less, more, rate):
    def step(frac):
        urgent = work_of(urgent_rows=frac * 12e3)
        return predict(MIXED | urgent, costs=with_link(rate, latency_s=0.0)).step_s

    low, high = sorted((less, more))
    assert step(low) <= step(high) * (1 + 1e-9)


def test_costs_of_one_host_say_nothing_of_two():
    with pytest.raises(ValueError, match="expected the link between hosts"):
        predict(costs=replace(COSTS, inter=None))


@pytest.mark.parametrize("world", [World(1, 1), WORLD])
@pytest.mark.parametrize("overlap", [1.0, 0.6])
def test_rows_move_into_slots_and_back_at_once_while_the_step_computes(world, overlap):
    kernels = dict(COSTS.kernels, fetch_slot=Line(2e-3, 0.0, 1e-9), return_slot=Line(0, 1e-6, 3e-9))
    costs = replace(COSTS, kernels=kernels, overlap=overlap)
    without = predict(costs=costs, world=world)
    for fetched, returned in ((1e3, 0.0), (1e5, 1e4), (1e4, 1e5), (1e6, 1e6)):
        moved = work_of(fetched_rows=fetched, returned_rows=returned)
        step = predict(MIXED | moved, costs=costs, world=world)
        back_s = returned * 1e-6 + moved["returned_bytes"] * 3e-9
        moving_s = max(2e-3 + moved["fetched_bytes"] * 1e-9, back_s)
        exposed_s = max(moving_s - overlap * without.step_s, (1 - overlap) * 0.0)
        assert step.step_s == pytest.approx(without.step_s + exposed_s)
        assert sum(step.stage_s.values()) == pytest.approx(step.step_s)
        added = {n: step.stage_s[n] - without.stage_s[n] for n in STAGES}
        assert added.pop("rows_exchange") == pytest.approx(exposed_s)
        assert not any(added.values())
        hidden_s = step.hidden_s["rows_exchange"] - without.hidden_s["rows_exchange"]
        assert hidden_s == pytest.approx(moving_s - exposed_s)
        assert step.sent_bytes == without.sent_bytes
