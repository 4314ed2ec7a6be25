"""Random small placement problems and a slow oracle for them."""

from __future__ import annotations

import numpy as np

from hotrec.cost_model.costs import KERNELS, Costs, Line, Link, World
from hotrec.cost_model.demand import TableDemand
from hotrec.cost_model.quantities import hot_cold_quantities
from hotrec.cost_model.step import QUANTITIES, Workload, predict_step
from hotrec.planner.search import POOLED_LOADS, Limits, pooled_imbalance
from hotrec.types import Exchange, TablePlacement

GROUPS = ("cold_groups", "hot_groups", "pooled_groups", "replicated_groups")


def make_demand(rng, name, *, dim, row_bytes, num_draws, world, num_groups, most_rows):
    """A table whose groups have few rows; some rows may never have been seen."""
    weights = np.sort(rng.pareto(rng.uniform(0.5, 2.0), num_groups) + 1e-3)[::-1]
    rows = rng.integers(1, most_rows + 1, num_groups)
    probs = weights / (weights * rows).sum()
    unseen = int(rng.integers(0, 3)) * int(rng.random() < 0.5)
    columns = int(rng.integers(1, 3))
    of_rank, of_host, of_any = (
        -np.expm1(num_draws * ranks * np.log1p(-np.minimum(probs, 1 - 1e-12)))
        for ranks in (1, world.ranks_per_host, world.num_ranks)
    )
    return TableDemand(
        name=name,
        num_rows=int(rows.sum()) + unseen,
        dim=dim,
        row_bytes=row_bytes,
        lookups_per_sample=columns * float(rng.choice([1.0, 1.0, 5.0])),
        num_columns=columns,
        rows_G=rows.astype(np.int64),
        probs_G=probs,
        by_rank_G=of_rank,
        by_any_G=of_any,
        by_host_G=of_host if world.has_levels else None,
        by_both_G=of_rank * of_any,
        by_host_both_G=of_host * of_any if world.has_levels else None,
    )


def make_costs(rng, device, *, hosts):
    """Costs of a machine that need not be sane: prices over several orders of magnitude."""

    def line():
        fixed, item, byte = 10.0 ** rng.uniform([-7, -9, -11], [-3, -5, -7])
        return Line(fixed * (rng.random() < 0.7), item, byte * (rng.random() < 0.8))

    link = Link(10.0 ** rng.uniform(-7, -2), 10.0 ** rng.uniform(5, 10))
    if rng.random() < 0.1:
        link = Link(10.0, link.bytes_per_s)  # latency is all there is
    inter = Link(10.0 ** rng.uniform(-6, -2), 10.0 ** rng.uniform(4, 9)) if hosts > 1 else None
    overlap = float(rng.choice([0.0, 0.5, 1.0, rng.random()]))
    return Costs(
        name="random",
        origin="built-in",
        device=device,
        kernels={name: line() for name in KERNELS},
        intra=link,
        inter=inter,
        device_bytes=1 << 30 if device == "cuda" else 0,
        host_bytes=1 << 30,
        overlap=overlap,
        overhead_s=float(rng.choice([0.0, 1e-3])),
    )


def make_case(seed, *, most_tables=3, num_groups=3, most_rows=2):
    """Demands, costs, world, workload and limits, some of which bind or cannot be met."""
    rng = np.random.default_rng(seed)
    device = "cpu" if seed % 2 else "cuda"
    world = World(*[(1, 1), (2, 2), (2, 1), (4, 2), (4, 4)][seed % 5])
    batch_size = int(rng.choice([1, 4, 32]))
    costs = make_costs(rng, device, hosts=world.num_hosts)
    demands = []
    for t in range(int(rng.integers(1, most_tables + 1))):
        dim = int(rng.choice([2, 8]))
        demands.append(
            make_demand(
                rng,
                f"t{t}",
                dim=dim,
                row_bytes=4 * dim + int(rng.choice([0, 4, 4 * dim])),
                num_draws=batch_size,
                world=world,
                num_groups=int(rng.integers(1, num_groups + 1)),
                most_rows=most_rows,
            )
        )
    workload = Workload(batch_size, float(rng.choice([0, 1e3])), float(rng.random()), 100)
    whole = sum(d.num_rows * (d.row_bytes + 4 * d.dim + 4) for d in demands)
    device_bytes, host_bytes = (whole * float(rng.choice([0.3, 0.6, 1.0, 3.0])) for _ in range(2))
    replica = None if rng.random() < 0.6 else whole * rng.random() / 2
    return demands, costs, world, workload, Limits(device_bytes, host_bytes, replica)


