import dataclasses
import itertools
import re

import numpy as np
import pytest

from hotrec.cost_model.costs import KERNELS, Costs, Line, Link, World
from hotrec.cost_model.demand import TableDemand
from hotrec.cost_model.forms import StepPrediction, Workload
from hotrec.cost_model.memory import cached_row_bytes, replica_row_bytes, shard_row_bytes
from hotrec.cost_model.quantities import hot_cold_quantities
from hotrec.cost_model.step import make_step_model
from hotrec.planning.optimise import compare, optimise
from hotrec.planning.optimise_limits import InfeasibleError, Limits
from hotrec.types import Exchange, Sharding, TablePlacement, Tier
from tests.unit.planning.optimise_cases import brute_force, make_case, make_costs

CRITEO_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


def zipf_demand(name, num_rows, *, dim=64, alpha=1.05, lookups=1.0, batch=2048, ranks=16):
    """A table whose lookups follow Zipf's law, heads exact, the tail in groups."""
    head = min(num_rows, 64)
    tail = np.geomspace(head, num_rows, 65).astype(np.int64)
    edges = np.unique(np.concatenate([np.arange(head + 1), tail]))
    rows = np.diff(edges)
    probs = ((edges[:-1] + edges[1:] + 1) / 2) ** -alpha
    probs = np.minimum(probs / (probs * rows).sum(), 1 - 1e-12)
    draws = batch * lookups
    return TableDemand(
        name=name,
        num_rows=num_rows,
        dim=dim,
        row_bytes=4 * dim + 4,
        lookups_per_sample=lookups,
        num_columns=1,
        rows_G=rows.astype(np.int64),
        probs_G=probs,
        by_rank_G=-np.expm1(draws * np.log1p(-probs)),
        by_any_G=-np.expm1(draws * ranks * np.log1p(-probs)),
    )


def machine(device="cuda"):
    """Plain costs: host memory slow, misses slower, links between."""
    kernels = {name: Line(1e-5, 1e-10, 1e-12) for name in KERNELS}
    for name in ("read_host", "update_host", "pooled_host", "pooled_update_host"):
        kernels[name] = Line(1e-5, 1e-10, 5e-11)
    for name in ("read_miss", "pooled_miss"):
        kernels[name] = Line(1e-5, 1e-9, 1e-10)
    kernels["dense"] = Line(0, 1e-14)
    return Costs(
        name="plain",
        origin="built-in",
        device=device,
        kernels=kernels,
        intra=Link(1e-5, 3e11),
        inter=Link(2e-5, 5e10),
        device_bytes=80 << 30,
        host_bytes=1 << 40,
        overlap=0.9,
    )


WORKLOAD = Workload(2048, 2e6, 0.3, 1_000_000)
BY_LOADER = dataclasses.replace(WORKLOAD, is_routed_by_loader=True)
WORLD = World(16, 8)


@pytest.mark.parametrize("first", range(0, 600, 200))
def test_optimum_equals_brute_force(first):
    outcomes = {"solved": 0, "infeasible": 0, "hot": 0, "pooled": 0, "cached": 0, "dense": 0}
    for seed in range(first, first + 200):
        case = make_case(seed)
        least = brute_force(*case)
        if least is None:
            with pytest.raises(InfeasibleError):
                optimise(*case)
            outcomes["infeasible"] += 1
            continue
        choice = optimise(*case)
        step_s = choice.prediction.step_s
        assert step_s == pytest.approx(least, rel=1e-9), seed
        assert choice.bound_s <= step_s
        assert choice.bound_s == pytest.approx(step_s, rel=1e-6), seed
        outcomes["solved"] += 1
        outcomes["hot"] += any(choice.num_hot.values())
        outcomes["dense"] += choice.is_hot_dense
        tables = choice.tables.values()
        outcomes["pooled"] += any(t.exchange is Exchange.POOLED for t in tables)
        outcomes["cached"] += any(t.tier is Tier.HOST_CACHED for t in tables)
    # The cases are of every kind, or the test would prove less than it says.
    assert all(outcomes.values()), outcomes


