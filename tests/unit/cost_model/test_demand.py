import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from benchmarks.plan_speed import make_histogram, make_table_rows
from hotrec.cost_model.demand import (
    all_hot_share,
    build_demand,
    build_demand_heldout,
    coverage,
    expected_distinct,
    prob_drawn,
    prob_met,
    take_rows,
)
from hotrec.cost_model.histogram import CountHistogram, build_histogram

COUNTS = arrays(np.int64, st.integers(1, 60), elements=st.integers(0, 50)).filter(
    lambda counts: counts.sum() > 0
)
TABLE = {"dim": 4, "row_bytes": 20, "num_columns": 1}


def make_demand(counts, /, *, lookups=1.0, batch_size=8, world_size=2, heldout=None, **changes):
    build = build_demand if heldout is None else build_demand_heldout
    return build(
        "t",
        build_histogram(np.asarray(counts), None if heldout is None else np.asarray(heldout)),
        **{**TABLE, **changes},
        lookups_per_sample=lookups,
        batch_size=batch_size,
        world_size=world_size,
    )


def zipf_counts(num_rows, exponent, num_lookups):
    """Counts so large that rounding does not matter, with their probabilities."""
    weights = np.arange(1, num_rows + 1) ** -exponent
    counts = np.rint(num_lookups * weights / weights.sum()).astype(np.int64)
    return counts, counts / counts.sum()


def count_distinct_by_drawing(probs, num_hot, *, num_draws, world_size, num_trials, seed=0):
    """(T, 3): hot rows of a rank, cold rows of a rank, hot rows of any rank, of simulated steps."""
    rng = np.random.default_rng(seed)
    found = np.empty((num_trials, 3))
    for trial in range(num_trials):
        ranks = [np.unique(rng.choice(probs.size, num_draws, p=probs)) for _ in range(world_size)]
        found[trial] = (
            np.mean([(rows < num_hot).sum() for rows in ranks]),
            np.mean([(rows >= num_hot).sum() for rows in ranks]),
            (np.unique(np.concatenate(ranks)) < num_hot).sum(),
        )
    return found


@pytest.mark.parametrize(
    ("num_rows", "exponent", "num_hot", "lookups", "world_size"),
    [(300, 1.05, 20, 1.0, 2), (2000, 0.8, 100, 3.0, 4), (50, 1.2, 50, 2.0, 1), (500, 0.5, 0, 1, 2)],
)
def test_distinct_rows_as_drawn(num_rows, exponent, num_hot, lookups, world_size):
    counts, probs = zipf_counts(num_rows, exponent, 10**9)
    demand = make_demand(counts, lookups=lookups, batch_size=64, world_size=world_size)
    found = count_distinct_by_drawing(
        probs, num_hot, num_draws=int(64 * lookups), world_size=world_size, num_trials=200
    )
    errors = found.std(axis=0, ddof=1) / math.sqrt(len(found))
    expected = np.array(expected_distinct(demand, num_hot))
    assert (np.abs(found.mean(axis=0) - expected) <= 4 * errors + 1e-9).all()


def test_distinct_rows_of_batches_of_the_profiled_data():
    # Batches cut from the very lookups that were counted, in random order: the estimate is exact,
    # also where a batch is half of the data.
    rng = np.random.default_rng(1)
    lookups = rng.zipf(1.5, 400) % 150
    demand = make_demand(np.bincount(lookups, minlength=150), batch_size=100, world_size=2)
    ranks, both = [], []
    for _ in range(400):
        drawn = rng.permutation(lookups)
        ranks.append(np.unique(drawn[:100]).size)
        both.append(np.unique(drawn[:200]).size)
    for found, expected in ((ranks, demand.by_rank_G), (both, demand.by_any_G)):
        error = np.std(found, ddof=1) / math.sqrt(len(found))
        assert np.mean(found) == pytest.approx(float(demand.rows_G @ expected), abs=4 * error)


def test_distinct_rows_of_new_data_from_a_small_profile():
    # Profiles are samples themselves: over many of them the estimate for new batches has no bias,
    # where putting c / K for p falls 3% short or more.
    rng = np.random.default_rng(2)
    probs = zipf_counts(400, 1.0, 10**9)[1]
    estimates, plug_in = [], []
    for _ in range(300):
        counts = rng.multinomial(500, probs)
        demand = make_demand(counts, batch_size=100)
        estimates.append(float(demand.rows_G @ demand.by_rank_G))
        plug_in.append(float(prob_met(counts / 500, 100).sum()))
    truth = float(prob_met(probs, 100).sum())
    error = np.std(estimates, ddof=1) / math.sqrt(len(estimates))
    assert np.mean(estimates) == pytest.approx(truth, abs=4 * error)
    assert np.mean(plug_in) < 0.97 * truth


