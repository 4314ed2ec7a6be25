"""Device operations and host waits of a whole training step, as ``hotrec bench`` builds it.

    python -m tests.stand_in.launches

prints, for TorchRec's plan and for hotrec's pipelines, the operations that the last step starts on
the device (kernels and copies, those of the dense layers and of the optimizer among them), how
often the host waits, and its copies from memory that is not pinned. A DLRM over 26 tables, row-wise
Adagrad, some rows read by more ids than a kernel sums at once. Options: names of cases,
--world-size, --steps, --lines (operations by the line of hotrec that starts them).
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.stand_in.build import why_not
from tests.stand_in.log import Kind, note_step, recording, steps_of
from tests.stand_in.steps import NO_KERNEL, Step, figures, wait_for_thread

BATCH_SIZE = 512  # more than the ids that a kernel sums at once
TABLE_ROWS = (3, 4, 10, 24, 60, *range(100, 2200, 100))
HOT_FRAC = 0.05
# By name: the placement, the pipeline, where ids are routed, and further fields of a variant.
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "torchrec": ("planner", "sparse_dist", "loader", {}),
    "all_cold": ("all_cold", "sparse_dist", "loader", {}),
    "all_cold, device": ("all_cold", "sparse_dist", "main", {}),
    "look_ahead": ("hot_cold", "look_ahead", "loader", {}),
    "look_ahead, device": ("hot_cold", "look_ahead", "main", {}),
    "look_ahead, all_cold": ("all_cold", "look_ahead", "loader", {}),
    "look_ahead, slots": ("hot_cold", "look_ahead", "loader", {"tier": "cached"}),
    "look_ahead, depth 0": ("hot_cold", "look_ahead", "loader", {"depth": 0}),
}


@dataclass(frozen=True)
class Launches:
    """The figures of the last step, and its operations by line."""

    step: Step
    lines: dict[tuple[str, str, str], int]  # by thread, line and operator


def measure(names: list[str], num_steps: int) -> dict[str, Launches]:
    """On every rank: the cases, one after the other."""
    import torch

    from hotrec.assemble.policies import ColdRows
    from hotrec.bench.cases import Case, build_runner, split_case
    from hotrec.bench.job import subject_of
    from hotrec.bench.samples import ZipfTables
    from hotrec.cli.store import build_config, compose_config
    from hotrec.planner.plan import Plan, TorchrecTables
    from hotrec.planner.policies import choose_all_cold, choose_fraction
    from hotrec.runtime.ranks import Ranks
    from hotrec.types import ColdTier, PipelineKind, PipelineSpec

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    ranks = Ranks(rank, world_size, rank, world_size, device)
    config = build_config(
        compose_config(
            "bench",
            (
                f"bench.table_rows=[{','.join(map(str, TABLE_ROWS))}]",
                f"bench.batch_size={BATCH_SIZE}",
                "bench.device=cuda",
            ),
        )
    )
    samples = ZipfTables(TABLE_ROWS, exponent=1.05, num_dense=13, seed=0)
    subject, counts = subject_of(config, samples.schema), samples.count(10_000)
    batches = samples.batches(
        num_steps + 8, batch_size=BATCH_SIZE, rank=rank, world_size=world_size
    )
    found = {}
    for name in names:
        placement, kind, routing, more = CASES[name]
        tier = ColdTier[more.get("tier", "fused")]
        pipeline = PipelineSpec(PipelineKind[kind], depth=more.get("depth", 1))
        if placement == "planner":
            case = Case(name, Plan(TorchrecTables(), pipeline))
        elif placement == "all_cold":
            partition = choose_all_cold(counts)
        else:
            partition = choose_fraction(counts, hot_frac=HOT_FRAC)
        if placement != "planner":
            placed = ColdRows(tier, 0.9).place(partition, device.type)
            case = split_case(name, placed, pipeline, is_routed_by_loader=routing == "loader")
        pinned = [batch.pin_memory() for batch in batches]
        with recording() as log:
            runner = build_runner(subject, case, pinned, ranks, samples)
            note_step()
            for _ in range(num_steps):
                runner.step()
                if kind == "look_ahead":
                    wait_for_thread(runner.pipeline)
                note_step()
            runner.drain()
            runner.pipeline.close()
        entries = steps_of(log.entries)[-1]
        lines = Counter(
            (entry.thread, entry.place, entry.name)
            for entry in entries
            if entry.kind is Kind.OPERATOR and not entry.name.startswith(NO_KERNEL)
        )
        found[name] = Launches(figures(entries), dict(lines))
        del runner
    return found


def main() -> None:
    from tests.stand_in.ranks import run_on_device

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {list(CASES)}")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lines", action="store_true")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(reason)
    [first, *_] = run_on_device(
        "tests.stand_in.launches:measure", options.world_size, timeout_s=300,
        names=options.cases, num_steps=options.steps,
    )  # fmt: skip
    print(f"{'case':<24}{'operations':>12}{'waits':>8}{'on main':>8}{'pageable':>10}")
    for name, launches in first.items():
        step = launches.step
        print(
            f"{name:<24}{step.num_operators:>12}{step.num_syncs:>8}{step.num_main_syncs:>8}"
            f"{sum(step.pageable.values()):>10}"
        )
        if options.lines:
            for (thread, place, what), num in sorted(launches.lines.items()):
                print(f"    {num:>4} {what:<32} {thread:<16} {place}")
            for (stream, thread, what, place), num in sorted(step.syncs.items()):
                print(f"    {num:>4} wait: {stream} ({thread}): {what}, {place}")


if __name__ == "__main__":
    main()
