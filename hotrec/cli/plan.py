"""``hotrec plan``: the hot rows, and TorchRec's plan for a number of ranks, without any rank."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch

from hotrec.artifact import Artifact
from hotrec.cli.assemble import (
    build_unsharded,
    chosen_device,
    make_machine,
    replica_memory_bytes,
    row_bytes,
)
from hotrec.cli.choose import Terms, obtain_partition
from hotrec.cli.record import PLAN_JSON, PLAN_TEXT, write_plan
from hotrec.cli.schema import Config, HotColdConfig
from hotrec.data.chunks import Dataset
from hotrec.planner import Machine, plan_text
from hotrec.types import Partition

logger = logging.getLogger(__name__)


def run(config: Config, run_dir: Path) -> dict[str, Any]:
    """Write paths.partition, and plan.json and plan.txt into the run directory."""
    dataset = Dataset.open(config.paths.dataset)
    machine = _machine(config)
    partition, artifact = _partition(config, dataset, machine)
    unsharded = build_unsharded(
        config,
        dataset.schema,
        partition,
        world_size=machine.world_size,
        compute_device=machine.device,
        dense_device=torch.device("meta"),
    )
    plan = unsharded.plan(machine)
    write_plan(plan, run_dir)
    print(plan_text(plan), file=sys.stderr)
    figures: dict[str, Any] = {
        "command": "plan",
        "placement": config.placement.kind.name,
        "world_size": machine.world_size,
        "device": machine.device,
        "plan_json": run_dir / PLAN_JSON,
        "plan_text": run_dir / PLAN_TEXT,
    }
    if artifact is not None:
        total = artifact.content["total"]
        logger.info("%s: %s; %d of %d rows hot", artifact.path, *_hot_words(artifact))
        figures |= {
            "partition": artifact.path,
            "content_hash": artifact.content_hash,
            "policy": artifact.content["policy"],
            "total_rows": total["num_rows"],
            **{key: value for key, value in total.items() if key != "num_rows"},
        }
    return figures


def _machine(config: Config) -> Machine:
    plan = config.plan
    ranks_per_host = plan.ranks_per_host or plan.world_size
    if plan.world_size % ranks_per_host:
        raise ValueError(
            f"plan.ranks_per_host: expected a divisor of plan.world_size={plan.world_size}, "
            f"got {ranks_per_host}."
        )
    return make_machine(
        config.planner,
        world_size=plan.world_size,
        ranks_per_host=ranks_per_host,
        device=chosen_device(plan.device),
        batch_size=config.trainer.batch_size,
    )


def _partition(
    config: Config, dataset: Dataset, machine: Machine
) -> tuple[Partition | None, Artifact | None]:
    if not isinstance(config.placement, HotColdConfig):
        return None, None  # TorchRec's plans split no table
    terms = Terms(
        row_bytes=row_bytes(dataset.schema, config),
        global_batch_size=config.trainer.batch_size * machine.world_size,
        memory_bytes=replica_memory_bytes(machine),
    )
    profile, output = Path(config.paths.profile), Path(config.paths.partition)
    return obtain_partition(config.placement, dataset, profile, output, terms)


def _hot_words(artifact: Artifact) -> tuple[str, int, int]:
    total = artifact.content["total"]
    return artifact.content["policy"], total["hot_rows"], total["num_rows"]
