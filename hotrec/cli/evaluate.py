"""``hotrec evaluate``: the quality of a run's checkpoint on a split of the run's dataset."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hotrec.assemble.job import chosen_device
from hotrec.cli.watched import read_trained, watched_ranks
from hotrec.config.roots import EvaluateConfig
from hotrec.runs.evaluate import evaluate_run
from hotrec.runs.train import placement_name


def run(config: EvaluateConfig, run_dir: Path) -> dict[str, Any]:
    """Evaluate with the model, partition and dataset that the training run recorded."""
    start_s = time.perf_counter()
    device = chosen_device(config.device)
    with watched_ranks(run_dir, device=device) as ranks:
        trained_dir, trained = read_trained(config.run_dir, ranks)
        result = evaluate_run(config, trained, trained_dir, ranks)
    return {
        "command": "evaluate",
        "run_dir": trained_dir,
        "checkpoint": result.checkpoint,
        "step": result.step,
        "is_best": result.is_best,
        "split": config.split,
        "placement": placement_name(trained.placement.kind.name, result.plan),
        **result.quality.to_json(),
        "unknown_ids": None if result.unknown is None else result.unknown.to_json(),
        **({"suspicious": result.suspicious} if result.suspicious else {}),
        "world_size": ranks.world_size,
        "elapsed_s": time.perf_counter() - start_s,
    }
