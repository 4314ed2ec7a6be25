"""``hotrec predict``: raw files in, scores out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hotrec.cli.store import read_config
from hotrec.cli.watched import watched_ranks
from hotrec.config.roots import Config, PredictConfig
from hotrec.runs.predict import predict_run
from hotrec.runtime.ranks import broadcast_object, same_verdict
from hotrec.runtime.run_dir import CONFIG_FILE, find_trained


def run(config: PredictConfig, run_dir: Path) -> dict[str, Any]:
    """Score files with the model that the training run recorded."""
    start_s = time.perf_counter()
    # Ranks exchange objects and files, no tensors, so gloo is enough on any machine.
    with watched_ranks(run_dir, device="cpu", timeout_s=config.timeout_s) as ranks:
        found = same_verdict(lambda: find_trained(config.run_dir) if ranks.is_first else None)
        trained_dir = broadcast_object(found)
        assert trained_dir is not None  # rank 0 has found it
        trained = same_verdict(lambda: read_config(trained_dir / CONFIG_FILE, Config))
        scored = predict_run(config, trained, trained_dir)
    elapsed_s = time.perf_counter() - start_s
    return {
        "command": "predict",
        "run_dir": trained_dir,
        "output": scored.artifact.path,
        "checkpoint": scored.checkpoint,
        "step": scored.step,
        "num_files": scored.num_files,
        "num_skipped": scored.num_skipped,
        **({} if scored.quality is None else scored.quality.to_json()),
        "num_samples": scored.num_samples,
        "samples_per_s": scored.num_samples / elapsed_s,
        "world_size": ranks.world_size,
        "elapsed_s": elapsed_s,
    }
