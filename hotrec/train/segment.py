"""The batches of one segment of steps, and the time that the step waited for the loader."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hotrec.data.batch import Batch
from hotrec.runtime.stages import mark
from hotrec.train.schedule import Segment


class SegmentBatches(Iterator[Batch]):
    """The batches of one segment, and the time spent waiting for them.

    It ends with the segment, or earlier after ``cut``: the pipeline then computes its batches in
    flight, so that the loader's position matches the weights.
    """

    def __init__(self, source: Iterator[Batch], segment: Segment) -> None:
        self.first_step = segment.first_step
        self.num_steps = segment.num_steps
        self.wait_s = 0.0
        self._source = source
        self._num_samples: list[int] = []
        self._taken: dict[int, Batch] = {}  # by step, until the step ends

    def __next__(self) -> Batch:
        if len(self._num_samples) >= self.num_steps:
            # The pipeline keeps this object, often in a cycle. Without the source the loader's
            # workers end with the run.
            self._source = iter(())
            raise StopIteration
        mark("ids_exchange")
        start = time.perf_counter()
        batch = next(self._source)
        self.wait_s += time.perf_counter() - start
        mark("other")
        self._taken[self.first_step + len(self._num_samples)] = batch
        self._num_samples.append(batch.num_global_samples)
        return batch

    def steps(self) -> Iterator[int]:
        """Iterate over the segment's steps until the pipeline is drained."""
        index = 0
        while index < self.num_steps:  # ``cut`` may lower it meanwhile
            yield self.first_step + index
            self._taken.pop(self.first_step + index, None)
            index += 1

    def cut(self) -> None:
        """Return no more batches."""
        self.num_steps = len(self._num_samples)

    def batch(self, step: int) -> Batch:
        """The batch of ``step``, once the pipeline has taken it and until the step ends."""
        return self._taken[step]

    def num_samples(self, step: int) -> int:
        """The number of samples of all ranks in the batch of ``step``."""
        return self._num_samples[step - self.first_step]
