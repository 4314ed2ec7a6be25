"""Rows behind device slots are moved beside the steps of other batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hotrec.data.batch import Batch
from hotrec.embedding.cached_rows import RowMover
from hotrec.runtime.ranks import Ranks
from hotrec.train.pipelines import make_pipeline
from hotrec.types import PipelineKind, PipelineSpec
from tests.exact.case import Case
from tests.exact.training import Training

CASE = Case(
    hosts="0", seed=8, partition="all_cold", optimizer="rowwise_adagrad", pipeline="look_ahead",
    exchange="auto", tier="cached", slots=1.0, batches="drift", steps=8,
)  # fmt: skip


def batches_of(training: Training, begin: int, end: int) -> Iterator[Batch]:
    return (training.batch(step) for step in range(begin, end))


@pytest.mark.parametrize(("window", "num_steps"), [(0, 1), (3, 2)])
def test_steps_are_computed_while_rows_of_later_ones_are_moved(
    one_rank: Ranks, monkeypatch: pytest.MonkeyPatch, window: int, num_steps: int
) -> None:
    """They return before the rows have arrived, which with a window are moved a step earlier."""
    gather = RowMover.gather
    is_fetching, may_fetch = threading.Event(), threading.Event()

    def gather_later(*given: Any) -> list[torch.Tensor | None]:
        is_fetching.set()
        assert may_fetch.wait(20)
        return gather(*given)

    training = Training(CASE)
    spec = PipelineSpec(PipelineKind.look_ahead, depth=CASE.depth, window=window)
    pipeline = make_pipeline(spec, training.model, training.optimizer, training.device)
    pipeline.start()
    batches = batches_of(training, 0, 8)
    pipeline.progress(batches)
    pipeline.drain()
    monkeypatch.setattr(RowMover, "gather", gather_later)
    for _ in range(num_steps):
        pipeline.progress(batches)
    assert is_fetching.wait(20)
    assert not may_fetch.is_set()
    may_fetch.set()
    pipeline.progress(batches)
    pipeline.drain()
    pipeline.close()
