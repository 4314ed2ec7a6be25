"""The training pipeline of a program of its own, in the place of TorchRec's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.embedding.prefetch.row_ahead import RowsAhead
from hotrec.program.choice import OFF, Choice
from hotrec.program.features import in_pipeline
from hotrec.program.parallel import choice_of
from hotrec.train.pipelines import EndOfDataError, LookAhead, make_pipeline


class _Part(Iterator[Any]):
    """The batches until the next decision of which rows are hot.

    Args:
        source: The program's iterator.
        most: Batches to take.
        before: What was taken and computed of another iterator since the last decision.
    """

    def __init__(self, source: Iterator[Any], most: int, before: _Part | None = None) -> None:
        self.source = source
        self._most = most
        self.num_taken: int = 0 if before is None else before.num_taken
        self.num_computed: int = 0 if before is None else before.num_computed

    def __next__(self) -> Any:
        if self.num_taken >= self._most:
            raise StopIteration
        batch = next(self.source)
        self.num_taken += 1
        return batch


class Pipeline:
    """Trains what ``parallelize`` returned, as ``TrainPipelineSparseDist`` would.

    ::

        pipeline = hotrec.Pipeline(model, optimizer, device)
        batches = iter(loader)
        while True:
            try:
                loss, logits, labels = pipeline.progress(batches)
            except StopIteration:
                break

    Batches are of any type with ``to(device, non_blocking=...)`` and ``record_stream``
    (``torchrec.streamable.Pipelineable``) and hold ``KeyedJaggedTensor`` in their attributes.
    Every rank has as many batches as the others. With hot="off" this is TorchRec's pipeline.

    With look-ahead, gradients may still travel when ``progress`` returns. Reading the state of the
    model or the optimizer waits for them; ``drain`` does so at other times.

    Args:
        model: The sharded model.
        optimizer: Its optimizer.
        device: The model's device; None for the one it was sharded on.
        grad_clip_norm: Largest joint norm of the dense layers' mean gradients; None for no
            clipping. Rows are not clipped: their owners update them in backward.
        hot_set: Hot rows that follow the data; None to keep those of the choice.
        adapt_every: Steps between its decisions, before which no batch is read ahead.

    Raises:
        ValueError: If the model or the optimizer is not one of ``parallelize``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | None = None,
        *,
        grad_clip_norm: float | None = None,
        hot_set: AdaptiveHotSet | None = None,
        adapt_every: int = 100,
    ) -> None:
        self.choice: Choice = choice_of(model)
        target = torch.device(device if device is not None else model.device)  # type: ignore[arg-type]
        self._model = model
        self._hot_set, self._adapt_every = hot_set, adapt_every
        self._part: _Part | None = None
        self._pipeline: Any
        if self.choice.name == OFF and grad_clip_norm is None:
            self._pipeline = TrainPipelineSparseDist(model, optimizer, target)
            return
        kind = self.choice.pipeline.value
        ahead = LookAhead(lambda: RowsAhead(model, target))
        self._pipeline = make_pipeline(kind, model, optimizer, target, ahead, grad_clip_norm)

    def progress(self, batches: Iterator[Any]) -> Any:
        """Compute the next batch and, in training mode, update the model.

        Some batches are read ahead. With another iterator than before, those of the one before come
        first.

        Returns:
            What the model returns beside the loss; the loss, detached, if that is all.

        Raises:
            StopIteration: If all batches are computed.
            ValueError: If the model returns no loss, or one without gradient in training.
            RuntimeError: If the model changes the features before a collection reads them.
        """
        with in_pipeline(self._model):
            try:
                if self._hot_set is None:
                    return self._pipeline.progress(batches)
                return self._progress(self._hot_set, batches)
            except EndOfDataError:
                raise StopIteration from None

    def _progress(self, hot_set: AdaptiveHotSet, batches: Iterator[Any]) -> Any:
        if not self._pipeline.model.training:
            return self._pipeline.progress(batches)
        if self._part is None or self._part.source is not batches:
            self._part = _Part(batches, self._adapt_every, self._part)
        output = self._pipeline.progress(self._part)
        self._part.num_computed += 1
        if self._part.num_computed == self._adapt_every:
            self._pipeline.drain()
            hot_set.adapt()
            self._part = _Part(batches, self._adapt_every)
        return output

    def drain(self) -> None:
        """Wait until all updates are applied on this rank; batches that were read stay."""
        if not isinstance(self._pipeline, TrainPipelineSparseDist):
            self._pipeline.drain()

    def close(self) -> None:
        """Apply all updates, and end the pipeline's threads and process groups.

        A ``with`` block does this at its end, and after an error it does not wait for other ranks.
        """
        self.drain()
        self._close()

    def _close(self) -> None:
        if not isinstance(self._pipeline, TrainPipelineSparseDist):
            self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.drain()
        self._close()
