"""Stage 1: one step per optimizer and tier, which finds a missing kernel; then ``tests/gpu``.

FBGEMM's tables are compared with the update rules in plain torch, hotrec's steps with each other.
Ids repeat from once to thousands of times: FBGEMM has a kernel for short runs of equal ids, one for
long ones, and one that splits very long ones.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_day.record import FAILED, Parts, Summary, Table
from benchmarks.gpu_day.stage import DASH, Day, bench_config, free_memory, main
from benchmarks.gpu_day.tbe import DEVICE, UVM, UVM_CACHE, Tables, optimizers_of, tiers_of
from hotrec.bench.cases import Case, build_runner
from hotrec.bench.samples import ZipfTables
from hotrec.config.groups import FractionPlacement, Routing, TorchrecPlacement
from hotrec.embedding.update_rules import OptimizerSpec, sum_by_row, update_rows
from hotrec.planning.policies import choose_fraction
from hotrec.runtime.ranks import Ranks, process_group
from hotrec.types import ColdTier, OptimizerKind, PipelineKind, TorchrecPlan

REPOSITORY = Path(__file__).resolve().parents[2]
COLD_TIERS = {
    DEVICE: ColdTier.fused,
    UVM: ColdTier.fused_uvm,
    UVM_CACHE: ColdTier.fused_uvm_caching,
}
STEPS, NUM_STEPS = ("hot_cold", "look_ahead", "torchrec", "torchrec_prefetch"), 3
TOLERANCE = 1e-5
TESTS, STAGED = "tests/gpu", "tests/gpu/test_staged_parity.py"  # the latter in stage 6
TESTS_LIMIT_S = 400
TEST_LINE = re.compile(r"^(tests/\S+) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", re.MULTILINE)


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
    cold = COLD_TIERS[tier]
    if name.startswith("torchrec"):
        placement = TorchrecPlacement(plan=TorchrecPlan.table_wise, tier=cold)
        is_ahead = name == "torchrec_prefetch"
        pipeline = PipelineKind.prefetch if is_ahead else PipelineKind.sparse_dist
        return Case(name, placement, None, pipeline)
    return Case(
        name,
        FractionPlacement(cold_tier=cold, routing=Routing.device),
        choose_fraction(counts, hot_frac=0.02),
        PipelineKind.look_ahead if name == "look_ahead" else PipelineKind.sparse_dist,
    )


def check_step(kind: OptimizerKind, name: str, tier: str, ranks: Ranks) -> dict[str, Any]:
    """Steps of a whole model; their losses."""
    config = bench_config(
        "bench=smoke", f"optimizer={kind.value}", f"bench.device={ranks.device.type}"
    )
    samples = ZipfTables(config.bench.table_rows, exponent=1.05, num_dense=4, seed=0)
    batches = samples.batches(
        NUM_STEPS + 4, batch_size=config.bench.batch_size, rank=0, world_size=1
    )
    case = make_case(name, tier, samples.count(10000))
    runner = build_runner(config, case, samples.schema, batches, ranks, samples)
    for _ in range(NUM_STEPS - 1):
        runner.step()
    runner.drain()
    runner.pipeline.close()
    return {"losses": [float(loss) for loss in runner.losses]}


def run_tests(
    *words: str, may_skip: bool = False, limit_s: float = TESTS_LIMIT_S
) -> dict[str, Any]:
    """Run tests in a process of their own; what each came to.

    Args:
        words: for pytest.
        may_skip: all is well also where every test is skipped, as on a machine without a GPU.
        limit_s: then the tests are ended.

    Raises:
        RuntimeError: if pytest ended without a single result.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *words]
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=limit_s,
        )  # fmt: skip
        output, exit_code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        # As bytes, also where text was asked for.
        output = late.stdout.decode(errors="replace") if late.stdout else ""
        exit_code = -1
    print(output)
    results = {name: result.lower() for name, result in TEST_LINE.findall(output)}
    if not results:
        last = " / ".join(output.splitlines()[-5:])
        raise RuntimeError(f"pytest {' '.join(words)}: expected results of tests, got {last}")
    is_ok = exit_code == 0 and (may_skip or "passed" in results.values())
    return {"tests": results, "is_ok": is_ok, "is_late": exit_code == -1}


