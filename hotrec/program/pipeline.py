"""The training pipeline of a user's program, instead of TorchRec's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum
from typing import Any, Self

import torch
from torch import nn

from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.program.choice import Choice
from hotrec.program.feed import Agreement, Feed, Source
from hotrec.program.guard import Guard
from hotrec.program.parallel import choice_of
from hotrec.runtime.ranks import RankError, rank, world_size
from hotrec.train.pipelines import EndOfDataError, LookAheadPipeline, make_pipeline
from hotrec.train.traced import first_line
from hotrec.types import PipelineSpec

logger = logging.getLogger(__name__)


class _State(Enum):
    """What a pipeline does; open is idle, or holds batches."""

    OPEN = "an open one"
    INSIDE = "one inside a step. Call it once at a time, not from the model"
    CLOSED = "a closed one. Create a new one"


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

    Batches are of any type with ``to(device, non_blocking=...)`` and ``record_stream``, as of
    ``torchrec.streamable.Pipelineable``, and have ``KeyedJaggedTensor`` in their attributes. If
    ranks have different numbers of batches, they get an error once the common batches are computed.
    If batches differ in size, losses are weighted, so that their mean is that of all samples.

    An error of the iterator is raised once the batches before it are computed. The next call goes
    on with the next batch. After an error inside a step, other calls than ``drain`` and ``close``
    are refused, since rows may be updated in part.

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
        ValueError: If the model or the optimizer is not from ``parallelize``, or ``adapt_every`` is
            below 1.
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
        if adapt_every < 1:
            raise ValueError(f"adapt_every: expected at least 1, got {adapt_every}. Raise it.")
        self.choice: Choice = choice_of(model)
        self._device = torch.device(device if device is not None else model.device)  # type: ignore[arg-type]
        self._model = model
        self._hot_set, self._adapt_every = hot_set, adapt_every
        self._guard: Guard = model.hotrec_guard  # type: ignore[assignment]
        if optimizer is not self._guard.optimizer:
            raise ValueError(
                f"optimizer {type(optimizer).__name__}: expected the one that hotrec.parallelize "
                "returned with this model, got another. Pass that one, since it updates all rows."
            )
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
        check, is_strict = self._guard.choose_check(model)
        of_all = self._agreement, self._guard.waiting, check
        self._train_feed = Feed(*of_all, is_strict=is_strict, is_ahead=True)
        self._eval_feed = Feed(*of_all, is_strict=is_strict, is_ahead=False)
        # Those that this pipeline does not turn to are dropped at its end, with their workers.
        self._left = [*self._guard.waiting]
        if hot_set is not None:
            self._train_feed.num_left = adapt_every
        self._state = _State.OPEN
        self._was_drained = False
        if isinstance(self._pipeline, LookAheadPipeline):
            self._guard.were_rows_written()
            self._pipeline.watch_rows(self._ask_for_writes)

    def progress(self, batches: Iterator[Any]) -> Any:
        """Compute the next batch and, in training mode, update the model.

        Some batches are prefetched in training. With a new iterator, those of the previous one come
        first.

        Returns:
            The model's second output; the detached loss if it only returns a loss.

        Raises:
            StopIteration: If all batches are computed. The next call asks the iterator again.
            RuntimeError: If the ranks have different numbers of batches, once the common ones are
                computed; if the model changes the features before a collection reads them; if an
                earlier step failed.
            ValueError: If a batch cannot be looked up; if the model returns no loss, or one without
                gradient in training.
            RankError: On the ranks without an error of their own.
        """
        self._check_open()
        if not hasattr(batches, "__next__"):
            raise TypeError(
                f"batches: expected an iterator, got {type(batches).__name__}. Pass iter(...) of "
                "it, the same one until it is exhausted."
            )
        is_training = self._model.training
        self._guard.check_unchanged()
        if is_training and not torch.is_grad_enabled():
            raise RuntimeError(
                "hotrec.Pipeline.progress: expected gradients in training mode, got them disabled "
                "(torch.no_grad). Call model.eval() to evaluate, or leave the block to train."
            )
        feed, source = self._feed_of(batches, is_training=is_training)
        is_ahead = is_training or bool(feed.held)
        if is_ahead:
            self._pipeline.check_mode()
        with self._inside(feed, is_training=is_training):
            feed.turn_to(source)
            try:
                output = self._pipeline.progress(feed) if is_ahead else self._evaluate(feed)
                feed.held.popleft()
                if feed.is_paused:
                    self._adapt(feed)
                return output
            except EndOfDataError:
                pass
        return feed.raise_end()

    def _check_open(self) -> None:
        self._guard.check_whole("hotrec.Pipeline", "an open pipeline")
        if self._state is not _State.OPEN:
            raise RuntimeError(
                f"hotrec.Pipeline: expected an open pipeline, got {self._state.value}."
            )

    @contextmanager
    def _inside(self, feed: Feed, *, is_training: bool) -> Iterator[None]:
        """A step. Unless it ends, ranks or rows may be apart, so that no other one starts."""
        self._state = _State.INSIDE
        try:
            with self._guard.inside(feed):
                yield
        except BaseException as caught:
            error = self._agreement.error_of_all(caught)
            said = error if isinstance(error, RankError) else RankError(rank(), first_line(error))
            untrained = self._train_feed.untrained
            done, way_out = "Nothing was updated", "create a new one"
            is_final = is_training or world_size() > 1
            if is_final:
                done = "Rows may be updated in part" if is_training else "Ranks may be apart"
                way_out = "go on from a checkpoint, with a new model, parallelize and Pipeline"
            self._guard.fail(
                f"failed: {str(said).partition(chr(10))[0].rstrip('.')}. {done}, and batches "
                f"{untrained} were taken, but not trained. Close the pipeline and {way_out}.",
                is_final=is_final,
            )
            if error is caught:
                raise
            raise error from caught
        self._state = _State.OPEN

    def _feed_of(self, batches: Iterator[Any], *, is_training: bool) -> tuple[Feed, Source]:
        of_train, of_eval, waiting = self._train_feed, self._eval_feed, self._guard.waiting
        known = [*of_train.sources, of_eval.source, *waiting]
        source = next((one for one in known if one.batches is batches), None) or Source(batches)
        waiting[:] = [one for one in waiting if one.waiting]
        # An error of it may offer a batch again, which the next pipeline must compute.
        self._left = [one for one in self._left if one is not source]
        is_ahead = is_training or source is of_train.source
        return of_train if is_ahead else of_eval, source

    def _evaluate(self, feed: Feed) -> Any:
        """Compute a batch in line, keeping the batches prefetched for training."""
        batch = next(feed, None)
        if batch is None:
            raise EndOfDataError
        _, output = self._model(batch.to(self._device, non_blocking=True))
        return output

    def _adapt(self, feed: Feed) -> None:
        """Decide on hot rows, with no batch in flight."""
        assert self._hot_set is not None
        self._pipeline.flush()
        self._hot_set.adapt()
        self._guard.were_rows_written()
        feed.num_left = self._adapt_every

    def _ask_for_writes(self) -> Callable[[], bool]:
        """Start to ask all ranks whether their programs wrote rows, which were read ahead."""
        may_differ = self._guard.were_rows_written() or self._was_drained
        self._was_drained = False
        found = self._agreement.start([int(may_differ)])
        return lambda: any(is_written for [is_written] in found())

    def drain(self) -> None:
        """Wait until all updates are applied on this rank, before you read or write weights.

        Prefetched batches are kept. With look-ahead their rows are read again, since writes to
        ``parameter.data`` leave no trace.
        """
        self._pipeline.flush()
        self._was_drained = True

    def close(self) -> None:
        """Apply all updates, and stop the pipeline's threads and process groups.

        A ``with`` block does this at its end, and after an error it does not wait for other ranks.
        """
        if self._state is not _State.CLOSED:
            # After a failure, as far as they go.
            has_failed = bool(self._guard.failure)
            untrained = self._train_feed.untrained
            if untrained and not has_failed:
                logger.warning(
                    "hotrec.Pipeline: closed with batches %s taken, but not trained. Only a new "
                    "one of the model computes them, if it gets the same iterator next.",
                    untrained,
                )
            with suppress(Exception) if has_failed else nullcontext():
                self.drain()
            self._close()

    def _close(self) -> None:
        self._state = _State.CLOSED
        self._pipeline.close()
        self._agreement.close()
        waiting = self._guard.waiting
        waiting[:] = [source for source in waiting if source not in self._left]
        self._left.clear()
        self._train_feed.close()
        self._eval_feed.close()
        self._guard.leave_pipeline(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._close()
