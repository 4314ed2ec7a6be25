import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hotrec.planning.policies import (
    check_hot_bytes,
    choose_all_cold,
    choose_all_hot,
    choose_budget,
    choose_coverage,
    choose_fraction,
    choose_min_accesses,
    fix_tables,
    measure_hot_bytes,
)

TABLES = ("a", "b", "c")
ROW_BYTES = {"a": 8, "b": 12, "c": 20}
COUNTS = st.fixed_dictionaries(
    {
        table: arrays(
            np.int64,
            st.integers(1, 8),
            elements=st.one_of(st.integers(0, 6), st.sampled_from([0, 70_000])),
        )
        for table in TABLES
    }
)


def ranked(counts, *, row_bytes=None, min_count=1):
    """All seen rows as (table, row), densest first: the oracle of every joint policy."""
    rows = [(t, r) for t in sorted(counts) for r in range(counts[t].size)]
    size = row_bytes or dict.fromkeys(counts, 1)
    seen = [(t, r) for t, r in rows if counts[t][r] >= min_count]
    return sorted(seen, key=lambda x: (-counts[x[0]][x[1]] / size[x[0]], x[0], x[1]))


def chosen(partition):
    return {(t, int(r)) for t in partition.num_rows for r in partition.hot(t)}


def check_invariants(partition, counts, *, min_count=1, fixed=()):
    """What holds for every policy."""
    assert partition.num_rows == {t: c.size for t, c in counts.items()}
    for table in set(counts) - set(fixed):
        hot = partition.hot(table)
        assert hot.dtype == np.int64
        assert np.unique(hot).size == hot.size
        assert (counts[table][hot] >= min_count).all()
        # The top H of the table, in falling order, ties by row number.
        order = np.lexsort((np.arange(counts[table].size), -counts[table]))
        assert hot.tolist() == order[: hot.size].tolist()


def shuffled_tables(counts):
    return dict(reversed(list(counts.items())))


@given(counts=COUNTS, frac=st.floats(0, 1), min_count=st.integers(1, 3))
def test_fraction_of_all_rows(counts, frac, min_count):
    partition = choose_fraction(counts, hot_frac=frac, min_count=min_count)
    wanted = math.floor(frac * partition.total_rows + 1e-6)
    assert chosen(partition) == set(ranked(counts, min_count=min_count)[:wanted])
    check_invariants(partition, counts, min_count=min_count)
    again = choose_fraction(shuffled_tables(counts), hot_frac=frac, min_count=min_count)
    assert chosen(again) == chosen(partition)


@given(counts=COUNTS, frac=st.floats(0, 1))
def test_fraction_of_each_table(counts, frac):
    partition = choose_fraction(counts, hot_frac=frac, per_table=True)
    for table, values in counts.items():
        wanted = math.floor(frac * values.size + 1e-6)
        assert partition.num_hot(table) == min(wanted, int((values > 0).sum()))
    check_invariants(partition, counts)


def test_fraction_does_not_lose_a_row_to_rounding():
    counts = {"a": np.arange(1, 101)}
    assert 0.29 * 100 < 29
    assert choose_fraction(counts, hot_frac=0.29).num_hot("a") == 29


@given(counts=COUNTS, coverage=st.floats(0, 1))
def test_coverage_takes_the_fewest_rows(counts, coverage):
    partition = choose_coverage(counts, coverage=coverage)
    total = sum(int(c.sum()) for c in counts.values())
    needed = math.ceil(coverage * total - 1e-6)
    covered = list(itertools.accumulate(int(counts[t][r]) for t, r in ranked(counts)))
    fewest = 0 if needed <= 0 else next(i for i, c in enumerate(covered, 1) if c >= needed)
    assert chosen(partition) == set(ranked(counts)[:fewest])
    check_invariants(partition, counts)


@given(counts=COUNTS, coverage=st.floats(0, 1))
def test_coverage_of_each_table(counts, coverage):
    partition = choose_coverage(counts, coverage=coverage, per_table=True)
    for table, values in counts.items():
        needed = math.ceil(coverage * values.sum() - 1e-6)
        falling = np.sort(values)[::-1]
        num_hot = partition.num_hot(table)
        assert falling[:num_hot].sum() >= needed
        assert num_hot == 0 or falling[: num_hot - 1].sum() < needed
    check_invariants(partition, counts)


