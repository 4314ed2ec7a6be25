import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hotrec.cost_model.demand import (
    all_hot_share,
    coverage,
    expected_distinct,
    expected_urgent,
    prob_drawn,
    prob_met,
)
from tests.unit.cost_model.samples import draw_steps, make_demand, zipf

COUNTS = arrays(np.int64, st.integers(1, 60), elements=st.integers(0, 50)).filter(
    lambda counts: counts.sum() > 0
)


def is_mean_of(found, expected):
    """Whether what was drawn, (T, ...), has the expected mean, by four standard errors."""
    error = np.std(found, axis=0, ddof=1) / math.sqrt(len(found))
    return (np.abs(np.mean(found, axis=0) - expected) <= 4 * error + 1e-4).all()


@pytest.mark.parametrize(
    ("num_rows", "exponent", "num_hot", "lookups", "world_size"),
    [
        (300, 1.05, 20, 1.0, 2),
        (2000, 0.8, 100, 3.0, 4),
        (50, 1.2, 50, 2.0, 1),
        (500, 0.5, 0, 1, 2),
        (3000, 1.05, 100, 4.0, 4),
        (40, 1.2, 5, 4.0, 3),
    ],
)
def test_distinct_and_urgent_rows_as_drawn(num_rows, exponent, num_hot, lookups, world_size):
    counts, probs = zipf(num_rows, exponent)
    demand = make_demand(counts, lookups=lookups, batch_size=64, world_size=world_size)
    steps = draw_steps(probs, int(64 * lookups), world_size=world_size, num_steps=300)
    found = []
    for ranks, after in zip(steps[::2], steps[1::2], strict=True):
        following = np.concatenate(after)
        found.append(
            (
                np.mean([(rows < num_hot).sum() for rows in ranks]),
                np.mean([(rows >= num_hot).sum() for rows in ranks]),
                (np.unique(np.concatenate(ranks)) < num_hot).sum(),
                np.mean([(np.isin(r, following) & (r >= num_hot)).sum() for r in ranks]),
            )
        )
    assert is_mean_of(
        found, [*expected_distinct(demand, num_hot), expected_urgent(demand, num_hot)]
    )


def test_estimates_from_a_small_profile_have_no_bias():
    # Profiles are samples themselves. Putting c / K for p falls 3% short or more, and the product
    # of two probabilities takes rows that were seen once for likelier than they are.
    rng = np.random.default_rng(2)
    counts, probs = zipf(400, 1.0)
    estimates, plug_in, products = [], [], []
    for _ in range(300):
        counts = rng.multinomial(500, probs)
        demand = make_demand(counts, batch_size=100)
        estimates.append((float(demand.rows_G @ demand.by_rank_G), expected_urgent(demand)))
        plug_in.append(float(prob_met(counts / 500, 100).sum()))
        products.append(expected_urgent(replace(demand, by_both_G=None)))
    by_rank = prob_met(probs, 100)
    urgent = float(by_rank @ prob_met(probs, 200))
    assert is_mean_of(estimates, [by_rank.sum(), urgent])
    assert np.mean(plug_in) < 0.97 * by_rank.sum()
    assert np.mean(products) > 1.02 * urgent


@pytest.mark.parametrize("total", [1, 2, 3, 10, 29, 100])
def test_prob_drawn_is_the_hypergeometric(total):
    counts = np.arange(1, total + 1)
    for draws in range(total + 1):
        exact = [1 - math.comb(total - c, draws) / math.comb(total, draws) for c in counts.tolist()]
        found = prob_drawn(counts.astype(np.float64), total, draws)
        assert found == pytest.approx(exact, abs=1e-14, rel=0.1 / total)


@given(counts=COUNTS, batch_size=st.integers(1, 200), world_size=st.integers(1, 5))
def test_more_hot_rows_only_move_rows(counts, batch_size, world_size):
    demand = make_demand(counts, batch_size=batch_size, world_size=world_size)
    everything = expected_distinct(demand, counts.size)[0]
    assert everything <= min(batch_size, np.count_nonzero(counts)) + 1e-9
    before = np.full(5, -1e300)
    for num_hot in range(counts.size + 1):
        hot, cold, union = expected_distinct(demand, num_hot)
        assert hot + cold == pytest.approx(everything)
        assert hot - 1e-9 <= union <= min(world_size * hot, num_hot) + 1e-9
        covered, urgent = coverage(demand, num_hot), expected_urgent(demand, num_hot)
        assert 0 <= covered <= 1
        assert -1e-9 <= urgent <= cold + 1e-9
        now = np.array([hot, -cold, union, covered, -urgent])
        assert (now >= before - 1e-9).all()
        before = now
    assert covered == pytest.approx(1.0)


def test_all_hot_share():
    first, second = make_demand([70, 20, 10], lookups=3.0), make_demand([1, 1], "u")
    samples = np.random.default_rng(4).choice(3, (20_000, 3), p=[0.7, 0.2, 0.1])
    found = (samples < 2).all(axis=1).mean()
    assert all_hot_share([first], {"t": 2}) == pytest.approx(found, abs=4 * 0.0032)
    share = all_hot_share([first], {"t": 2}) / 2
    assert all_hot_share([first, second], {"t": 2, "u": 1}) == pytest.approx(share)
    assert all_hot_share([first, second], {}) == 0.0
