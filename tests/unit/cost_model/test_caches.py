from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.cost_model.caches import (
    CachedTable,
    conflict_frac,
    lfu_hit_frac,
    miss_ratio_curve,
    num_slots,
    shared_cache_shares,
)
from hotrec.cost_model.demand import build_demand
from hotrec.cost_model.histogram import build_histogram

# Che's approximation against a simulated cache (the traces' own noise is about a third of it).
LRU_TOLERANCE = 0.01


def make_demand(counts, *, batch_size=64, world_size=2):
    return build_demand(
        "t",
        build_histogram(np.asarray(counts)),
        dim=4,
        row_bytes=20,
        lookups_per_sample=1.0,
        num_columns=1,
        batch_size=batch_size,
        world_size=world_size,
    )


def lru_hit_frac(demand, num_cached, num_skipped=0, **options):
    return 1 - miss_ratio_curve(demand, [num_cached], "lru", num_skipped, **options)[0]


def zipf(num_rows, exponent):
    weights = np.arange(1, num_rows + 1) ** -float(exponent)
    counts = np.rint(1e9 * weights / weights.sum()).astype(np.int64)
    return counts, counts / counts.sum()


def simulate_lru(lookups, num_cached, num_warm):
    """Share of hits after ``num_warm`` lookups, one by one."""
    cache: OrderedDict[int, None] = OrderedDict()
    num_hits = 0
    for position, row in enumerate(lookups):
        if row in cache:
            num_hits += position >= num_warm
            cache.move_to_end(row)
        else:
            cache[row] = None
            if len(cache) > num_cached:
                cache.popitem(last=False)
    return num_hits / (len(lookups) - num_warm)


def simulate_lru_by_step(steps, num_cached, num_warm):
    """Share of the distinct rows of a rank that the cache of all ranks holds before each step."""
    cache: OrderedDict[int, None] = OrderedDict()
    num_hits = num_rows = 0
    for position, ranks in enumerate(steps):
        if position >= num_warm:
            for rows in ranks:
                num_hits += sum(row in cache for row in rows)
                num_rows += len(rows)
        for row in dict.fromkeys(row for rows in ranks for row in rows):
            cache[row] = None
            cache.move_to_end(row)
        while len(cache) > num_cached:
            cache.popitem(last=False)
    return num_hits / num_rows


