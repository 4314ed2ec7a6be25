"""Device operations and host waits of a whole training step, as ``hotrec compare`` builds it.

A DLRM over 26 tables, row-wise Adagrad, some rows read by more ids than a kernel sums at once.
"""

from __future__ import annotations

from typing import Any

from tests.stand_in.log import note_step, recording, steps_of
from tests.stand_in.steps import Step, figures, wait_for_thread

BATCH_SIZE = 512  # more than the ids that a kernel sums at once
TABLE_ROWS = (3, 4, 10, 24, 60, *range(100, 2200, 100))
HOT_FRAC = 0.05
# By name: the placement, where ids are routed, and further fields of a variant.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "look_ahead": ("hot_cold", "loader", {}),
    "look_ahead, device": ("hot_cold", "main", {}),
    "look_ahead, all_cold": ("all_cold", "loader", {}),
    "look_ahead, slots": ("hot_cold", "loader", {"tier": "cached"}),
}


def measure(names: list[str], num_steps: int) -> dict[str, Step]:
    """On every rank: the last step of each case."""
    import torch

    from hotrec.assemble.policies import ColdRows
    from hotrec.bench.cases import build_runner, split_case
    from hotrec.bench.job import subject_of
    from hotrec.bench.samples import ZipfTables
    from hotrec.cli.store import build_config, compose_config
    from hotrec.planner.policies import choose_all_cold, choose_fraction
    from hotrec.runtime.ranks import Ranks
    from hotrec.types import ColdTier, PipelineKind, PipelineSpec

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    ranks = Ranks(rank, world_size, rank, world_size, device)
    config = build_config(
        compose_config(
            "compare",
            (
                f"plans.table_rows=[{','.join(map(str, TABLE_ROWS))}]",
                f"plans.batch_size={BATCH_SIZE}",
                "device=cuda",
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
        placement, routing, more = CASES[name]
        pipeline = PipelineSpec(PipelineKind.look_ahead)
        partition = choose_fraction(counts, hot_frac=HOT_FRAC)
        if placement == "all_cold":
            partition = choose_all_cold(counts)
        placed = ColdRows(ColdTier[more.get("tier", "fused")], 0.9).place(partition, device.type)
        case = split_case(name, placed, pipeline, is_routed_by_loader=routing == "loader")
        pinned = [batch.pin_memory() for batch in batches]
        with recording() as log:
            runner = build_runner(subject, case, pinned, ranks, samples)
            note_step()
            for _ in range(num_steps):
                runner.step()
                wait_for_thread(runner.pipeline)
                note_step()
            runner.drain()
            runner.pipeline.close()
        found[name] = figures(steps_of(log.entries)[-1])
        del runner
    return found
