import dataclasses
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hotrec.cost_model.caches import CachedTable, lfu_hit_frac, num_slots, shared_cache_shares
from hotrec.cost_model.costs import REQUIRED, Costs, Line, Link, World
from hotrec.cost_model.demand import expected_distinct, expected_urgent
from hotrec.cost_model.forms import QUANTITIES, Workload
from hotrec.cost_model.quantities import (
    TableSharding,
    between_hosts_bound_bytes,
    cached_rows,
    hot_cold_caches,
    hot_cold_quantities,
    predict_torchrec,
    served_by_shard,
    torchrec_caches,
    torchrec_quantities,
)
from hotrec.cost_model.step import make_model, make_step_model
from hotrec.runtime.traffic import SentBytes, lower_bound_between_hosts_bytes
from hotrec.types import (
    Exchange,
    Levels,
    PipelineKind,
    PipelineSpec,
    RowOrder,
    Sharding,
    TableOutput,
    TablePlacement,
    Tier,
)
from tests.unit.cost_model import samples

POOLED = TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE)
WORKLOAD = Workload(batch_size=4, dense_flops=0.0, bottom_frac=0.0, num_dense_values=0)


make_demand = partial(samples.make_demand, batch_size=4)


def make_costs(**changes):
    lines = {name: Line(1e-6, 1e-9, 1e-10) for name in REQUIRED}  # enough on devices
    link = Link(1e-4, 1e9)
    costs = Costs("test", "built-in", "cuda", lines, link, link, 10**9, 10**9)
    return dataclasses.replace(costs, **changes)


def predict(quantities, world, **changes):
    workload = dataclasses.replace(WORKLOAD, **changes)
    return make_step_model(make_costs(), world, workload).predict(quantities)


def two_tables(world_size=2):
    """A shared table of two columns, D=4; a multi-hot one of 3 ids a sample, D=8."""
    return [
        make_demand([8, 4, 2, 2], "a", dim=4, lookups=2.0, num_columns=2, world_size=world_size),
        make_demand([3, 3, 3, 0], "b", dim=8, lookups=3.0, world_size=world_size),
    ]


def test_hot_cold_by_hand():
    demands = two_tables()
    tables = {"a": TablePlacement(), "b": TablePlacement(tier=Tier.HOST)}
    found = hot_cold_quantities(demands, {"a": 1, "b": 2}, tables, World(2, 2), 4)
    assert set(found) == set(QUANTITIES)
    a, b = (expected_distinct(d, n) for d, n in zip(demands, (1, 2), strict=True))
    urgent = [expected_urgent(d, n) for d, n in zip(demands, (1, 2), strict=True)]
    of_a = {"lookups": 8, "rows_device": a[1], "urgent_rows": urgent[0], "hot_rows": a[0]}
    of_b = {"lookups": 12, "rows_host": b[1], "urgent_rows": urgent[1], "hot_rows": b[0]}
    of_a |= {"union_rows": a[2], "replica_rows": 1, "cold_groups": 1, "hot_groups": 1}
    of_b |= {"union_rows": b[2], "replica_rows": 2, "cold_groups": 1, "hot_groups": 1}
    expected = Counter(samples.work_of(16, **of_a))
    expected.update(samples.work_of(32, **of_b))
    assert found == pytest.approx({**dict.fromkeys(QUANTITIES, 0.0), **expected})


def test_groups_are_dimensions_that_need_them():
    demands = [make_demand([2, 1], name, dim=dim) for name, dim in (("a", 4), ("b", 4), ("c", 8))]
    rows = dict.fromkeys("abc", TablePlacement())

    def groups(num_hot, tables=rows):
        found = hot_cold_quantities(demands, num_hot, tables, World(2, 2), 4)
        return tuple(found[f"{name}_groups"] for name in ("hot", "cold", "pooled"))

    assert groups({}) == (0, 2, 0)
    assert groups({"a": 1}) == (1, 2, 0)
    assert groups({"a": 2, "b": 2}) == (1, 1, 0)
    assert groups({"a": 2, "b": 2, "c": 2}) == (2, 0, 0)
    assert groups({"a": 1}, {**rows, "c": POOLED}) == (1, 1, 1)


