"""``hotrec evaluate``: the quality of a run's checkpoint on a split of the run's dataset."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hotrec.assemble.job import chosen_device
from hotrec.cli.store import read_config
from hotrec.cli.watched import watched_ranks
from hotrec.config.roots import Config, EvaluateConfig
from hotrec.runs.evaluate import evaluate_run
from hotrec.runs.train import placement_name
from hotrec.runtime.ranks import broadcast_object, same_verdict
from hotrec.runtime.run_dir import CONFIG_FILE, find_trained


def run(config: EvaluateConfig, run_dir: Path) -> dict[str, Any]:
    """Evaluate with the model, partition and dataset that the training run recorded."""
    start_s = time.perf_counter()
    device = chosen_device(config.device)
    with watched_ranks(run_dir, device=device) as ranks:
        found = same_verdict(lambda: find_trained(config.run_dir) if ranks.is_first else None)
        trained_dir = broadcast_object(found)
        assert trained_dir is not None  # rank 0 has found it
        trained = same_verdict(lambda: read_config(trained_dir / CONFIG_FILE, Config))
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
