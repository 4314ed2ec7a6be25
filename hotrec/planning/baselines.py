"""Policies of other systems, for comparison: HugeCTR, FAE, a frequency cache, SCARS.

Each chooses the hot rows that its paper or code would, with the interface of
``hotrec.planning.policies``. hotrec then trains them like those of any other policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hotrec.cost_model.demand import Floats, prob_met
from hotrec.cost_model.histogram import CountHistogram, build_histogram, order_all_rows
from hotrec.planning.policies import (
    Counts,
    ProfiledTables,
    check_frac,
    check_positive,
    check_row_bytes,
    sort_by_density,
    take_densest,
)
from hotrec.types import HugectrLink, Partition, Rows

FREQ_CACHE_FRAC = 0.015
FAE_SMALL_TABLE_BYTES = 1 << 20


def hugectr_threshold(
    link: HugectrLink,
    *,
    num_ranks: int,
    num_hosts: int,
    global_batch_size: int,
    all_to_all_bytes_per_s: float = 1.9e11,
    all_reduce_bytes_per_s: float = 1.3e11,
    efficiency: float = 1.0,
    max_duplicate_prob: float = 0.01,
) -> float:
    """Accesses per global batch from which HugeCTR's hybrid embedding makes a category frequent.

    HugeCTR v4.3, ``hybrid_embedding``: over I sampled batches the threshold is T; here T / I, since
    all formulas are proportional to I. N ranks, n hosts, M samples of a rank, a and r the
    bandwidths of all-to-all and all-reduce:

        IB_NVLink          N a / r efficiency N / (N - 1)
        IB_NVLink_Hier     N a / r efficiency n / (n - 1)
        NVLink_SingleNode  N M sqrt(2 max_duplicate_prob / (M (M - 1)))

    Raises:
        ValueError: If a number is not above 0, or the formula needs more ranks, hosts or samples.
    """
    check_positive(
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        global_batch_size=global_batch_size,
        all_to_all_bytes_per_s=all_to_all_bytes_per_s,
        all_reduce_bytes_per_s=all_reduce_bytes_per_s,
        efficiency=efficiency,
        max_duplicate_prob=max_duplicate_prob,
    )
    if link is HugectrLink.nvlink_single_node:
        samples = global_batch_size / num_ranks
        if samples <= 1:
            raise ValueError(
                f"global_batch_size: expected more than one sample for each of {num_ranks} ranks, "
                f"got {global_batch_size}."
            )
        return global_batch_size * math.sqrt(2 * max_duplicate_prob / (samples * (samples - 1)))
    parts, what = (num_ranks, "ranks") if link is HugectrLink.ib_nvlink else (num_hosts, "hosts")
    if parts < 2:
        raise ValueError(
            f"num_{what}: expected at least 2 for {link.value}, got {parts}. Take "
            f"{HugectrLink.nvlink_single_node.value}."
        )
    ratio = all_to_all_bytes_per_s / all_reduce_bytes_per_s * efficiency
    return num_ranks * ratio * parts / (parts - 1)


def choose_hugectr(
    counts: Counts,
    *,
    min_accesses_per_step: float,
    num_ranks: int,
    global_batch_size: int,
    num_samples: int,
    fixed: Mapping[str, Rows] | None = None,
    min_count: int = 1,
) -> Partition:
    """The rows at or above HugeCTR's threshold, their number rounded down to a multiple of N.

    Args:
        min_accesses_per_step: The threshold, see ``hugectr_threshold``.
        num_ranks: World size N.
        num_samples: The number of samples that were counted.

    Raises:
        ValueError: If a number is not above 0.
    """
    check_positive(
        min_accesses_per_step=min_accesses_per_step,
        num_ranks=num_ranks,
        global_batch_size=global_batch_size,
        num_samples=num_samples,
    )
    tables = ProfiledTables.of(counts, fixed, min_count)
    needed = min_accesses_per_step * num_samples
    num_frequent = sum(
        int(h.num_rows[h.values * global_batch_size >= needed].sum())
        for h in tables.histograms.values()
    )
    num_frequent -= num_frequent % num_ranks
    num_hot = take_densest(tables.histograms, dict.fromkeys(counts, 1), num_frequent)
    return tables.partition(num_hot, f"HugeCTR, {min_accesses_per_step:g} accesses per step")


def choose_fae(
    counts: Counts,
    *,
    budget_bytes: int,
    row_bytes: Mapping[str, int],
    small_table_bytes: int = FAE_SMALL_TABLE_BYTES,
    fixed: Mapping[str, Rows] | None = None,
    min_count: int = 1,
) -> Partition:
    """FAE's hot set: one access threshold for all tables, lowered until the budget is full.

    Tables smaller than ``small_table_bytes`` are wholly hot, rows never seen too. Of the others all
    rows with at least t accesses are, t being the lowest that fits; rows of equal count stay
    together. Adnan et al., PVLDB 15(1) 2022, sections 3 and 4. Unlike the code published with it,
    rows that the sample never saw do not fill the budget.

    Args:
        counts: Access counts in a sample of the inputs (5% in the paper), or in all of them.
        budget_bytes: Bytes for all hot rows with their optimizer state, also those of small and
            fixed tables.
        row_bytes: Bytes of one row of each table, with its optimizer state.

    Raises:
        ValueError: If the budget does not hold the small and fixed tables.
    """
    check_row_bytes(row_bytes, counts)
    decided = dict(fixed or {})
    for table, rows in counts.items():
        if table not in decided and rows.size * row_bytes[table] < small_table_bytes:
            decided[table] = order_all_rows(rows)
    tables = ProfiledTables.of(counts, decided, min_count)
    taken = sum(rows.size * row_bytes[table] for table, rows in decided.items())
    if taken > budget_bytes:
        raise ValueError(
            f"budget_bytes: expected at least {taken} for {len(decided)} small or fixed tables, "
            f"got {budget_bytes}. Raise the budget, or lower small_table_bytes."
        )
    empty = np.empty(0, np.int64)
    groups = [(h.values, h.num_rows * row_bytes[t]) for t, h in tables.histograms.items()]
    values, sizes = (np.concatenate([empty, *(group[i] for group in groups)]) for i in range(2))
    order = np.argsort(-values, kind="stable")
    values, spent = values[order], taken + np.cumsum(sizes[order])
    # A threshold takes the rows of its count in every table, so only the sum after the last of
    # them counts.
    is_last = np.append(values[1:] != values[:-1], True)[: values.size]
    fitting = values[is_last & (spent <= budget_bytes)]
    threshold = float(fitting.min()) if fitting.size else math.inf
    num_hot = {
        table: int(h.num_rows[h.values >= threshold].sum())
        for table, h in tables.histograms.items()
    }
    return tables.partition(num_hot, f"FAE, {budget_bytes:,} bytes")


def choose_freq_cache(
    counts: Counts,
    *,
    dims: Mapping[str, int],
    cached_frac: float = FREQ_CACHE_FRAC,
    fixed: Mapping[str, Rows] | None = None,
    min_count: int = 1,
) -> Partition:
    """The most accessed rows of all tables, as a frequency-aware cache keeps them on the device.

    Rows go by access count alone, whatever their size, until the next one exceeds ``cached_frac``
    of all embedding parameters. Fang et al., arXiv 2208.05321: 1.5% of the parameters.

    Args:
        dims: Embedding dim D of each table.
        cached_frac: Fraction of the parameters to cache. Fixed tables count too.

    Raises:
        ValueError: If ``cached_frac`` is outside 0..1 or a table has no dimension.
    """
    check_frac("cached_frac", cached_frac)
    check_row_bytes(dims, counts)
    tables = ProfiledTables.of(counts, fixed, min_count)
    budget = cached_frac * sum(rows.size * dims[table] for table, rows in counts.items())
    budget -= sum(rows.size * dims[table] for table, rows in tables.fixed.items())
    groups = sorted(
        (
            (-int(v), table, int(n))
            for table, h in tables.histograms.items()
            for v, n in zip(h.values, h.num_rows, strict=True)
        )
    )
    num_hot = dict.fromkeys(tables.histograms, 0)
    for _, table, num_rows in groups:
        fitting = min(num_rows, max(math.floor(budget / dims[table] + 1e-9), 0))
        num_hot[table] += fitting
        budget -= fitting * dims[table]
        if fitting < num_rows:
            break
    return tables.partition(num_hot, f"frequency cache, {cached_frac:g} of the parameters")


def choose_scars(
    counts: Counts,
    *,
    memory_bytes: int,
    row_bytes: Mapping[str, int],
    num_samples: int,
    global_batch_size: int,
    cold_row_s: float,
    hot_row_s: float,
    fixed: Mapping[str, Rows] | None = None,
    min_count: int = 1,
) -> Partition:
    """The hot set that makes the mean step of hot and mixed batches shortest, without tiers.

    After SCARS (arXiv 2411.01611): coalesced cold rows, batches of all-hot samples, throughput
    under a memory bound. The objective is our reading of it, not its text. c a row's count, K_t the
    lookups of table t in the profile, L_t its lookups per sample, B the global batch, k hot rows:

        U(k) = sum over cold rows of 1 - (1 - c / K_t)^(B L_t)     coalesced cold rows of a batch
        f(k) = product over tables of H_t^L_t                       share of all-hot samples
        minimise (1 - f(k)) cold_row_s U(k) + hot_row_s k           over the k densest rows

    Rows are taken by count per byte, rows of one table and count together, except those that the
    memory cuts off.

    Args:
        memory_bytes: Bytes for all hot rows with their optimizer state, also of fixed tables.
        row_bytes: Bytes of one row of each table, with its optimizer state.
        num_samples: The number of samples that were counted.
        cold_row_s: Seconds to send a coalesced cold row and its gradient.
        hot_row_s: Seconds of a hot row in the all-reduce.

    Raises:
        ValueError: If a number is out of range, or the fixed tables exceed the memory.
    """
    check_row_bytes(row_bytes, counts)
    if num_samples < 1 or global_batch_size < 1 or not (cold_row_s >= 0 and hot_row_s >= 0):
        raise ValueError(
            "scars: expected at least 1 sample and batch and costs of at least 0, got "
            f"{num_samples}, {global_batch_size}, {cold_row_s}, {hot_row_s}."
        )
    tables = ProfiledTables.of(counts, fixed, min_count)
    taken = sum(rows.size * row_bytes[table] for table, rows in tables.fixed.items())
    if taken > memory_bytes:
        raise ValueError(
            f"memory_bytes: expected at least {taken} for the fixed tables, got {memory_bytes}. "
            "Raise it, or fix fewer tables."
        )
    batches = global_batch_size / num_samples
    names = sorted(tables.histograms)
    groups = _densest_first(tables.histograms, row_bytes, memory_bytes - taken)
    shares, cold_rows = _scars_curve(tables, names, groups, num_samples, batches)
    sizes = np.concatenate([[0], np.cumsum(groups[2])])
    best = int(np.argmin((1 - shares) * cold_row_s * cold_rows + hot_row_s * sizes))
    table_of, _, num_rows = (column[:best] for column in groups)
    num_hot = {name: int(num_rows[table_of == i].sum()) for i, name in enumerate(names)}
    return tables.partition(num_hot, f"SCARS, {memory_bytes:,} bytes")


def _scars_curve(
    tables: ProfiledTables,
    names: list[str],
    groups: tuple[Rows, Rows, Rows],
    num_samples: int,
    batches: float,
) -> tuple[Floats, Floats]:
    """Returns f and U of ``choose_scars`` with the first 0..G groups hot, float64 (G + 1,)."""
    whole = {table: build_histogram(rows) for table, rows in tables.counts.items()}
    cold_rows = sum(
        float(h.num_rows @ _coalesced(h.values, h.num_lookups, batches)) for h in whole.values()
    )
    log_hot, num_none = 0.0, 0  # log f, over tables with hot lookups; tables without
    for table, rows in tables.fixed.items():
        values = tables.counts[table][rows]
        cold_rows -= float(_coalesced(values, whole[table].num_lookups, batches).sum())
        covered, total = int(values.sum()), whole[table].num_lookups
        num_none += covered == 0 < total
        log_hot += total / num_samples * math.log(covered / total) if covered else 0.0
    num_none += sum(whole[name].num_lookups > 0 for name in names)
    shares, colds = [0.0 if num_none else math.exp(log_hot)], [cold_rows]
    covered_by = dict.fromkeys(names, 0)
    for i, value, count in zip(*(column.tolist() for column in groups), strict=True):
        total, before = whole[names[i]].num_lookups, covered_by[names[i]]
        after = covered_by[names[i]] = before + value * count
        num_none -= before == 0
        log_before = math.log(before / total) if before else 0.0
        log_hot += total / num_samples * (math.log(after / total) - log_before)
        cold_rows -= count * float(_coalesced(np.array([value]), total, batches)[0])
        shares.append(0.0 if num_none else math.exp(min(log_hot, 0.0)))
        colds.append(max(cold_rows, 0.0))
    return np.array(shares), np.array(colds)


def _coalesced(values: Rows, num_lookups: int, batches: float) -> Floats:
    """Probability that a batch reads a row, by its count: 1 - (1 - c / K)^(K batches)."""
    return prob_met(values / max(num_lookups, 1), num_lookups * batches)


def _densest_first(
    histograms: Mapping[str, CountHistogram], row_bytes: Mapping[str, int], budget: int
) -> tuple[Rows, Rows, Rows]:
    """Returns the densest groups that fit the budget, the last one cut to what fits.

    Returns:
        int64 (G,) each: the table's place among the sorted names, a row's count, the number of
        rows.
    """
    table_of, values, num_rows, size = sort_by_density(histograms, row_bytes)
    spent = np.cumsum(size * num_rows)
    whole = int(np.searchsorted(spent, budget, side="right"))
    num_rows = num_rows[: whole + 1]
    if whole < spent.size:
        left = budget - (int(spent[whole - 1]) if whole else 0)
        num_rows[whole] = left // int(size[whole])
    keep = num_rows > 0
    return table_of[: whole + 1][keep], values[: whole + 1][keep], num_rows[keep]
