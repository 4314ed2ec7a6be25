"""Compares row kernels on CPU: FBGEMM's and those of hotrec/embedding/cpu_rows.py.

    python benchmarks/cpu_rows.py [--num-rows 30000] [--num-tables 12] [--dim 64] [--repeats 15]

One process, one thread, as a rank on a small host has. Both read the same distinct rows of the
same tables, and update them with the same gradient; FBGEMM's pooled kernel with bags of one id is a
third column, since it does the same work with a better loop. At the end, torch and hotrec write
rows into one table. Medians of the thread's processor time, to reduce the effect of other work on
the machine. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.bench.machine import machine_facts
from hotrec.embedding.cpu_rows import ColdRowsOnCpu
from hotrec.embedding.flat import flat_rows, put_rows, table_begins
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.types import OptimizerKind

FBGEMM = {
    OptimizerKind.sgd: EmbOptimType.EXACT_SGD,
    OptimizerKind.rowwise_adagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    OptimizerKind.adagrad: EmbOptimType.EXACT_ADAGRAD,
}
LEARNING_RATE, EPS = 0.01, 1e-8


def make_module(
    kind: OptimizerKind, pooling: PoolingMode, num_tables: int, table_rows: int, dim: int
) -> Any:
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(table_rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * num_tables,
        optimizer=FBGEMM[kind],
        pooling_mode=pooling,
        learning_rate=LEARNING_RATE,
        eps=EPS,
    )


def make_features(num_rows: int, num_tables: int, table_rows: int, seed: int) -> KeyedJaggedTensor:
    """Distinct rows of each table, in random order, one "sample" as in training."""
    rng = np.random.default_rng(seed)
    per_table = num_rows // num_tables
    rows = [rng.choice(table_rows, per_table, replace=False) for _ in range(num_tables)]
    return KeyedJaggedTensor(
        keys=[f"t{table}" for table in range(num_tables)],
        values=torch.from_numpy(np.concatenate(rows)),
        lengths=torch.full((num_tables,), per_table, dtype=torch.int32),
        stride=1,
    )


def median_s(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
    return float(np.median(times[2:]))  # two calls to warm up


def time_lookup(lookup: Callable[[], torch.Tensor], repeats: int) -> dict[str, float]:
    grad_UD = torch.randn_like(lookup())
    return {
        "forward_s": median_s(lookup, repeats),
        "forward_backward_s": median_s(lambda: lookup().backward(grad_UD), repeats),
    }


def measure(
    kind: OptimizerKind, *, num_rows: int, num_tables: int, table_rows: int, dim: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Seconds of a lookup, and of a lookup with its update, for each kernel."""
    features = make_features(num_rows, num_tables, table_rows, seed=0)
    offsets_T = features.offsets().long()
    unpooled = make_module(kind, PoolingMode.NONE, num_tables, table_rows, dim)
    pooled = make_module(kind, PoolingMode.SUM, num_tables, table_rows, dim)
    # hotrec takes over a module's memory, so it gets one of its own.
    owner = make_module(kind, PoolingMode.NONE, num_tables, table_rows, dim)
    rate_holder = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LEARNING_RATE)
    ours = ColdRowsOnCpu(owner, rate_holder, OptimizerSpec(kind, LEARNING_RATE, EPS))
    rows_K = features.values()
    own_K = flat_rows(features, table_begins([table_rows] * num_tables))
    offsets_K = torch.arange(rows_K.numel() + 1)
    return {
        "fbgemm_unpooled": time_lookup(lambda: unpooled(rows_K, offsets_T), repeats),
        "fbgemm_pooled": time_lookup(lambda: pooled(rows_K, offsets_K), repeats),
        "hotrec": time_lookup(lambda: ours.look_up(own_K), repeats),
    }


def measure_writes(
    *, num_rows: int, num_tables: int, table_rows: int, dim: int, repeats: int
) -> dict[str, float]:
    """Seconds to write the distinct rows of a step into one table of all tables' rows."""
    target_RD = torch.zeros(num_tables * table_rows, dim)
    rng = np.random.default_rng(1)
    rows_U = torch.from_numpy(rng.choice(len(target_RD), num_rows, replace=False))
    values_UD = torch.randn(num_rows, dim)
    ways: dict[str, Callable[[], object]] = {
        "index_copy_": lambda: target_RD.index_copy_(0, rows_U, values_UD),
        "hotrec": lambda: put_rows(target_RD, rows_U, values_UD),
    }
    return {name: median_s(way, repeats) for name, way in ways.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-rows", type=int, default=30_000, help="distinct rows of a step")
    parser.add_argument("--num-tables", type=int, default=12)
    parser.add_argument("--table-rows", type=int, default=400_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    figures = {}
    print(f"{'optimizer':<16}  {'kernel':<16}  forward ms  forward + backward ms", file=sys.stderr)
    for kind in FBGEMM:
        figures[kind.value] = measure(kind, **vars(options))
        for kernel, times in figures[kind.value].items():
            print(
                f"{kind.value:<16}  {kernel:<16}  {times['forward_s'] * 1e3:10.1f}  "
                f"{times['forward_backward_s'] * 1e3:21.1f}",
                file=sys.stderr,
            )
    writes = measure_writes(**vars(options))
    for way, seconds in writes.items():
        print(f"{'write rows':<16}  {way:<16}  {seconds * 1e3:10.1f}", file=sys.stderr)
    facts = {"processor": machine_facts()["processor"], "torch": torch.__version__, **vars(options)}
    print(json.dumps({**facts, "kernels": figures, "writes": writes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
