"""The search against every placement of small problems, and within memory on large ones."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from hotrec.cost_model.costs import KERNELS, Costs, Line, Link, World
from hotrec.cost_model.demand import TableDemand
from hotrec.cost_model.forms import Workload
from hotrec.planner.search import InfeasibleError, Limits, search_placement
from hotrec.types import Exchange
from tests.helpers.samples import sample
from tests.unit.planner.search_cases import brute_force, limit_sizes, make_case, memory_of

WORKLOAD = Workload(2048, 2e6, 0.3, 1_000_000)
WORLD = World(16, 8)


def zipf_demand(name, num_rows, *, alpha=1.05):
    """A table whose lookups follow Zipf's law, heads exact, the tail in groups."""
    head = min(num_rows, 64)
    tail = np.geomspace(head, num_rows, 65).astype(np.int64)
    edges = np.unique(np.concatenate([np.arange(head + 1), tail]))
    return demand_of(name, np.diff(edges), ((edges[:-1] + edges[1:] + 1) / 2) ** -alpha)


def demand_of(name, rows, weights):
    """A table of groups of so many rows, with weights of their lookups."""
    probs = np.minimum(weights / (weights * rows).sum(), 1 - 1e-12)
    by_rank, by_host, by_any = (
        -np.expm1(2048 * n * np.log1p(-probs)) for n in (1, WORLD.ranks_per_host, WORLD.num_ranks)
    )
    demand = TableDemand(name, int(rows.sum()), 64, 260, 1.0, 1, rows, probs, by_rank, by_any)
    return dataclasses.replace(demand, by_host_G=by_host, by_host_both_G=by_host * by_any)


def machine(device="cuda"):
    """Plain costs."""
    kernels = dict.fromkeys(KERNELS, Line(1e-5, 1e-10, 1e-12))
    kernels["dense"] = Line(0, 1e-14)
    links = {"intra": Link(1e-5, 3e11), "inter": Link(2e-5, 5e10)}
    sizes = {"device_bytes": 80 << 30, "host_bytes": 1 << 40}
    return Costs("plain", "built-in", device, kernels, **links, **sizes, overlap=0.9)


def used_frac(demands, choice, limits, ranks, *, is_cpu, is_routed_on_device):
    """What the choice takes of the scarcest memory."""
    options = {"is_cpu": is_cpu, "is_routed_on_device": is_routed_on_device}
    used = memory_of(demands, choice.num_hot, choice.tables, ranks, **options)
    return float((used / np.maximum(limit_sizes(limits, is_cpu), 1)).max())


@pytest.mark.slow
def test_small_problems_against_every_placement():
    """The search finds the best of all placements."""
    kinds = dict.fromkeys(("infeasible", "hot", "pooled"), 0)
    for seed in sample(range(160), 1, 3):
        case = make_case(seed)
        least_s = brute_force(*case)
        if least_s is None:
            with pytest.raises(InfeasibleError):
                search_placement(*case)
            kinds["infeasible"] += 1
            continue
        choice = search_placement(*case)
        # A faster one would not fit.
        assert 1 - 1e-9 <= choice.prediction.step_s / least_s <= 1 + 1e-6, seed
        kinds["hot"] += any(choice.num_hot.values())
        tables = choice.tables.values()
        kinds["pooled"] += any(t.exchange is Exchange.POOLED for t in tables)
    assert all(kinds.values()), kinds


@pytest.mark.parametrize("seed", range(6))
def test_less_memory_never_makes_a_shorter_step(seed):
    """Of problems with several dimensions, each of which fits its memory."""
    demands, costs, world, workload, _ = make_case(seed, most_tables=8, num_groups=40, most_rows=60)
    is_cpu, whole = costs.device == "cpu", sum(d.num_rows * d.row_bytes for d in demands)
    least_s = 0.0
    for device_frac, replica_frac in ((4.0, 4.0), (2.0, 0.3), (1.6, 0.1)):
        limits = Limits(whole * device_frac, whole * 2, whole * replica_frac)
        choice = search_placement(demands, costs, world, workload, limits)
        options = {"is_cpu": is_cpu, "is_routed_on_device": True}
        assert used_frac(demands, choice, limits, world.num_ranks, **options) <= 1 + 1e-9
        assert choice.prediction.step_s >= least_s * (1 - 1e-6)
        least_s = choice.prediction.step_s


def test_hot_range_is_kept():
    demands = [zipf_demand(f"t{i}", 5000) for i in range(3)]
    span = {"t0": (7, 7), "t1": (0, 0), "t2": (5000, 5000)}
    limits = Limits(1e12, 1e12)
    choice = search_placement(demands, machine(), WORLD, WORKLOAD, limits, hot_range=span)
    assert choice.num_hot == {"t0": 7, "t1": 0, "t2": 5000}
    free = search_placement(demands, machine(), WORLD, WORKLOAD, limits)
    assert free.prediction.step_s <= choice.prediction.step_s


def test_tables_of_a_dimension_share_messages() -> None:
    """Half of the rows of a group fit, which pay if another table's hot rows are sent anyway."""
    first = demand_of("a", np.array([100, 400]), np.array([100.0, 1.0]))
    second = demand_of("b", np.array([100, 4000]), np.array([50.0, 0.001]))
    limits, span = Limits(1e12, 1e12, 150 * 260), {"a": (100, 100)}
    choice = search_placement([first, second], machine(), WORLD, WORKLOAD, limits, hot_range=span)
    assert choice.num_hot == {"a": 100, "b": 50}


def test_many_tables_share_a_budget() -> None:
    """Of which only the largest are improved: at one price of memory, as an even split would."""
    demands = [zipf_demand(f"t{i}", 5000) for i in range(60)]
    limits = Limits(1e12, 1e12, 500 * 60 * 260)
    even = {demand.name: (500, 500) for demand in demands}
    found, expected = (
        search_placement(demands, machine(), WORLD, WORKLOAD, limits, hot_range=hot_range)
        for hot_range in (None, even)
    )
    assert found.prediction.step_s <= 1.005 * expected.prediction.step_s


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_budget_that_is_named_fits(device):
    demands = [zipf_demand(f"t{i}", rows) for i, rows in enumerate((1000, 900, 40))]
    limits = Limits(1000, 7_000)
    for name in ("host_bytes",) if device == "cpu" else ("device_bytes", "host_bytes"):
        with pytest.raises(
            InfeasibleError, match=rf"^{name}: .* got {getattr(limits, name)}"
        ) as error:
            search_placement(demands, machine(device), WORLD, WORKLOAD, limits)
        need = float(re.search(r"at least (\d+) on each of 16 ranks", str(error.value))[1])
        limits = dataclasses.replace(limits, **{name: need})
    search_placement(demands, machine(device), WORLD, WORKLOAD, limits)
    fixed, limits = zipf_demand("a", 100), Limits(1e9, 1e9, 100)
    with pytest.raises(InfeasibleError, match=f"replica_bytes: expected at least {50 * 260}"):
        search_placement([fixed], machine(), WORLD, WORKLOAD, limits, hot_range={"a": (50, 60)})