@given(counts=COUNTS, coverages=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_more_coverage_keeps_the_hot_rows(counts, coverages):
    low, high = sorted(coverages)
    assert chosen(choose_coverage(counts, coverage=low)) <= chosen(
        choose_coverage(counts, coverage=high)
    )


def test_coverage_out_of_reach_is_an_error():
    counts = {"a": np.array([6, 1, 1]), "b": np.array([2])}
    with pytest.raises(ValueError, match=r"of all tables: expected at most 0\.800000.* got 0\.9"):
        choose_coverage(counts, coverage=0.9, min_count=2)
    with pytest.raises(ValueError, match=r"of all tables: expected at most 0\.200000"):
        choose_coverage(counts, coverage=0.5, fixed=fix_tables(counts, overrides={"a": "cold"}))
    with pytest.raises(ValueError, match=r"of table a: expected at most 0\.750000"):
        choose_coverage(counts, coverage=0.9, per_table=True, min_count=2)


def spend(counts, budget, row_bytes):
    """The greedy rule by a loop over rows: one that is too large does not bar smaller ones."""
    hot = set()
    for table, row in ranked(counts, row_bytes=row_bytes):
        if row_bytes[table] <= budget:
            hot.add((table, row))
            budget -= row_bytes[table]
    return hot


@settings(max_examples=200)
@given(counts=COUNTS, budget=st.integers(0, 300))
def test_budget_is_the_greedy_loop_and_never_exceeded(counts, budget):
    partition = choose_budget(counts, budget_bytes=budget, row_bytes=ROW_BYTES)
    assert measure_hot_bytes(partition, ROW_BYTES) <= budget
    assert chosen(partition) == spend(counts, budget, ROW_BYTES)
    check_invariants(partition, counts)
    again = choose_budget(shuffled_tables(counts), budget_bytes=budget, row_bytes=ROW_BYTES)
    assert chosen(again) == chosen(partition)


@settings(max_examples=50)
@given(
    counts=st.fixed_dictionaries(
        {t: arrays(np.int64, st.integers(1, 3), elements=st.integers(0, 9)) for t in TABLES}
    ),
    budget=st.integers(0, 100),
)
def test_budget_with_one_row_size_is_the_best_there_is(counts, budget):
    """Against all subsets of rows: equal sizes make the greedy choice optimal."""
    row_bytes = dict.fromkeys(TABLES, 12)
    rows = [(t, r) for t in TABLES for r in range(counts[t].size)]
    num_affordable = min(budget // 12, len(rows))
    best = max(
        sum(int(counts[t][r]) for t, r in subset)
        for subset in itertools.combinations(rows, num_affordable)
    )
    partition = choose_budget(counts, budget_bytes=budget, row_bytes=row_bytes)
    assert sum(int(counts[t][r]) for t, r in chosen(partition)) == best


@settings(max_examples=50)
@given(counts=COUNTS, budget=st.integers(0, 300), seed=st.integers(0, 100))
def test_budget_does_not_depend_on_row_numbers(counts, budget, seed):
    rng = np.random.default_rng(seed)
    mixed = {t: rng.permutation(c) for t, c in counts.items()}
    first = choose_budget(counts, budget_bytes=budget, row_bytes=ROW_BYTES)
    second = choose_budget(mixed, budget_bytes=budget, row_bytes=ROW_BYTES)
    for table in TABLES:
        found = counts[table][first.hot(table)].tolist()
        assert found == mixed[table][second.hot(table)].tolist()


def test_budget_fills_up_with_smaller_rows():
    counts = {"a": np.array([1, 1]), "c": np.array([90, 80])}
    partition = choose_budget(counts, budget_bytes=36, row_bytes=ROW_BYTES)
    assert chosen(partition) == {("c", 0), ("a", 0), ("a", 1)}


def test_budget_errors():
    counts = {"a": np.array([3, 2]), "b": np.array([1])}
    with pytest.raises(ValueError, match="at most the 100 bytes of device memory, got 101"):
        choose_budget(counts, budget_bytes=101, row_bytes=ROW_BYTES, memory_bytes=100)
    whole = choose_budget(counts, budget_bytes=100, row_bytes=ROW_BYTES, memory_bytes=100)
    assert whole.total_hot == 3
    with pytest.raises(ValueError, match="budget_bytes: expected at least 0, got -1"):
        choose_budget(counts, budget_bytes=-1, row_bytes=ROW_BYTES)
    with pytest.raises(ValueError, match=r"row_bytes\.b: expected the bytes of a row.*got None"):
        choose_budget(counts, budget_bytes=1, row_bytes={"a": 4})
    with pytest.raises(ValueError, match=r"row_bytes\.a: .*got 0"):
        choose_budget(counts, budget_bytes=1, row_bytes={"a": 0, "b": 1})
    fixed = fix_tables(counts, overrides={"a": "hot"})
    with pytest.raises(
        ValueError, match=r"at least 16 for the tables fixed hot \(\['a'\]\), got 15"
    ):
        choose_budget(counts, budget_bytes=15, row_bytes=ROW_BYTES, fixed=fixed)


@given(
    counts=COUNTS,
    least=st.floats(0.01, 20),
    batch=st.integers(1, 64),
    num_samples=st.integers(1, 100),
)
def test_min_accesses_is_the_break_even_rule(counts, least, batch, num_samples):
    partition = choose_min_accesses(
        counts, min_accesses_per_step=least, global_batch_size=batch, num_samples=num_samples
    )
    assert chosen(partition) == {
        (t, r) for t, r in ranked(counts) if counts[t][r] * batch >= least * num_samples
    }
    check_invariants(partition, counts)


def test_min_accesses_includes_the_border():
    counts = {"a": np.array([1, 4, 2, 0])}
    partition = choose_min_accesses(
        counts, min_accesses_per_step=1, global_batch_size=8, num_samples=16
    )
    assert partition.hot("a").tolist() == [1, 2]


@pytest.mark.parametrize("name", ["min_accesses_per_step", "global_batch_size", "num_samples"])
def test_min_accesses_refuses(name):
    arguments = {"min_accesses_per_step": 1.0, "global_batch_size": 1, "num_samples": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name}: expected above 0, got 0"):
        choose_min_accesses({"a": np.array([1])}, **arguments)


@given(counts=COUNTS)
def test_all_hot_and_all_cold(counts):
    hot = choose_all_hot(counts)
    for table, values in counts.items():
        order = np.lexsort((np.arange(values.size), -values))
        assert hot.hot(table).tolist() == order.tolist()
    cold = choose_all_cold(counts)
    assert cold.total_hot == 0
    assert (hot.policy, cold.policy) == ("all hot", "all cold")


@given(counts=COUNTS, data=st.data())
def test_overrides_and_small_tables(counts, data):
    override = data.draw(
        st.sampled_from(["hot", "cold"])
        | st.integers(0, counts["a"].size)
        | st.floats(0, 1, allow_nan=False)
    )
    fixed = fix_tables(counts, overrides={"a": override}, small_table_rows=4)
    assert set(fixed) == {"a"} | {t for t in ("b", "c") if counts[t].size <= 4}
    values = counts["a"]
    order = np.lexsort((np.arange(values.size), -values)).tolist()
    seen = int((values > 0).sum())
    match override:
        case "hot":
            expected = order
        case "cold":
            expected = []
        case float():
            expected = order[: min(math.floor(override * values.size + 1e-6), seen)]
        case _:
            expected = order[: min(override, seen)]
    assert fixed["a"].tolist() == expected
    for table in set(fixed) - {"a"}:
        # Wholly hot: also the rows that were never seen.
        assert sorted(fixed[table].tolist()) == list(range(counts[table].size))


POLICIES = {
    "fraction": lambda counts, fixed: choose_fraction(counts, hot_frac=0.4, fixed=fixed),
    "fraction per table": lambda counts, fixed: choose_fraction(
        counts, hot_frac=0.4, per_table=True, fixed=fixed
    ),
    "coverage": lambda counts, fixed: choose_coverage(counts, coverage=0.3, fixed=fixed),
    "budget": lambda counts, fixed: choose_budget(
        counts, budget_bytes=500, row_bytes=ROW_BYTES, fixed=fixed
    ),
    "min accesses": lambda counts, fixed: choose_min_accesses(
        counts, min_accesses_per_step=2, global_batch_size=1, num_samples=1, fixed=fixed
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_overrides_stand_under_every_policy(policy):
    rng = np.random.default_rng(0)
    counts = {t: rng.integers(0, 9, 12) for t in TABLES}
    fixed = fix_tables(counts, overrides={"a": "hot", "b": 2})
    partition = POLICIES[policy](counts, fixed)
    assert partition.hot("a").tolist() == fixed["a"].tolist()
    assert partition.hot("b").tolist() == fixed["b"].tolist()
    assert partition.num_hot("a") == 12
    check_invariants(partition, counts, fixed=fixed)
    expected_c = {"fraction": 0, "fraction per table": 4}
    if policy in expected_c:
        # 40% of 36 rows are 14: the fixed tables have taken all of them.
        assert partition.num_hot("c") == expected_c[policy]


def test_fixed_tables_pay_from_the_budget():
    counts = {"a": np.array([0, 0, 1]), "b": np.array([9, 8, 7])}
    fixed = fix_tables(counts, overrides={"a": "hot"})
    partition = choose_budget(counts, budget_bytes=24 + 2 * 12, row_bytes=ROW_BYTES, fixed=fixed)
    assert partition.hot("b").tolist() == [0, 1]
    assert measure_hot_bytes(partition, ROW_BYTES) == 48


def test_fixed_tables_count_towards_the_coverage():
    counts = {"a": np.array([50]), "b": np.array([30, 15, 5])}
    fixed = fix_tables(counts, small_table_rows=1)
    assert choose_coverage(counts, coverage=0.8, fixed=fixed).hot("b").tolist() == [0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("warm", r"overrides\.a: expected 'hot', 'cold', .* got 'warm'"),
        (True, r"overrides\.a: .* got True"),
        (1.5, r"overrides\.a: expected a fraction in 0\.\.1, got 1\.5"),
        (3, r"overrides\.a: expected at most the table's 2 rows, got 3"),
        (-1, r"overrides\.a: expected at most the table's 2 rows, got -1"),
    ],
)
def test_override_refuses(override, message):
    with pytest.raises(ValueError, match=message):
        fix_tables({"a": np.array([1, 2])}, overrides={"a": override})


def test_unknown_tables_and_bad_numbers_are_refused():
    counts = {"a": np.array([1, 2])}
    with pytest.raises(ValueError, match=r"overrides: expected tables of \['a'\], got \['z'\]"):
        fix_tables(counts, overrides={"z": "hot"})
    with pytest.raises(ValueError, match=r"fixed: .*'a'.* got \['z'\]"):
        choose_fraction(counts, hot_frac=0.5, fixed={"z": np.array([0])})
    with pytest.raises(ValueError, match="min_count: expected at least 1.* got 0"):
        choose_fraction(counts, hot_frac=0.5, min_count=0)
    with pytest.raises(ValueError, match=r"hot_frac: expected a fraction in 0\.\.1, got 1\.01"):
        choose_fraction(counts, hot_frac=1.01)
    with pytest.raises(ValueError, match=r"coverage: expected a fraction in 0\.\.1, got -0\.1"):
        choose_coverage(counts, coverage=-0.1)


def test_hot_rows_beyond_memory_are_refused_for_any_policy():
    partition = choose_all_hot({"a": np.array([1, 2]), "b": np.array([1])})
    check_hot_bytes(partition, ROW_BYTES, 28)
    with pytest.raises(ValueError, match=r"\(all hot\): expected .* at most 27 bytes.* got 28"):
        check_hot_bytes(partition, ROW_BYTES, 27)


def test_policy_is_named():
    counts = {"a": np.array([1, 2])}
    assert choose_fraction(counts, hot_frac=0.5).policy == "fraction 0.5 of all rows"
    assert choose_coverage(counts, coverage=0.9, per_table=True).policy == (
        "coverage 0.9 of each table"
    )
    assert choose_budget(counts, budget_bytes=4096, row_bytes=ROW_BYTES).policy == (
        "budget 4,096 bytes per device"
    )
    assert (
        choose_min_accesses(
            counts, min_accesses_per_step=0.5, global_batch_size=8, num_samples=3
        ).policy
        == "at least 0.5 accesses per step of 8 samples"
    )
