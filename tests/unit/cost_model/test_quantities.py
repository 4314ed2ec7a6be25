import dataclasses
from functools import partial

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hotrec.cost_model.costs import REQUIRED, Costs, Line, Link, World
from hotrec.cost_model.demand import expected_distinct, expected_urgent
from hotrec.cost_model.quantities import (
    TableSharding,
    between_hosts_bound_bytes,
    hot_cold_quantities,
    torchrec_quantities,
)
from hotrec.cost_model.step import QUANTITIES, Workload, predict_step
from hotrec.runtime.traffic import SentBytes, lower_bound_between_hosts_bytes
from hotrec.types import (
    Exchange,
    Levels,
    PipelineKind,
    PipelineSpec,
    TableOutput,
    TablePlacement,
    Tier,
)
from tests.unit.cost_model import samples
from tests.unit.cost_model.samples import SPARSE_DIST

POOLED = TablePlacement(Exchange.POOLED)
WORKLOAD = Workload(batch_size=4, dense_flops=0.0, bottom_frac=0.0, num_dense_values=0)
ONE_TIER = Costs(
    *("test", "built-in", "cuda", {name: Line(1e-6, 1e-9, 1e-10) for name in REQUIRED}),
    *(Link(1e-4, 1e9), Link(1e-4, 1e9), 10**9, 10**9),
)

make_demand = partial(samples.make_demand, batch_size=4)


def is_near(found, trials):
    """Whether each mean of what was simulated, (T, ...), is as predicted, by 4 standard errors."""
    error = np.std(trials, axis=0, ddof=1) / np.sqrt(len(trials))
    return (np.abs(np.mean(trials, axis=0) - found) <= 4 * error + 1e-9).all()


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
    sent = predict_step(ONE_TIER, world, WORKLOAD, SPARSE_DIST, quantities).sent_bytes
    trials = []
    num_draws = num_columns * bag_size * batch_size
    for ranks in samples.draw_steps(probs, num_draws, world_size=world_size, num_steps=150):
        cold = [rows[rows >= num_hot] for rows in ranks]
        # Owners by row number modulo W: even shards.
        away = np.mean([(rows % world_size != rank).sum() for rank, rows in enumerate(cold)])
        hot = np.mean([(rows < num_hot).sum() for rows in ranks])
        union = (np.unique(np.concatenate(ranks)) < num_hot).sum()
        others = (world_size - 1) / world_size
        trials.append((4 * away, 64 * away, 64 * away, (64 + 4) * others * (hot + union)))
    stages = ("ids_exchange", "rows_exchange", "grads_exchange", "hot_exchange")
    assert is_near([sent[stage] for stage in stages], trials)


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
    pipeline = PipelineSpec(kind, levels=levels)
    step = predict_step(ONE_TIER, world, workload, pipeline, quantities)
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
    predicted = step.between_hosts_bytes
    predicted_bound = between_hosts_bound_bytes([demand], world, num_dense)
    for found, trials in ((predicted, counted), (predicted_bound, bounds)):
        assert abs(found - np.mean(trials)) <= 4 * np.std(trials, ddof=1) / np.sqrt(400) + 1
    if levels is Levels.two:
        ids_bytes = (row_bytes - 128) * quantities["relayed_rows"] / 2
        assert predicted - ids_bytes == pytest.approx(predicted_bound)