def tests_table(part: Mapping[str, Any]) -> Table:
    """The tests by file, and each that did not pass."""
    by_file: dict[str, dict[str, int]] = {}
    for name, result in part["tests"].items():
        counts = by_file.setdefault(name.partition("::")[0], {})
        counts[result] = counts.get(result, 0) + 1
    results = sorted({result for counts in by_file.values() for result in counts})
    wrong = [name for name, result in part["tests"].items() if result in ("failed", "error")]
    note = "Not passed: " + ", ".join(f"`{name}`" for name in wrong) if wrong else ""
    if part["is_late"]:
        note += " The tests were ended at their limit of time; what had ended until then is here."
    return Table(
        "Tests",
        ["file", *results],
        [[file, *[str(counts.get(r, 0)) for r in results]] for file, counts in by_file.items()],
        note.strip(),
    )


def tests_verdict(part: Mapping[str, Any]) -> str:
    """Such as ``24 of 59 tests passed, 35 skipped``."""
    results = list(part["tests"].values())
    others = [f"{results.count(r)} {r}" for r in sorted(set(results)) if r != "passed"]
    return ", ".join([f"{results.count('passed')} of {len(results)} tests passed", *others])


def losses_apart(parts: Parts) -> list[str]:
    """The steps whose losses are not those of the same optimizer in device memory."""
    losses = {name: part["losses"] for name, part in parts.items() if "losses" in part}
    apart = []
    for name, found in losses.items():
        expected = losses.get(f"step {name.split()[1]} {STEPS[0]} {DEVICE}", found)
        if max(abs(a - b) for a, b in zip(found, expected, strict=True)) > TOLERANCE:
            apart.append(name)
    return apart


def summarize(parts: Parts) -> Summary:
    checked = {name: part for name, part in parts.items() if name != TESTS}
    columns: dict[str, dict[str, str]] = {}
    apart = losses_apart(parts)
    for name, part in checked.items():
        kind, optimizer, rest = name.split(" ", 2)
        said = f"failed: {part['error']}" if part["status"] == FAILED else "ok"
        said = "loss differs" if name in apart else said
        columns.setdefault(f"{kind} {rest}", {})[optimizer] = said
    optimizers = sorted({name.split()[1] for name in checked})
    rows = [[row, *[of.get(o, DASH) for o in optimizers]] for row, of in columns.items()]
    tables = [Table("One step", ["what", *optimizers], rows)] if rows else []
    num_failed = sum(part["status"] == FAILED for part in checked.values()) + len(apart)
    verdict = (
        f"{len(checked) - num_failed} of {len(checked)} combinations of optimizer, tier and kernel "
        "make a step that equals the reference"
    )
    tests = parts.get(TESTS, {})
    is_ok = not apart
    if "tests" in tests:
        tables.append(tests_table(tests))
        verdict += f"; {TESTS}: {tests_verdict(tests)}"
        is_ok = is_ok and tests["is_ok"]
    return Summary(f"{verdict}.", tables, is_ok)


def run(day: Day) -> None:
    device = day.device
    dim, num_rows = day.pick(128, 8), day.pick(5000, 50)
    for kind in optimizers_of(device):
        spec = OptimizerSpec(kind, learning_rate=0.05, eps=1e-3)
        for tier in tiers_of(device):
            for is_pooled in (False, True):
                tables = Tables(3, num_rows, dim, spec, tier, is_pooled=is_pooled)
                form = "pooled" if is_pooled else "rows"
                day.record.part(
                    f"fbgemm {kind.value} {form} {tier}", lambda t=tables: check_tables(t, device)
                )
    with process_group(device=device.type) as ranks:
        for kind in optimizers_of(device):
            for name in STEPS:
                for tier in tiers_of(device):
                    if name == "torchrec_prefetch" and tier != UVM_CACHE:
                        continue  # only a cache can be filled ahead
                    day.record.part(
                        f"step {kind.value} {name} {tier}",
                        lambda k=kind, n=name, t=tier: check_step(k, n, t, ranks),
                    )
    free_memory(device)
    day.record.part(
        TESTS, lambda: run_tests(TESTS, f"--ignore={STAGED}", may_skip=day.is_rehearsal)
    )


if __name__ == "__main__":
    sys.exit(main(run, summarize))
