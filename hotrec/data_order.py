"""The order of training samples, from the configuration: the loader, and what goes with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotrec.config.groups import AllHotOrder
from hotrec.config.roots import Config
from hotrec.data.all_hot import (
    AllHotSamples,
    SampleSubset,
    count_steps_of_kinds,
    read_all_hot,
    write_all_hot,
)
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader, num_steps
from hotrec.data.locality import Assign
from hotrec.planning.training_plan import Settled
from hotrec.runtime.ranks import Ranks, same_verdict
from hotrec.train.alternate import AlternatingLoader, Alternation

logger = logging.getLogger(__name__)

SPLIT = "train"
ALL_HOT = "all_hot"


def find_all_hot(
    config: Config, dataset: Dataset, settled: Settled, run_dir: Path, *, is_resumed: bool
) -> AllHotSamples | None:
    """The all-hot samples that order=all_hot needs, None for another order; collective.

    Args:
        is_resumed: the run goes on with its own checkpoint, so what it kept must still hold.

    Raises:
        ValueError: if nothing is hot, so that no sample can be all-hot.
        ArtifactError: if the run kept those of another dataset or partition.
    """
    if not isinstance(config.order, AllHotOrder):
        return None
    partition, artifact = settled.partition, settled.artifact
    if partition is None or artifact is None or partition.total_hot == 0:
        found = "TorchRec's own plan" if partition is None else f"{partition.policy}: 0 hot rows"
        raise ValueError(
            f"order: expected a placement with hot rows for order=all_hot, got {found}. "
            "Choose order=shuffled, or a placement that replicates rows, such as "
            "placement=coverage."
        )
    path = run_dir / ALL_HOT
    if is_resumed and path.exists():
        return read_all_hot(dataset, SPLIT, partition_hash=artifact.content_hash, path=path)
    return write_all_hot(
        dataset, SPLIT, partition, partition_hash=artifact.content_hash, output=path
    )


def count_epoch_steps(
    config: Config, dataset: Dataset, samples: AllHotSamples | None, world_size: int
) -> int:
    """Steps of an epoch, the same on every rank."""
    batch_size = config.trainer.batch_size
    if samples is None:
        return num_steps(dataset, SPLIT, batch_size, world_size)
    return sum(count_steps_of_kinds(samples, batch_size=batch_size, world_size=world_size))


def make_alternation(
    config: Config, samples: AllHotSamples | None, world_size: int
) -> Alternation | None:
    """What says which kind of batch is next, None where there is one kind only; logs the order."""
    order, trainer = config.order, config.trainer
    if samples is None or not isinstance(order, AllHotOrder):
        return None
    all_hot, mixed = count_steps_of_kinds(
        samples, batch_size=trainer.batch_size, world_size=world_size
    )
    logger.info(
        "order=all_hot: training samples are reordered: %d of %d (%.1f%%) are all-hot and come in "
        "batches of their own; an epoch is %d all-hot and %d mixed steps, in blocks of %.3g of "
        "each kind's at first%s",
        sum(samples.num_all_hot),
        samples.num_samples,
        100 * samples.frac,
        all_hot,
        mixed,
        order.start_rate,
        "" if trainer.eval_every_steps and trainer.eval_splits else "; no evaluation changes that",
    )
    if all_hot == 0:
        logger.warning("order=all_hot: no sample is all-hot, so no step saves the cold exchange")
    return Alternation(
        all_hot,
        mixed,
        start_rate=order.start_rate,
        least_rate=order.least_rate,
        patience=order.patience,
    )


def make_train_loader(
    config: Config,
    ranks: Ranks,
    transform: Callable[[Any], Any] | None,
    samples: AllHotSamples | None,
    alternation: Alternation | None,
    assign: Assign | None,
) -> Any:
    """The loader of all training steps; collective.

    Args:
        transform: of the ids, in the workers.
        samples: of ``find_all_hot``.
        alternation: of ``make_alternation``.
        assign: of ``hotrec.data_assign.choose_assign``.
    """
    trainer = config.trainer

    def make(subset: SampleSubset | None) -> Any:
        return make_loader(
            config.paths.dataset,
            SPLIT,
            batch_size=trainer.batch_size,
            rank=ranks.rank,
            world_size=ranks.world_size,
            seed=trainer.seed,
            epochs=trainer.num_epochs,
            shuffle=True,
            num_workers=trainer.num_workers,
            transform=transform,
            pin_memory=ranks.device.type == "cuda",
            subset=subset,
            assign=assign,
        )

    if samples is None or alternation is None:
        return same_verdict(lambda: make(None))
    subsets = {kind: samples.subset(is_all_hot=kind) for kind in (True, False)}
    loaders = same_verdict(
        lambda: {kind: make(subset) for kind, subset in subsets.items() if subset.num_samples}
    )
    return AlternatingLoader(loaders.get(True), loaders.get(False), alternation)