@given(
    counts=st.lists(st.integers(0, 20), min_size=2, max_size=20).filter(any),
    num_hot=st.integers(0, 20),
    tier=st.sampled_from([Tier.DEVICE, Tier.CACHED]),
    world_size=st.sampled_from([1, 2, 4]),
)
def test_quantities_are_of_the_distinct_rows(counts, num_hot, tier, world_size):
    """Those that others own, too; and a group of messages for rows that are cold, and for hot."""
    demand = make_demand(counts, "a", lookups=3.0, world_size=world_size)
    num_hot, load_frac = min(num_hot, len(counts)), 0.3 if tier is Tier.CACHED else None
    placed = TablePlacement(tier=tier, cache_load_frac=load_frac)
    world = World(world_size, world_size)
    found = hot_cold_quantities([demand], {"a": num_hot}, {"a": placed}, world, 4)
    assert set(found) == set(QUANTITIES)
    hot, cold, union = expected_distinct(demand, num_hot)
    expected = {"lookups": 12, "hot_rows": hot, "union_rows": union}
    expected |= {"cold_groups": int(num_hot < len(counts)), "hot_groups": int(num_hot > 0)}
    expected["urgent_rows"] = expected_urgent(demand, num_hot)
    expected["cold_rows"] = cold
    expected = {**dict.fromkeys(QUANTITIES, 0.0), **samples.work_of(16, **expected)}
    assert found == pytest.approx(expected, abs=1e-9)


# Of a rank: 12 ids, 4 lengths of half an id, B F D 4 = 128 bytes of pooled vectors; whole rows have
# 32 bytes. By sharding: ids looked up, bytes of them, bytes of vectors sent, ids and lengths sent.
OF_BAGS = {
    ("table_wise", 2): ([0, 0, 48, 0], 32, [0, 0, 3 * 128, 0], [14, 14, 0, 14]),
    ("row_wise", 0, 1, 2, 3): ([12] * 4, 32, [3 * 128] * 4, [3 * (3 + 2)] * 4),
    ("column_wise", 1, 3): ([0, 48, 0, 48], 16, [0, 3 * 64, 0, 3 * 64], [28, 14, 28, 14]),
    # Reduce-scatter of 4 batches on the host, a half of each travels; one batch to the other host.
    ("table_row_wise", 2, 3): ([0, 0, 24, 24], 32, [0, 0, 384, 384], [16, 16, 8, 8]),
    ("grid_shard", 0, 1, 2, 3): ([24] * 4, 16, [3 * 64] * 4, [8 + 16] * 4),
}
# Rows are not de-duplicated and sent as they are, one for each id; and the bytes put in order.
OF_SEQUENCES = {
    ("table_wise", 2): ([0, 0, 48, 0], 32, [0, 0, 3 * 384, 0], [0, 0, 48 * 32, 0]),
    ("row_wise", 0, 1, 2, 3): ([12] * 4, 32, [3 * 96] * 4, [2 * 384] * 4),  # owner and reader
    ("column_wise", 1, 3): ([0, 48, 0, 48], 16, [0, 576, 0, 576], [384, 60 * 32 - 48 * 16] * 2),
}


@pytest.mark.parametrize("output", [TableOutput.pooled, TableOutput.expanded])
def test_kinds_of_sharding_by_hand(output):
    is_pooled, world = output is TableOutput.pooled, World(4, 2)
    demand = make_demand([3, 3, 3, 0], "b", dim=8, lookups=3.0, world_size=4)
    demand = dataclasses.replace(demand, output=output)
    for (kind, *ranks), expected in (OF_BAGS if is_pooled else OF_SEQUENCES).items():
        sharding = {"b": TableSharding(kind, tuple(ranks))}
        per_rank = torchrec_quantities([demand], sharding, world, 4)
        ids, row_bytes, sent_bytes, last = expected
        names = "pooled_ids_device", "pooled_bytes_device", "pooled_sent_bytes"
        found = [[of[name] for of in per_rank] for name in names]
        assert found == [ids, [n * row_bytes for n in ids], sent_bytes], kind
        name = "pooled_sent_ids" if is_pooled else "permuted_bytes"
        assert [of[name] for of in per_rank] == last, kind
    for of in torchrec_quantities([demand], {"b": TableSharding("data_parallel", ())}, world, 4):
        assert (of["replicated_ids"], of["replicated_bytes"]) == (12, 4 * 32)
        assert not any(v for name, v in of.items() if not name.startswith("replicated"))
