"""Policies of papers, for comparison: FAE, the frequency-aware cache and SCARS."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from hotrec.cost_model.demand import Floats, prob_met
from hotrec.cost_model.histogram import build_histogram, order_all_rows
from hotrec.planner.counted import CountedTables, Counts, Groups
from hotrec.types import Partition


def choose_fae(
    counts: Counts | CountedTables,
    *,
    budget_bytes: int,
    row_bytes: Mapping[str, int],
    small_table_bytes: int,
) -> Partition:
    """FAE's hot set: one access threshold for all tables, lowered until the budget is full.

    Tables smaller than ``small_table_bytes`` are entirely hot, including unseen rows. Of the
    others, all rows with at least t accesses are hot, with the lowest t that fits; rows of equal
    count stay together. Adnan et al., PVLDB 15(1) 2022, sections 3 and 4. Unlike in the published
    code, rows that the sample never saw do not use the budget.

    Raises:
        ValueError: If the small and fixed tables exceed the budget.
    """
    tables = CountedTables.of(counts)
    free = {
        table: histogram
        for table, histogram in tables.histograms.items()
        if tables.counts[table].size * row_bytes[table] >= small_table_bytes
    }
    small = {t: order_all_rows(tables.counts[t]) for t in tables.histograms if t not in free}
    tables = CountedTables(tables.counts, {**tables.fixed, **small}, free)
    groups = Groups.sort(tables.histograms, row_bytes, tables.ones)
    spent = tables.taken(row_bytes, budget_bytes) + np.cumsum(groups.size * groups.num_rows)
    # A threshold selects the rows with its count in every table, so only the sum after the last of
    # them counts.
    is_last = np.append(groups.value[1:] != groups.value[:-1], True)[: groups.value.size]
    threshold = groups.value[is_last & (spent <= budget_bytes)].min(initial=np.iinfo(np.int64).max)
    num_hot = tables.num_where(lambda values: values >= threshold)
    return tables.partition(num_hot, f"FAE, {budget_bytes:,} bytes")


def choose_freq_cache(
    counts: Counts | CountedTables,
    *,
    dims: Mapping[str, int],
    cached_frac: float,
) -> Partition:
    """The most accessed rows of all tables, as a frequency-aware cache keeps them on the device.

    Rows are selected by access count, regardless of size, until the next one exceeds
    ``cached_frac`` of all embedding parameters. Fang et al., arXiv 2208.05321: 1.5% of the
    parameters.

    The hot rows of fixed tables count too.
    """
    tables = CountedTables.of(counts)
    budget = cached_frac * sum(rows.size * dims[table] for table, rows in tables.counts.items())
    budget -= sum(rows.size * dims[table] for table, rows in tables.fixed.items())
    groups = Groups.sort(tables.histograms, dims, tables.ones)
    num_hot = groups.by_table(groups.fill(budget), tables.histograms)
    return tables.partition(num_hot, f"frequency cache, {cached_frac:g} of the parameters")


def choose_scars(
    counts: Counts | CountedTables,
    *,
    memory_bytes: int,
    row_bytes: Mapping[str, int],
    num_samples: int,
    global_batch_size: int,
    cold_row_s: float,
    hot_row_s: float,
) -> Partition:
    """The hot set with the shortest mean step of hot and mixed batches, without tiers.

    After SCARS (arXiv 2411.01611): coalesced cold rows, batches of all-hot samples, throughput
    under a memory bound. The objective is our reading of the paper. With c a row's count, K_t the
    lookups of table t in the profile, L_t its lookups per sample, B the global batch, k hot rows:

        U(k) = sum over cold rows of 1 - (1 - c / K_t)^(B L_t)     coalesced cold rows of a batch
        f(k) = product over tables of H_t^L_t                       share of all-hot samples
        minimise (1 - f(k)) cold_row_s U(k) + hot_row_s k           over the k densest rows

    Rows are selected by count per byte, rows of one table and count together, except where memory
    ends.

    Args:
        memory_bytes: Bytes for all hot rows with their optimizer state, also of fixed tables.
        cold_row_s: Seconds to send a coalesced cold row and its gradient.
        hot_row_s: Seconds of a hot row in the all-reduce.

    Raises:
        ValueError: If the fixed tables exceed the memory.
    """
    tables = CountedTables.of(counts)
    groups = Groups.sort(tables.histograms, row_bytes)
    num_rows = groups.fill(memory_bytes - tables.taken(row_bytes, memory_bytes))
    groups = dataclasses.replace(groups, num_rows=num_rows).at(num_rows > 0)
    all_hot, cold_rows = _scars_curve(tables, groups, num_samples, global_batch_size)
    sizes = np.append(0, np.cumsum(groups.num_rows))
    best = int(np.argmin((1 - all_hot) * cold_row_s * cold_rows + hot_row_s * sizes))
    best_groups = groups.at(slice(best))
    num_hot = best_groups.by_table(best_groups.num_rows, tables.histograms)
    return tables.partition(num_hot, f"SCARS, {memory_bytes:,} bytes")


def _scars_curve(
    tables: CountedTables, groups: Groups, num_samples: int, global_batch_size: int
) -> tuple[Floats, Floats]:
    """Returns f and U of ``choose_scars`` with the first 0..G groups hot, float64 (G + 1,)."""
    # The change by each group: of log f, of the tables without a hot lookup, and of U.
    log_hot, num_none, cold_rows = np.zeros((3, groups.table.size + 1))
    place = {table: i for i, table in enumerate(tables.histograms)}
    for table, counts in tables.counts.items():
        whole = build_histogram(counts)
        total = max(whole.num_lookups, 1)
        num_draws = total * global_batch_size / num_samples
        cold_rows[0] += whole.num_rows @ prob_met(whole.values / total, num_draws)
        num_none[0] += whole.num_lookups > 0
        if table in tables.fixed:
            values = counts[tables.fixed[table]]
            at, rows, starts = (
                np.zeros(values.size, np.int64),
                np.ones_like(values),
                slice(-1, None),
            )
        else:
            at = 1 + np.flatnonzero(groups.table == place[table])
            values, rows, starts = groups.value[at - 1], groups.num_rows[at - 1], slice(None)
        np.subtract.at(cold_rows, at, rows * prob_met(values / total, num_draws))
        covered = np.cumsum(values * rows)[starts]
        if covered.size and covered[-1]:
            logs = np.diff(np.log(covered / total), prepend=0.0)
            log_hot[at[starts]] += total / num_samples * logs
            num_none[at[0]] -= 1
    all_hot = np.exp(np.minimum(np.cumsum(log_hot), 0.0)) * (np.cumsum(num_none) <= 0)
    return all_hot, np.maximum(np.cumsum(cold_rows), 0.0)
