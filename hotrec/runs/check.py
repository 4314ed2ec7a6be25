"""Checks of a training run's settings that need no plan, and of those that need no data.

``hotrec run`` runs them before its first stage, and again once the dataset exists; a training run
before planning. Settings that depend on the plan are checked when it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hotrec.assemble.job import (
    architecture_of,
    check_placement,
    item_to_rank,
    label_weights_of,
    optimizer_specs,
    order_of,
    schedule_of,
)
from hotrec.assemble.order import check_order, count_epoch_steps
from hotrec.config.groups import TorchrecPlacement
from hotrec.config.roots import Config
from hotrec.cost_model.builtin import BUILTIN
from hotrec.data.chunks import Dataset
from hotrec.data.groups import group_by_of
from hotrec.data.items import item_column
from hotrec.embedding.fused import check_optimizer
from hotrec.planner.counted import num_overridden
from hotrec.train.callbacks import import_callback
from hotrec.train.schedule import count_steps


def check_settings(config: Config, *, device: str) -> None:
    """Check the settings that need no data.

    Args:
        config: A validated configuration.
        device: "cpu" or "cuda".

    Raises:
        ValueError: If a callback, checkpoint or run is not available, or settings conflict on this
            device.
    """
    trainer, costs = config.trainer, config.planner.costs
    for path in trainer.callbacks:
        import_callback(path)
    for key, given in (("resume", trainer.resume), ("warm_start", trainer.warm_start)):
        if given is not None and given not in ("latest", "none") and not Path(given).is_dir():
            raise ValueError(
                f"trainer.{key}: expected a checkpoint directory, got {given!r}. Correct the path."
            )
    if costs not in ("auto", "measured", *BUILTIN):
        raise ValueError(
            f"planner.costs: expected auto, measured or one of {sorted(BUILTIN)}, got {costs!r}. "
            "Correct the name."
        )
    check_placement(config, device)
    if isinstance(config.placement, TorchrecPlacement):
        embedding, _ = optimizer_specs(config.optimizer)
        check_optimizer(embedding, torch.device(device), has_tables=True)


def check_with_data(config: Config, dataset: Dataset, *, world_size: int) -> int:
    """Check the settings that need the dataset, but no plan.

    Returns:
        The steps of the run; a lower bound for order=all_hot.

    Raises:
        ValueError: If the dataset lacks what the configuration names, or is too short for it.
        ArtifactError: If its samples are not in the requested order.
    """
    trainer, order = config.trainer, order_of(config)
    per_epoch = count_epoch_steps(order, dataset, None, world_size)
    steps = count_steps(per_epoch, epochs=trainer.num_epochs, max_steps=trainer.max_steps)
    if order.blocks is None:
        schedule_of(config.optimizer.schedule, steps)
    check_order(order, dataset)
    check_splits(trainer.eval_splits, dataset)
    group_by_of(dataset, trainer.eval_group_by)
    item_to_rank(config, dataset)
    if order.negatives is not None:
        item_column(dataset, order.negatives.feature)
    label_weights_of(trainer, dataset.schema)
    architecture_of(config.model, dataset.schema)
    num_rows = {table.name: table.num_rows for table in dataset.schema.tables}
    num_overridden(getattr(config.placement, "overrides", {}), num_rows)
    return steps


def check_splits(asked: Sequence[str], dataset: Dataset) -> None:
    """Check that the splits to evaluate have samples."""
    present = [split for split in dataset.splits if dataset.num_samples(split)]
    missing = [split for split in asked if split not in present]
    if missing:
        raise ValueError(
            f"trainer.eval_splits: expected non-empty splits, some of {present}, got {missing}. "
            "Set 'trainer.eval_splits=[]', or prepare the data with these splits."
        )
