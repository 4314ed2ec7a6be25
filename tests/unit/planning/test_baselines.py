import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hotrec.planning.baselines import (
    choose_fae,
    choose_freq_cache,
    choose_hugectr,
    choose_scars,
    hugectr_threshold,
)
from hotrec.planning.policies import fix_tables
from hotrec.types import HugectrLink

TABLES = ("a", "b", "c")
ROW_BYTES = {"a": 8, "b": 12, "c": 20}
COUNTS = st.fixed_dictionaries(
    {t: arrays(np.int64, st.integers(1, 6), elements=st.integers(0, 6)) for t in TABLES}
)


def chosen(partition):
    return {(t, int(r)) for t in partition.num_rows for r in partition.hot(t)}


def ranked(counts, *, size=None, but=(), min_count=1):
    """All seen rows as (table, row), most accesses (per byte) first, ties by table and row."""
    rows = [(t, r) for t in sorted(set(counts) - set(but)) for r in range(counts[t].size)]
    seen = [(t, r) for t, r in rows if counts[t][r] >= min_count]
    return sorted(
        seen, key=lambda x: -counts[x[0]][x[1]] / (size or dict.fromkeys(counts, 1))[x[0]]
    )


def test_hugectr_thresholds():
    common = {"num_ranks": 16, "num_hosts": 2, "global_batch_size": 65536}
    flat = hugectr_threshold(HugectrLink.ib_nvlink, **common)
    assert flat == pytest.approx(16 * (1.9e11 / 1.3e11) * 16 / 15)
    hier = hugectr_threshold(HugectrLink.ib_nvlink_hier, **common)
    assert hier == pytest.approx(16 * (1.9e11 / 1.3e11) * 2)
    single = hugectr_threshold(HugectrLink.nvlink_single_node, **{**common, "num_hosts": 1})
    assert single == pytest.approx(65536 * math.sqrt(0.02 / (4096 * 4095)))
    with pytest.raises(ValueError, match="num_hosts"):
        hugectr_threshold(HugectrLink.ib_nvlink_hier, **{**common, "num_hosts": 1})
    with pytest.raises(ValueError, match="num_ranks"):
        hugectr_threshold(HugectrLink.ib_nvlink, **{**common, "num_ranks": 1})
    with pytest.raises(ValueError, match="one sample"):
        hugectr_threshold(HugectrLink.nvlink_single_node, **{**common, "global_batch_size": 16})
    with pytest.raises(ValueError, match="efficiency"):
        hugectr_threshold(HugectrLink.ib_nvlink, **common, efficiency=0)


def test_hugectr_single_node_bounds_duplicates():
    """At the threshold a row is expected max_duplicate_prob times in a pair of a rank's samples."""
    ranks, batch = 8, 8192
    per_step = hugectr_threshold(
        HugectrLink.nvlink_single_node, num_ranks=ranks, num_hosts=1, global_batch_size=batch
    )
    prob, samples = per_step / batch, batch // ranks
    assert prob**2 * samples * (samples - 1) / 2 == pytest.approx(0.01)


@settings(max_examples=150, deadline=None)
@given(counts=COUNTS, ranks=st.integers(1, 4), needed=st.sampled_from([0.3, 1.0, 2.0, 3.5]))
def test_hugectr_against_a_plain_loop(counts, ranks, needed):
    partition = choose_hugectr(
        counts,
        min_accesses_per_step=needed,
        num_ranks=ranks,
        global_batch_size=4,
        num_samples=6,
    )
    above = [(t, r) for t, r in ranked(counts) if counts[t][r] * 4 >= needed * 6]
    assert chosen(partition) == set(above[: len(above) // ranks * ranks])


@settings(max_examples=150, deadline=None)
@given(counts=COUNTS, budget=st.integers(0, 250), small=st.sampled_from([0, 30, 60]))
def test_fae_against_every_threshold(counts, budget, small):
    def run():
        return choose_fae(counts, budget_bytes=budget, row_bytes=ROW_BYTES, small_table_bytes=small)

    tiny = [t for t, c in counts.items() if c.size * ROW_BYTES[t] < small]
    whole = {(t, r) for t in tiny for r in range(counts[t].size)}
    best = None
    for threshold in range(8, 0, -1):
        hot = whole | {(t, r) for t, r in ranked(counts, but=tiny) if counts[t][r] >= threshold}
        if sum(ROW_BYTES[t] for t, _ in hot) <= budget:
            best = hot
    if best is None and sum(ROW_BYTES[t] for t, _ in whole) > budget:
        with pytest.raises(ValueError, match="budget_bytes"):
            run()
        return
    assert chosen(run()) == best


@settings(max_examples=150, deadline=None)
@given(counts=COUNTS, frac=st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]))
def test_freq_cache_against_a_plain_loop(counts, frac):
    dims = {"a": 2, "b": 3, "c": 5}
    partition = choose_freq_cache(counts, dims=dims, cached_frac=frac)
    budget = frac * sum(c.size * dims[t] for t, c in counts.items())
    expected = set()
    for table, row in ranked(counts):
        if dims[table] > budget + 1e-9:
            break
        budget -= dims[table]
        expected.add((table, row))
    assert chosen(partition) == expected