@pytest.mark.parametrize(
    ("exponent", "num_cached", "num_skipped"),
    [(1.05, 10, 0), (1.05, 200, 0), (0.8, 500, 50), (1.2, 100, 20), (0.0, 300, 0)],
)
def test_lru_as_simulated_by_lookup(exponent, num_cached, num_skipped):
    counts, probs = zipf(2000, exponent)
    lookups = np.random.default_rng(0).choice(2000, 60_000, p=probs)
    cold = lookups[lookups >= num_skipped].tolist()
    found = simulate_lru(cold, num_cached, len(cold) // 3)
    demand = make_demand(counts)
    hit_frac = lru_hit_frac(demand, num_cached, num_skipped, is_per_lookup=True)
    assert hit_frac == pytest.approx(found, abs=LRU_TOLERANCE)


@pytest.mark.parametrize(("num_cached", "num_skipped"), [(300, 0), (800, 0), (500, 30)])
def test_lru_as_simulated_by_step(num_cached, num_skipped):
    counts, probs = zipf(3000, 1.05)
    rng = np.random.default_rng(1)
    steps = []
    for _ in range(900):
        ranks = [np.unique(rng.choice(3000, 64, p=probs)) for _ in range(2)]
        steps.append([rows[rows >= num_skipped].tolist() for rows in ranks])
    found = simulate_lru_by_step(steps, num_cached, 300)
    hit_frac = lru_hit_frac(make_demand(counts), num_cached, num_skipped)
    assert hit_frac == pytest.approx(found, abs=LRU_TOLERANCE)


@pytest.mark.parametrize(("num_cached", "num_skipped"), [(0, 0), (40, 0), (200, 25)])
def test_lfu_as_simulated(num_cached, num_skipped):
    counts, probs = zipf(3000, 1.05)
    rng = np.random.default_rng(2)
    end = num_skipped + num_cached
    lookups = rng.choice(3000, 100_000, p=probs)
    cold = lookups[lookups >= num_skipped]
    demand = make_demand(counts, batch_size=500)
    found = (cold < end).mean()
    hit_frac = lfu_hit_frac(demand, num_cached, num_skipped, is_per_lookup=True)
    assert hit_frac == pytest.approx(found, abs=0.006)
    distinct = np.concatenate([np.unique(batch) for batch in lookups.reshape(200, 500)])
    distinct = distinct[distinct >= num_skipped]
    found = (distinct < end).mean()
    assert lfu_hit_frac(demand, num_cached, num_skipped) == pytest.approx(found, abs=0.006)


def test_lfu_by_hand():
    demand = make_demand([5, 3, 1, 1], batch_size=1, world_size=1)
    assert lfu_hit_frac(demand, 1) == pytest.approx(0.5)
    assert lfu_hit_frac(demand, 1, 1) == pytest.approx(0.6)
    # Half of a group, and more than there is.
    assert lfu_hit_frac(demand, 1.5) == pytest.approx(0.65)
    assert lfu_hit_frac(demand, 100, 1) == 1.0
    # Nothing but hot rows is looked up.
    assert lfu_hit_frac(demand, 0, 4) == 1.0


def test_lru_by_hand():
    # Two rows alike, one cached: it is either of them.
    assert lru_hit_frac(make_demand([4, 4]), 1, is_per_lookup=True) == pytest.approx(0.5)
    # p = 0.9, 0.1: T of a cache of one row by bisection on 0.1^T + 0.9^T = 1.
    low, high = 0.0, 20.0
    for _ in range(60):
        time = (low + high) / 2
        low, high = (time, high) if 0.1**time + 0.9**time > 1 else (low, time)
    hit_frac = lru_hit_frac(make_demand([9, 1]), 1, is_per_lookup=True)
    assert hit_frac == pytest.approx(0.9 * (1 - 0.1**low) + 0.1 * (1 - 0.9**low))


def test_lru_ends():
    demand = make_demand([50, 30, 20, 0, 0])
    assert lru_hit_frac(demand, 0) == 0.0
    assert lru_hit_frac(demand, 3) == 1.0
    assert lru_hit_frac(demand, 2, 1) == 1.0
    assert lru_hit_frac(demand, 1, 3) == 1.0
    # A row that takes every lookup has no finite rate.
    assert lru_hit_frac(make_demand([7]), 0.5) == pytest.approx(0.5)


def test_tiny_probabilities():
    counts = np.concatenate([[10**12], np.ones(1000, np.int64)])
    curve = miss_ratio_curve(make_demand(counts), [500], "lru", 1, is_per_lookup=True)
    assert curve[0] == pytest.approx(0.5, rel=1e-6)


@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=15).filter(any),
    num_skipped=st.integers(0, 5),
    is_per_lookup=st.booleans(),
)
def test_curves_fall_and_lfu_beats_lru(counts, num_skipped, is_per_lookup):
    demand = make_demand(counts, batch_size=5)
    sizes = np.arange(len(counts) + 2)
    lfu = miss_ratio_curve(demand, sizes, "lfu", num_skipped, is_per_lookup=is_per_lookup)
    lru = miss_ratio_curve(demand, sizes, "lru", num_skipped, is_per_lookup=is_per_lookup)
    for curve in (lfu, lru):
        assert curve.dtype == np.float64
        assert curve.shape == sizes.shape
        assert (np.diff(curve) <= 1e-9).all()
        assert curve[-1] == 0.0
        assert curve[0] == pytest.approx(float(np.count_nonzero(counts) > num_skipped))
    assert (lfu <= lru + 1e-9).all()


def test_curve_is_its_points():
    counts, _ = zipf(5000, 1.05)
    demand = make_demand(counts)
    sizes = [0, 10, 200.5, 4999]
    for policy, hit_frac in (("lfu", lfu_hit_frac), ("lru", lru_hit_frac)):
        curve = miss_ratio_curve(demand, sizes, policy, 7)
        assert curve == pytest.approx([1 - hit_frac(demand, size, 7) for size in sizes])


def test_refuses():
    demand = make_demand([1, 2])
    with pytest.raises(ValueError, match="expected sizes and hot rows of at least 0"):
        miss_ratio_curve(demand, [1, -1], "lfu")
    with pytest.raises(ValueError, match="-3 hot rows"):
        lru_hit_frac(demand, 1, -3)
    with pytest.raises(ValueError, match="expected 'lfu' or 'lru', got 'fifo'"):
        miss_ratio_curve(demand, [1], "fifo")


# --- FBGEMM's cache: sets of 32 ways, shared by tables