def memory_of(demands, num_hot, tables, ranks, *, is_cpu):
    """Device, host and replica bytes of the mean rank, ids routed on the device."""
    device = host = replica = 0.0
    for d in demands:
        hot, placed = num_hot[d.name], tables[d.name]
        on_device, in_memory = shard_row_bytes(d, placed.tier)
        device += hot * replica_row_bytes(d) + d.num_rows * on_device / ranks
        host += d.num_rows * in_memory / ranks
        device += d.num_rows * (placed.cache_load_frac or 0.0) * cached_row_bytes(d) / ranks
        replica += hot * d.row_bytes
        if placed.exchange is Exchange.ROWS:
            host += 4 * d.num_rows
            device += 0 if is_cpu else 4 * d.num_rows
    return (0.0, device + host, replica) if is_cpu else (device, host, replica)


@pytest.mark.parametrize("seed", range(16))
def test_large_cases_against_simple_policies(seed):
    demands, costs, world, workload, _ = make_case(seed, most_tables=8, num_groups=40, most_rows=60)
    is_cpu = costs.device == "cpu"
    whole = sum(d.num_rows * d.row_bytes for d in demands)
    limits = Limits(whole * 0.8, whole * (2.0 if is_cpu else 1.5), whole * 0.3)
    choice = optimise(demands, costs, world, workload, limits)
    step_s = choice.prediction.step_s
    assert choice.bound_s <= step_s
    assert choice.gap_frac < 0.02
    used = memory_of(demands, choice.num_hot, choice.tables, world.num_ranks, is_cpu=is_cpu)
    sizes = [limits.device_bytes, limits.host_bytes, limits.replica_bytes]
    assert all(n <= size * (1 + 1e-9) for n, size in zip(used, sizes, strict=True))
    tier = Tier.DEVICE if is_cpu else Tier.HOST
    tables = {d.name: TablePlacement(tier=tier) for d in demands}
    num_tried = 0
    for frac in (0.0, 0.01, 0.05, 0.1, 0.2, 0.3):
        num_hot = {d.name: int(frac * d.num_rows) for d in demands}
        used = memory_of(demands, num_hot, tables, world.num_ranks, is_cpu=is_cpu)
        if any(n > size for n, size in zip(used, sizes, strict=True)):
            continue
        num_tried += 1
        does = hot_cold_quantities(demands, num_hot, tables, world, workload.batch_size)
        for is_dense in (False, True):
            model = make_step_model(costs, world, workload, is_hot_dense=is_dense)
            predicted = model.predict(does).step_s
            assert step_s <= predicted * (1 + 1e-9)
            assert choice.bound_s <= predicted * (1 + 1e-9)
    assert num_tried >= 1


@pytest.mark.parametrize(
    ("device_frac", "host_frac", "replica_frac"),
    [(1e3, 1e3, None), (0.3, 1.02, None), (0.02, 2.0, None), (16.0, 16.0, 1e-3)],
)
def test_criteo_sizes_are_solved_to_a_tenth_of_a_percent(device_frac, host_frac, replica_frac):
    demands = [zipf_demand(f"t{i}", rows) for i, rows in enumerate(CRITEO_ROWS)]
    share = sum(d.num_rows * d.row_bytes for d in demands) / WORLD.num_ranks
    replica = None if replica_frac is None else share * replica_frac
    limits = Limits(share * device_frac, share * host_frac, replica)
    choice = optimise(demands, machine(), WORLD, BY_LOADER, limits)
    assert 0 <= choice.gap_frac < 1e-3
    used = memory_of(demands, choice.num_hot, choice.tables, WORLD.num_ranks, is_cpu=False)
    assert used[0] - 4 * sum(d.num_rows for d in demands) <= limits.device_bytes
    assert used[1] <= limits.host_bytes


def test_many_tables_of_several_dims_are_solved():
    rng = np.random.default_rng(0)
    demands = [
        zipf_demand(
            f"t{i}",
            int(10 ** rng.uniform(2, 7)),
            dim=int(rng.choice([16, 64])),
            alpha=float(rng.uniform(0.8, 1.2)),
            lookups=float(rng.choice([1, 1, 20])),
        )
        for i in range(120)
    ]
    share = sum(d.num_rows * d.row_bytes for d in demands) / WORLD.num_ranks
    limits = Limits(share * 0.3, share * 1.1)
    choice = optimise(demands, machine(), WORLD, BY_LOADER, limits)
    assert 0 <= choice.gap_frac < 1e-3
    assert sum(choice.num_hot.values()) > 0


