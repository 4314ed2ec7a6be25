"""The loader: prepared chunks -> ``hotrec.data.batch.Batch``, per rank, in worker processes.

Every rank takes the same number of steps; no sample is lost or repeated in an epoch. Worker k of n
makes steps k, k + n, ..., and the loader alternates between the workers, so the order of batches
does not depend on their number. The position is the number of samples that all ranks have consumed.
It can be restored without reading, with any number of ranks and workers and any batch size.
"""

from __future__ import annotations

import multiprocessing.queues
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.data.batch import Batch
from hotrec.data.chunks import Dataset
from hotrec.data.days import days_of
from hotrec.data.gather import Gathered, Gatherer, select_bags, with_empty
from hotrec.data.groups import GroupBy
from hotrec.data.items import ItemColumn
from hotrec.data.locality import Assign
from hotrec.data.order import GlobalBatch, SampleOrder, StepSequence, num_steps_of, select_pieces
from hotrec.data.packing import Packed, pack
from hotrec.data.tokens import ByTokens, SampleWork
from hotrec.types import Rows

_RANK_CHECK_S = 1.0
# A multiple of the tiles of products of matrices.
PADDED_TO = 64
# Applied to the ids in the worker, e.g. hotrec.routing's routing.
Transform = Callable[[KeyedJaggedTensor], Any]


class Subset(Protocol):
    """Some of the samples of a split, such as ``SampleSubset`` and ``ItemSamples``."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of these samples in each chunk."""

    @property
    def is_all_hot(self) -> bool:
        """Whether they only read hot rows."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What a checkpoint's position in these samples depends on."""

    def rows(self, chunk: int) -> Rows:
        """Their positions in a chunk, int64, increasing."""


def padded_size(batch_size: int) -> int:
    """The samples of each batch of an evaluation, empty ones included.

    Products of matrices add up all rows of such batches in the same order, so that equal samples
    have equal logits. In others the order depends on a sample's place: the last rows, outside the
    tiles, are added up by other instructions.
    """
    return -(-batch_size // PADDED_TO) * PADDED_TO


def num_steps(
    dataset: Dataset, split: str, batch_size: int, world_size: int, *, drop_last: bool = False
) -> int:
    """Steps of one epoch of a split, the same on every rank."""
    return num_steps_of(dataset.num_samples(split), batch_size, world_size, drop_last=drop_last)


def step_sequence(
    dataset: Dataset,
    split: str,
    global_batch: int,
    *,
    by_day: bool = False,
    first_sample: int = 0,
    drop_last: bool = False,
) -> StepSequence:
    """The steps of a loader of a split, the same on every rank; see ``make_loader``."""
    parts: tuple[int, ...] = (dataset.num_samples(split),)
    if by_day:
        parts = tuple(day.num_samples for day in days_of(dataset, split))
    return StepSequence(parts, global_batch, first_sample, drop_last)


def make_loader(  # noqa: PLR0913
    dataset_path: str | Path,
    split: str,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int = 0,
    epochs: int | None = None,
    shuffle: bool = True,
    num_workers: int = 0,
    keep_workers: bool = False,
    transform: Transform | None = None,
    drop_last: bool = False,
    by_day: bool = False,
    pin_memory: bool = False,
    subset: Subset | None = None,
    assign: Assign | ByTokens | None = None,
) -> Loader:
    """Make one rank's loader of a split.

    Args:
        dataset_path: The directory of a prepared dataset.
        split: "train", "valid" or "test".
        batch_size: The number of samples per rank and step.
        rank: This rank.
        world_size: The number of ranks.
        seed: The seed of the shuffle, the same on all ranks.
        epochs: The number of passes over the split; None for no end.
        shuffle: Whether to shuffle chunks, and rows within a chunk, by (seed, epoch).
        num_workers: The number of worker processes; 0 reads in this process.
        keep_workers: Whether workers persist across iterations.
        transform: A picklable function that workers apply to the ids.
        drop_last: Whether to drop the last step of an epoch if it is not full.
        by_day: Whether a step ends with each day of the split; for the order of the files.
        pin_memory: Whether batches are in page-locked memory, for a GPU.
        subset: The samples to use, which may be fewer than a global batch; None for all.
        assign: A picklable function that assigns the samples of a global batch to ranks; workers
            then read the ids of the whole global batch, or only the lengths for ``ByTokens``. None
            keeps the order of the batch.

    Returns:
        A loader of ``Batch``, whose ``state_dict`` is the same on every rank.

    Raises:
        ValueError: if the split is empty or, with ``shuffle`` or ``drop_last``, holds fewer samples
            than one global batch.
        ArtifactError: if there is no complete dataset.
    """
    if batch_size < 1 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"loader: expected batch_size >= 1 and 0 <= rank < world_size, got "
            f"batch_size {batch_size}, rank {rank}, world_size {world_size}."
        )
    dataset = Dataset.open(dataset_path)
    sizes = [chunk.num_samples for chunk in dataset.chunks(split)]
    order = SampleOrder(
        sizes if subset is None else subset.sizes,
        rank=rank,
        world_size=world_size,
        seed=seed,
        shuffle=shuffle,
        rows_of_chunk=None if subset is None else subset.rows,
    )
    # An evaluation may be smaller than a batch; training on less than one is a mistake.
    needed = batch_size * world_size if drop_last or (shuffle and subset is None) else 1
    if order.num_samples < needed:
        raise ValueError(
            f"dataset {dataset.artifact.path} split {split}: expected at least {needed} samples "
            f"(batch size {batch_size} on {world_size} ranks), got {order.num_samples}. "
            "Choose a smaller batch, fewer ranks or more data."
        )
    # A checkpoint's position is only meaningful in the same order of samples.
    identity: dict[str, Any] = {
        "dataset": dataset.artifact.content_hash,
        "split": split,
        "seed": seed,
        "shuffle": shuffle,
    }
    is_all_hot = subset is not None and subset.is_all_hot
    if subset is not None:
        identity |= subset.identity
    global_batch = batch_size * world_size
    if subset is None:
        steps = step_sequence(dataset, split, global_batch, by_day=by_day, drop_last=drop_last)
    else:
        steps = StepSequence((order.num_samples,), global_batch, drop_last=drop_last)
    if is_all_hot and not isinstance(assign, ByTokens):
        assign = None  # all ranks have the rows of its samples, so it does not matter who owns them
    batches = Batches(
        Gatherer(dataset, split),
        order,
        identity,
        steps,
        epochs,
        transform,
        assign,
        is_all_hot,
    )
    return Loader(
        batches,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_pack_in_worker,
        pin_memory=pin_memory,
        persistent_workers=keep_workers and num_workers > 0,
        worker_init_fn=_leave_signals_to_rank,
    )


