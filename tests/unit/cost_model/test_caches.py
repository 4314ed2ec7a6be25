from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.cost_model.caches import (
    CachedTable,
    lfu_hit_frac,
    lru_miss_ratios,
    shared_cache_shares,
)
from tests.unit.cost_model.samples import draw_steps, make_demand, zipf

# Che's approximation against a simulated cache (the traces' own noise is about a third of it).
LRU_TOLERANCE = 0.01


def lru_hit_frac(demand, num_cached, num_skipped=0, **options):
    return 1 - lru_miss_ratios(demand, [num_cached], num_skipped, **options)[0]


def simulate_lru(lookups, num_cached, num_warm, num_sets=1, seed=0):
    """Share of hits after ``num_warm`` lookups, one by one; a row's set is drawn at random."""
    set_of = np.random.default_rng(seed).integers(0, num_sets, max(lookups) + 1)
    caches = [OrderedDict() for _ in range(num_sets)]
    num_hits = 0
    for position, row in enumerate(lookups):
        cache = caches[set_of[row]]
        num_hits += row in cache and position >= num_warm
        cache[row] = None
        cache.move_to_end(row)
        if len(cache) > num_cached // num_sets:
            cache.popitem(last=False)
    return num_hits / (len(lookups) - num_warm)


def simulate_lru_by_step(steps, num_cached, num_warm):
    """Share of the distinct rows of a rank that the cache of all ranks holds before each step."""
    cache: OrderedDict[int, None] = OrderedDict()
    num_hits = num_rows = 0
    for position, ranks in enumerate(steps):
        together = [row for rows in ranks for row in rows]
        if position >= num_warm:
            num_hits += sum(row in cache for row in together)
            num_rows += len(together)
        for row in together:
            cache[row] = None
            cache.move_to_end(row)
        while len(cache) > num_cached:
            cache.popitem(last=False)
    return num_hits / num_rows


@pytest.mark.parametrize(("num_cached", "num_skipped"), [(300, 0), (800, 0), (500, 30)])
def test_lru_as_simulated_by_step(num_cached, num_skipped):
    counts, probs = zipf(3000, 1.05)
    steps = draw_steps(probs, 64, world_size=2, num_steps=900, seed=1)
    cold = [[rows[rows >= num_skipped].tolist() for rows in ranks] for ranks in steps]
    found = simulate_lru_by_step(cold, num_cached, 300)
    hit_frac = lru_hit_frac(make_demand(counts, batch_size=64), num_cached, num_skipped)
    assert hit_frac == pytest.approx(found, abs=LRU_TOLERANCE)


@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=15).filter(any),
    num_skipped=st.integers(0, 5),
    is_per_lookup=st.booleans(),
)
def test_curves_fall_and_lfu_beats_lru(counts, num_skipped, is_per_lookup):
    demand = make_demand(counts, batch_size=5)
    sizes = np.arange(len(counts) + 2)
    options = {"num_skipped": num_skipped, "is_per_lookup": is_per_lookup}
    lru = lru_miss_ratios(demand, sizes, **options)
    lfu = np.array([1 - lfu_hit_frac(demand, size, **options) for size in sizes])
    for curve in (lfu, lru):
        assert (np.diff(curve) <= 1e-9).all()
        assert curve[-1] == 0.0
        assert curve[0] == pytest.approx(float(np.count_nonzero(counts) > num_skipped))
    assert (lfu <= lru + 1e-9).all()
    assert lru == pytest.approx([1 - lru_hit_frac(demand, size, **options) for size in sizes])


# --- FBGEMM's cache: sets of 32 ways, shared by tables


@pytest.mark.parametrize(("exponent", "num_sets"), [(1.05, 4), (1.05, 16), (0.8, 30), (0.0, 55)])
def test_sets_as_simulated(exponent, num_sets):
    counts, probs = zipf(2000, exponent)
    lookups = np.random.default_rng(3).choice(2000, 90_000, p=probs).tolist()
    found = np.mean(
        [simulate_lru(lookups, 32 * num_sets, 30_000, num_sets, seed) for seed in range(3)]
    )
    table = CachedTable(make_demand(counts, batch_size=1, world_size=1), is_per_lookup=True)
    [shares] = shared_cache_shares([table], 32 * num_sets)
    assert shares.hit == pytest.approx(found, abs=LRU_TOLERANCE)
