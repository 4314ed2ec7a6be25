import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.cost_model.costs import World
from hotrec.cost_model.memory import memory_by_rank
from hotrec.cost_model.quantities import TableSharding
from hotrec.types import Exchange, TablePlacement, Tier
from tests.unit.cost_model import samples

POOLED = TablePlacement(Exchange.POOLED)


def make_demand(name, num_rows, *, dim=4, state_bytes=4):
    counts = np.ones(num_rows, np.int64)
    return samples.make_demand(counts, name, dim=dim, row_bytes=4 * dim + state_bytes)


def memory(demands, num_hot, tables, world_size=2, device="cuda", **options):
    found = memory_by_rank(
        demands, num_hot, tables, World(world_size, world_size), device, **options
    )
    return [(entry["device_bytes"], entry["host_bytes"]) for entry in found]


def test_hot_and_cold_by_hand():
    demand = make_demand("a", 5)  # 16 bytes of floats, 4 of state
    # 2 replicas of 20; shards of 3 and 2 rows; the router's 4 x 5.
    expected = [(2 * 20 + 3 * 20 + 20, 20), (2 * 20 + 2 * 20 + 20, 20)]
    assert memory([demand], {"a": 2}, {"a": TablePlacement()}) == expected
    by_loader = [(device - 20, host) for device, host in expected]
    found = memory([demand], {"a": 2}, {"a": TablePlacement()}, is_routed_on_device=False)
    assert found == by_loader
    # On CPU everything is host memory, and the router is there once.
    on_cpu = [(0, device - 20 + host) for device, host in expected]
    assert memory([demand], {"a": 2}, {"a": TablePlacement()}, device="cpu") == on_cpu


def test_torchrec_plans_by_hand():
    demands = [make_demand("a", 5), make_demand("b", 3, dim=8)]
    shardings = {
        "a": TableSharding("table_wise", (1,)),
        "b": TableSharding("data_parallel", ()),
    }
    # b: 3 rows of 36 bytes and twice 32 of gradients on every rank.
    assert memory(demands, {}, shardings) == [(3 * 100, 0), (3 * 100 + 5 * 20, 0)]
    rows = TableSharding("row_wise", (0, 1), Tier.HOST)
    columns = TableSharding("column_wise", (0, 1))
    found = memory(demands, {}, {"a": rows, "b": columns})
    assert found == [(3 * 4 + 54, 3 * 16), (2 * 4 + 54, 2 * 16)]
    # Row-wise state, one float, stays on the device for every row, cached or not; a slot has 16 and
    # FBGEMM's 8 + 8, and its map 4 for each row.
    cached = TableSharding("table_wise", (0,), Tier.HOST_CACHED, 0.4)
    found = memory(demands[:1], {}, {"a": cached})
    assert found == [(5 * (4 + 4) + 2 * 32, 5 * 16), (0, 0)]
    # State of a whole row goes where the row is, and is not cached.
    full = [make_demand("a", 5, state_bytes=16)]
    assert memory(full, {}, {"a": cached}) == [(5 * 4 + 2 * 32, 5 * 32), (0, 0)]
    grid = TableSharding("grid_shard", (0, 1, 2, 3))
    found = memory_by_rank(demands[1:], {}, {"b": grid}, World(4, 2), "cuda")
    assert [entry["device_bytes"] for entry in found] == [36, 18, 36, 18]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    world_size=st.sampled_from([1, 2, 4]),
    exchange=st.sampled_from(list(Exchange)),
)
def test_every_row_is_somewhere(sizes, world_size, exchange):
    demands = [make_demand(f"t{i}", size) for i, size in enumerate(sizes)]
    tables = {d.name: TablePlacement(exchange) for d in demands}
    found = memory(demands, {}, tables, world_size, is_routed_on_device=False)
    router = 4 * sum(sizes) * world_size * (exchange is Exchange.ROWS)
    assert sum(map(sum, found)) == pytest.approx(20 * sum(sizes) + router)
    on_cpu = memory(demands, {}, tables, world_size, device="cpu")
    assert sum(map(sum, on_cpu)) == pytest.approx(20 * sum(sizes) + router)
    assert all(device == 0 for device, _ in on_cpu)
    fewer = memory(demands, {demands[0].name: 0}, tables, world_size)
    more = memory(demands, {demands[0].name: max(sizes[0] - 1, 0)}, tables, world_size)
    assert all(m[0] >= f[0] for m, f in zip(more, fewer, strict=True))
