"""Measures one GPU whose row budget is smaller than the tables.

    python benchmarks/one_gpu.py [--table-gib 8] [--budget-gib 1] [--batch-size 8192] [--rounds 50]
                                 [--page benchmarks/results/one_gpu.md]

Cases, interleaved as in `hotrec bench` (same code), NCCL with one rank:

    all_hbm             TorchRec, all rows in GPU memory: the target, without a budget
    uvm                 TorchRec, rows in host memory, read by the GPU over the bus
    uvm_cache           TorchRec, rows in host memory, the budget as FBGEMM's cache
    uvm_cache_prefetch  the same, filled for the next batch by TorchRec's prefetch pipeline
    hot_cold_uvm        the budget as hot rows in GPU memory, cold rows in host memory
    hot_cold_cache      half of the budget as hot rows, half as a cache of the cold rows

The budget counts GPU memory per row: weights for a cached row; weights, gradient and optimizer
state for a hot row. All cases exist at the same time: the GPU's memory must hold the tables once,
and the host memory that the GPU maps once for each of the other cases. The last line on stdout is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hotrec.assemble.policies import ColdRows
from hotrec.bench.benchmark import measure
from hotrec.bench.cases import Case, split_case
from hotrec.bench.job import CaseChooser, make_benchmark
from hotrec.cli.store import build_config, compose_config
from hotrec.config.roots import BenchConfig, BenchRootConfig
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.planner.policies import choose_fraction
from hotrec.report.render import markdown_table
from hotrec.report.units import show_bytes, show_count, show_frac, show_seconds
from hotrec.runtime.memory import read_memory
from hotrec.runtime.ranks import process_group
from hotrec.types import ColdTier, Partition, PipelineKind, PipelineSpec, Rows, TorchrecPlan

GIB = 1 << 30
# Free memory that is left to activations, batches and the libraries, of the GPU and of the host.
SPARE_GIB = 6.0
NUM_HOST_CASES, NUM_BUDGETS = 5, 4
BASELINE = "uvm_cache"
COLUMNS = ("case", "step p50", "p10", "p90", "samples/s", f"step / {BASELINE}", "GPU memory", "hot")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table-gib", type=float, default=8.0, help="weights of all tables")
    parser.add_argument("--budget-gib", type=float, default=1.0, help="GPU memory for rows")
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--page", type=Path, default=None)
    options = parser.parse_args(arguments)
    if not 0 < options.budget_gib < options.table_gib:
        parser.error(
            f"--budget-gib: expected above 0 and below --table-gib {options.table_gib:g}, got "
            f"{options.budget_gib:g}"
        )
    return options


def scale_rows(table_rows: Sequence[int], num_bytes: float, row_bytes: int) -> list[int]:
    """Tables in the same proportion whose weights take about ``num_bytes``."""
    factor = num_bytes / (row_bytes * sum(table_rows))
    return [max(1, round(rows * factor)) for rows in table_rows]


def make_config(options: argparse.Namespace) -> BenchRootConfig:
    """The configuration of ``hotrec bench`` that this script measures with."""
    words = [
        "bench=criteo_like_b8192",
        "bench.device=cuda",
        f"bench.batch_size={options.batch_size}",
        f"bench.rounds={options.rounds}",
        "bench.profile_samples=10000000",
    ]
    config: BenchRootConfig = build_config(compose_config("bench", words))
    row_bytes = 4 * config.model.embedding_dim
    config.bench.table_rows = scale_rows(
        config.bench.table_rows, options.table_gib * GIB, row_bytes
    )
    return config


def hot_row_bytes(dim: int) -> int:
    """GPU memory of a hot row: weights, gradient, and row-wise Adagrad's sum."""
    return 4 * (2 * dim + 1)


def hottest_rows(counts: Mapping[str, Rows], num_bytes: float, dim: int) -> Partition:
    total_rows = sum(rows.size for rows in counts.values())
    num_hot = int(num_bytes / hot_row_bytes(dim))
    return choose_fraction(counts, hot_frac=min(1.0, num_hot / total_rows))


