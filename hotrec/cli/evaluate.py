"""``hotrec evaluate``: the quality of a run's checkpoint on a split of the run's dataset."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotrec.artifact import read_artifact
from hotrec.build import build_sharded, chosen_device
from hotrec.cli.app import CONFIG_FILE
from hotrec.cli.store import read_config
from hotrec.config.roots import Config, EvaluateConfig
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader
from hotrec.planning.training_plan import settled_before
from hotrec.runs.record import CHECKPOINTS, find_run
from hotrec.runs.train import checkpoint_facts, make_run_machine, placement_name
from hotrec.runtime.ranks import broadcast_object, process_group, same_verdict
from hotrec.train.checkpoint import find_latest, load_checkpoint
from hotrec.train.evaluate import evaluate

logger = logging.getLogger(__name__)


def run(config: EvaluateConfig, run_dir: Path) -> dict[str, Any]:
    """Evaluate with the model, partition and dataset that the training run recorded."""
    start_s = time.perf_counter()
    device = chosen_device(config.device)
    with process_group(device=device, timeout_s=config.timeout_s) as ranks:
        found = same_verdict(lambda: _find(config.run_dir) if ranks.is_first else None)
        trained_dir = broadcast_object(found)
        assert trained_dir is not None  # rank 0's
        trained = same_verdict(lambda: read_config(trained_dir / CONFIG_FILE, Config))
        checkpoint = same_verdict(
            lambda: _checkpoint(trained_dir, config.checkpoint, ranks.world_size)
        )
        dataset = same_verdict(lambda: Dataset.open(trained.paths.dataset))
        settled = same_verdict(lambda: settled_before(trained, trained_dir))
        trained = settled.config
        machine = make_run_machine(trained, ranks)
        sharded = build_sharded(trained, dataset.schema, settled.placement, machine, ranks.device)
        facts = checkpoint_facts(trained, dataset, settled.artifact)
        position = load_checkpoint(checkpoint, model=sharded.model, facts=facts)
        batches = same_verdict(
            lambda: make_loader(
                trained.paths.dataset,
                config.split,
                batch_size=config.batch_size or trained.trainer.eval_batch_size,
                rank=ranks.rank,
                world_size=ranks.world_size,
                epochs=1,
                shuffle=False,
                num_workers=config.num_workers,
                transform=sharded.transform,
                pin_memory=ranks.device.type == "cuda",
            )
        )
        pipeline = sharded.make_pipeline(ranks.device)
        quality = evaluate(pipeline, batches)
        pipeline.close()
    logger.info("%s on %s: AUC %.5f", checkpoint, config.split, quality.auc)
    return {
        "command": "evaluate",
        "run_dir": trained_dir,
        "checkpoint": checkpoint.name,
        "step": position.step,
        "split": config.split,
        "placement": placement_name(trained),
        **asdict(quality),
        "world_size": ranks.world_size,
        "elapsed_s": time.perf_counter() - start_s,
    }


def _find(run_dir: str) -> Path:
    return find_run(run_dir, holding=f"{CHECKPOINTS}/latest", key="run_dir")


def _checkpoint(trained_dir: Path, name: str, world_size: int) -> Path:
    directory = trained_dir / CHECKPOINTS
    path = find_latest(directory) if name == "latest" else directory / name
    if path is None or not path.is_dir():
        names = sorted(found.name for found in directory.glob("step-*"))
        raise ValueError(f"checkpoint: expected latest or one of {names}, got {name!r}.")
    saved = read_artifact(path, kind="checkpoint").content["facts"]["world_size"]
    if saved != world_size:
        raise ValueError(
            f"launch.num_ranks: expected {saved}, the ranks that {path} was trained with, got "
            f"{world_size}. Set launch.num_ranks={saved}."
        )
    return path
