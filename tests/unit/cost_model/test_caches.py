from collections import OrderedDict

import numpy as np
import pytest

from hotrec.cost_model.caches import (
    CachedTable,
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
