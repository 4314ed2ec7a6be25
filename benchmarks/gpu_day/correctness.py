"""Stage 1: steps in every memory with every optimizer against their references.

FBGEMM's tables are compared with the update rules in plain torch, hotrec's steps with each other.
Ids repeat from once to thousands of times: FBGEMM has a kernel for short runs of equal ids, one for
long ones, and one that splits very long ones.
"""

from __future__ import annotations

import sys

from benchmarks.gpu_day.kernels import TOLERANCE, all_steps, check_step, check_tables
from benchmarks.gpu_day.record import FAILED, Parts, Summary, Table
from benchmarks.gpu_day.stage import DASH, Day, main
from benchmarks.gpu_day.tbe import DEVICE, LOCATIONS, Tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.ranks import process_group
from hotrec.types import OptimizerKind


def losses_apart(parts: Parts) -> list[str]:
    """The steps whose losses are not those of the same optimizer in device memory."""
    losses = {name: part["losses"] for name, part in parts.items() if "losses" in part}
    apart = []
    for name, found in losses.items():
        expected = losses.get(f"step {name.split()[1]} hot_cold {DEVICE}", found)
        is_near = (abs(a - b) <= TOLERANCE for a, b in zip(found, expected, strict=True))
        if not all(is_near):  # NaN is not
            apart.append(name)
    return apart


def summarize(parts: Parts) -> Summary:
    columns: dict[str, dict[str, str]] = {}
    apart = losses_apart(parts)
    for name, part in parts.items():
        kind, optimizer, rest = name.split(" ", 2)
        said = "failed" if part["status"] == FAILED else "ok"
        said = "loss differs" if name in apart else said
        columns.setdefault(f"{kind} {rest}", {})[optimizer] = said
    optimizers = sorted({name.split()[1] for name in parts})
    rows = [[row, *[of.get(o, DASH) for o in optimizers]] for row, of in columns.items()]
    tables = [Table("One step", ["what", *optimizers], rows)] if rows else []
    num_failed = sum(part["status"] == FAILED for part in parts.values()) + len(apart)
    verdict = (
        f"{len(parts) - num_failed} of {len(parts)} combinations of optimizer, tier and kernel "
        "make a step that equals the reference."
    )
    return Summary(verdict, tables, not apart)


def run(day: Day) -> None:
    dim, num_rows = day.pick(128, 8), day.pick(5000, 50)
    for kind in OptimizerKind:
        spec = OptimizerSpec(kind, learning_rate=0.05, eps=1e-3)
        for tier in LOCATIONS:
            for is_pooled in (False, True):
                tables = Tables(3, num_rows, dim, spec, tier, is_pooled=is_pooled)
                form = "pooled" if is_pooled else "rows"
                day.record.part(
                    f"fbgemm {kind.value} {form} {tier}",
                    lambda t=tables: check_tables(t, day.device),
                )
    with process_group(device="cuda") as ranks:
        for kind, name, tier in all_steps(day.pick(list(OptimizerKind), [OptimizerKind.adam])):
            day.record.part(
                f"step {kind.value} {name} {tier}",
                lambda k=kind, n=name, t=tier: check_step(k, n, t, ranks),
            )


if __name__ == "__main__":
    sys.exit(main(run, summarize))