def step_of(case, pipeline, num_hot, tables):
    """The step's seconds with a placement."""
    demands, costs, world, workload, _ = case
    quantities = hot_cold_quantities(demands, num_hot, tables, world, workload.batch_size)
    pooled = [d for d in demands if tables[d.name].exchange is Exchange.POOLED]
    quantities |= {n: quantities[n] * pooled_imbalance(pooled, world) for n in POOLED_LOADS}
    return predict_step(costs, world, workload, pipeline, quantities).step_s


def limit_sizes(limits, is_cpu):
    """Device, host and replica bytes, infinite where there is no limit."""
    replica = np.inf if limits.replica_bytes is None else limits.replica_bytes
    return np.array([np.inf if is_cpu else limits.device_bytes, limits.host_bytes, replica])


def brute_force(demands, costs, world, workload, limits, pipeline):
    """The least predicted step over every placement with prefixes hot; None if nothing fits.

    All combinations of what each table can do, at once: quantities are sums over tables, except
    the message groups, which tables of one dimension share.
    """
    is_cpu = costs.device == "cpu"
    every = [list(_options(d, world, limits, is_cpu)) for d in demands]
    sizes = limit_sizes(limits, is_cpu)
    shape = tuple(len(options) for options in every)
    memory = np.zeros((*shape, 3))
    total = {name: np.zeros(shape) for name in QUANTITIES}
    for t, (demand, options) in enumerate(zip(demands, every, strict=True)):
        along = [1] * len(shape)
        along[t] = -1
        memory = memory + np.array([m for _, _, m in options]).reshape(*along, 3)
        does = [
            hot_cold_quantities(
                [demand], {demand.name: hot}, {demand.name: placed}, world, workload.batch_size
            )
            for hot, placed, _ in options
        ]
        for name in set(QUANTITIES) - set(GROUPS):
            total[name] = total[name] + np.array([d[name] for d in does]).reshape(along)
        for name in GROUPS:
            key = f"{name} {demand.dim}"
            needs = np.array([d[name] for d in does]).reshape(along)
            total[key] = np.maximum(total.get(key, np.zeros(shape)), needs)
    for name in GROUPS:
        total[name] = sum(total[f"{name} {dim}"] for dim in {d.dim for d in demands})
    for name in POOLED_LOADS:
        total[name] = total[name] * _imbalances(demands, every, world)
    fits = (memory <= sizes * (1 + 1e-9)).all(axis=-1)
    if not fits.any():
        return None
    step_s = predict_step(costs, world, workload, pipeline, total).step_s
    return float(np.broadcast_to(step_s, shape)[fits].min())


def _imbalances(demands, every, world):
    """The imbalance of each combination's pooled tables."""
    found = np.ones([len(options) for options in every])
    for at in np.ndindex(found.shape):
        placed = [options[i][1] for i, options in zip(at, every, strict=True)]
        pooled = [
            demand
            for demand, of in zip(demands, placed, strict=True)
            if of.exchange is Exchange.POOLED
        ]
        found[at] = pooled_imbalance(pooled, world)
    return found


def _options(demand, world, limits, is_cpu):
    """(hot rows, placement, memories) of everything a table can do."""
    ranks, size = world.num_ranks, demand.num_rows
    whole = size * demand.row_bytes
    for exchange in Exchange:
        is_pooled = exchange is Exchange.POOLED
        if is_pooled and whole > (limits.host_bytes if is_cpu else limits.device_bytes):
            continue
        for hot in range(1 if is_pooled else size + 1):
            placed = TablePlacement(exchange)
            numbers = {demand.name: hot}, {demand.name: placed}
            yield hot, placed, memory_of([demand], *numbers, ranks, is_cpu=is_cpu)


def memory_of(demands, num_hot, tables, ranks, *, is_cpu, is_routed_on_device=True):
    """Device, host and replica bytes of the mean rank; on a CPU all memory is the host's."""
    device = host = replica = 0.0
    for d in demands:
        hot, placed = num_hot[d.name], tables[d.name]
        device += hot * d.row_bytes + d.num_rows * d.row_bytes / ranks
        replica += hot * d.row_bytes
        if placed.exchange is Exchange.ROWS:  # the router
            host += 4 * d.num_rows
            device += 4 * d.num_rows * (is_routed_on_device and not is_cpu)
    return np.array([0.0, device + host, replica] if is_cpu else [device, host, replica])
