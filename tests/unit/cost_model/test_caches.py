from collections import OrderedDict

import numpy as np
import pytest

from hotrec.cost_model.caches import (
    CachedTable,
    conflict_frac,
    shared_cache_shares,
)
from tests.unit.cost_model.samples import make_demand, zipf

# Che's approximation against a simulated cache (the traces' own noise is about a third of it).
LRU_TOLERANCE = 0.01


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


@pytest.mark.parametrize(("exponent", "num_sets"), [(1.05, 4), (1.05, 16), (0.8, 30), (0.0, 55)])
def test_sets_as_simulated(exponent, num_sets):
    counts, probs = zipf(2000, exponent)
    lookups = np.random.default_rng(3).choice(2000, 90_000, p=probs).tolist()
    found = np.mean(
        [simulate_lru(lookups, 32 * num_sets, 30_000, num_sets, seed) for seed in range(3)]
    )
    table = CachedTable(make_demand(counts, batch_size=1, world_size=1))
    [shares] = shared_cache_shares([table], 32 * num_sets)
    assert shares.hit == pytest.approx(found, abs=LRU_TOLERANCE)


def test_tables_share_a_cache():
    """Where one is not looked up, the other has it all, whatever their sizes."""
    counts, _ = zipf(2000, 1.05)
    busy = make_demand(counts, batch_size=64)
    idle = make_demand(np.zeros(5000, np.int64), batch_size=64)
    [alone] = shared_cache_shares([CachedTable(busy)], 320)
    both = shared_cache_shares([CachedTable(idle), CachedTable(busy)], 320)
    assert both[1].hit == pytest.approx(alone.hit, abs=1e-3)
    assert both[0].hit == 1.0
    # Two that are alike have as much together as one has of half the cache.
    twice = shared_cache_shares([CachedTable(busy), CachedTable(busy)], 640)
    assert [share.hit for share in twice] == pytest.approx([alone.hit] * 2, abs=2e-3)