def test_no_other_set_of_rows_is_faster():
    """Over all sets of hot rows of a table, not just its most looked-up ones."""
    num_solved = 0
    for seed in range(1, 160, 2):  # on CPU
        demands, costs, world, workload, limits = make_case(seed, most_tables=1, num_groups=4)
        limits = dataclasses.replace(limits, exchanges=(Exchange.ROWS,))
        try:
            choice = optimise(demands, costs, world, workload, limits)
        except InfeasibleError:
            continue
        (demand,) = demands
        does = hot_cold_quantities(
            demands, {}, {demand.name: TablePlacement()}, world, workload.batch_size
        )
        unseen = demand.num_rows - int(demand.rows_G.sum())
        for taken in itertools.product(*[range(int(n) + 1) for n in [*demand.rows_G, unseen]]):
            hot = sum(taken)
            memory = (demand.row_bytes + 4 * demand.dim) * hot + 4 * demand.num_rows
            memory += demand.num_rows * demand.row_bytes / world.num_ranks
            if memory > limits.host_bytes * (1 + 1e-9):
                continue
            if hot * demand.row_bytes > (limits.replica_bytes or np.inf):
                continue
            by_rank, by_any = (
                float(np.dot(taken[:-1], probs)) for probs in (demand.by_rank_G, demand.by_any_G)
            )
            total = dict(does, hot_groups=float(hot > 0), cold_groups=float(hot < demand.num_rows))
            for kind, number in (("hot", by_rank), ("union", by_any), ("replica", hot)):
                total[f"{kind}_rows"] = number
                total[f"{kind}_bytes"] = number * 4 * demand.dim
            total["rows_device"] -= by_rank
            total["bytes_device"] -= by_rank * 4 * demand.dim
            for is_dense in (False, True):
                model = make_step_model(costs, world, workload, is_hot_dense=is_dense)
                step_s = model.predict(total).step_s
                assert choice.prediction.step_s <= step_s * (1 + 1e-9), (seed, taken)
        num_solved += 1
    assert num_solved > 50


def test_hot_range_is_kept():
    demands = [zipf_demand(f"t{i}", 5000) for i in range(3)]
    span = {"t0": (7, 7), "t1": (0, 0), "t2": (5000, 5000)}
    limits = Limits(1e12, 1e12)
    choice = optimise(demands, machine(), WORLD, WORKLOAD, limits, hot_range=span)
    assert choice.num_hot == {"t0": 7, "t1": 0, "t2": 5000}
    free = optimise(demands, machine(), WORLD, WORKLOAD, limits)
    assert free.prediction.step_s <= choice.prediction.step_s
    for bad in ({"t9": (0, 1)}, {"t0": (3, 2)}, {"t0": (0, 5001)}):
        with pytest.raises(ValueError, match="hot_range"):
            optimise(demands, machine(), WORLD, WORKLOAD, limits, hot_range=bad)


def test_options_that_are_not_allowed_are_not_taken():
    demands = [zipf_demand("a", 2000, lookups=20.0), zipf_demand("b", 50, dim=16)]
    limits = Limits(1e9, 1e9, tiers=(Tier.HOST,), exchanges=(Exchange.ROWS,), hot_exchanges=(True,))
    choice = optimise(demands, machine(), WORLD, WORKLOAD, limits)
    assert choice.is_hot_dense
    assert {t.tier for t in choice.tables.values()} == {Tier.HOST}
    assert {t.exchange for t in choice.tables.values()} == {Exchange.ROWS}
    row_wise = dataclasses.replace(limits, exchanges=(Exchange.POOLED,), tiers=(Tier.DEVICE,))
    pooled = optimise(demands, machine(), WORLD, WORKLOAD, row_wise)
    assert {t.sharding for t in pooled.tables.values()} == {Sharding.TABLE_WISE}
    none = dataclasses.replace(row_wise, shardings=(Sharding.ROW_WISE,))
    with pytest.raises(InfeasibleError, match="Allow tier device and exchange rows"):
        optimise(demands, machine(), WORLD, WORKLOAD, none)


