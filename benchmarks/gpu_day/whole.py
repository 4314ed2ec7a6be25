"""Stage 3: whole training steps of a model whose tables exceed the device's budget for rows.

DLRM on Criteo-like tables, interleaved as in `hotrec compare`, NCCL with one rank. All
rows in GPU memory are the target, without a budget. TorchRec's plans keep rows in host memory that
the device reads (UVM), or behind FBGEMM's cache, which its prefetch pipeline fills for the next
batch. hotrec keeps them behind slots that look-ahead fills; a variant gives half of the budget to
hot rows. The budget counts GPU memory per row: weights in a cache, weights and state in a slot,
weights, gradient and state of a hot row.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu_day.machinery import measure
from benchmarks.gpu_day.record import OK, DoesNotFitError, Parts, Summary, Table
from benchmarks.gpu_day.stage import DASH, Day, bench_config, main
from hotrec.assemble.policies import ColdRows
from hotrec.bench.cases import Case, split_case
from hotrec.bench.samples import ZipfTables
from hotrec.config.roots import CompareConfig
from hotrec.cost_model.profile import Profile
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.planner.policies import choose_all_cold, choose_fraction, choose_popular_rows
from hotrec.report.units import show_bytes, show_count, show_frac, show_seconds
from hotrec.runtime.memory import read_memory
from hotrec.runtime.ranks import Ranks, process_group
from hotrec.types import (
    ColdTier,
    Partition,
    PipelineKind,
    PipelineSpec,
    PopularRows,
    RowFetch,
    Rows,
    TorchrecPlan,
    TorchrecTier,
)

GIB = 1 << 30
TARGET, CACHE, PREFETCH = "GPU memory", "UVM cache", "UVM cache, prefetch"
SLOTS, MAPPED = "slots", "mapped slots"
# What longer batches are made of, and up to which length all cases are run.
MAIN, SHORT = (TARGET, PREFETCH, SLOTS, CACHE, MAPPED), 8192
# Free memory that is left to activations, batches and the libraries, of the GPU and of the host.
SPARE_BYTES = 8 * GIB
NUM_HOST_CASES = 7
NUM_COUNTED_SAMPLES = 1 << 20


def slot_bytes(dim: int) -> int:
    """GPU memory of a row with row-wise Adagrad's sum."""
    return 4 * (dim + 1)


def hot_row_bytes(dim: int) -> int:
    """GPU memory of a hot row: weights, gradient, and row-wise Adagrad's sum."""
    return 4 * (2 * dim + 1)


def make_cases(
    budget_bytes: float, dim: int, counts: Mapping[str, Rows], batch_size: int, device: str
) -> list[Case]:
    """The cases of the module docstring, for a budget."""
    num_rows = sum(rows.size for rows in counts.values())
    cold = choose_all_cold(counts)

    def torchrec(name: str, tier: TorchrecTier, *, is_ahead: bool = False) -> Case:
        kind = PipelineKind.prefetch if is_ahead else PipelineKind.sparse_dist
        frac = budget_bytes / (4 * dim * num_rows)
        cached = (frac,) if tier is TorchrecTier.fused_uvm_caching else ()
        tables = TorchrecTables(TorchrecPlan.table_wise, tier, *cached)
        return Case(name, Plan(tables, PipelineSpec(kind)))

    def slots(
        name: str,
        partition: Partition = cold,
        share: float = 1.0,
        *,
        fetch: RowFetch = RowFetch.staged,
        is_routed_by_loader: bool = True,
    ) -> Case:
        def popular(load_frac: float) -> dict[str, PopularRows]:
            num = NUM_COUNTED_SAMPLES
            return choose_popular_rows(
                partition, Profile(num, 0, counts), load_frac=load_frac,
                global_batch_size=batch_size, world_size=1,
            )  # fmt: skip

        frac = share * budget_bytes / (slot_bytes(dim) * num_rows)
        placed = ColdRows(ColdTier.cached, frac, row_fetch=fetch).place(partition, device, popular)
        pipeline = PipelineSpec(PipelineKind.look_ahead)
        return split_case(name, placed, pipeline, is_routed_by_loader=is_routed_by_loader)

    hot = choose_fraction(counts, hot_frac=budget_bytes / 2 / (hot_row_bytes(dim) * num_rows))
    cases = [
        torchrec(TARGET, TorchrecTier.fused),
        torchrec(PREFETCH, TorchrecTier.fused_uvm_caching, is_ahead=True),
        slots(SLOTS),
        torchrec(CACHE, TorchrecTier.fused_uvm_caching),
        torchrec("UVM", TorchrecTier.fused_uvm),
        slots("slots, routed in the step", is_routed_by_loader=False),
        slots("hot rows and slots", hot, 0.5),
    ]
    # The stand-in's host memory is not mapped.
    return [*cases, slots(MAPPED, fetch=RowFetch.mapped)] if device == "cuda" else cases


