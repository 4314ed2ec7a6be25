"""Measures routing: ids per second that one core splits into hot and cold, and de-duplicates.

    python benchmarks/routing_speed.py [--batch-size 2048 8192] [--multi-hot 1 10] [--repeats 15]

The tables, popularity and hot rows are those of `hotrec bench bench=criteo_like_b2048`. Multi-hot
features have the given number of ids per sample. Medians of one thread in processor time, to reduce
the effect of other work on the machine; wall time is also printed. The last line on stdout is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.bench.job import choose_hot_rows
from hotrec.bench.machine import machine_facts
from hotrec.bench.samples import ZipfTables
from hotrec.cli.store import build_config, compose_config
from hotrec.config.roots import BenchConfig
from hotrec.routing.features import Column
from hotrec.routing.router import Router

TARGET_IDS_PER_S = 10e6


def make_router(bench: BenchConfig, tables: ZipfTables) -> Router:
    partition = choose_hot_rows(bench, tables.count(bench.profile_samples))
    columns = [
        Column(feature.name, feature.name, feature.table, is_mean=False)
        for feature in tables.schema.features
    ]
    return Router({64: columns}, partition)


def make_features(tables: ZipfTables, batch_size: int, ids_per_bag: int) -> KeyedJaggedTensor:
    """A batch with ``ids_per_bag`` ids in every bag: the one-hot ids of as many samples."""
    batch = tables.batches(1, batch_size=batch_size * ids_per_bag, rank=0, world_size=1)[0]
    num_bags = len(tables.schema.features) * batch_size
    return KeyedJaggedTensor(
        keys=batch.sparse.keys(),
        values=batch.sparse.values(),
        lengths=torch.full((num_bags,), ids_per_bag, dtype=torch.int32),
    )


def measure(router: Router, features: KeyedJaggedTensor, repeats: int) -> dict[str, float]:
    clock, processor = [], []
    for _ in range(repeats + 2):
        start, start_processor = time.perf_counter(), time.thread_time()
        routed = router(features)
        clock.append(time.perf_counter() - start)
        processor.append(time.thread_time() - start_processor)
    processor_s = float(np.median(processor[2:]))  # two calls to warm up
    num_ids = features.values().numel()
    return {
        "num_ids": num_ids,
        "num_distinct_rows": sum(group.rows.values().numel() for group in routed.groups),
        "hot_lookups_frac": routed.num_hot_lookups() / num_ids,
        "clock_s": float(np.median(clock[2:])),
        "processor_s": processor_s,
        "ids_per_core_s": num_ids / processor_s,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--multi-hot", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bench", default="criteo_like_b2048", help="choice of bench=")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bench = build_config(compose_config("bench", [f"bench={options.bench}"])).bench
    tables = ZipfTables(
        bench.table_rows, exponent=bench.zipf_exponent, num_dense=bench.num_dense, seed=bench.seed
    )
    router = make_router(bench, tables)
    results = []
    for batch_size in options.batch_size:
        for ids_per_bag in options.multi_hot:
            found = measure(router, make_features(tables, batch_size, ids_per_bag), options.repeats)
            results.append({"batch_size": batch_size, "ids_per_bag": ids_per_bag, **found})
            print(
                f"batch {batch_size:>6}  ids per bag {ids_per_bag:>3}  "
                f"{found['clock_s'] * 1e3:7.1f} ms  "
                f"{found['ids_per_core_s'] / 1e6:6.1f} M ids/s per core",
                file=sys.stderr,
            )
    facts = {
        "processor": machine_facts()["processor"],
        "torch": torch.__version__,
        "target_ids_per_s": TARGET_IDS_PER_S,
        "is_reached": all(result["ids_per_core_s"] >= TARGET_IDS_PER_S for result in results),
    }
    print(json.dumps({**facts, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