@pytest.mark.parametrize("total", [*range(1, 30), 100, 250])
def test_prob_drawn_is_the_hypergeometric(total):
    counts = np.arange(1, total + 1)
    for draws in range(total + 1):
        exact = [1 - math.comb(total - c, draws) / math.comb(total, draws) for c in counts.tolist()]
        found = prob_drawn(counts.astype(np.float64), total, draws)
        assert found == pytest.approx(exact, abs=1e-14, rel=0.1 / total)


def test_probabilities_that_are_tiny_or_one():
    assert prob_met(np.array([1e-18]), 1e4)[0] == pytest.approx(1e-14, rel=1e-12)
    assert prob_met(np.array([1.0, 0.5]), 0).tolist() == [0, 0]
    assert prob_met(np.array([1.0]), 3).tolist() == [1]
    assert prob_drawn(np.array([1.0]), 10**15, 1e3)[0] == pytest.approx(1e-12, rel=1e-9)
    # A row that takes every lookup; more draws than lookups; no draw.
    assert prob_drawn(np.array([100.0]), 100, 1).tolist() == [1]
    assert prob_drawn(np.array([1.0, 99.0]), 100, 250).tolist() == [1, 1]
    assert prob_drawn(np.array([1.0, 100.0]), 100, 0).tolist() == [0, 0]


def test_groups_by_hand():
    demand = make_demand([0, 6, 1, 1, 0, 2], batch_size=1, world_size=1)
    assert demand.num_rows == 6
    assert demand.rows_G.tolist() == [1, 1, 2]
    assert demand.probs_G == pytest.approx([0.6, 0.2, 0.1])
    # One lookup of one rank: the probabilities are those of the lookup.
    assert demand.by_rank_G == pytest.approx([0.6, 0.2, 0.1])
    assert demand.by_any_G == pytest.approx([0.6, 0.2, 0.1])
    assert expected_distinct(demand, 2) == pytest.approx((0.8, 0.2, 0.8))
    # Half of the last group.
    assert expected_distinct(demand, 3) == pytest.approx((0.9, 0.1, 0.9))
    # Rows never seen add nothing.
    assert expected_distinct(demand, 6) == pytest.approx((1.0, 0.0, 1.0))
    assert take_rows(demand, 2, 1).tolist() == [0, 1, 1]
    assert coverage(demand, 3) == pytest.approx(0.9)


def test_a_table_that_nobody_reads():
    demand = make_demand([0, 0, 0], lookups=0.0)
    assert demand.rows_G.size == 0
    assert expected_distinct(demand, 2) == (0.0, 0.0, 0.0)
    assert coverage(demand, 2) == 0.0
    assert all_hot_share([demand], {}) == 1.0


@given(counts=COUNTS, batch_size=st.integers(1, 200), world_size=st.integers(1, 5))
def test_more_hot_rows_only_move_rows(counts, batch_size, world_size):
    demand = make_demand(counts, batch_size=batch_size, world_size=world_size)
    everything = expected_distinct(demand, counts.size)[0]
    assert everything <= min(batch_size, np.count_nonzero(counts)) + 1e-9
    before = (-1.0, math.inf, -1.0, -1.0)
    for num_hot in range(counts.size + 1):
        hot, cold, union = expected_distinct(demand, num_hot)
        covered = coverage(demand, num_hot)
        assert hot + cold == pytest.approx(everything)
        assert hot - 1e-9 <= union <= min(world_size * hot, num_hot) + 1e-9
        assert hot >= before[0] - 1e-9
        assert cold <= before[1] + 1e-9
        assert union >= before[2] - 1e-9
        assert 0 <= covered <= 1
        assert covered >= before[3]
        before = (hot, cold, union, covered)
    assert covered == pytest.approx(1.0)