def test_cache_by_hand():
    # One lookup of one rank: q is p. Of 6 cold rows the two most looked-up ones are cached.
    demand = make_demand([50, 20, 10, 5, 5, 5, 3, 2], "a", batch_size=1, world_size=1)
    placed = TablePlacement(tier=Tier.HOST_CACHED, cache_load_frac=0.25)
    found = hot_cold_quantities([demand], {"a": 2}, {"a": placed}, World(1, 1), 1)
    assert (found["rows_hit"], found["rows_miss"]) == pytest.approx((0.15, 0.15))
    assert (found["bytes_hit"], found["bytes_miss"]) == pytest.approx((2.4, 2.4))
    assert found["rows_host"] == found["rows_device"] == 0
    pooled = dataclasses.replace(placed, exchange=Exchange.POOLED, sharding=Sharding.TABLE_WISE)
    found = hot_cold_quantities([demand], {}, {"a": pooled}, World(1, 1), 1)
    assert (found["pooled_ids_hit"], found["pooled_ids_miss"]) == pytest.approx((0.7, 0.3))
    assert found["pooled_bytes_miss"] == pytest.approx(0.3 * 16)


def test_pooled_by_hand():
    demands = two_tables(world_size=4)
    world = World(4, 4)
    found = hot_cold_quantities(demands, {}, dict.fromkeys("ab", POOLED), world, 4)
    # Of a rank's 8 + 12 ids three quarters go to others, with 8 + 4 lengths of half an id each.
    assert found["pooled_sent_ids"] == pytest.approx(0.75 * (8 + 12 + (8 + 4) / 2))
    # Vectors of 2 x 4 and 1 x 8 floats a sample.
    assert found["pooled_sent_bytes"] == pytest.approx(0.75 * 4 * (2 * 16 + 32))
    assert found["pooled_ids_device"] == 20
    assert found["pooled_bytes_device"] == 8 * 16 + 12 * 32
    assert found["lookups"] == 0
    by_rows = TablePlacement(Exchange.POOLED, Sharding.ROW_WISE)
    found = hot_cold_quantities(demands, {}, dict.fromkeys("ab", by_rows), world, 4)
    assert found["pooled_sent_ids"] == pytest.approx(0.75 * 20 + 3 * 12 / 2)
    assert found["pooled_sent_bytes"] == pytest.approx(3 * 4 * (2 * 16 + 32))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_mean_rank_of_table_wise_plan_does_what_a_pooled_placement_does(world_size):
    demands, world = two_tables(world_size), World(world_size, world_size)
    for sharding, kind in ((Sharding.TABLE_WISE, "table_wise"), (Sharding.ROW_WISE, "row_wise")):
        placed = dict.fromkeys("ab", TablePlacement(Exchange.POOLED, sharding))
        mean = hot_cold_quantities(demands, {}, placed, world, 4)
        owners = tuple(range(world_size)) if kind == "row_wise" else (world_size - 1,)
        shardings = dict.fromkeys("ab", TableSharding(kind, owners))
        per_rank = torchrec_quantities(demands, shardings, world, 4)
        for name in QUANTITIES:
            if not name.endswith("groups"):
                found = np.mean([quantities[name] for quantities in per_rank])
                assert found == pytest.approx(mean[name]), name


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_hot_cold_as_simulated(world_size):
    """Distinct rows and their bytes of drawn multi-hot batches, several columns of one table."""
    counts, probs = samples.zipf(400, 1.05)
    num_columns, bag_size, batch_size, num_hot = 2, 3, 16, 25
    demand = make_demand(
        counts,
        "a",
        dim=16,
        lookups=num_columns * bag_size,
        num_columns=num_columns,
        batch_size=batch_size,
        world_size=world_size,
    )
    world = World(world_size, world_size)
    quantities = hot_cold_quantities(
        [demand], {"a": num_hot}, {"a": TablePlacement()}, world, batch_size
    )
    sent = predict(quantities, world).sent_bytes
    trials = []
    num_draws = num_columns * bag_size * batch_size
    for ranks in samples.draw_steps(probs, num_draws, world_size=world_size, num_steps=150):
        cold = [rows[rows >= num_hot] for rows in ranks]
        # Owners by row number modulo W: even shards.
        away = np.mean([(rows % world_size != rank).sum() for rank, rows in enumerate(cold)])
        hot = np.mean([(rows < num_hot).sum() for rows in ranks])
        trials.append((4 * away, 64 * away, 64 * away, (64 + 4) * (world_size - 1) * hot))
    error = np.std(trials, axis=0, ddof=1) / np.sqrt(len(trials))
    stages = ("ids_exchange", "rows_exchange", "grads_exchange", "hot_exchange")
    expected = np.array([sent[stage] for stage in stages])
    assert (np.abs(np.mean(trials, axis=0) - expected) <= 4 * error + 1e-9).all()


