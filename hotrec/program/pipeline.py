"""The training pipeline of a user's program, instead of TorchRec's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import nn

from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.program.choice import Choice
from hotrec.program.features import in_pipeline
from hotrec.program.feed import Agreement, Feed
from hotrec.program.guard import Guard
from hotrec.program.parallel import choice_of
from hotrec.train.pipelines import EndOfDataError, make_pipeline
from hotrec.types import PipelineSpec


class _Part(Iterator[Any]):
    """The batches until the next decision on hot rows.

    Args:
        source: The program's iterator.
        most: Maximum number of batches to take.
        before: Batches taken and computed of another iterator since the last decision.
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
    """Trains the model of ``parallelize``, like ``TrainPipelineSparseDist``.

    ::

        pipeline = hotrec.Pipeline(model, optimizer, device)
        batches = iter(loader)
        while True:
            try:
                loss, logits, labels = pipeline.progress(batches)
            except StopIteration:
                break

    Batches are of any type with ``to(device, non_blocking=...)`` and ``record_stream``
    (``torchrec.streamable.Pipelineable``) and have ``KeyedJaggedTensor`` in their attributes. If
    ranks have different numbers of batches, they get an error once the common batches are computed.
    If batches differ in size, losses are weighted, so that their mean is that of all samples.

    In evaluation mode each batch is computed immediately, and batches prefetched for training are
    kept. With hot="off" TorchRec's pipeline runs the steps.

    With look-ahead, gradients may still be in flight when ``progress`` returns. Reading the state
    of the model or the optimizer waits for them; ``drain`` does so at other times.

    Creating and closing one is a collective.

    Args:
        model: The sharded model.
        optimizer: Its optimizer.
        device: The model's device; None for the one it was sharded on.
        grad_clip_norm: Maximum joint norm of the dense layers' mean gradients; None for no
            clipping. Rows are not clipped: their owners update them in backward.
        hot_set: Hot rows that follow the data; None to keep those of the choice.
        adapt_every: Steps between its decisions, across which no batch is prefetched.

    Raises:
        ValueError: If the model or the optimizer is not from ``parallelize``.
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
        self._device = torch.device(device if device is not None else model.device)  # type: ignore[arg-type]
        self._model = model
        self._hot_set, self._adapt_every = hot_set, adapt_every
        self._part: _Part | None = None
        self._guard: Guard = model.hotrec_guard  # type: ignore[assignment]
        self._guard.enter_pipeline(self)
        try:
            self._pipeline = make_pipeline(
                PipelineSpec(self.choice.pipeline, window=0),
                model,
                optimizer,
                self._device,
                grad_clip_norm,
                may_read_late=self.choice.is_off,
            )
        except BaseException:
            self._guard.leave_pipeline(self)
            raise
        self._agreement = Agreement()
        self._check, self._is_strict = self._guard.choose_check(model)
        # Of the last iterators in training and in evaluation.
        self._train_feed: Feed | None = None
        self._eval_feed: Feed | None = None
        self._is_closed = False

    def progress(self, batches: Iterator[Any]) -> Any:
        """Compute the next batch and, in training mode, update the model.

        Some batches are prefetched in training. With a new iterator, those of the previous one come
        first.

        Returns:
            The model's second output; the detached loss if it only returns a loss.

        Raises:
            StopIteration: If all batches are computed.
            RuntimeError: If the ranks have different numbers of batches, once the common ones are
                computed; if the model changes the features before a collection reads them.
            ValueError: If a batch cannot be looked up; if the model returns no loss, or one without
                gradient in training.
            RankError: On the ranks without an error of their own.
        """
        if self._is_closed:
            raise RuntimeError(
                "hotrec.Pipeline: expected an open pipeline, got a closed one. Create a new one."
            )
        if not hasattr(batches, "__next__"):
            raise TypeError(
                f"batches: expected an iterator, got {type(batches).__name__}. Pass iter(...) of "
                "it, the same one until it is exhausted."
            )
        is_training = self._model.training
        feed = self._feed_of(batches, is_training=is_training)
        with in_pipeline(self._model), self._guard.inside(feed):
            try:
                if is_training and self._hot_set is not None:
                    output = self._progress(self._hot_set, feed)
                elif is_training or feed.held:
                    output = self._pipeline.progress(feed)
                else:
                    output = self._evaluate(feed)
            except EndOfDataError:
                error = feed.error or StopIteration()
            else:
                feed.held.popleft()
                return output
        raise error

    def _feed_of(self, batches: Iterator[Any], *, is_training: bool) -> Feed:
        train_feed, eval_feed = self._train_feed, self._eval_feed
        if train_feed is not None and train_feed.source is batches:
            return train_feed
        is_evaluated = eval_feed is not None and eval_feed.source is batches
        if is_evaluated and not is_training:
            return eval_feed  # type: ignore[return-value]
        before = [train_feed] if is_training else []
        before += [eval_feed] if is_evaluated else []
        feed = Feed(
            batches,
            self._agreement,
            self._check,
            is_strict=self._is_strict,
            before=[one for one in before if one is not None],
        )
        if is_training:
            self._train_feed = feed
        else:
            self._eval_feed = feed
        return feed

    def _evaluate(self, feed: Feed) -> Any:
        """Compute a batch in line, keeping the batches prefetched for training."""
        batch = next(feed, None)
        if batch is None:
            raise EndOfDataError
        _, output = self._model(batch.to(self._device, non_blocking=True))
        return output

    def _progress(self, hot_set: AdaptiveHotSet, feed: Feed) -> Any:
        if self._part is None or self._part.source is not feed:
            self._part = _Part(feed, self._adapt_every, self._part)
        output = self._pipeline.progress(self._part)
        self._part.num_computed += 1
        if self._part.num_computed == self._adapt_every:
            self._pipeline.drain()
            hot_set.adapt()
            self._part = _Part(feed, self._adapt_every)
        return output

    def drain(self) -> None:
        """Wait until all updates are applied on this rank; prefetched batches are kept."""
        self._pipeline.drain()

    def close(self) -> None:
        """Apply all updates, and stop the pipeline's threads and process groups.

        A ``with`` block does this at its end, and after an error it does not wait for other ranks.
        """
        if not self._is_closed:
            self.drain()
            self._close()

    def _close(self) -> None:
        self._is_closed = True
        self._pipeline.close()
        self._agreement.close()
        self._guard.leave_pipeline(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._close()
