"""Every policy against a plain loop over the rows."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hotrec.assemble.policies import choose_hot
from hotrec.config.groups import (
    AllHotPlacement,
    BudgetPlacement,
    CoveragePlacement,
    FaePlacement,
    FractionPlacement,
    ScarsPlacement,
)
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.demand import prob_drawn
from hotrec.cost_model.profile import Profile
from hotrec.planner.counted import CountedTables
from hotrec.planner.machine import Machine
from hotrec.planner.paper_policies import choose_fae, choose_freq_cache, choose_scars
from hotrec.planner.policies import (
    choose_budget,
    choose_coverage,
    choose_fraction,
    choose_popular_rows,
)
from hotrec.types import Partition

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


def ranked(counts, *, row_bytes=None, but=()):
    """All seen rows as (table, row), densest first: the oracle of every joint policy."""
    rows = [(t, r) for t in sorted(set(counts) - set(but)) for r in range(counts[t].size)]
    size = row_bytes or dict.fromkeys(counts, 1)
    seen = [(t, r) for t, r in rows if counts[t][r] > 0]
    return sorted(seen, key=lambda x: -counts[x[0]][x[1]] / size[x[0]])


def chosen(partition):
    return {(t, int(r)) for t in partition.num_rows for r in partition.hot(t)}


def check_invariants(partition, counts, *, fixed=()):
    """What holds for every policy."""
    assert partition.num_rows == {t: c.size for t, c in counts.items()}
    for table in set(counts) - set(fixed):
        hot = partition.hot(table)
        assert hot.dtype == np.int64
        assert (counts[table][hot] > 0).all()
        # The top H of the table, in falling order, ties by row number.
        assert hot.tolist() == falling(counts[table])[: hot.size]


def falling(counts):
    return np.lexsort((np.arange(counts.size), -counts)).tolist()


@given(counts=COUNTS, frac=st.floats(0, 1))
def test_fraction(counts, frac):
    partition = choose_fraction(CountedTables.of(counts), hot_frac=frac)
    wanted = math.floor(frac * partition.total_rows + 1e-6)
    assert chosen(partition) == set(ranked(counts)[:wanted])
    check_invariants(partition, counts)
    shuffled = CountedTables.of(dict(reversed(list(counts.items()))))
    again = choose_fraction(shuffled, hot_frac=frac)
    assert chosen(again) == chosen(partition)


@given(counts=COUNTS, coverage=st.floats(0, 1))
def test_coverage_takes_the_fewest_rows(counts, coverage):
    partition = choose_coverage(counts, coverage=coverage)
    needed = math.ceil(coverage * sum(int(c.sum()) for c in counts.values()) - 1e-6)
    covered = list(itertools.accumulate(int(counts[t][r]) for t, r in ranked(counts)))
    fewest = 0 if needed <= 0 else next(i for i, c in enumerate(covered, 1) if c >= needed)
    assert chosen(partition) == set(ranked(counts)[:fewest])
    check_invariants(partition, counts)


@given(counts=COUNTS, budget=st.integers(0, 300))
def test_budget_is_the_greedy_loop(counts, budget):
    """One row that is too large does not bar smaller ones."""
    partition = choose_budget(counts, budget_bytes=budget, row_bytes=ROW_BYTES)
    hot, left = set(), budget
    for table, row in ranked(counts, row_bytes=ROW_BYTES):
        if ROW_BYTES[table] <= left:
            hot.add((table, row))
            left -= ROW_BYTES[table]
    assert chosen(partition) == hot
    check_invariants(partition, counts)


@given(counts=COUNTS, budget=st.integers(0, 250), small=st.sampled_from([0, 30, 60]))
def test_fae_against_every_threshold(counts, budget, small):
    def run():
        return choose_fae(counts, budget_bytes=budget, row_bytes=ROW_BYTES, small_table_bytes=small)

    tiny = [t for t, c in counts.items() if c.size * ROW_BYTES[t] < small]
    whole = {(t, r) for t in tiny for r in range(counts[t].size)}
    best = None
    for threshold in (70_001, 70_000, *range(6, 0, -1)):
        hot = whole | {(t, r) for t, r in ranked(counts, but=tiny) if counts[t][r] >= threshold}
        if sum(ROW_BYTES[t] for t, _ in hot) <= budget:
            best = hot
    if best is None:
        with pytest.raises(ValueError, match="budget_bytes"):
            run()
    else:
        assert chosen(run()) == best


@given(counts=COUNTS, frac=st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]))
def test_freq_cache_ends_at_the_first_row_that_is_too_large(counts, frac):
    partition = choose_freq_cache(counts, dims=ROW_BYTES, cached_frac=frac)
    left, expected = frac * sum(c.size * ROW_BYTES[t] for t, c in counts.items()), set()
    for table, row in ranked(counts):
        left -= ROW_BYTES[table]
        if left < -1e-9:
            break
        expected.add((table, row))
    assert chosen(partition) == expected


def scars_seconds(counts, hot, *, batch, num_samples, cold_s, hot_s):
    """The objective of SCARS for any set of hot rows."""
    cold, share = 0.0, 1.0
    for table, values in counts.items():
        total = int(values.sum())
        if not total:
            continue
        covered = sum(int(values[r]) for t, r in hot if t == table)
        share *= (covered / total) ** (total / num_samples)
        for row, value in enumerate(values):
            if (table, row) not in hot:
                cold += 1 - (1 - value / total) ** (batch * total / num_samples)
    return (1 - share) * cold_s * cold + hot_s * len(hot)


@given(
    counts=st.fixed_dictionaries(
        {t: arrays(np.int64, st.integers(1, 6), elements=st.integers(0, 6)) for t in TABLES}
    ),
    memory=st.integers(50, 300),
    hot_s=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    batch=st.sampled_from([2, 16]),
    is_fixed=st.booleans(),
)
def test_scars_against_every_size(counts, memory, hot_s, batch, is_fixed):
    fixed = {"a": np.arange(counts["a"].size)} if is_fixed else {}
    partition = choose_scars(
        CountedTables.of(counts, overrides=dict.fromkeys(fixed, "hot")),
        memory_bytes=memory,
        row_bytes=ROW_BYTES,
        num_samples=5,
        global_batch_size=batch,
        cold_row_s=1.0,
        hot_row_s=hot_s,
    )
    hot = [("a", int(r)) for r in fixed.get("a", ())]
    left, sizes = memory - 8 * len(hot), [len(hot)]
    for (table, _), group in itertools.groupby(
        ranked(counts, row_bytes=ROW_BYTES, but=fixed), key=lambda x: (x[0], counts[x[0]][x[1]])
    ):
        rows = list(group)
        fitting = rows[: left // ROW_BYTES[table]]
        left -= ROW_BYTES[table] * len(fitting)
        hot += fitting
        sizes.append(len(hot))
        if len(fitting) < len(rows):
            break
    numbers = {"batch": batch, "num_samples": 5, "cold_s": 1.0, "hot_s": hot_s}
    best = min(scars_seconds(counts, set(hot[:n]), **numbers) for n in sizes)
    found = chosen(partition)
    assert found in [set(hot[:n]) for n in sizes]
    assert scars_seconds(counts, found, **numbers) == pytest.approx(best, rel=1e-9, abs=1e-9)


# --- overrides


@given(counts=COUNTS, data=st.data())
def test_overrides(counts, data):
    values = counts["a"]
    override = data.draw(
        st.sampled_from(["hot", "cold"]) | st.integers(0, values.size) | st.floats(0, 1)
    )
    fixed = CountedTables.of(counts, overrides={"a": override}).fixed
    assert set(fixed) == {"a"}
    order, seen = falling(values), int((values > 0).sum())
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


@pytest.mark.parametrize(
    "placement",
    [
        FractionPlacement(hot_frac=0.5),
        CoveragePlacement(coverage_frac=0.9),
        BudgetPlacement(hot_budget_mib=2**-12),
        FaePlacement(hot_budget_mib=2**-10),
        ScarsPlacement(hot_budget_mib=2**-10),
        AllHotPlacement(),
    ],
)
def test_configured_policies(placement):
    """What they choose has to fit the memory."""
    counts = {t: np.arange(9, dtype=np.int64) for t in TABLES}
    profile, costs = Profile(100, 0, counts), BUILTIN["cpu_1gbit"]
    row_bytes = dict.fromkeys(TABLES, 32)

    def choose(bytes_of_rank):
        on = Machine(4, 4, "cpu", 0, 4 * bytes_of_rank, 16)
        return choose_hot(placement, profile, on, row_bytes, 8, costs)

    num_hot = choose(5000).total_hot
    assert choose(32 * num_hot).total_hot == num_hot > 0
    with pytest.raises(ValueError, match=r"expected .*at most .* got"):
        choose(32 * num_hot - 1)


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize(
    ("load_frac", "expected"),
    [
        # Rank 0 has a1, a3, a5 and b1; rank 1 has a0, a2, a4 and b0, b2.
        (0.2, {"a": [0], "b": [1]}),
        (0.5, {"a": [0, 2, 3, 4], "b": [1]}),
        (1.0, {"a": [0, 2, 3, 4], "b": [0, 1, 2]}),
    ],
)
def test_each_rank_begins_with_its_most_looked_up_cold_rows(load_frac, expected, batch_size):
    counts = {"a": np.array([9, 8, 7, 6, 5, 0]), "b": np.array([4, 10, 1])}
    found = choose_popular_rows(
        Partition({"a": 6, "b": 3}, {"a": np.array([1])}),
        Profile(10, 0, counts),
        load_frac=load_frac,
        global_batch_size=batch_size,
        world_size=2,
    )
    assert {name: rows["row"].tolist() for name, rows in found.items()} == expected
    for table, rows in found.items():  # with the probability that a batch reads them
        num_lookups = counts[table].sum()
        of_rows = counts[table][rows["row"]].astype(float)
        chances = prob_drawn(of_rows, num_lookups, num_lookups / 10 * batch_size)
        assert rows["prob"] == pytest.approx(chances)
