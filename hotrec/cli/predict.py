"""``hotrec predict``: raw files in, scores out."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotrec.cli.watched import read_trained, watched_ranks
from hotrec.config.roots import PredictConfig
from hotrec.runs.predict import predict_run

logger = logging.getLogger(__name__)
_NUM_SHOWN = 12
# Difference to the share of the held-out samples that is worth a warning.
_NOTABLE_FRAC = 0.1


def run(config: PredictConfig, run_dir: Path) -> dict[str, Any]:
    """Score files with the model that the training run recorded."""
    start_s = time.perf_counter()
    # Ranks exchange objects and files, no tensors, so gloo is enough on any machine.
    with watched_ranks(run_dir, device="cpu") as ranks:
        trained_dir, trained = read_trained(config.run_dir, ranks)
        scored = predict_run(config, trained, trained_dir)
    elapsed_s = time.perf_counter() - start_s
    if ranks.is_first:
        say_unknown(scored["unknown_ids"])
    return {
        "command": "predict",
        "run_dir": trained_dir,
        **scored,
        "samples_per_s": scored["num_samples"] / elapsed_s,
        "world_size": ranks.world_size,
        "elapsed_s": elapsed_s,
    }


def say_unknown(unknown_ids: Mapping[str, Mapping[str, Any]]) -> None:
    """Log the unknown ids, with the share in the held-out samples."""
    by_frac = sorted(unknown_ids.items(), key=lambda item: -item[1]["unknown_frac"])
    shares, is_odd = [], False
    for column, of in by_frac[:_NUM_SHOWN]:
        usual = of["held_out_frac"]
        held_out = "" if usual is None else f" (held out {usual:.1%})"
        shares.append(f"{column} {of['unknown_frac']:.1%}{held_out}")
        is_odd |= of["unknown_frac"] > (usual or 0.0) + _NOTABLE_FRAC
    if shares:
        level = logging.WARNING if is_odd else logging.INFO
        words = "unknown ids (unseen or rare in training): %s"
        logger.log(level, words, ", ".join(shares))