def test_tier_without_costs_is_not_taken():
    costs = machine()
    kernels = {n: line for n, line in costs.kernels.items() if n != "read_miss"}
    costs = dataclasses.replace(costs, kernels=kernels)
    demand = zipf_demand("a", 100_000)
    share = demand.num_rows * demand.row_bytes / WORLD.num_ranks
    choice = optimise([demand], costs, WORLD, BY_LOADER, Limits(share / 2, share * 1.5))
    assert choice.tables["a"].tier is Tier.HOST


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_smallest_feasible_budget_is_feasible_and_one_byte_less_is_not(device):
    demands = [zipf_demand(f"t{i}", rows) for i, rows in enumerate((1000, 900, 40))]
    costs = machine(device)
    with pytest.raises(InfeasibleError, match="expected at least") as error:
        optimise(demands, costs, WORLD, WORKLOAD, Limits(10_000, 9_000))
    match = re.match(r"(\w+): expected at least (\d+) .* or use (\d+) ranks", str(error.value))
    assert match, error.value
    name, need = match[1], int(match[2])
    assert name == "host_bytes" if device == "cpu" else name in ("host_bytes", "device_bytes")
    enough = dataclasses.replace(Limits(10_000, 9_000), **{name: need})
    optimise(demands, costs, WORLD, WORKLOAD, enough)
    less = dataclasses.replace(enough, **{name: need - 1})
    with pytest.raises(InfeasibleError):
        optimise(demands, costs, WORLD, WORKLOAD, less)
    if device == "cpu":
        more = World(int(match[3]), 8)
        optimise(demands, costs, more, WORKLOAD, Limits(10_000, 9_000))


def test_a_pooled_table_must_fit_one_rank():
    demand = zipf_demand("wide", 10_000)
    limits = Limits(1e6, 1e6, exchanges=(Exchange.POOLED,))
    with pytest.raises(InfeasibleError, match="table wide.*one rank"):
        optimise([demand], machine(), WORLD, WORKLOAD, limits)


def test_replica_limit_below_fixed_rows():
    demand = zipf_demand("a", 100)
    with pytest.raises(InfeasibleError, match=f"replica_bytes: expected at least {50 * 260}"):
        optimise(
            [demand], machine(), WORLD, WORKLOAD, Limits(1e9, 1e9, 100), hot_range={"a": (50, 60)}
        )


def test_bad_input():
    for name in ("device_bytes", "host_bytes", "replica_bytes"):
        with pytest.raises(ValueError, match=name):
            Limits(**{"device_bytes": 1.0, "host_bytes": 1.0, name: -1.0})
        with pytest.raises(ValueError, match=name):
            Limits(**{"device_bytes": 1.0, "host_bytes": 1.0, name: float("nan")})
    with pytest.raises(ValueError, match="tiers"):
        Limits(1, 1, tiers=())
    with pytest.raises(ValueError, match="at least one table"):
        optimise([], machine(), WORLD, WORKLOAD, Limits(1, 1))
    twice = [zipf_demand("a", 10), zipf_demand("a", 10)]
    with pytest.raises(ValueError, match="different names"):
        optimise(twice, machine(), WORLD, WORKLOAD, Limits(1e9, 1e9))


def test_compare_names_the_fastest_and_says_when_nothing_pays():
    demands, costs, world, workload, _ = make_case(11)
    choice = optimise(demands, costs, world, workload, Limits(1e9, 1e9))
    step_s = choice.prediction.step_s

    def baseline(factor):
        stages = {name: s * factor for name, s in choice.prediction.stage_s.items()}
        return StepPrediction(step_s * factor, stages, {}, {"hot_exchange": 5.0})

    name, why = compare(choice, {"slow": baseline(2.0), "slower": baseline(3.0)})
    assert name == "hot_cold"
    assert "for slow, 50.0% less" in why
    name, why = compare(choice, {"slow": baseline(2.0), "torchrec planner": baseline(0.5)})
    assert name == "torchrec planner"
    assert "does not pay" in why
    assert compare(choice, {"same": baseline(1.0)})[0] == "same"
    assert compare(choice, {})[0] == "hot_cold"


def test_costs_of_a_case_differ():
    one, two = (make_costs(np.random.default_rng(s), "cuda", hosts=2) for s in (0, 1))
    assert one.kernels != two.kernels
