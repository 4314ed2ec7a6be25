"""The order of training samples: days, all-hot blocks, assignment to owners, and their loaders."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotrec.artifact import Artifact
from hotrec.config.groups import AllHotOrder, OrderAssign, OrderKind
from hotrec.data.all_hot import (
    AllHotSamples,
    SampleSubset,
    count_steps_of_kinds,
    read_all_hot,
    write_all_hot,
)
from hotrec.data.chunks import Dataset
from hotrec.data.days import check_time_order, days_of
from hotrec.data.items import Negatives, training_items
from hotrec.data.loader import make_loader, num_steps, step_sequence
from hotrec.data.locality import Assign, ByOwner
from hotrec.data.tokens import ByTokens, SampleWork
from hotrec.runtime.cores import num_workers
from hotrec.runtime.hosts import gather_host_of_rank
from hotrec.runtime.ranks import Ranks, same_verdict, world_size
from hotrec.train.alternate import AlternatingLoader, Alternation
from hotrec.types import Exchange, Partition, Placement, Schema

logger = logging.getLogger(__name__)

SPLIT, ALL_HOT = "train", "all_hot"
# The minimum length of blocks of all-hot batches, as a share of an epoch's.
LEAST_RATE = 0.01


@dataclass(frozen=True)
class TrainingOrder:
    """Which samples training reads, in which order, and which rank computes them.

    Args:
        dataset: Directory of the dataset.
        batch_size: Samples of a rank's batch.
        seed: Seed of the order.
        num_epochs: Passes over the training split.
        num_workers: Loader workers of a rank; None to derive them from the number of cores.
        kind: Shuffled, in the order of the log, or with separate batches of all-hot samples.
        assign: Which rank computes a sample.
        by_day: Whether each day is evaluated before it is trained on, so that no batch spans days.
        blocks: The blocks of all-hot and mixed batches; None for other orders.
        negatives: Which items the loss compares samples with; None if it does not.
    """

    dataset: str
    batch_size: int
    seed: int = 0
    num_epochs: int = 1
    num_workers: int | None = 0
    kind: OrderKind = OrderKind.shuffled
    assign: OrderAssign = OrderAssign.as_read
    by_day: bool = False
    blocks: AllHotOrder | None = None
    negatives: Negatives | None = None

    @property
    def is_shuffled(self) -> bool:
        return self.kind is not OrderKind.time

    def on_one_rank(self, world_size: int) -> TrainingOrder:
        """The order of the global batches of a number of ranks, as if one rank read them."""
        return replace(self, batch_size=self.batch_size * world_size)


@dataclass(frozen=True)
class Adaptation:
    """How the hot rows follow the data.

    Args:
        every_steps: Steps between decisions.
        decay: Factor applied to lookup counts at each decision.
        max_rows: Maximum number of rows that a decision makes hot.
    """

    every_steps: int
    decay: float
    max_rows: int


def owned_tables(placement: Placement) -> list[str]:
    """Tables whose cold rows are sent to the ranks that read them.

    Tables with a pooled exchange are excluded: they send one vector per remote sample, for any
    number of rows.
    """
    partition = placement.partition
    return [
        name
        for name, num_rows in partition.num_rows.items()
        if partition.num_hot(name) < num_rows and placement.tables[name].exchange is Exchange.ROWS
    ]


def check_assign(order: TrainingOrder, placement: Placement | None) -> None:
    """Refuse an assignment by owners if no row has an owner.

    Args:
        order: Order of the run.
        placement: Planned placement; None for TorchRec's plans.

    Raises:
        ValueError: If no table has cold rows that are exchanged as rows.
    """
    if order.assign is not OrderAssign.by_owner:
        return
    if placement is not None and owned_tables(placement):
        return
    found = "TorchRec's own plan"
    if placement is not None:
        found = f"{placement.partition.policy}: none"
    raise ValueError(
        "order.assign: expected a placement with cold rows that are exchanged as rows for "
        f"{order.assign.name}, got {found}. Choose order.assign=as_read, or a placement such as "
        "placement=coverage."
    )


def adapts(
    asked: Adaptation | None, order: TrainingOrder, placement: Placement | None
) -> Adaptation | None:
    """How the hot rows follow the data; None if they do not, or if the plan has no hot rows.

    Args:
        asked: The configured adaptation; None for none.
        order: Order of the run.
        placement: Planned placement; None for TorchRec's plans.

    Raises:
        ValueError: If the order of samples or their ranks depend on the hot rows of the plan.
    """
    if asked is None:
        return None
    if order.blocks is not None or order.assign is OrderAssign.by_owner:
        found = f"order={order.kind.name} order.assign={order.assign.name}"
        raise ValueError(
            f"order: expected shuffled or time and samples as read if hot rows follow the data, "
            f"got {found}. Set placement.adapt_every_steps=0, or choose another order."
        )
    partition = None if placement is None else placement.partition
    if partition is not None and any(
        0 < partition.num_hot(table) < rows for table, rows in partition.num_rows.items()
    ):
        return asked
    logger.warning(
        "placement.adapt_every_steps=%d has no effect: no table of the plan has hot and cold rows",
        asked.every_steps,
    )
    return None


def choose_assign(
    order: TrainingOrder,
    schema: Schema,
    placement: Placement | None,
    work: SampleWork | None = None,
) -> Assign | ByTokens | None:
    """The assignment of training samples to ranks; None if they stay as read. Collective.

    Args:
        order: Order of the run.
        schema: Features and tables of the dataset.
        placement: Placement that passed ``check_assign``.
        work: The work of a sample; needed for by_tokens.
    """
    if order.assign is OrderAssign.as_read:
        return None
    name = f"order.assign={order.assign.name}"
    if order.assign is OrderAssign.by_tokens:
        assert work is not None
        logger.info(
            "%s: samples are assigned for even work, so that ranks have different numbers of them",
            name,
        )
        return ByTokens(schema.feature_names, work)
    assert placement is not None
    logger.info(
        "%s: each training sample goes to the rank that holds most of its cold rows; loader "
        "workers read the ids of the whole global batch",
        name,
    )
    return by_owner(schema, placement)


def by_owner(schema: Schema, placement: Placement) -> ByOwner:
    """``ByOwner`` for the exchanged rows of a placement; a collective."""
    hot_rows = {table: placement.partition.hot(table) for table in owned_tables(placement)}
    return ByOwner(schema, hot_rows, world_size(), gather_host_of_rank())


def find_all_hot(
    order: TrainingOrder,
    dataset: Dataset,
    planned: tuple[Partition | None, Artifact | None],
    run_dir: Path,
    staged: Path,
    *,
    is_resumed: bool,
) -> AllHotSamples | None:
    """The all-hot samples for order=all_hot, None for another order; collective.

    Args:
        order: Order of the run.
        dataset: Dataset of the run.
        planned: The hot rows and their artifact; None and None for TorchRec's plans.
        run_dir: Directory of the run, with the samples that it saved before.
        staged: Directory to save the samples in.
        is_resumed: Whether the run resumes its own checkpoint and must use its saved samples.

    Raises:
        ValueError: If the placement has no hot rows.
        ArtifactError: If the saved samples belong to another dataset or partition.
    """
    if order.blocks is None:
        return None
    partition, artifact = planned
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
        dataset, SPLIT, partition, partition_hash=artifact.content_hash, output=staged / ALL_HOT
    )


def check_order(order: TrainingOrder, dataset: Dataset) -> None:
    """Check that the dataset has the order that a run requires.

    Raises:
        ArtifactError: If its samples are not in order of time, or the required days are unknown.
        ValueError: If there is no day to evaluate ahead, or all samples have the same lengths.
    """
    if order.assign is OrderAssign.by_tokens and not has_lengths(dataset.schema):
        raise ValueError(
            f"order.assign: expected a column of several ids for {order.assign.name}, got one id "
            f"in each of {list(dataset.schema.feature_names)}. Choose order.assign=as_read."
        )
    if order.is_shuffled:
        return
    if not check_time_order(dataset):
        logger.warning("order=time: the dataset has no times; samples are in the order of the log")
    if order.by_day and len(days := days_of(dataset, SPLIT)) < 2:
        raise ValueError(
            "order.evaluate_ahead: expected at least two days in the training split of "
            f"{dataset.artifact.path}, got {[day.name for day in days]}. Prepare it with a split "
            "by time, or from a file for each day."
        )


def has_lengths(schema: Schema) -> bool:
    """Whether samples differ in their numbers of ids."""
    return any(feature.is_multi_hot for feature in schema.features)


def count_epoch_steps(
    order: TrainingOrder, dataset: Dataset, samples: AllHotSamples | None, world_size: int
) -> int:
    """Steps of an epoch, the same on every rank."""
    batch_size = order.batch_size
    if order.by_day:
        return step_sequence(dataset, SPLIT, batch_size * world_size, by_day=True).count_steps(1)
    if samples is None:
        return num_steps(dataset, SPLIT, batch_size, world_size)
    return sum(count_steps_of_kinds(samples, batch_size=batch_size, world_size=world_size))


def make_alternation(
    order: TrainingOrder, samples: AllHotSamples | None, world_size: int
) -> Alternation | None:
    """The alternation of all-hot and mixed batches, None without all-hot samples."""
    blocks = order.blocks
    if samples is None or blocks is None:
        return None
    all_hot, mixed = count_steps_of_kinds(
        samples, batch_size=order.batch_size, world_size=world_size
    )
    logger.info(
        "order=all_hot: training samples are reordered: %d of %d (%.1f%%) are all-hot and get "
        "separate batches; an epoch has %d all-hot and %d mixed steps, in blocks of initially %.3g "
        "of each kind",
        sum(samples.num_all_hot),
        samples.num_samples,
        100 * samples.frac,
        all_hot,
        mixed,
        blocks.start_rate,
    )
    if all_hot == 0:
        logger.warning("order=all_hot: no sample is all-hot, so no step saves the cold exchange")
    return Alternation(
        all_hot,
        mixed,
        start_rate=blocks.start_rate,
        least_rate=LEAST_RATE,
        patience=blocks.patience,
    )


def make_train_loader(
    order: TrainingOrder,
    ranks: Ranks,
    transform: Callable[[Any], Any] | None,
    samples: AllHotSamples | None,
    alternation: Alternation | None,
    assign: Assign | ByTokens | None,
    work: SampleWork | None = None,
) -> Any:
    """The loader of all training steps; collective.

    Args:
        order: Order of the run.
        ranks: Ranks of the process group.
        transform: Router that the workers apply; None to route on the device.
        samples: Result of ``find_all_hot``.
        alternation: Result of ``make_alternation``.
        assign: Result of ``choose_assign``.
        work: The work of a sample, to be counted for each batch; None if it is not.
    """
    workers = num_workers(order.num_workers, ranks)
    items = None
    if order.negatives is not None:
        dataset = same_verdict(lambda: Dataset.open(order.dataset))
        items = training_items(dataset, SPLIT, order.negatives)

    def make(subset: SampleSubset | None) -> Any:
        loader = make_loader(
            order.dataset,
            SPLIT,
            batch_size=order.batch_size,
            rank=ranks.rank,
            world_size=ranks.world_size,
            seed=order.seed,
            epochs=order.num_epochs,
            shuffle=order.is_shuffled,
            by_day=order.by_day,
            num_workers=workers,
            transform=transform,
            pin_memory=ranks.device.type == "cuda",
            subset=subset,
            assign=assign,
        )
        loader.add_work(work)
        loader.add_items(items)
        return loader

    if samples is None or alternation is None:
        return same_verdict(lambda: make(None))
    subsets = {kind: samples.subset(is_all_hot=kind) for kind in (True, False)}
    loaders = same_verdict(
        lambda: {kind: make(subset) for kind, subset in subsets.items() if subset.num_samples}
    )
    return AlternatingLoader(loaders.get(True), loaders.get(False), alternation)
