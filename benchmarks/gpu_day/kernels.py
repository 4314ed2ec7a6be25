"""One step of FBGEMM's tables, and of whole models, in every memory and with every optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from benchmarks.gpu_day.stage import bench_config, free_memory
from benchmarks.gpu_day.tbe import DEVICE, LOCATIONS, MAPPED_SLOTS, SLOTS, UVM, UVM_CACHE, Tables
from hotrec.assemble.policies import ColdRows
from hotrec.bench.cases import Case, build_runner, split_case
from hotrec.bench.job import subject_of
from hotrec.bench.samples import ZipfTables
from hotrec.embedding.update_rules import sum_by_row, update_rows
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.planner.policies import choose_fraction
from hotrec.runtime.ranks import Ranks
from hotrec.types import (
    ColdTier,
    OptimizerKind,
    PipelineKind,
    PipelineSpec,
    RowFetch,
    TorchrecPlan,
    TorchrecTier,
)

TORCHREC_TIERS = dict(zip((DEVICE, UVM, UVM_CACHE), TorchrecTier, strict=True))
NUM_STEPS = 3
# Few enough that rows leave them, and enough for the batches in flight.
SLOTS_FRAC = 0.2
TOLERANCE = 1e-5
# What whole steps are made by, and where their rows may be: only look-ahead fills slots, and only
# a cache can be filled ahead.
STEPS: dict[str, tuple[str, ...]] = {
    "hot_cold": (DEVICE,),
    "look_ahead": (DEVICE, SLOTS, MAPPED_SLOTS),
    "torchrec": tuple(LOCATIONS),
    "torchrec_prefetch": (UVM_CACHE,),
}
# Optimizer, what makes the steps, and where the rows are.
Step = tuple[OptimizerKind, str, str]


def check_tables(tables: Tables, device: torch.device) -> dict[str, Any]:
    """One step of FBGEMM's tables against the update rule.

    Raises:
        RuntimeError: if a weight differs.
    """
    module = tables.build(device)
    before = [weight.detach().cpu().clone() for weight in module.split_embedding_weights()]
    generator = torch.Generator().manual_seed(5)
    repeats = torch.tensor([3000, 200, 20, *[1] * (tables.num_rows - 3)])
    rows_K = torch.repeat_interleave(torch.arange(tables.num_rows), repeats)
    rows_K = rows_K[torch.randperm(rows_K.numel(), generator=generator)]
    per_bag = 2 if tables.is_pooled else 1
    num_bags = rows_K.numel() // per_bag
    rows_K = rows_K[: num_bags * per_bag]
    indices = rows_K.repeat(tables.num_tables).to(device)
    offsets = torch.arange(0, indices.numel() + 1, per_bag, device=device)
    out = module(indices, offsets)
    grad = torch.randn(out.shape, generator=generator)
    out.backward(grad.to(device))
    if tables.tier == UVM_CACHE:
        module.flush()
    spec, dim, worst = tables.optimizer, tables.dim, 0.0
    for table, weight in enumerate(module.split_embedding_weights()):
        if tables.is_pooled:
            of_bags = grad[:, table * dim : (table + 1) * dim]
            grad_KD = of_bags.repeat_interleave(per_bag, dim=0)
        else:
            grad_KD = grad[table * num_bags : (table + 1) * num_bags]
        rows_U, grad_UD = sum_by_row(rows_K, grad_KD.double(), tables.num_rows)
        expected = before[table].double()
        states = {
            name: torch.zeros(spec.state_shape(tables.num_rows, dim), dtype=torch.float64)
            for name in spec.state_names
        }
        update_rows(
            spec, expected, states, rows_U, grad_UD,
            learning_rate=spec.learning_rate, num_updates=1,
        )  # fmt: skip
        error = (weight.detach().cpu().double() - expected).norm() / expected.norm()
        worst = max(worst, float(error))
    if not worst <= TOLERANCE:
        raise RuntimeError(
            f"weights after a step: expected a relative difference of at most {TOLERANCE} from the "
            f"update rule, got {worst:.2g}"
        )
    return {"largest_difference": worst}


def make_case(name: str, tier: str, counts: Mapping[str, Any]) -> Case:
    """A step of the program: hot and cold rows, with look-ahead, or TorchRec's own tables."""
    if name.startswith("torchrec"):
        is_ahead = name == "torchrec_prefetch"
        kind = PipelineKind.prefetch if is_ahead else PipelineKind.sparse_dist
        tables = TorchrecTables(TorchrecPlan.table_wise, TORCHREC_TIERS[tier])
        return Case(name, Plan(tables, PipelineSpec(kind)))
    row_fetch = RowFetch.mapped if tier == MAPPED_SLOTS else RowFetch.staged
    cold = ColdTier.fused if tier == DEVICE else ColdTier.cached
    cold_rows = ColdRows(cold, SLOTS_FRAC, row_fetch=row_fetch)
    placed = cold_rows.place(choose_fraction(counts, hot_frac=0.02), "cuda")
    is_ahead = name == "look_ahead"
    kind = PipelineKind.look_ahead if is_ahead else PipelineKind.sparse_dist
    return split_case(name, placed, PipelineSpec(kind))


def check_step(
    kind: OptimizerKind, name: str, tier: str, ranks: Ranks, num_steps: int = NUM_STEPS
) -> dict[str, Any]:
    """Steps of a whole model; their losses."""
    config = bench_config("plans=smoke", f"optimizer={kind.value}")
    samples = ZipfTables(config.plans.table_rows, exponent=1.05, num_dense=4, seed=0)
    batches = samples.batches(
        num_steps + 4, batch_size=config.plans.batch_size, rank=0, world_size=1
    )
    case = make_case(name, tier, samples.count(10000))
    subject = subject_of(config, samples.schema)
    runner = build_runner(subject, case, batches, ranks, samples)
    for _ in range(num_steps - 1):
        runner.step()
    runner.drain()
    runner.pipeline.close()
    losses = [float(loss) for loss in runner.losses]
    del runner
    free_memory()
    return {"losses": losses}


def all_steps(kinds: Iterable[OptimizerKind]) -> Iterator[Step]:
    """Every kind of step, wherever its rows may be."""
    for kind in kinds:
        for name, tiers in STEPS.items():
            for tier in tiers:
                yield kind, name, tier


def default_steps(kinds: Iterable[OptimizerKind]) -> Iterator[Step]:
    """One kind of step for each memory, slots and mapped slots among them."""
    for kind in kinds:
        for tier in (*TORCHREC_TIERS, SLOTS, MAPPED_SLOTS):
            name = "hot_cold" if tier == DEVICE else "torchrec"
            yield kind, "look_ahead" if tier in (SLOTS, MAPPED_SLOTS) else name, tier
