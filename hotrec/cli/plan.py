"""``hotrec plan``: the placement, its plan and its prediction for any number of ranks."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from hotrec.assemble.counted import profile_path
from hotrec.assemble.job import chosen_device, make_job
from hotrec.assemble.machine import make_machine
from hotrec.assemble.model import build_unsharded
from hotrec.assemble.planning import SettledPlan, make_proposal
from hotrec.cli.launch import BRIEF
from hotrec.cli.stage import is_in_sweep
from hotrec.config.roots import Config, PlannerConfig
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.outline import write_outline
from hotrec.data.chunks import Dataset
from hotrec.planner.machine import Machine
from hotrec.runs.record import write_plan
from hotrec.runtime.memory import GIB
from hotrec.runtime.run_dir import PARTITION, PLAN_JSON, PLAN_TEXT, PREDICTION

logger = logging.getLogger(__name__)


def run(config: Config, run_dir: Path) -> dict[str, Any]:
    """Write paths.partition, and plan.json, plan.txt and prediction.json to the run."""
    try:
        return _plan(config, run_dir)
    except ValueError as error:
        # In a sweep, a machine that is too small is a result too.
        if not is_in_sweep():
            raise
        logger.warning("this job of the sweep does not fit: %s", error)
        (run_dir / PREDICTION).write_text(json.dumps({"infeasible": str(error)}, indent=2) + "\n")
        return {"command": "plan", "infeasible": str(error)}


def _plan(config: Config, run_dir: Path) -> dict[str, Any]:
    config = _use_outline(config)
    dataset = Dataset.open(config.paths.dataset)
    machine = _machine(config)
    # Each job of a sweep keeps its own partition.
    output = run_dir / PARTITION if is_in_sweep() else Path(config.paths.partition)
    job = make_job(config, dataset)
    proposal = make_proposal(job, machine, is_plan=True)
    settled = proposal.settle(output, proposal.recorded_trial if config.plan.trial else None)
    unsharded = build_unsharded(job.spec, settled.plan, settled.placement, machine)
    sharding = unsharded.plan(machine)
    text = write_plan(sharding, run_dir, settled.prediction)
    figures: dict[str, Any] = {
        "command": "plan",
        "placement": config.placement.kind.name,
        "world_size": machine.world_size,
        "device": machine.device,
        "plan_json": run_dir / PLAN_JSON,
        "plan_text": run_dir / PLAN_TEXT,
    }
    if settled.prediction is not None:
        figures |= _predicted_figures(settled)
    # After everything has been written, so that an error is the last line.
    if BRIEF not in os.environ and not is_in_sweep():
        print(text, file=sys.stderr)
    return figures | _partition_figures(settled)


def _use_outline(config: Config) -> Config:
    """The configuration; if the data does not exist yet, with the paths of its outline."""
    outline, dataset = config.data.outline, Path(config.paths.dataset)
    if outline is None or dataset.exists():
        return config
    digest = sha256(repr(asdict(outline)).encode()).hexdigest()[:12]
    directory = dataset.parent / f"outline-{digest}"
    profile = profile_path(directory / "dataset")
    is_made = profile.exists()
    logger.log(
        logging.INFO if is_made and is_in_sweep() else logging.WARNING,
        "paths.dataset %s does not exist: planning for data.outline, %s; its profile is in %s",
        *(dataset, outline.origin, directory),
    )
    if not is_made:
        write_outline(outline, directory / "dataset", profile)
    return replace(config, paths=replace(config.paths, dataset=str(directory / "dataset")))


def _predicted_figures(settled: SettledPlan) -> dict[str, Any]:
    document, entry = settled.prediction, settled.predicted
    assert document is not None
    assert entry is not None
    return {
        "chosen": document["chosen"],
        "why": document["why"],
        "costs": document["costs"]["name"],
        "predicted_step_s": entry["step_s"],
        "predicted_samples_per_s": entry["samples_per_s"],
        "predicted_sent_bytes": entry["total_sent_bytes"],
    }


def _partition_figures(settled: SettledPlan) -> dict[str, Any]:
    artifact = settled.artifact
    if artifact is None:
        return {}
    total = artifact.content["total"]
    logger.info(
        "%s: %s; %d of %d rows hot",
        artifact.path,
        artifact.content["policy"],
        total["hot_rows"],
        total["num_rows"],
    )
    return {
        "partition": artifact.path,
        "content_hash": artifact.content_hash,
        "policy": artifact.content["policy"],
        "total_rows": total["num_rows"],
        **{key: value for key, value in total.items() if key != "num_rows"},
    }


def _machine(config: Config) -> Machine:
    plan, (hbm_gib, host_gib) = config.plan, _memory_of(config.planner)
    ranks_per_host = plan.ranks_per_host or plan.world_size
    if plan.world_size % ranks_per_host:
        raise ValueError(
            f"plan.ranks_per_host: expected a divisor of plan.world_size={plan.world_size}, "
            f"got {ranks_per_host}."
        )
    return make_machine(
        world_size=plan.world_size,
        ranks_per_host=ranks_per_host,
        device=chosen_device(plan.device),
        batch_size=config.trainer.batch_size,
        hbm_gib=hbm_gib,
        host_gib=host_gib,
    )


def _memory_of(planner: PlannerConfig) -> tuple[float | None, float | None]:
    """GiB per device and host; where none are given, of the machine that built-in costs are of."""
    costs = BUILTIN.get(planner.costs)
    if costs is None:
        return planner.hbm_gib, planner.host_gib
    return (
        planner.hbm_gib or costs.device_bytes / GIB or None,
        planner.host_gib or costs.host_bytes / GIB,
    )
