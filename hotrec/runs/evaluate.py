"""Evaluate a run's checkpoint on a split of its dataset."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotrec.assemble.job import make_job
from hotrec.assemble.planning import read_settled_plan
from hotrec.assemble.trainable import assemble
from hotrec.config.roots import Config, EvaluateConfig
from hotrec.data.unknown import UnknownIds, unknown_ids_of
from hotrec.planner.plan import Plan
from hotrec.runs.suspicious import suspicious_columns
from hotrec.runs.train import make_eval_loader, make_ranking, make_run_machine, open_dataset
from hotrec.runtime.cores import num_workers
from hotrec.runtime.ranks import Ranks, same_verdict
from hotrec.runtime.run_dir import CHECKPOINTS
from hotrec.train.checkpoint import BEST, LATEST, find_latest, load_checkpoint
from hotrec.train.evaluate import Quality, evaluate

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True)
class EvaluatedRun:
    """A checkpoint and its quality.

    Args:
        plan: Plan that the run trained.
        checkpoint: Name of the checkpoint.
        step: Number of updates before the checkpoint.
        quality: Quality over all ranks.
        is_best: Whether this is the run's best checkpoint.
        unknown: Unknown ids of the split, counted by ``prepare``; None if it did not.
        suspicious: The result of ``suspicious_columns``, on rank 0.
    """

    plan: Plan
    checkpoint: str
    step: int
    quality: Quality
    is_best: bool
    unknown: UnknownIds | None
    suspicious: Mapping[str, Any]


def evaluate_run(
    config: EvaluateConfig, trained: Config, trained_dir: Path, ranks: Ranks
) -> EvaluatedRun:
    """Evaluate with the model, partition and dataset of a training run; collective.

    Args:
        config: Split and checkpoint to evaluate.
        trained: Configuration of the run.
        trained_dir: Directory of the run.
        ranks: Ranks of the process group, any number.

    Raises:
        ArtifactError: If the dataset, partition or checkpoint is missing or altered.
        ValueError: If there is no such checkpoint.
    """
    keeps_best = trained.trainer.keeps_best
    checkpoint = same_verdict(
        lambda: find_checkpoint(trained_dir, config.checkpoint, keeps_best=keeps_best)
    )
    dataset = same_verdict(lambda: open_dataset(trained.paths, checkpoint))
    machine = make_run_machine(trained, ranks)
    job = same_verdict(lambda: make_job(trained, dataset))
    settled = same_verdict(lambda: read_settled_plan(job, trained_dir, machine))
    trainable = assemble(job.spec, settled.plan, settled.placement, machine, ranks.device)
    facts = job.facts(settled.artifact)
    position = load_checkpoint(checkpoint, model=trainable.model, facts=facts)
    workers = num_workers(config.num_workers, ranks)
    batch_size = config.batch_size or trained.trainer.eval_batch_size
    given = {"batch_size": batch_size, "num_workers": workers}
    batches = same_verdict(lambda: make_eval_loader(job, config.split, trainable, ranks, **given))
    batches.add_groups(job.group_by)
    batches.add_items(job.item)
    ranking = make_ranking(job, trainable, ranks, batch_size, workers)
    with trainable.pipeline() as pipeline:
        quality = evaluate(pipeline, batches, ranking=ranking)
    auc = "none" if quality.auc is None else f"{quality.auc:.5f}"
    logger.info("%s on %s: AUC %s", checkpoint, config.split, auc)
    unknown = unknown_ids_of(dataset).get(config.split)
    if unknown is not None and (text := unknown.text(config.split)) is not None:
        logger.warning("%s", text)
    of_labels = {name: of.auc for name, of in quality.by_label.items()}
    suspicious = same_verdict(
        lambda: suspicious_columns(dataset, quality.auc, of_labels) if ranks.is_first else {}
    )
    return EvaluatedRun(
        settled.plan,
        checkpoint.name,
        position.step,
        quality,
        same_verdict(lambda: is_best(checkpoint)),
        unknown,
        suspicious,
    )


def find_checkpoint(trained_dir: Path, name: str, *, keeps_best: bool) -> Path:
    """Resolve the checkpoint of a run by name; the only place that does.

    Args:
        trained_dir: Directory of the run.
        name: AUTO for the best if the run keeps it, otherwise the newest; or BEST, LATEST, or a
            directory's name.
        keeps_best: Whether the run keeps the best one.

    Raises:
        ValueError: If there is no such checkpoint.
    """
    directory = trained_dir / CHECKPOINTS
    chosen = (BEST if keeps_best else LATEST) if name == AUTO else name
    path = find_latest(directory, chosen) if chosen in (LATEST, BEST) else directory / chosen
    if path is not None and path.is_dir():
        return path
    names = sorted(found.name for found in directory.glob("step-*"))
    if name == AUTO and keeps_best:
        raise ValueError(
            f"checkpoint: expected a best checkpoint in {trained_dir} (trainer.keep_best), got "
            f"none before its first evaluation. Set checkpoint=latest, or one of {names}."
        )
    raise ValueError(f"checkpoint: expected auto, latest, best or one of {names}, got {name!r}.")


def is_best(checkpoint: Path) -> bool:
    """Whether a checkpoint is its run's best one."""
    return find_latest(checkpoint.parent, BEST) == checkpoint