def compare(day: Day, ranks: Ranks, batch_size: int, num_steps: int) -> dict[str, Any]:
    """Run the cases, after steps that fill caches and slots as many as are timed of each.

    Raises:
        DoesNotFitError: if they do not fit the GPU or the host side by side.
    """
    table_bytes, budget_bytes = day.pick(8 * GIB, 1 << 20), day.pick(GIB, 1 << 18)
    config = bench_config(
        "plans=criteo_like_b8192", "optimizer=rowwise_adagrad",
        # Rounding grows in hundreds of steps.
        "optimizer.learning_rate=0.0001",
        f"model.embedding_dim={day.pick(128, 8)}", f"plans.batch_size={batch_size}",
        *day.pick((), ("model.dense_layer_sizes=[16,8]", "model.over_layer_sizes=[16,1]")),
        f"plans.rounds={day.pick(num_steps // 10, 1)}", f"plans.block_steps={day.pick(10, 3)}",
        "plans.block_skip=1", "plans.warmup_rounds=2", "plans.counted_steps=1",
    )  # fmt: skip
    dim, bench = config.model.embedding_dim, config.plans
    factor = table_bytes / (4 * dim * sum(bench.table_rows))
    bench.table_rows = [max(1, round(rows * factor)) for rows in bench.table_rows]
    _check_memory(config, budget_bytes, ranks)
    samples = ZipfTables(bench.table_rows, exponent=1.05, num_dense=13, seed=0)
    counts = samples.count(day.pick(NUM_COUNTED_SAMPLES, 1000))
    cases = make_cases(budget_bytes, dim, counts, bench.batch_size, ranks.device.type)
    if batch_size > SHORT:
        cases = [case for case in cases if case.name in MAIN]
    figures = measure(config, samples, cases, ranks, (PREFETCH, TARGET), num_steps)
    return {**figures, "table_bytes": table_bytes, "budget_bytes": budget_bytes}


def _check_memory(config: CompareConfig, budget_bytes: float, ranks: Ranks) -> None:
    tables = 4 * config.model.embedding_dim * sum(config.plans.table_rows)
    for memory, needed, free in (
        ("GPU", tables + NUM_HOST_CASES * budget_bytes, torch.cuda.mem_get_info(ranks.device)[0]),
        ("host", NUM_HOST_CASES * tables, read_memory()[1]),
    ):
        if needed + SPARE_BYTES > free:
            raise DoesNotFitError(
                f"needs {show_bytes(needed + SPARE_BYTES)} of {show_bytes(free)} of {memory} memory"
            )


def summarize(parts: Parts) -> Summary:
    done = [part for part in parts.values() if part["status"] == OK]
    said = [
        f"B = {show_count(part['batch_size'])}: "
        + ", ".join(
            f"{name} {_ratio(case, PREFETCH)}"
            for name, case in part["cases"].items()
            if name != PREFETCH
        )
        for part in done
    ]
    verdict = f"Step over that of {PREFETCH}: {'; '.join(said) or 'nothing was measured'}."
    is_ok = not any(part["losses_apart"] for part in done)
    return Summary(verdict, [_table(part) for part in done], is_ok)


def _ratio(case: Mapping[str, Any], baseline: str) -> str:
    against = case["against"].get(baseline)
    return DASH if against is None else f"{against['step_ratio']:.2f}"


def _table(part: Mapping[str, Any]) -> Table:
    rows = []
    for name, case in part["cases"].items():
        bus = part["bus"][name]
        rows.append([
            name, *(show_seconds(case[f"step_p{share}_s"]) for share in (50, 10, 90)),
            _ratio(case, PREFETCH), _ratio(case, TARGET), show_seconds(case["main_cpu_s"]),
            *(show_bytes(bus[way]) if way in bus else DASH for way in ("to_device", "to_host")),
            show_bytes(case["memory_bytes"]), show_frac(case["hot_lookups_frac"]),
        ])  # fmt: skip
    header = ["rows in", "step p50", "p10", "p90", f"over {PREFETCH}", f"over {TARGET}", "host"]
    header += ["over the bus: in", "out", "GPU memory", "hot lookups"]
    note = (
        f"DLRM, tables of {show_bytes(part['table_bytes'])} ({show_count(part['num_rows'])} rows, "
        f"D = {part['embedding_dim']}), budget {show_bytes(part['budget_bytes'])}, batch "
        f"{show_count(part['batch_size'])}, {show_count(part['num_ids'])} ids a step, row-wise "
        "Adagrad. Ratios: medians over the rounds. Caches and slots are full before steps are "
        "timed; slots begin with popular rows, as in training. Loader workers route batches for "
        "slots and remove duplicate ids, but for the case in which the step does. Bus: by NVML, in "
        "untimed steps. Host: processor time of the thread that trains, a step. GPU memory: growth "
        "of what torch's allocator holds."
    )
    if part["losses_apart"]:
        note += f" **Losses differ: {', '.join(part['losses_apart'])}.**"
    return Table(f"DLRM, B = {show_count(part['batch_size'])}", header, rows, note)


def run(day: Day) -> None:
    with process_group(device="cuda") as ranks:
        for batch_size, num_steps in day.pick({SHORT: 120, 32768: 40}, {32: 4}).items():
            day.record.part(
                f"DLRM, B = {batch_size}",
                lambda b=batch_size, n=num_steps: compare(day, ranks, b, n),
            )


if __name__ == "__main__":
    sys.exit(main(run, summarize))
