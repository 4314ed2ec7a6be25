import dataclasses
import math

import numpy as np
import pytest

from hotrec.cost_model.costs import KERNELS, Costs, Line, Link, World
from hotrec.cost_model.demand import TableDemand
from hotrec.cost_model.forms import Workload
from hotrec.cost_model.quantities import hot_cold_quantities
from hotrec.cost_model.step import break_even, make_step_model, marginal_s
from hotrec.planner.search import Limits, search_placement
from hotrec.types import TablePlacement
from tests.unit.cost_model.samples import work_of
from tests.unit.planner.search_cases import make_costs

WORKLOAD = Workload(64, 0.0, 0.3, 0)
WORLD = World(4, 4)


def machine(**changed):
    kernels = {name: Line() for name in KERNELS}
    kernels.update(changed)
    return Costs("c", "built-in", "cuda", kernels, Link(0.0, 1e12), None, 1, 1, overlap=0.0)


def gain(costs, dim, lookups):
    """Seconds saved by a replica of one row, by the whole model on one quantity at a time."""
    model = make_step_model(costs, WORLD, WORKLOAD)
    q, any_q = -math.expm1(-lookups / WORLD.num_ranks), -math.expm1(-lookups)
    cold = work_of(4 * dim, rows_device=q)
    hot = work_of(4 * dim, hot_rows=q, union_rows=any_q, replica_rows=1)
    return model.predict(cold).step_s - model.predict(hot).step_s


@pytest.mark.slow
def test_gain_changes_sign_where_it_says():
    answers = []
    for seed in range(120):
        rng = np.random.default_rng(seed)
        costs = dataclasses.replace(make_costs(rng, "cuda", hosts=1), overlap=0.0, overhead_s=0.0)
        at = break_even(costs, WORLD, WORKLOAD, 8)
        answers.append(at)
        lookups = np.geomspace(1e-9, 100, 50)
        gains = np.array([gain(costs, 8, m) for m in lookups])
        scale = np.abs(gains).max() * 1e-7
        if at is None:
            assert (gains <= scale).all()
        else:
            assert (gains[lookups > at * 1.001] >= -scale).all()
            assert (gains[lookups < at * 0.999] <= scale).all()
    assert None in answers
    assert 0.0 in answers
    assert any(answers)


def test_closed_form():
    # A cold row costs 3, a hot one 1, a replica 1 dense: (3 - 1) q = 1, q = 1/2.
    costs = machine(read_device=Line(0, 3.0), hot_read=Line(0, 1.0))
    assert break_even(costs, World(1, 1), WORKLOAD, 4) == 0.0
    costs = machine(read_device=Line(0, 1.0), hot_update=Line(0, 1.5))
    # On 4 ranks 4 lookups are some 2.5 reads by ranks, one update: q - 1.5 Q is below 0 for all m.
    assert break_even(costs, WORLD, WORKLOAD, 4) is None
    costs = machine(read_device=Line(0, 1.0), hot_update=Line(0, 0.5))
    # q = Q / 2 with q = 1 - x, Q = 1 - x^4: 1 - x^4 = 2 (1 - x), x = 0.5437.
    root = min(r.real for r in np.roots([1, 0, 0, -2, 1]) if abs(r.imag) < 1e-9 and r.real < 0.99)
    expected = -4 * math.log(root)
    messages = dataclasses.replace(costs, intra=Link(0.0, 1e30))
    assert break_even(messages, WORLD, WORKLOAD, 4) == pytest.approx(expected, rel=1e-6)


def test_hidden_messages_do_not_count():
    costs = dataclasses.replace(machine(), intra=Link(0.0, 1.0), overlap=1.0)
    model = make_step_model(costs, WORLD, Workload(64, 1e3, 0.5, 0))
    row = {"rows_device": 1.0, "bytes_device": 32.0}
    exposed = marginal_s(model, row, None)
    assert exposed == pytest.approx((4 + 2 * 32) * 3 / 4)
    kernels = {**costs.kernels, "dense": Line(0, 1.0)}
    busy = make_step_model(
        dataclasses.replace(costs, kernels=kernels), WORLD, Workload(64, 1e3, 0.5, 0)
    )
    assert marginal_s(busy, row, row) == 0.0
    assert marginal_s(model, row, row) == pytest.approx(exposed)


def test_agrees_with_the_optimum():
    """The search replicates the rows above the rule, and not those below it."""
    # Host memory costs more, cached or not, so that the search has no reason to move rows there.
    on_host = {name: Line(0, 9.0) for name in KERNELS if name.endswith(("host", "hit", "miss"))}
    costs = machine(**on_host, read_device=Line(0, 1.0), hot_update=Line(0, 0.5))
    costs = dataclasses.replace(costs, intra=Link(0.0, 1e30))
    at = break_even(costs, WORLD, WORKLOAD, 4)
    lookups = at * np.geomspace(8, 1 / 8, 13)[np.arange(13) != 6]
    demand = TableDemand(
        name="t",
        num_rows=13,  # one is never seen, so the cold messages cannot be saved
        dim=4,
        row_bytes=16,
        lookups_per_sample=1.0,
        num_columns=1,
        rows_G=np.ones(12, np.int64),
        probs_G=lookups / 256,
        by_rank_G=-np.expm1(-lookups / 4),
        by_any_G=-np.expm1(-lookups),
    )
    limits = Limits(1e9, 1e9, may_pool=False)
    choice = search_placement([demand], costs, WORLD, WORKLOAD, limits)
    assert choice.num_hot == {"t": int((lookups > at).sum())} == {"t": 6}
    tables = {"t": TablePlacement()}
    model = make_step_model(costs, WORLD, WORKLOAD)
    for num_hot in range(14):
        does = hot_cold_quantities([demand], {"t": num_hot}, tables, WORLD, 64)
        assert choice.prediction.step_s <= model.predict(does).step_s