def _pack_in_worker(batch: Batch) -> Batch | Packed:
    return batch if get_worker_info() is None else pack(batch)


class Loader(DataLoader[Batch]):
    """A loader with a restorable position."""

    dataset: Batches

    def __init__(self, batches: Batches, **settings: Any) -> None:
        super().__init__(batches, **settings)
        self._num_taken = 0

    def add_groups(self, group_by: GroupBy | None) -> None:
        """Give each batch the groups of its samples; before the first iteration."""
        self.dataset.group_by = group_by

    def add_work(self, work: SampleWork | None) -> None:
        """Give each batch the work of its samples; before the first iteration."""
        self.dataset.work = work

    def add_items(self, items: ItemColumn | None) -> None:
        """Give each batch the items of its samples; before the first iteration."""
        self.dataset.items = items

    def pad(self, batch_size: int) -> None:
        """Give each batch empty samples up to ``padded_size``; before the first iteration."""
        self.dataset.padded_size = padded_size(batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The position before the next batch, in JSON values; the same on every rank."""
        num_samples = self.dataset.steps.samples_before(self._num_taken)
        return {"num_samples": num_samples, "identity": self.dataset.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration at a saved position.

        Raises:
            ValueError: if the position belongs to another dataset, order or selection of samples.
        """
        mine, saved = self.dataset.identity, state["identity"]
        for key in mine | saved:
            if saved.get(key) != mine.get(key):
                raise ValueError(
                    f"loader state {key}: expected {mine.get(key)!r}, got {saved.get(key)!r}. "
                    "Resume with the settings of the run that saved it, or start a new run."
                )
        steps = replace(self.dataset.steps, first_sample=int(state["num_samples"]))
        self.dataset.steps = steps
        self._num_taken = 0

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # torch names its own class
        self._num_taken = 0
        return self._take(super().__iter__())

    def _take(self, iterator: Iterator[Batch | Packed]) -> Iterator[Batch]:
        for batch in iterator:
            self._num_taken += 1
            yield batch.unpack() if isinstance(batch, Packed) else batch


def _leave_messages_to_rank() -> None:
    """Print nothing in a worker: its rank receives the errors of batches, and detects its exit."""
    # This gets the errors of threads that send batches, for which the rank would wait forever.
    sys.excepthook = lambda *_: os._exit(1)
    on_error = staticmethod(lambda *_: os._exit(1))
    multiprocessing.queues.Queue._on_queue_feeder_error = on_error  # type: ignore[attr-defined]


def _leave_signals_to_rank(worker: int) -> None:
    """End a worker on SIGTERM only if its rank sent the signal, and when its rank is gone.

    torchrun sends SIGTERM or SIGINT to a rank's whole process group, as a terminal does, while the
    rank still needs batches to stop in order. Workers cannot just ignore SIGTERM, because
    multiprocessing ends them by it at exit and waits for them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    _leave_messages_to_rank()
    rank = os.getppid()

    def wait_for_rank() -> None:
        # A killed rank sends no signal, but its workers get another parent. Torch only detects that
        # within five seconds, while it waits for work.
        while os.getppid() == rank:
            received = signal.sigtimedwait({signal.SIGTERM}, _RANK_CHECK_S)
            if received is not None and received.si_pid == rank:
                break
        os._exit(0)

    threading.Thread(target=wait_for_rank, name="sigterm", daemon=True).start()


@dataclass(eq=False)
class Batches(IterableDataset[Batch]):
    """The batches of one rank."""

    gatherer: Gatherer
    order: SampleOrder
    identity: dict[str, Any]
    steps: StepSequence
    epochs: int | None
    transform: Transform | None
    assign: Assign | ByTokens | None
    is_all_hot: bool
    group_by: GroupBy | None = None
    work: SampleWork | None = None
    items: ItemColumn | None = None
    padded_size: int = 0

    def __iter__(self) -> BatchIterator:
        info = get_worker_info()
        first_step, stride = (0, 1) if info is None else (info.id, info.num_workers)
        return BatchIterator(self, first_step=first_step, stride=stride)


class BatchIterator(Iterator[Batch]):
    """One worker's batches: ``first_step``, ``first_step + stride``, and so on."""

    def __init__(self, batches: Batches, *, first_step: int, stride: int) -> None:
        self._batches = batches
        self._next_step = first_step
        self._stride = stride

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        drawn = self._batches.steps[self._next_step]
        if self._batches.epochs is not None and drawn.epoch >= self._batches.epochs:
            raise StopIteration
        batch = self._build(drawn)
        self._next_step += self._stride
        return batch

    def _build(self, drawn: GlobalBatch) -> Batch:
        schema, group_by = self._batches.gatherer.schema, self._batches.group_by
        items, num_drawn, work = self._batches.items, 0, None
        gathered, num_labels = self._gather(drawn), len(schema.labels)
        if (of_sample := self._batches.work) is not None:
            lengths = np.empty(0, np.int32) if gathered is None else gathered.lengths
            work = int(of_sample.of(schema.feature_names, lengths).sum())
        if gathered is None:
            # One sample with empty bags, for a rank without samples in an epoch's last step.
            gathered = Gathered(
                label=np.zeros((1, num_labels) if num_labels > 1 else 1, np.float32),
                dense=np.zeros((1, len(schema.dense)), np.float32),
                weight=np.zeros(1, np.float32),
                values=np.empty(0, np.int64),
                lengths=np.zeros(len(schema.features), np.int32),
            )
        if (num_missing := self._batches.padded_size - len(gathered.label)) > 0:
            gathered = with_empty(gathered, num_missing)
        if items is not None and items.drawn is not None:
            gathered, num_drawn = items.drawn.append(gathered, drawn, self._batches.order)
        sparse = KeyedJaggedTensor(
            keys=list(schema.feature_names),
            values=torch.from_numpy(gathered.values),
            lengths=torch.from_numpy(gathered.lengths),
            stride=len(gathered.label),
        )
        weight = gathered.weight
        if weight is None:
            weight = np.ones(len(gathered.label), np.float32)
        return Batch(
            dense=torch.from_numpy(gathered.dense),
            sparse=self._batches.transform(sparse) if self._batches.transform else sparse,
            labels=torch.from_numpy(gathered.label),
            weights=torch.from_numpy(weight),
            num_global_samples=drawn.num_samples,
            is_all_hot=self._batches.is_all_hot,
            groups=None if group_by is None else group_by.groups_of(sparse),
            work=work,
            items=None if items is None else items.items_of(sparse, num_drawn),
        )

    def _gather(self, drawn: GlobalBatch) -> Gathered | None:
        """This rank's samples of a global batch; None if it has none."""
        batches, order = self._batches, self._batches.order
        if batches.assign is None:
            pieces = order.pieces(drawn)
            return batches.gatherer.read(pieces) if pieces else None
        pieces, shares = order.global_pieces(drawn), order.shares(drawn)
        if isinstance(batches.assign, ByTokens):
            rank_S = batches.assign(batches.gatherer.read_lengths(pieces), shares.size)
            pieces = select_pieces(pieces, np.flatnonzero(rank_S == order.rank))
            return batches.gatherer.read(pieces) if pieces else None
        values, lengths = batches.gatherer.read_ids(pieces)
        mine = np.flatnonzero(batches.assign(values, lengths, shares) == order.rank)
        if mine.size == 0:
            return None
        numbers = batches.gatherer.read_numbers(select_pieces(pieces, mine))
        num_features = len(batches.gatherer.schema.features)
        return Gathered(*numbers, *select_bags(values, lengths, mine, num_features))