def test_freq_cache_is_one_and_a_half_percent_of_the_parameters():
    counts = {"a": np.arange(1000, 0, -1), "b": np.arange(1000, 0, -1)}
    partition = choose_freq_cache(counts, dims={"a": 8, "b": 8})
    assert partition.total_hot == 30


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


@settings(max_examples=150, deadline=None)
@given(
    counts=COUNTS,
    memory=st.integers(0, 250),
    hot_s=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    batch=st.sampled_from([2, 16]),
)
def test_scars_against_every_size(counts, memory, hot_s, batch):
    numbers = {"batch": batch, "num_samples": 5, "cold_s": 1.0, "hot_s": hot_s}
    partition = choose_scars(
        counts,
        memory_bytes=memory,
        row_bytes=ROW_BYTES,
        num_samples=5,
        global_batch_size=batch,
        cold_row_s=1.0,
        hot_row_s=hot_s,
    )
    best = math.inf
    hot, spent = [], 0
    groups = itertools.groupby(
        ranked(counts, size=ROW_BYTES), key=lambda x: (x[0], int(counts[x[0]][x[1]]))
    )
    sizes = [0]
    for _, group in groups:
        for table, row in group:
            if spent + ROW_BYTES[table] > memory:
                break
            spent += ROW_BYTES[table]
            hot.append((table, row))
        else:
            sizes.append(len(hot))
            continue
        sizes.append(len(hot))
        break
    best = min(scars_seconds(counts, set(hot[:n]), **numbers) for n in sizes)
    found = chosen(partition)
    assert found in [set(hot[:n]) for n in sizes]
    assert scars_seconds(counts, found, **numbers) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_scars_with_free_hot_rows_beats_every_subset():
    """For equal rows and free replicas the densest rows are the best of all sets of their size."""
    rng = np.random.default_rng(3)
    for _ in range(30):
        counts = {t: rng.integers(0, 6, 3).astype(np.int64) for t in ("a", "b")}
        size = {"a": 4, "b": 4}
        partition = choose_scars(
            counts,
            memory_bytes=12,
            row_bytes=size,
            num_samples=4,
            global_batch_size=8,
            cold_row_s=1.0,
            hot_row_s=0.0,
        )
        rows = [(t, r) for t in counts for r in range(3)]
        numbers = {"batch": 8, "num_samples": 4, "cold_s": 1.0, "hot_s": 0.0}
        cold = [
            scars_seconds(counts, set(hot), **{**numbers, "num_samples": 4})
            for hot in itertools.combinations(rows, 3)
        ]
        ours = scars_seconds(counts, chosen(partition), **numbers)
        # The share of all-hot samples is not in the ranking, so the best set may be another one.
        assert ours <= np.median(cold)
        assert partition.total_hot == min(3, sum(int((c > 0).sum()) for c in counts.values()))


def test_fixed_tables_and_min_count_are_kept():
    counts = {t: np.array([5, 4, 3, 1, 0], np.int64) for t in TABLES}
    fixed = fix_tables(counts, overrides={"a": "hot", "b": "cold"})
    shared = {"fixed": fixed, "min_count": 3}
    steps = {"num_samples": 5, "global_batch_size": 5}
    partitions = [
        choose_hugectr(counts, min_accesses_per_step=0.1, num_ranks=1, **steps, **shared),
        choose_fae(counts, budget_bytes=1000, row_bytes=ROW_BYTES, small_table_bytes=0, **shared),
        choose_freq_cache(counts, dims=ROW_BYTES, cached_frac=1.0, **shared),
        choose_scars(
            counts,
            memory_bytes=1000,
            row_bytes=ROW_BYTES,
            cold_row_s=1.0,
            hot_row_s=0.0,
            **steps,
            **shared,
        ),
    ]
    for partition in partitions:
        assert [partition.num_hot(t) for t in TABLES] == [5, 0, 3], partition.policy


def test_bad_input():
    counts = {t: np.array([2, 1], np.int64) for t in TABLES}
    with pytest.raises(ValueError, match="num_ranks"):
        choose_hugectr(
            counts, min_accesses_per_step=1, num_ranks=0, global_batch_size=1, num_samples=1
        )
    with pytest.raises(ValueError, match="cached_frac"):
        choose_freq_cache(counts, dims=ROW_BYTES, cached_frac=1.5)
    scars = {"row_bytes": ROW_BYTES, "num_samples": 2, "global_batch_size": 2}
    with pytest.raises(ValueError, match="scars"):
        choose_scars(counts, memory_bytes=9, cold_row_s=-1, hot_row_s=0, **scars)
    fixed = fix_tables(counts, overrides={"a": "hot"})
    with pytest.raises(ValueError, match="memory_bytes"):
        choose_scars(counts, memory_bytes=9, cold_row_s=1, hot_row_s=0, fixed=fixed, **scars)
