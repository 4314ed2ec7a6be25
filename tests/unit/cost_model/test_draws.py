"""Rows that are read again in the next step, against drawn batches."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hotrec.cost_model.demand import (
    build_demand,
    build_demand_heldout,
    expected_urgent,
    prob_both,
    prob_drawn,
)
from hotrec.cost_model.histogram import build_histogram

TABLE = {"dim": 4, "row_bytes": 20, "num_columns": 1}


def make_demand(counts, *, batch_size, world_size, lookups=1.0, **changes):
    return build_demand(
        "t",
        build_histogram(np.asarray(counts)),
        **TABLE,
        lookups_per_sample=lookups,
        batch_size=batch_size,
        world_size=world_size,
        **changes,
    )


def zipf(num_rows, exponent):
    weights = np.arange(1, num_rows + 1) ** -exponent
    return weights / weights.sum()


def count_urgent_by_drawing(probs, num_hot, *, num_draws, world_size, num_trials, seed=0):
    """Cold rows of a rank that some rank draws in the next step, mean over ranks; (trials,)."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num_trials):
        steps = [
            [np.unique(rng.choice(probs.size, num_draws, p=probs)) for _ in range(world_size)]
            for _ in range(2)
        ]
        following = np.concatenate(steps[1])
        found.append(np.mean([(np.isin(r, following) & (r >= num_hot)).sum() for r in steps[0]]))
    return np.array(found)


@pytest.mark.parametrize(
    ("num_rows", "exponent", "num_hot", "world_size"),
    [
        (3000, 1.05, 0, 2),
        (3000, 1.05, 100, 4),
        (500, 0.7, 20, 2),
        (40, 1.2, 5, 3),
        (40, 1.2, 40, 2),
    ],
)
def test_urgent_rows_as_drawn(num_rows, exponent, num_hot, world_size):
    probs = zipf(num_rows, exponent)
    counts = np.rint(1e9 * probs).astype(np.int64)
    demand = make_demand(counts, batch_size=256, world_size=world_size)
    found = count_urgent_by_drawing(
        probs, num_hot, num_draws=256, world_size=world_size, num_trials=150
    )
    error = found.std(ddof=1) / math.sqrt(found.size)
    assert abs(found.mean() - expected_urgent(demand, num_hot)) <= 4 * error + 1e-9


def test_urgent_rows_from_a_small_profile_have_no_bias():
    # The product of both probabilities takes rows that were seen once for likelier than they are.
    probs = zipf(20_000, 1.0)
    rng = np.random.default_rng(3)
    exact = make_demand(np.rint(1e10 * probs).astype(np.int64), batch_size=500, world_size=2)
    estimates, products = [], []
    for _ in range(60):
        counts = rng.multinomial(10_000, probs)
        demand = make_demand(counts, batch_size=500, world_size=2)
        estimates.append(expected_urgent(demand))
        products.append(expected_urgent(replace(demand, by_both_G=None)))
    truth = expected_urgent(exact)
    error = np.std(estimates, ddof=1) / math.sqrt(len(estimates))
    assert abs(np.mean(estimates) - truth) <= 4 * error
    assert np.mean(products) > truth + 4 * error


def test_both_by_hand():
    counts = np.array([1.0, 5.0, 10.0])
    # Two draws of one lookup each out of ten: c/10 (c-1)/9.
    found = prob_both(counts, 10, 1, 1)
    assert found == pytest.approx([0.0, 5 / 10 * 4 / 9, 1.0], abs=0.1 / 10)
    # More draws than lookups: the product.
    found = prob_both(counts, 10, 6, 6)
    assert found == pytest.approx(prob_drawn(counts, 10, 6) ** 2)
    assert (prob_both(counts, 10, 3, 0) == 0).all()


def test_urgent_rows_are_some_of_the_cold_ones():
    counts = np.random.default_rng(0).zipf(1.4, 2000) % 900
    demand = make_demand(counts, batch_size=64, world_size=2, max_groups=16)
    values = [expected_urgent(demand, n) for n in (0, 1, 10, 100, 2000)]
    assert all(a >= b >= 0 for a, b in zip(values, values[1:], strict=False))
    assert values[0] <= float(demand.rows_G @ demand.by_rank_G)
    exact = make_demand(counts, batch_size=64, world_size=2, max_groups=4096)
    assert values[0] == pytest.approx(expected_urgent(exact), rel=1e-6)


def test_everything_is_urgent_where_every_row_is_read():
    demand = make_demand([50, 40, 30], batch_size=100, world_size=2)
    assert expected_urgent(demand) == pytest.approx(3.0, abs=1e-3)
    assert expected_urgent(demand, 2) == pytest.approx(1.0, abs=1e-3)


def test_held_out_demand_takes_the_product():
    histogram = build_histogram(np.array([9, 3, 1, 0]), np.array([4, 4, 1, 1]))
    demand = build_demand_heldout(
        "t", histogram, **TABLE, lookups_per_sample=1.0, batch_size=2, world_size=2
    )
    product = float(demand.rows_G @ (demand.by_rank_G * demand.by_any_G))
    assert expected_urgent(demand) == pytest.approx(product)