def case_chooser(budget_bytes: float, dim: int) -> CaseChooser:
    """The cases of the module docstring, for a budget."""

    def choose(
        bench: BenchConfig, counts: Mapping[str, Rows], world_size: int, device: str
    ) -> list[Case]:
        cached_frac = budget_bytes / (4 * dim * sum(bench.table_rows))
        uvm, cache = ColdTier.fused_uvm, ColdTier.fused_uvm_caching

        def torchrec(name: str, *tier: Any, kind: PipelineKind = PipelineKind.sparse_dist) -> Case:
            tables = TorchrecTables(TorchrecPlan.table_wise, *tier)
            return Case(name, Plan(tables, PipelineSpec(kind)))

        def split(name: str, hot_bytes: float, tier: ColdTier) -> Case:
            hot = hottest_rows(counts, hot_bytes, dim)
            placed = ColdRows(tier, cached_frac / 2).place(hot, device)
            return split_case(name, placed)

        return [
            torchrec("all_hbm", ColdTier.fused),
            torchrec("uvm", uvm),
            torchrec("uvm_cache", cache, cached_frac),
            torchrec("uvm_cache_prefetch", cache, cached_frac, kind=PipelineKind.prefetch),
            split("hot_cold_uvm", budget_bytes, uvm),
            split("hot_cold_cache", budget_bytes / 2, cache),
        ]

    return choose


def check_memory(
    table_gib: float, budget_gib: float, *, device_bytes: int, host_bytes: int
) -> None:
    """Refuse tables that do not fit.

    Args:
        device_bytes: free memory of the GPU.
        host_bytes: free memory of the host.

    Raises:
        ValueError: if they are too large for either.
    """
    for memory, copies, free in (
        ("GPU", table_gib + NUM_BUDGETS * budget_gib, device_bytes / GIB),
        ("host", table_gib * NUM_HOST_CASES, host_bytes / GIB),
    ):
        if copies + SPARE_GIB > free:
            raise ValueError(
                f"--table-gib: expected all cases side by side and {SPARE_GIB:g} GiB to fit the "
                f"{free:.1f} GiB of free {memory} memory, got {copies:g} GiB with tables of "
                f"{table_gib:g}. Make the tables smaller."
            )


def result_rows(document: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            show_seconds(case["step_p50_s"]),
            show_seconds(case["step_p10_s"]),
            show_seconds(case["step_p90_s"]),
            show_count(case["samples_per_s"]),
            _times(case["against"].get(BASELINE, {}).get("step_ratio")),
            show_bytes(case["memory_bytes"]),
            show_frac(case["hot_lookups_frac"]),
        ]
        for name, case in document["cases"].items()
    ]


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def render(document: Mapping[str, Any], options: argparse.Namespace) -> str:
    machine, data = document["machine"], document["data"]
    packages = ", ".join(f"{name} {found}" for name, found in machine["packages"].items())
    apart = document["losses_apart"]
    agreement = f"**Losses differ: {', '.join(apart)}.**" if apart else "Losses of all cases agree."
    return "\n\n".join(
        [
            "# One GPU, tables larger than its row budget",
            f"{machine['gpu']}. Tables of {show_bytes(options.table_gib * GIB)} "
            f"({show_count(data['num_rows'])} rows, D = {data['embedding_dim']}), budget "
            f"{show_bytes(options.budget_gib * GIB)}, batch {show_count(options.batch_size)}, "
            f"{document['optimizer']}. NCCL, one rank.",
            markdown_table(COLUMNS, result_rows(document)),
            f"{agreement} Steps interleaved over {options.rounds} rounds; the ratio is the median "
            "over the rounds. GPU memory: growth of what torch's allocator holds; host memory "
            "(UVM) is not in it. Hot: share of the lookups.",
            f"{machine['processor']}, {machine['num_cores']} cores; Python {machine['python']}, "
            f"{packages}; code {machine['code']}.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print(
            f"one_gpu: expected a CUDA device, got none visible to torch {torch.__version__}. "
            "Run it on a machine with a GPU; `hotrec doctor` reports what is missing.",
            file=sys.stderr,
        )
        return 77
    check_memory(
        options.table_gib,
        options.budget_gib,
        device_bytes=torch.cuda.mem_get_info()[0],
        host_bytes=read_memory()[1],
    )
    config = make_config(options)
    choose = case_chooser(options.budget_gib * GIB, config.model.embedding_dim)
    with process_group(device="cuda") as ranks:
        document = measure(make_benchmark(config, ranks, choose), ranks, (BASELINE,))
    print(markdown_table(COLUMNS, result_rows(document)), file=sys.stderr)
    if options.page is not None:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(render(document, options) + "\n")
    print(json.dumps(document))
    return 1 if document["losses_apart"] else 0


if __name__ == "__main__":
    sys.exit(main())
