"""Replays the rows of batches through the slots of look-ahead, and counts the rows that move.

Every row that is read is changed, so each evicted row is written back. The policy is that of
``hotrec.embedding.slots``, by its own code.

Misses by number of slots are predicted with a sample of the rows and slots in
proportion (SHARDS: Waldspurger et al., FAST 2015). So the only error
is that of sampling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from hotrec.assemble.order import TrainingOrder
from hotrec.cost_model.profile import Profile
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader
from hotrec.embedding.slots import SlotMap, TooFewSlotsError
from hotrec.planner.request import Replayed
from hotrec.types import Partition, PipelineSpec, PopularRows, Rows

# Global batches to replay, fewer if the data ends before, and the share of them, from the first on,
# that is not counted.
NUM_BATCHES, SKIP_FRAC = 400, 0.25
# Maximum number of ids of the sampled rows in a stream, and minimum number of slots of a sample.
# When batches in flight fill nearly all slots, misses were off by up to 1.1 points with half of
# these slots, and by 0.13 with all of them.
MAX_IDS, MIN_SLOTS = 1 << 21, 5000
# Maximum number of ids to read for sampling; takes about ten seconds.
MAX_READ = 1 << 28


@dataclass(frozen=True)
class Stream:
    """The reads of batches, of rows that are numbered over all tables.

    Args:
        rows: Distinct rows of each batch, int64 (U,).
        counts: Lookups of every row in the profile, int64 (R,).
        every: Sampling interval: one of ``every`` rows is in the stream, and one of ``every`` slots
            in a cache.
    """

    rows: Sequence[Rows]
    counts: Rows
    every: int = 1


def sample_rows(counts: Rows, every: int) -> Rows:
    """Number every n-th row in the order of counts.

    So the sample has its share of the rows of each popularity. With a hash, the share of the most
    popular ones would be random.

    Args:
        counts: Lookups of every row in the profile, int64 (R,).

    Returns:
        The number of each row in the sample, int64 (R,), rising; -1 for those that are not in it.
    """
    is_taken = np.ones(counts.size, np.bool_)
    if every > 1:
        by_count = np.argsort(-counts, kind="stable")
        is_taken[:] = False
        is_taken[by_count[every // 2 :: every]] = True
    return np.where(is_taken, np.cumsum(is_taken) - 1, -1)


def sampling_step(num_ids: float, num_slots: float) -> int:
    """Sampling interval of rows for a stream of this many ids, and for this many slots."""
    return max(1, min(math.ceil(num_ids / MAX_IDS), int(num_slots / MIN_SLOTS)))


def number_rows(rows: Mapping[str, Rows], counts: Mapping[str, Rows]) -> Rows:
    """Rows by table, numbered over all tables in the order of the counts."""
    begins = np.cumsum([0, *(of_table.size for of_table in counts.values())])
    parts = [rows[table] + begin for table, begin in zip(counts, begins, strict=False)]
    return np.concatenate(parts)


def number_popular(
    popular: Mapping[str, PopularRows], counts: Mapping[str, Rows], numbers: Rows
) -> PopularRows:
    """Popular rows by table as rows of a stream, see ``read_stream``."""
    of_all = np.concatenate([popular[table] for table in counts])
    of_all["row"] = number_rows({table: popular[table]["row"] for table in counts}, counts)
    of_all["row"] = numbers[of_all["row"]]
    return of_all[of_all["row"] >= 0]


def read_stream(
    order: TrainingOrder,
    dataset: Dataset,
    counts: Mapping[str, Rows],
    *,
    num_batches: int,
    numbers: Rows,
    every: int,
) -> Stream:
    """The first global batches of training, in its order.

    Args:
        order: Their order, as one rank reads it.
        dataset: Its dataset.
        counts: Lookups of the rows of each table in the profile.
        num_batches: The number of batches.
        numbers: Numbers of the rows to replay, see ``sample_rows``.
        every: Sampling interval: one of ``every`` rows has a number.
    """
    begins = np.cumsum([0, *(of_table.size for of_table in counts.values())])
    begin_of = dict(zip(counts, begins.tolist(), strict=False))
    table_of = {feature.name: feature.table for feature in dataset.schema.features}
    loader = make_loader(
        order.dataset,
        "train",
        batch_size=order.batch_size,
        rank=0,
        world_size=1,
        seed=order.seed,
        epochs=order.num_epochs,
        shuffle=order.is_shuffled,
    )
    batches = []
    for batch in islice(loader, num_batches):
        ids = batch.sparse.values().long().numpy()
        starts = [begin_of[table_of[name]] for name in batch.sparse.keys()]  # noqa: SIM118 (a KJT)
        read = ids + np.repeat(starts, batch.sparse.length_per_key())
        found = numbers[read]
        batches.append(np.unique(found[found >= 0]))
    of_all = np.concatenate(list(counts.values()))
    return Stream(batches, of_all[numbers >= 0], every)


def draw_stream(
    counts: Rows, numbers: Rows, every: int, *, num_ids: float, num_batches: int
) -> Stream:
    """Batches of independent lookups with the profile's probabilities, if there is no data.

    Args:
        num_ids: Lookups of a global batch, of all rows.
    """
    of_stream = counts[numbers >= 0]
    ends = np.cumsum(of_stream)
    rng = np.random.default_rng(0)
    num_read = num_ids * ends[-1] / counts.sum()
    batches = [
        np.unique(
            np.searchsorted(ends, rng.integers(ends[-1], size=rng.poisson(num_read)), "right")
        )
        for _ in range(num_batches)
    ]
    return Stream(batches, of_stream, every)


@dataclass(frozen=True)
class SlotReplay:
    """The first training batches, or drawn ones without data, for any number of slots.

    The ranks' shards are treated as one: each serves as much as the others. Rows that are hot by
    the profile take no slots.

    Args:
        counts: Lookups of the rows of each table in the profile.
        numbers: Numbers of the sampled rows that may be in slots, int64 (R,); -1 of all others.
        stream: What the batches read of these rows.
        pipeline: Look-ahead, which fills the slots.
    """

    counts: Mapping[str, Rows]
    numbers: Rows
    stream: Stream
    pipeline: PipelineSpec

    @classmethod
    def read(
        cls,
        order: TrainingOrder,
        dataset: Dataset,
        profile: Profile,
        partition: Partition,
        pipeline: PipelineSpec,
        *,
        min_load_frac: float,
    ) -> SlotReplay:
        """Reads a sample of the rows that is large enough for the fewest slots to be replayed."""
        counts = profile.counts
        of_all = np.concatenate(list(counts.values()))
        num_ids = of_all.sum() / profile.num_samples * order.batch_size
        num_batches = max(2, min(NUM_BATCHES, int(MAX_READ / max(num_ids, 1.0))))
        every = sampling_step(num_ids * num_batches, min_load_frac * of_all.size)
        numbers = sample_rows(of_all, every)
        numbers[number_rows({t: partition.hot(t) for t in counts}, counts)] = -1
        numbers = np.where(numbers >= 0, np.cumsum(numbers >= 0) - 1, -1)
        if dataset.num_samples("train"):
            stream = read_stream(
                order,
                dataset,
                counts,
                num_batches=num_batches,
                numbers=numbers,
                every=every,
            )
        else:
            stream = draw_stream(of_all, numbers, every, num_ids=num_ids, num_batches=num_batches)
        return cls(counts, numbers, stream, pipeline)

    def predict(self, load_frac: float, popular_rows: Mapping[str, PopularRows]) -> Replayed | None:
        """Replay look-ahead over the slots of all ranks.

        Args:
            load_frac: Slots, as a fraction of the rows.
            popular_rows: Rows of each table that begin in slots.

        Returns:
            None if the batches in flight read more rows than there are slots.
        """
        stream, depth = self.stream, self.pipeline.batches_in_slots - 1
        num_slots = math.ceil(load_frac * self.numbers.size)
        return replay(
            stream,
            max(num_slots, stream.every * _min_slots(stream, depth)),
            int(SKIP_FRAC * len(stream.rows)),
            depth=depth,
            window=self.pipeline.batches_foreseen,
            popular=number_popular(popular_rows, self.counts, self.numbers),
        )


def _min_slots(stream: Stream, depth: int) -> int:
    """Slots for the rows of the batches in flight, estimated from the sample."""
    held = [
        np.unique(np.concatenate(stream.rows[number : number + depth + 1])).size
        for number in range(len(stream.rows))
    ]
    return max(held)


def replay(
    stream: Stream,
    num_slots: int,
    num_skipped: int,
    *,
    depth: int,
    window: int,
    popular: PopularRows,
) -> Replayed | None:
    """Replay a stream through look-ahead's slots.

    Args:
        num_slots: Slots for all rows; a sampled stream has its share of them.
        num_skipped: Number of first batches that are not counted.
        depth: Batches that hold slots besides the one that is computed.
        window: Number of further batches that are known.
        popular: Rows of the stream that are in slots at first.

    Returns:
        None if the batches in flight read more rows than there are slots.
    """
    every = stream.every
    size = max(1, round(num_slots / every))
    slots = SlotMap(stream.counts.size, size, popular, torch.device("cpu"))
    known = num_rows = num_in = num_out = 0
    try:
        for number, rows in enumerate(stream.rows):
            while window and known <= min(max(number, depth) + window, len(stream.rows) - 1):
                slots.foresee(torch.from_numpy(stream.rows[known]), known)
                known += 1
            if number > depth:
                slots.release(number - depth - 1, is_changed=True)
            _, moves = slots.reserve(torch.from_numpy(rows), number)
            if number < num_skipped:
                continue
            num_rows += rows.size
            num_in += int(np.isin(rows, moves.in_rows.numpy(), assume_unique=True).sum())
            num_out += moves.out_rows.numel()
    except TooFewSlotsError:
        return None
    of_batch = every / (len(stream.rows) - num_skipped)
    return Replayed(
        num_slots,
        1 - num_in / max(num_rows, 1),
        num_in * of_batch,
        num_out * of_batch,
    )