@given(counts=COUNTS, max_groups=st.integers(2, 12))
def test_merged_groups_keep_rows_lookups_and_distinct_rows(counts, max_groups):
    exact, merged = make_demand(counts), make_demand(counts, max_groups=max_groups)
    assert merged.rows_G.size <= max_groups
    assert merged.rows_G.sum() == exact.rows_G.sum()
    assert merged.rows_G @ merged.probs_G == pytest.approx(1.0)
    assert (np.diff(merged.probs_G) < 0).all()
    for name in ("by_rank_G", "by_any_G"):
        merged_sum = merged.rows_G @ getattr(merged, name)
        assert merged_sum == pytest.approx(exact.rows_G @ getattr(exact, name))
    # The highest counts stay apart.
    apart = min(max_groups // 2, exact.rows_G.size)
    assert merged.rows_G[:apart].tolist() == exact.rows_G[:apart].tolist()
    assert merged.probs_G[:apart] == pytest.approx(exact.probs_G[:apart])


def test_merging_hardly_moves_what_hot_rows_take():
    counts, _ = zipf_counts(200_000, 1.05, 10**8)
    exact = make_demand(counts, batch_size=4096, max_groups=10**6)
    merged = make_demand(counts, batch_size=4096)
    assert exact.rows_G.size > 10 * merged.rows_G.size
    for num_hot in (10, 300, 1000, 20_000, 150_000):
        found, expected = expected_distinct(merged, num_hot), expected_distinct(exact, num_hot)
        assert found == pytest.approx(expected, rel=1e-3)
        assert coverage(merged, num_hot) == pytest.approx(coverage(exact, num_hot), rel=1e-3)


def test_heldout_by_hand():
    # Ranked by train: row 3 (5 lookups), rows 0 and 1 (2 each); rows 2 and 4 never seen.
    train, heldout = [2, 2, 0, 5, 0], [3, 1, 2, 2, 2]
    demand = make_demand(train, heldout=heldout, batch_size=1, world_size=2)
    assert demand.rows_G.tolist() == [1, 2, 2]
    assert demand.probs_G == pytest.approx([0.2, 0.2, 0.2])
    assert coverage(demand, 2) == pytest.approx(0.4)
    assert demand.by_rank_G == pytest.approx([0.2] * 3)
    assert demand.by_any_G == pytest.approx([1 - 0.8**2] * 3)
    # Rows that nobody reads any more keep their rank.
    gone = make_demand([9, 1], heldout=[0, 4])
    assert gone.probs_G.tolist() == [0, 1]
    assert coverage(gone, 1) == 0.0


def test_heldout_counts_tell_rows_of_a_group_apart():
    # Rows 0 and 1 are of one group, read 3 times and once held out; rows 2 and 4 never seen.
    train, heldout = np.array([2, 2, 0, 5, 0]), np.array([3, 1, 2, 0, 0])
    demand = make_demand(
        train, heldout=heldout, counts=(train, heldout), batch_size=2, world_size=2
    )
    assert demand.rows_G.tolist() == [1, 2, 2]
    assert demand.probs_G == pytest.approx([0, 4 / 12, 2 / 12])

    def drawn(count, draws):
        return 1 - math.comb(6 - count, draws) / math.comb(6, draws)

    for by_G, draws in ((demand.by_rank_G, 2), (demand.by_any_G, 4)):
        expected = [0, (drawn(3, draws) + drawn(1, draws)) / 2, drawn(2, draws) / 2]
        assert by_G == pytest.approx(expected, rel=2e-2)
    # Merging groups changes no sum.
    merged = make_demand(
        train, heldout=heldout, counts=(train, heldout), batch_size=2, max_groups=2
    )
    assert expected_distinct(merged)[1] == pytest.approx(expected_distinct(demand)[1])
    with pytest.raises(ValueError, match="counts: expected 5 rows, got 5 and 4"):
        make_demand(train, heldout=heldout, counts=(train, heldout[:4]))


@pytest.mark.parametrize("heldout", [None, [4, 0, 3, 2]])
def test_given_draws_take_the_place_of_the_lookups(heldout):
    counts = [5, 3, 1, 1]
    given = make_demand(counts, heldout=heldout, batch_size=8, num_draws=(2.0, 3.0))
    by_rank, by_any = (
        make_demand(counts, heldout=heldout, batch_size=draws, world_size=1) for draws in (2, 3)
    )
    assert given.by_rank_G.tolist() == by_rank.by_rank_G.tolist()
    assert given.by_any_G.tolist() == by_any.by_any_G.tolist()
    assert given.lookups_per_sample == 1.0
    with pytest.raises(ValueError, match=r"num_draws: expected 0 <= .* got 3.0 and 2.0"):
        make_demand(counts, heldout=heldout, num_draws=(3.0, 2.0))


def test_heldout_needs_held_out_data():
    with pytest.raises(ValueError, match="held-out lookups: expected some, got 0"):
        make_demand([1, 2], heldout=[0, 0])


def test_heldout_distinct_rows_as_drawn():
    rng = np.random.default_rng(3)
    probs = zipf_counts(3000, 1.0, 10**9)[1]
    train, heldout = rng.multinomial(20_000, probs), rng.multinomial(20_000, probs)
    demand = make_demand(train, heldout=heldout, batch_size=256)
    hot = np.argsort(-train, kind="stable")[:300]
    sampled = [np.unique(rng.choice(3000, 256, p=probs)) for _ in range(200)]
    found_hot = np.mean([np.isin(rows, hot).sum() for rows in sampled])
    found = np.mean([rows.size for rows in sampled])
    expected_hot, expected_cold, _ = expected_distinct(demand, 300)
    assert expected_hot == pytest.approx(found_hot, rel=0.03)
    assert expected_hot + expected_cold == pytest.approx(found, rel=0.03)


def test_all_hot_share_by_hand():
    first = make_demand([6, 4], lookups=2.0)
    second = make_demand([1, 1], lookups=1.0)
    assert all_hot_share([first, second], {"t": 1}) == pytest.approx(0.6**2 * 0.5)
    assert all_hot_share([first, second], {}) == 0.0


def test_all_hot_share_as_drawn():
    rng = np.random.default_rng(4)
    probs = np.array([0.7, 0.2, 0.1])
    demand = make_demand([70, 20, 10], lookups=3.0)
    samples = rng.choice(3, (20_000, 3), p=probs)
    found = (samples < 2).all(axis=1).mean()
    assert all_hot_share([demand], {"t": 2}) == pytest.approx(found, abs=4 * 0.0032)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "table t dim: expected at least 1, got 0"),
        ({"num_columns": 0}, "table t num_columns"),
        ({"batch_size": 0}, "table t batch_size"),
        ({"world_size": -1}, "table t world_size"),
        ({"row_bytes": 15}, "table t row_bytes: expected at least 4 x dim = 16, got 15"),
        ({"lookups": -1.0}, "table t lookups_per_sample"),
        ({"lookups": math.inf}, "table t lookups_per_sample"),
        ({"max_groups": 1}, "table t max_groups: expected at least 2, got 1"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        make_demand([1, 2], **changes)


def test_a_billion_rows_are_a_few_numbers():
    histogram = CountHistogram(
        values=np.array([5, 1]),
        num_rows=np.array([10, 10**9]),
        heldout=np.zeros(2, np.int64),
        num_unseen=7,
        heldout_unseen=0,
    )
    demand = build_demand(
        "t", histogram, **TABLE, lookups_per_sample=1.0, batch_size=10**6, world_size=1
    )
    total = 10**9 + 50
    # 1e6 of 1e9 lookups: a row seen once is read with probability n / K.
    assert demand.by_rank_G[1] == pytest.approx(1e6 / total, rel=1e-9)


@pytest.mark.parametrize(
    ("num_rows", "exponent", "num_lookups"),
    [(50, 1.05, 1000), (30_000, 1.05, 10**7), (30_000, 0.8, 5000), (100_000, 1.2, 10**6)],
)
def test_histograms_of_the_speed_benchmark_are_those_of_the_law(num_rows, exponent, num_lookups):
    weights = np.arange(1, num_rows + 1) ** -exponent
    counts = np.rint(num_lookups * weights / weights.sum()).astype(np.int64)
    expected, found = build_histogram(counts), make_histogram(num_rows, exponent, num_lookups)
    assert found.total_rows == num_rows
    assert found.num_lookups == pytest.approx(expected.num_lookups, rel=1e-3)
    assert found.num_unseen == pytest.approx(expected.num_unseen, abs=2)
    assert found.values.size == pytest.approx(expected.values.size, abs=2)


def test_tables_of_the_speed_benchmark_have_all_rows():
    sizes = make_table_rows(500, 10**9)
    assert (len(sizes), sum(sizes)) == (500, 10**9)
    assert min(sizes) >= 1