@pytest.mark.parametrize(
    ("load", "percent", "digits"), [(1.0, 7.0, 1), (0.9, 3.3, 1), (0.8, 1.1, 1), (0.7, 0.24, 2)]
)
def test_conflicts_by_load(load, percent, digits):
    """The published figures, and the same by drawing sets for rows."""
    assert round(100 * conflict_frac(load), digits) == percent
    num_sets = 40_000
    num_rows = round(32 * load * num_sets)
    in_set = np.bincount(np.random.default_rng(0).integers(0, num_sets, num_rows))
    left_out = np.maximum(in_set - 32, 0).sum() / num_rows
    assert conflict_frac(load) == pytest.approx(left_out, rel=0.05)


def test_conflicts_at_the_ends():
    assert conflict_frac(0.0) == 0.0
    assert conflict_frac(0.1) < 1e-12
    assert conflict_frac(4.0) == pytest.approx(0.75, abs=1e-6)  # a quarter of the rows fits


def simulate_sets(lookups, num_sets, num_warm, seed=0):
    """Share of hits of an LRU cache of sets of 32, a row's set drawn at random."""
    set_of = np.random.default_rng(seed).integers(0, num_sets, max(lookups) + 1)
    caches = [OrderedDict() for _ in range(num_sets)]
    num_hits = 0
    for position, row in enumerate(lookups):
        cache = caches[set_of[row]]
        if row in cache:
            num_hits += position >= num_warm
            cache.move_to_end(row)
        else:
            cache[row] = None
            if len(cache) > 32:
                cache.popitem(last=False)
    return num_hits / (len(lookups) - num_warm)


@pytest.mark.parametrize(("exponent", "num_sets"), [(1.05, 4), (1.05, 16), (0.8, 30), (0.0, 55)])
def test_sets_as_simulated(exponent, num_sets):
    counts, probs = zipf(2000, exponent)
    lookups = np.random.default_rng(3).choice(2000, 90_000, p=probs).tolist()
    found = np.mean([simulate_sets(lookups, num_sets, 30_000, seed) for seed in range(3)])
    table = CachedTable(make_demand(counts, batch_size=1, world_size=1), is_per_lookup=True)
    [shares] = shared_cache_shares([table], 32 * num_sets)
    assert shares.hit == pytest.approx(found, abs=LRU_TOLERANCE)


@pytest.mark.parametrize("load", [0.7, 0.8, 0.9, 1.0])
def test_rows_alike_miss_what_finds_no_way(load):
    """Where all rows are as popular, what LRU misses is what the sets leave out."""
    num_rows = round(3200 * load)
    demand = make_demand(np.full(num_rows, 10), batch_size=1, world_size=1)
    [shares] = shared_cache_shares([CachedTable(demand, is_per_lookup=True)], 3200)
    assert 1 - shares.hit == pytest.approx(conflict_frac(load), abs=1e-3)


def test_tables_share_a_cache():
    """Where one is not looked up, the other has it all, whatever their sizes."""
    counts, _ = zipf(2000, 1.05)
    busy, idle = make_demand(counts), make_demand(np.zeros(5000, np.int64))
    [alone] = shared_cache_shares([CachedTable(busy)], 320)
    both = shared_cache_shares([CachedTable(idle), CachedTable(busy)], 320)
    assert both[1].hit == pytest.approx(alone.hit, abs=1e-3)
    assert both[0].hit == 1.0
    # Two that are alike have as much together as one has of half the cache.
    twice = shared_cache_shares([CachedTable(busy), CachedTable(busy)], 640)
    assert [share.hit for share in twice] == pytest.approx([alone.hit] * 2, abs=2e-3)


def test_the_rows_of_a_step_that_find_no_way_are_conflicts():
    counts, _ = zipf(2000, 0.5)
    table = CachedTable(make_demand(counts, batch_size=200, world_size=2))
    in_step = float(table.demand.rows_G @ table.demand.by_any_G)
    slots = in_step / 0.9
    [shares] = shared_cache_shares([table], slots)
    assert shares.conflict == pytest.approx(conflict_frac(0.9))
    assert shares.hit + shares.miss + shares.conflict == pytest.approx(1)
    # With prefetch the rows of two steps are in it.
    [ahead] = shared_cache_shares([table], 2 * slots, is_prefetched=True)
    assert ahead.conflict == pytest.approx(conflict_frac(0.9))
    assert ahead.hit > shares.hit
    assert (num_slots(0), num_slots(33), num_slots(64)) == (32, 64, 64)
