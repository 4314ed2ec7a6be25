"""The search against every placement of small problems, and within memory on large ones."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from hotrec.cost_model.costs import KERNELS, Costs, Line, Link, World
from hotrec.cost_model.demand import TableDemand
from hotrec.cost_model.step import Workload
from hotrec.planner.search import InfeasibleError, Limits, search_placement
from hotrec.types import Exchange
from tests.helpers.samples import sample
from tests.unit.cost_model.samples import LOOK_AHEAD, SPARSE_DIST
from tests.unit.planner.search_cases import (
    brute_force,
    limit_sizes,
    make_case,
    memory_of,
    step_of,
)

WORKLOAD = Workload(2048, 2e6, 0.3, 1_000_000)
WORLD = World(16, 8)
PIPELINES = SPARSE_DIST, LOOK_AHEAD


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


def used_frac(case, num_hot, tables):
    """What a placement takes of the scarcest memory."""
    demands, costs, world, _, limits = case
    is_cpu = costs.device == "cpu"
    used = memory_of(demands, num_hot, tables, world.num_ranks, is_cpu=is_cpu)
    return float((used / np.maximum(limit_sizes(limits, is_cpu), 1)).max())


@pytest.mark.slow
def test_small_problems_against_every_placement():
    """The search finds the best of all placements, in line and with look-ahead."""
    kinds = dict.fromkeys(("infeasible", "hot", "pooled"), 0)
    for seed in sample(range(160), 1, 3):
        case, pipeline = make_case(seed), PIPELINES[seed % 3 == 2]
        least_s = brute_force(*case, pipeline)
        if least_s is None:
            with pytest.raises(InfeasibleError):
                search_placement(*case, pipeline=pipeline)
            kinds["infeasible"] += 1
            continue
        found = search_placement(*case, pipeline=pipeline)
        # A faster one would not fit.
        assert 1 - 1e-9 <= step_of(case, pipeline, *found) / least_s <= 1 + 1e-6, seed
        kinds["hot"] += any(found[0].values())
        kinds["pooled"] += any(t.exchange is Exchange.POOLED for t in found[1].values())
    assert all(kinds.values()), kinds


@pytest.mark.parametrize("seed", range(6))
def test_less_memory_never_makes_a_shorter_step(seed):
    """Of problems with several dimensions, each of which fits its memory."""
    *case, _ = make_case(seed, most_tables=8, num_groups=40, most_rows=60)
    whole, pipeline = sum(d.num_rows * d.row_bytes for d in case[0]), PIPELINES[seed % 2]
    least_s = 0.0
    for device_frac, replica_frac in ((4.0, 4.0), (2.0, 0.3), (1.6, 0.1)):
        limited = *case, Limits(whole * device_frac, whole * 2, whole * replica_frac)
        found = search_placement(*limited, pipeline=pipeline)
        assert used_frac(limited, *found) <= 1 + 1e-9
        step_s = step_of(limited, pipeline, *found)
        assert step_s >= least_s * (1 - 1e-3)
        least_s = step_s


def search(demands, limits, device="cuda", **options):
    case = demands, machine(device), WORLD, WORKLOAD, limits
    found = search_placement(*case, pipeline=SPARSE_DIST, **options)
    return found[0], step_of(case, SPARSE_DIST, *found)


def test_hot_range_is_kept():
    demands = [zipf_demand(f"t{i}", 5000) for i in range(3)]
    span = {"t0": (7, 7), "t1": (0, 0), "t2": (5000, 5000)}
    num_hot, step_s = search(demands, Limits(1e12, 1e12), hot_range=span)
    assert num_hot == {"t0": 7, "t1": 0, "t2": 5000}
    assert search(demands, Limits(1e12, 1e12))[1] <= step_s


def test_tables_of_a_dimension_share_messages() -> None:
    """Half of the rows of a group fit, which pay if another table's hot rows are sent anyway."""
    first = demand_of("a", np.array([100, 400]), np.array([100.0, 1.0]))
    second = demand_of("b", np.array([100, 4000]), np.array([50.0, 0.001]))
    limits, span = Limits(1e12, 1e12, 150 * 260), {"a": (100, 100)}
    assert search([first, second], limits, hot_range=span)[0] == {"a": 100, "b": 50}


def test_many_tables_share_a_budget() -> None:
    """Of which only the largest are improved, from rows in order of their lookups."""
    demands = [zipf_demand(f"t{i}", 5000) for i in range(60)]
    limits = Limits(1e12, 1e12, 500 * 60 * 260)
    even = {demand.name: (500, 500) for demand in demands}
    assert search(demands, limits)[1] <= 1.005 * search(demands, limits, hot_range=even)[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_budget_that_is_named_fits(device):
    demands = [zipf_demand(f"t{i}", rows) for i, rows in enumerate((1000, 900, 40))]
    limits = Limits(1000, 7_000)
    for name in ("host_bytes",) if device == "cpu" else ("device_bytes", "host_bytes"):
        with pytest.raises(
            InfeasibleError, match=rf"^{name}: .* got {getattr(limits, name)}"
        ) as error:
            search(demands, limits, device)
        need = float(re.search(r"at least (\d+) on each of 16 ranks", str(error.value))[1])
        limits = dataclasses.replace(limits, **{name: need})
    search(demands, limits, device)
    fixed, limits = zipf_demand("a", 100), Limits(1e9, 1e9, 100)
    with pytest.raises(InfeasibleError, match=f"replica_bytes: expected at least {50 * 260}"):
        search([fixed], limits, hot_range={"a": (50, 60)})