@pytest.mark.parametrize("kind", [PipelineKind.sparse_dist, PipelineKind.look_ahead])
def test_two_levels_as_simulated(kind):
    """Two hosts of two ranks: inside hosts in fp32, then the rows of a host once on the rails."""
    world, num_hot, batch_size = World(4, 2), 6, 12
    counts, probs = samples.zipf(60, 1.1)
    demand = make_demand(
        counts, "a", dim=16, lookups=3.0, batch_size=batch_size, world_size=4, ranks_per_host=2
    )
    quantities = hot_cold_quantities(
        [demand], {"a": num_hot}, {"a": TablePlacement()}, world, batch_size
    )
    spec = PipelineSpec(kind, levels=Levels.two)
    model = make_model(make_costs(), world, WORKLOAD, pipeline=spec)
    sent = model.predict(quantities).sent_bytes
    trials = []
    for ranks in samples.draw_steps(probs, 3 * batch_size, world_size=4, num_steps=400):
        cold = [rows[rows >= num_hot] for rows in ranks]
        hosts = [np.union1d(*cold[:2]), np.union1d(*cold[2:])]
        # The owner of a row is its number modulo 4: its relay is the number modulo 2.
        inside = np.mean([(rows % 2 != rank % 2).sum() for rank, rows in enumerate(cold)])
        rails = sum((rows % 4 // 2 != host).sum() for host, rows in enumerate(hosts)) / 4
        hot = [rows[rows < num_hot] for rows in ranks]
        met = sum(np.union1d(*hot[host : host + 2]).size for host in (0, 2)) / 4
        to_owners = np.mean([(rows % 2 != rank % 2).sum() for rank, rows in enumerate(hot)])
        gathered = np.unique(np.concatenate(hot)).size / 2
        added_up = 68 * (to_owners + met + gathered)
        trials.append((inside + rails, 64 * (inside + rails), added_up))
    error = np.std(trials, axis=0, ddof=1) / np.sqrt(len(trials))
    row_bytes = 6 if kind is PipelineKind.look_ahead else 4
    found = [sent["ids_exchange"] / row_bytes, sent["rows_exchange"], sent["hot_exchange"]]
    is_near = np.abs(np.mean(trials, axis=0) - found) <= 4 * error + 1e-9
    # Look-ahead reduces all of so few hot rows.
    assert is_near[: 3 if kind is PipelineKind.sparse_dist else 2].all()
    assert sent["grads_exchange"] == sent["rows_exchange"]
    # Fewer bytes cross than in one level, by the rows that both ranks of a host read.
    assert 2 * quantities["relayed_rows"] < 2 * quantities["rows_device"]


@pytest.mark.parametrize("levels", [Levels.one, Levels.two])
@pytest.mark.parametrize("kind", [PipelineKind.sparse_dist, PipelineKind.look_ahead])
def test_bytes_between_hosts_as_counted(kind, levels, monkeypatch):
    """Two hosts of two ranks, cold rows and dense layers: counted as in a run, with its bound."""
    world, batch_size, hosts, num_dense = World(4, 2), 12, (0, 0, 1, 1), 1000
    counts, probs = samples.zipf(60, 1.1)
    demand = make_demand(
        counts, "a", dim=16, lookups=3.0, batch_size=batch_size, world_size=4, ranks_per_host=2
    )
    quantities = hot_cold_quantities([demand], {}, {"a": TablePlacement()}, world, batch_size)
    workload = dataclasses.replace(WORKLOAD, num_dense_values=num_dense)
    model = make_model(make_costs(), world, workload, pipeline=PipelineSpec(kind, levels=levels))
    # An id, and with look-ahead two flags in reply; a row and its gradient.
    row_bytes = (6 if kind is PipelineKind.look_ahead else 4) + 2 * 64
    # The dense layers add up inside hosts first (NCCL); a ring's count is 3/4 instead of 1/2.
    dense_bytes = 2 * 4 * num_dense / 2 / 2
    counted, bounds = [], []
    for ranks in samples.draw_steps(probs, 3 * batch_size, world_size=4, num_steps=400):
        of_hosts = [np.union1d(*ranks[:2]), np.union1d(*ranks[2:])]
        between = bound = 0.0
        for rank, rows in enumerate(ranks):
            own, local = hosts[rank], rank % 2
            # The owner of a row is its number modulo 4, its relay the number modulo 2.
            relayed = of_hosts[own][of_hosts[own] % 2 == local]
            asked = rows if levels is Levels.one else relayed
            traffic = SentBytes(hosts)
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            to_owners = row_bytes * np.bincount(asked % 4, minlength=4)
            to_owners[rank] = 0
            traffic.add("all_to_all", to_owners.tolist(), range(4))
            between += traffic.between_hosts_bytes["all_to_all"] / 4
            rows_of_rank = {16: relayed.size}
            bound += lower_bound_between_hosts_bytes(
                rows_of_rank, hosts, rank, num_dense_values=num_dense
            )
        counted.append(between + dense_bytes)
        bounds.append(bound / 4)
    predicted = model.predict(quantities).between_hosts_bytes
    predicted_bound = between_hosts_bound_bytes([demand], world, num_dense)
    for found, trials in ((predicted, counted), (predicted_bound, bounds)):
        assert abs(found - np.mean(trials)) <= 4 * np.std(trials, ddof=1) / np.sqrt(400) + 1
    if levels is Levels.two:
        ids_bytes = (row_bytes - 128) * quantities["relayed_rows"] / 2
        assert predicted - ids_bytes == pytest.approx(predicted_bound)


def test_torchrec_kinds_of_sequences_by_hand():
    demand = make_demand([3, 3, 3, 0], "b", dim=8, lookups=3.0, world_size=4)
    demand = dataclasses.replace(demand, output=TableOutput.expanded)
    world = World(4, 4)

    def per_rank(kind, *ranks):
        sharding = TableSharding(kind, ranks)
        found = torchrec_quantities([demand], {"b": sharding}, world, 4)
        return {name: [of[name] for of in found] for name in QUANTITIES}

    # 12 ids of a rank, rows of 32 bytes, 4 lengths of half an id. Nothing is de-duplicated.
    whole = per_rank("table_wise", 2)
    assert whole["pooled_ids_device"] == [0, 0, 48, 0]
    assert whole["pooled_sent_bytes"] == [0, 0, 3 * 12 * 32, 0]
    assert whole["permuted_bytes"] == [0, 0, 48 * 32, 0]
    assert whole["pooled_sent_ids"] == [14, 14, 0, 14]
    rows = per_rank("row_wise", 0, 1, 2, 3)
    assert rows["pooled_ids_device"] == [12] * 4
    assert rows["pooled_sent_bytes"] == [3 * 3 * 32] * 4
    assert rows["permuted_bytes"] == [2 * 12 * 32] * 4  # by the owner and by the reader
    assert rows["pooled_sent_ids"] == [3 * (3 + 2)] * 4
    columns = per_rank("column_wise", 1, 3)
    assert columns["pooled_bytes_device"] == [0, 48 * 16, 0, 48 * 16]
    assert columns["pooled_sent_bytes"] == [0, 3 * 12 * 16, 0, 3 * 12 * 16]
    assert columns["permuted_bytes"] == [12 * 32, 60 * 32 - 48 * 16] * 2
    copies = per_rank("data_parallel")
    assert copies["replicated_ids"] == [12] * 4
    assert copies["replicated_bytes"] == [4 * 32] * 4
    assert not any(sum(of) for name, of in copies.items() if name.startswith(("p", "c", "h")))
    # Sent once in forward, received once in backward, and copied as often as it is reordered.
    model = make_step_model(make_costs(), world, WORKLOAD)
    stage_s = [predict_torchrec(model, per_of).stage_s["rows_exchange"] for per_of in (
        torchrec_quantities([demand], {"b": TableSharding("row_wise", (0, 1, 2, 3))}, world, 4),
        [{"pooled_sent_bytes": 3 * 3 * 32, "pooled_groups": 1.0}] * 4,
    )]  # fmt: skip
    assert stage_s[0] - stage_s[1] == pytest.approx(2 * 12 * 32 * 1e-10)
    bags = dataclasses.replace(demand, name="a", output=TableOutput.pooled)
    both = {name: TableSharding("table_wise", (0,)) for name in "ab"}
    assert torchrec_quantities([demand, bags], both, world, 4)[0]["pooled_groups"] == 2


def test_sequences_are_not_exchanged_pooled():
    demand = dataclasses.replace(make_demand([3, 1], "a"), output=TableOutput.packed)
    with pytest.raises(ValueError, match="^placement table a exchange: expected rows"):
        hot_cold_quantities([demand], {}, {"a": POOLED}, World(2, 2), 4)


def test_torchrec_kinds_by_hand():
    demand = make_demand([3, 3, 3, 0], "b", dim=8, lookups=3.0, world_size=4)
    world = World(4, 2)

    def per_rank(kind, *ranks, **cache):
        sharding = TableSharding(kind, ranks, **cache)
        return torchrec_quantities([demand], {"b": sharding}, world, 4)

    def column(found, name):
        return [quantities[name] for quantities in found]

    # B F D 4 = 128 bytes of pooled vectors, 12 ids, 4 lengths of half an id.
    whole = per_rank("table_wise", 2)
    assert column(whole, "pooled_ids_device") == [0, 0, 48, 0]
    assert column(whole, "pooled_bytes_device") == [0, 0, 48 * 32, 0]
    assert column(whole, "pooled_sent_bytes") == [0, 0, 3 * 128, 0]
    assert column(whole, "pooled_sent_ids") == [14, 14, 0, 14]
    assert {of["pooled_groups"] for of in whole} == {1}
    assert not any(v for of in whole for n, v in of.items() if not n.startswith("pooled"))
    rows = per_rank("row_wise", 0, 1, 2, 3)
    assert column(rows, "pooled_ids_device") == [12] * 4
    assert column(rows, "pooled_sent_bytes") == [3 * 128] * 4
    assert column(rows, "pooled_sent_ids") == [3 * (3 + 2)] * 4
    columns = per_rank("column_wise", 1, 3)
    assert column(columns, "pooled_ids_device") == [0, 48, 0, 48]
    assert column(columns, "pooled_bytes_device") == [0, 48 * 16, 0, 48 * 16]
    assert column(columns, "pooled_sent_bytes") == [0, 3 * 64, 0, 3 * 64]
    assert column(columns, "pooled_sent_ids") == [28, 14, 28, 14]
    host = per_rank("table_row_wise", 2, 3)
    assert column(host, "pooled_ids_device") == [0, 0, 24, 24]
    # Reduce-scatter of 4 batches on the host, a half of each travels; one batch to the other host.
    assert column(host, "pooled_sent_bytes") == [0, 0, 2 * 128 + 128, 2 * 128 + 128]
    assert column(host, "pooled_sent_ids") == [16, 16, 8, 8]
    grid = per_rank("grid_shard", 0, 1, 2, 3)
    assert column(grid, "pooled_ids_device") == [24] * 4
    assert column(grid, "pooled_bytes_device") == [24 * 16] * 4
    assert column(grid, "pooled_sent_bytes") == [3 * 64] * 4
    assert column(grid, "pooled_sent_ids") == [8 + 16] * 4
    cached = per_rank("table_wise", 0, tier=Tier.HOST_CACHED, cache_load_frac=0.5)
    # A set of 32 slots is the least that FBGEMM has.
    assert column(cached, "pooled_ids_hit") == pytest.approx([48, 0, 0, 0])
    assert column(cached, "pooled_ids_miss") == pytest.approx([0, 0, 0, 0], abs=1e-9)


def test_cached_tables_of_a_rank_share_its_cache():
    demands = [make_demand(list(range(400, 0, -1)), name, world_size=2) for name in "abc"]
    cache = {"tier": Tier.HOST_CACHED, "cache_load_frac": 0.4}
    shardings = {
        "a": TableSharding("table_wise", (0,), **cache),
        "b": TableSharding("table_wise", (0,), **cache),
        "c": TableSharding("row_wise", (0, 1), **cache),
    }
    found = torchrec_caches(demands, shardings, World(2, 2))
    parts = [CachedTable(demand, is_per_lookup=True) for demand in demands]
    # 160 rows each of a and b; of c half of its 160 rows on each rank, in a cache of its own.
    together = shared_cache_shares(parts[:2], 320)
    half = dataclasses.replace(parts[2], share=0.5)
    [alone] = shared_cache_shares([half], num_slots(80))
    assert found == {
        (0, "a"): together[0], (0, "b"): together[1], (0, "c"): alone, (1, "c"): alone
    }  # fmt: skip
    assert together[0] != shared_cache_shares(parts[:1], 160)[0]
    per_rank = torchrec_quantities(demands, shardings, World(2, 2), 4)
    ids = per_rank[0]["pooled_ids_hit"] + per_rank[0]["pooled_ids_miss"]
    assert ids + per_rank[0]["pooled_ids_host"] == pytest.approx(2 * 4 * (1 + 1 + 0.5))
    assert per_rank[1]["pooled_ids_hit"] == pytest.approx(4 * alone.hit)


def test_caches_of_a_placement_are_by_dimension_and_one_for_pooled():
    counts = list(range(300, 0, -1))
    demands = [
        make_demand(counts, name, dim=dim) for name, dim in zip("abcd", (4, 4, 8, 8), strict=True)
    ]
    cached = TablePlacement(tier=Tier.HOST_CACHED, cache_load_frac=0.4)
    pooled = dataclasses.replace(cached, exchange=Exchange.POOLED, sharding=Sharding.TABLE_WISE)
    tables = {"a": cached, "b": cached, "c": cached, "d": pooled}
    found = hot_cold_caches(demands, {"a": 20}, tables, World(1, 1))
    both = [CachedTable(demands[0], 20), CachedTable(demands[1])]
    assert [found["a"], found["b"]] == shared_cache_shares(both, 256)
    assert [found["c"]] == shared_cache_shares([CachedTable(demands[2])], 128)
    last = CachedTable(demands[3], is_per_lookup=True)
    assert [found["d"]] == shared_cache_shares([last], 128)
    quantities = hot_cold_quantities(demands, {"a": 20}, tables, World(1, 1), 4, found)
    cold = {d.name: expected_distinct(d, {"a": 20}.get(d.name, 0))[1] for d in demands}
    hits = sum(cold[name] * found[name].hit for name in "abc")
    assert quantities["rows_hit"] == pytest.approx(hits)
    assert quantities["rows_host"] == pytest.approx(
        sum(cold[name] * found[name].conflict for name in "abc")
    )
    # No cache does better than to hold the most looked-up rows for good.
    best = hot_cold_quantities(demands, {"a": 20}, tables, World(1, 1), 4)
    assert best["rows_miss"] < quantities["rows_miss"] + quantities["rows_host"]


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize(("state_bytes", "crosses"), [(0, 0), (4, 0), (16, 16), (32, 32)])
def test_element_wise_state_crosses_the_bus_whatever_is_cached(tier, state_bytes, crosses):
    demand = dataclasses.replace(
        make_demand([9, 4, 2, 1], "a", world_size=2), row_bytes=16 + state_bytes
    )
    frac = 0.5 if tier in (Tier.HOST_CACHED, Tier.CACHED) else None
    placed = TablePlacement(tier=tier, cache_load_frac=frac)
    found = hot_cold_quantities([demand], {"a": 1}, {"a": placed}, World(2, 2), 4)
    touched = float(demand.by_any_G[1:] @ demand.rows_G[1:]) / 2
    if tier is Tier.CACHED:  # which look-ahead brings into the slots with the rows
        crosses = 0
    expected = 0 if tier is Tier.DEVICE else touched * crosses
    assert found["state_bytes_host"] == pytest.approx(expected)
    owned = {"a": TableSharding("table_wise", (1,), tier, frac)}
    per_rank = torchrec_quantities([demand], owned, World(2, 2), 4)
    whole = float(demand.by_any_G @ demand.rows_G) * (0 if tier is Tier.DEVICE else crosses)
    assert [q["state_bytes_host"] for q in per_rank] == pytest.approx([0, whole])


def test_torchrec_data_parallel_by_hand():
    demands = two_tables()
    shardings = {"a": TableSharding("data_parallel", ()), "b": TableSharding("row_wise", (0, 1))}
    expected = samples.work_of(
        16, replicated_ids=8, replicated_rows=4, replicated_groups=1, pooled_groups=1
    )
    for quantities in torchrec_quantities(demands, shardings, World(2, 2), 4):
        assert expected.items() <= quantities.items()
        sent = predict(quantities, World(2, 2)).sent_bytes
        assert sent["hot_exchange"] == 64  # 2 (W-1)/W of 64 bytes
    shardings["a"] = TableSharding("table_wise", (0,))
    assert torchrec_quantities(demands, shardings, World(2, 2), 4)[0]["pooled_groups"] == 2


def test_slowest_rank_and_mean_bytes():
    demands, world = two_tables(), World(2, 2)
    shardings = {"a": TableSharding("table_wise", (0,)), "b": TableSharding("table_wise", (1,))}
    per_rank = torchrec_quantities(demands, shardings, world, 4)
    model = make_step_model(make_costs(), world, WORKLOAD)
    found, each = predict_torchrec(model, per_rank), [model.predict(q) for q in per_rank]
    for stage, slowest, other in (("row_lookup", 1, 0), ("ids_exchange", 0, 1)):
        assert found.stage_s[stage] == each[slowest].stage_s[stage] > each[other].stage_s[stage]
    assert found.step_s == pytest.approx(sum(found.stage_s.values()))
    assert found.step_s > max(p.step_s for p in each)
    assert found.sent_bytes["rows_exchange"] == pytest.approx((128 + 128) / 2)
    assert found.sent_bytes["ids_exchange"] == pytest.approx(8 * (14 + 12) / 2)


# Tables and figures of benchmarks/results/criteo_like_b2048.md and criteo_like_b8192.md.
TABLE_ROWS = (1461, 584, 876_000, 876_000, 306, 24, 12_518, 634, 4, 93_146, 5684, 876_000, 3195)
TABLE_ROWS += (28, 14_993, 876_000, 11, 5653, 2173, 5, 876_000, 18, 16, 286_181, 105, 142_572)
MEASURED = {
    2048: {"distinct": 14_974, "hot_cold": (1.93e6, 1.98e6), "hand_tuned": (7.51e6, 1.56e6)},
    8192: {"distinct": 42_491, "hot_cold": (7.25e6, 3.79e6), "hand_tuned": (21.5e6, 5.83e6)},
}
TABLE_WISE_BYTES = {2048: 14.0e6, 8192: 55.8e6}
DENSE_BYTES = 737e3


@pytest.fixture(scope="module")
def criteo_like():
    """Counts of the exact Zipf law, and the 20,000 hottest rows by table."""
    laws = [samples.zipf(rows, 1.05, 10**12) for rows in TABLE_ROWS]
    threshold = np.sort(np.concatenate([p[:20_000] for _, p in laws]))[-20_000]
    num_hot = {f"C{i}": int((p >= threshold).sum()) for i, (_, p) in enumerate(laws)}
    return [counts for counts, _ in laws], num_hot


@pytest.mark.parametrize("batch_size", [2048, 8192])
def test_traffic_of_the_measured_pages(criteo_like, batch_size):
    counts, num_hot = criteo_like
    world, measured = World(2, 2), MEASURED[batch_size]
    demands = [
        make_demand(of_table, f"C{i}", dim=64, batch_size=batch_size)
        for i, of_table in enumerate(counts)
    ]
    model = make_step_model(
        make_costs(), world, Workload(batch_size, 0.0, 0.0, int(DENSE_BYTES / 4))
    )

    def to_all(prediction):
        stages = ("ids_exchange", "rows_exchange", "grads_exchange")
        return sum(prediction.sent_bytes[stage] for stage in stages)

    tables = {demand.name: TablePlacement() for demand in demands}
    quantities = hot_cold_quantities(demands, num_hot, tables, world, batch_size)
    found = model.predict(quantities)
    distinct = quantities["hot_rows"] + quantities["rows_device"]
    assert distinct == pytest.approx(measured["distinct"], rel=0.03)
    gathered = found.sent_bytes["hot_exchange"]
    assert found.sent_bytes["other"] == pytest.approx(DENSE_BYTES, rel=1e-3)
    assert (to_all(found), gathered) == pytest.approx(measured["hot_cold"], rel=0.03)

    owned = {d.name: TableSharding("table_wise", (i % 2,)) for i, d in enumerate(demands)}
    found = predict_torchrec(model, torchrec_quantities(demands, owned, world, batch_size))
    assert to_all(found) == pytest.approx(TABLE_WISE_BYTES[batch_size], rel=0.03)

    for demand in demands:  # what an expert writes: small tables data-parallel
        if demand.num_rows < batch_size:
            owned[demand.name] = TableSharding("data_parallel", ())
    found = predict_torchrec(model, torchrec_quantities(demands, owned, world, batch_size))
    expected = pytest.approx(measured["hand_tuned"], rel=0.03)
    reduced = found.sent_bytes["hot_exchange"] + found.sent_bytes["other"]
    assert (to_all(found), reduced) == expected


@given(
    counts=st.lists(st.integers(0, 20), min_size=2, max_size=20).filter(any),
    world_size=st.sampled_from([1, 2, 4]),
    load_frac=st.floats(0, 1),
    num_hot=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_more_hot_rows_move_work_from_shards_to_replicas(counts, world_size, load_frac, num_hot):
    demand = make_demand(counts, "a", world_size=world_size)
    placed = TablePlacement(tier=Tier.HOST_CACHED, cache_load_frac=load_frac)
    found = []
    for hot in sorted(min(n, len(counts)) for n in num_hot):
        of = hot_cold_quantities([demand], {"a": hot}, {"a": placed}, World(world_size, 1), 4)
        cold = of["rows_hit"] + of["rows_miss"]
        assert of["hot_rows"] + cold == pytest.approx(expected_distinct(demand)[1])
        assert min(of.values()) >= -1e-12
        hit_frac = lfu_hit_frac(demand, cached_rows(demand, placed), hot)
        assert of["rows_hit"] == pytest.approx(hit_frac * cold)
        found.append(of)
    fewer, more = found
    assert more["hot_rows"] >= fewer["hot_rows"] - 1e-9
    assert more["rows_miss"] <= fewer["rows_miss"] + 1e-9


def test_served_by_shard_by_hand():
    # Shards of ceil(5 / 2) rows; one lookup of each of 2 ranks: p of each row, twice.
    counts = np.array([4, 0, 2, 1, 3])
    assert served_by_shard(counts, np.empty(0, np.int64), 1, 2) == pytest.approx([1.2, 0.8])
    assert served_by_shard(counts, np.array([4, 0]), 1, 2) == pytest.approx([0.4, 0.2])
    # Rows 0 to 4 are stored as 0, 3, 1, 4, 2: rows 0, 2 and 4 are in the first shard.
    spread = served_by_shard(counts, np.array([4]), 1, 2, order=RowOrder(5))
    assert spread == pytest.approx([1.2, 0.2])
    # More ranks than rows: the last shards are empty.
    assert served_by_shard(counts, np.array([0]), 1, 8) == pytest.approx(
        [0, 0, 1.6, 0.8, 2.4, 0, 0, 0]
    )


def test_served_by_shard_adds_up_to_the_cold_rows(monkeypatch):
    monkeypatch.setattr("hotrec.cost_model.histogram.SLICE_ROWS", 7)
    counts = np.random.default_rng(0).integers(0, 9, 100)
    demand = make_demand(counts, "a", batch_size=30, world_size=3)
    hot = np.argsort(-counts, kind="stable")[:20]
    served = served_by_shard(counts, hot, 30, 3)
    assert served.sum() == pytest.approx(3 * expected_distinct(demand, 20)[1])
    # Rows numbered by falling popularity: the first shard serves most.
    served = served_by_shard(np.sort(counts)[::-1], np.empty(0, np.int64), 30, 3)
    assert served[0] > served[1] > served[2]
    spread = served_by_shard(
        np.sort(counts)[::-1], np.empty(0, np.int64), 30, 3, order=RowOrder(100)
    )
    assert spread.sum() == pytest.approx(served.sum())
    assert spread.max() / spread.mean() < 1.05 < served.max() / served.mean()


@pytest.mark.parametrize(
    ("num_hot", "tables", "message"),
    [
        ({}, {}, "got none of \\['a'\\]"),
        ({"b": 1}, {"a": TablePlacement()}, "hot rows of \\['b'\\]"),
        ({"a": 4}, {"a": TablePlacement()}, "expected 0..3 hot rows, got 4"),
        ({"a": 1}, {"a": POOLED}, "expected no hot rows in a table whose exchange is pooled"),
        ({}, {"a": TablePlacement(tier=Tier.HOST_CACHED)}, "cache_load_frac: .* got None"),
        (
            {},
            {"a": TablePlacement(tier=Tier.HOST_CACHED, cache_load_frac=1.5)},
            "cache_load_frac: .* got 1.5",
        ),
    ],
)
def test_refuses_placements(num_hot, tables, message):
    with pytest.raises(ValueError, match=message):
        hot_cold_quantities([make_demand([1, 1, 0], "a")], num_hot, tables, World(2, 2), 4)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "got none of \\['a'\\]"),
        ({"a": ("rows", (0,))}, "sharding kind: expected one of .* got 'rows'"),
        ({"a": ("table_wise", ())}, "sharding table_wise: expected the rank of each shard"),
        ({"a": ("table_wise", (2,))}, "expected ranks in 0..1, got 2"),
    ],
)
def test_refuses_shardings(tables, message):
    demands = [make_demand([1], "a")]

    def predicts():
        shardings = {name: TableSharding(*of) for name, of in tables.items()}
        torchrec_quantities(demands, shardings, World(2, 2), 4)

    with pytest.raises(ValueError, match=message):
        predicts()


def test_a_torchrec_cache_of_unnamed_size_is_fbgemms():
    demand = make_demand([1] * 10, "a")
    assert cached_rows(demand, TableSharding("table_wise", (0,), Tier.HOST_CACHED)) == 2.0
    assert cached_rows(demand, TableSharding("table_wise", (0,), Tier.HOST)) == 0.0
