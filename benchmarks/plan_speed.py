"""Measures planning: seconds and memory from access counts to the fastest placement.

    python benchmarks/plan_speed.py [--num-tables 500] [--num-rows 1e9] [--costs NAME]

The tables have Zipf popularity and sizes spread evenly over orders of magnitude. Their counts are
histograms computed from Zipf's law: the arrays of counts would fill 8 GB, and reading them is the
work of `hotrec profile`. The demands of all tables and the search are timed, in wall time and in
processor time, which does not include other work on the machine; the peak of memory is that of the
whole process. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from collections.abc import Sequence

import numpy as np

from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import World
from hotrec.cost_model.demand import TableDemand, build_demand
from hotrec.cost_model.forms import Workload
from hotrec.cost_model.histogram import CountHistogram, merge_histograms
from hotrec.cost_model.memory import memory_by_rank
from hotrec.planner.search import Choice, InfeasibleError, Limits, search_placement

# Of the processor, and bytes.
TARGET_S, TARGET_BYTES = 1.5, 4e9
NUM_SAMPLES = 100_000_000
NUM_HEAD_ROWS = 10_000
DIMS = (32, 64, 128)
SMALLEST_ROWS, DECADES = 100, 5.5


def make_table_rows(num_tables: int, total_rows: int) -> list[int]:
    """Rows of each table, from some hundred up over ``DECADES``, ``total_rows`` together."""
    sizes = SMALLEST_ROWS * 10 ** np.linspace(0, DECADES, num_tables)
    sizes = np.maximum(np.rint(sizes * total_rows / sizes.sum()), 1).astype(np.int64)
    sizes[-1] += total_rows - sizes.sum()
    return [int(size) for size in sizes]


def make_histogram(num_rows: int, exponent: float, num_lookups: float) -> CountHistogram:
    """Counts of a Zipf law: one by one for the head, by whole counts for the tail.

    The k-th row has num_lookups k^-a / H lookups, rounded; a count v belongs to the ranks k whose
    lookups lie in v - 1/2 .. v + 1/2, so their number needs no array of the rows.
    """
    num_head = min(num_rows, NUM_HEAD_ROWS)
    head = np.arange(1, num_head + 1, dtype=np.float64) ** -exponent
    # The rest of the sum by the integral between half ranks.
    ends = (np.array([num_head, num_rows]) + 0.5) ** (1 - exponent) / (1 - exponent)
    scale = num_lookups / (head.sum() + ends[1] - ends[0])
    values, rows = np.unique(np.rint(head * scale).astype(np.int64), return_counts=True)
    parts = [_histogram(values, rows)]
    num_seen = int(rows[values > 0].sum())
    if num_rows > num_head:
        counts = np.arange(1, int(np.rint(head[-1] * scale)) + 1)
        # Ranks with at least this count; the last are those with a count of 1 or more.
        reached = ((counts - 0.5) / scale) ** (-1 / exponent)
        reached = np.clip(np.floor(reached), num_head, num_rows).astype(np.int64)
        tail_rows = reached - np.append(reached[1:], num_head)
        parts.append(_histogram(counts, tail_rows))
        num_seen += int(tail_rows.sum())
    return dataclasses.replace(merge_histograms(parts), num_unseen=num_rows - num_seen)


def _histogram(values: np.ndarray, rows: np.ndarray) -> CountHistogram:
    keep = (values > 0) & (rows > 0)
    values, rows = values[keep][::-1].astype(np.int64), rows[keep][::-1].astype(np.int64)
    return CountHistogram(values, rows, np.zeros_like(values), 0, 0)


def plan(
    histograms: Sequence[CountHistogram], options: argparse.Namespace
) -> tuple[list[TableDemand], Choice, dict[str, float]]:
    """Demands and choice, and the seconds of each."""
    costs = BUILTIN[options.costs]
    local = min(8, options.num_ranks)
    world = World(options.num_ranks, local)
    start, start_processor = time.perf_counter(), time.process_time()
    demands = [
        build_demand(
            f"t{number}",
            histogram,
            dim=DIMS[number % len(DIMS)],
            row_bytes=4 * DIMS[number % len(DIMS)] + 4,
            lookups_per_sample=1.0,
            num_columns=1,
            batch_size=options.batch_size,
            world=world,
        )
        for number, histogram in enumerate(histograms)
    ]
    demands_s = time.perf_counter() - start
    choice = search_placement(
        demands,
        costs,
        world,
        Workload(options.batch_size, 1e8, 0.1, 10_000_000),
        Limits(
            device_bytes=0.5 * costs.device_bytes,
            host_bytes=0.5 * costs.host_bytes / local,
        ),
    )
    total_s = time.perf_counter() - start
    seconds = {
        "demands_s": demands_s,
        "search_s": total_s - demands_s,
        "plan_s": total_s,
        "processor_s": time.process_time() - start_processor,
    }
    return demands, choice, seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-tables", type=int, default=500)
    parser.add_argument("--num-rows", type=float, default=1e9, help="of all tables")
    parser.add_argument("--zipf-exponent", type=float, default=1.05)
    parser.add_argument("--num-ranks", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=2048, help="per rank")
    parser.add_argument("--costs", choices=sorted(BUILTIN), default="dgx_h100_infiniband")
    options = parser.parse_args(arguments)
    table_rows = make_table_rows(options.num_tables, int(options.num_rows))
    histograms = [make_histogram(n, options.zipf_exponent, NUM_SAMPLES) for n in table_rows]
    try:
        demands, choice, seconds = plan(histograms, options)
    except InfeasibleError as error:
        parser.error(str(error))
    world = World(options.num_ranks, min(8, options.num_ranks))
    device = BUILTIN[options.costs].device
    memory = memory_by_rank(demands, choice.num_hot, choice.tables, world, device)
    plan_s = seconds["plan_s"]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{len(demands)} tables, {sum(table_rows):,} rows: {plan_s:.2f} s "
        f"({seconds['processor_s']:.2f} s of processor time), "
        f"{peak_bytes / 1e9:.2f} GB at most",
        file=sys.stderr,
    )
    result = {
        "num_tables": len(demands),
        "num_rows": sum(table_rows),
        "num_groups": sum(demand.rows_G.size for demand in demands),
        "num_distinct_counts": sum(histogram.values.size for histogram in histograms),
        **seconds,
        "peak_bytes": peak_bytes,
        "target_s": TARGET_S,
        "target_bytes": TARGET_BYTES,
        "is_reached": seconds["processor_s"] <= TARGET_S and peak_bytes <= TARGET_BYTES,
        "step_s": choice.prediction.step_s,
        "num_hot": sum(choice.num_hot.values()),
        "device_bytes": max(entry["device_bytes"] for entry in memory),
        "host_bytes": max(entry["host_bytes"] for entry in memory),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
