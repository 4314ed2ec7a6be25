"""The training pipelines: TorchRec's, and hotrec's own, which prefetches embedding rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.data.batch import Batch
from hotrec.embedding.optimizers import ModelOptimizer
from hotrec.embedding.pooled import ShardedPooledBags
from hotrec.embedding.row_ahead import Part, RowsAhead
from hotrec.embedding.tables import outermost_sharded
from hotrec.embedding.torchrec import (
    holds_batches,
    is_torchrecs,
    lookups,
    pipelined_modules,
    rewritten_forwards,
    wrap_rewriting,
)
from hotrec.routing.batches import features_of_each
from hotrec.routing.features import RoutedFeatures
from hotrec.runtime.stages import backward_point, mark, mark_backward, named_range
from hotrec.train.dense_sync import DenseSync, dense_parameters
from hotrec.train.traced import attributes_kept, first_line
from hotrec.types import PipelineKind, PipelineSpec

# The model's detached outputs: loss (), logits (B,), labels (B,).
Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class EndOfDataError(RuntimeError):
    """The iterator is exhausted; an escaping StopIteration would silently end a caller's loop."""


class Pipeline(ABC):
    """Runs the steps of a sharded model and its optimizer.

    In training mode ``progress`` updates the model, in evaluation mode it only computes. A pipeline
    may replace the model's forward, so evaluation runs through the pipeline too.

    Args:
        kind: The pipeline's name in the configuration.
        model: The sharded model.
        device: The model's device.
    """

    def __init__(self, kind: str, model: nn.Module, device: torch.device) -> None:
        self.kind = kind
        self.model = model
        self.device = device

    @abstractmethod
    def start(self) -> None:
        """Prepare for a new iterator.

        Raises:
            RuntimeError: if batches of the previous iterator have not been computed.
        """

    def check_mode(self) -> None:  # noqa: B027
        """Check that the model's mode is that of the batches in flight.

        Raises:
            RuntimeError: if they were prefetched for the other mode.
        """

    @abstractmethod
    def progress(self, batches: Iterator[Any]) -> Any:
        """Compute the next batch and, in training mode, update the model.

        Returns:
            The model's second output; for ``ClickTask`` loss (), logits (B,) and labels (B,),
            detached; for ``RetrievalTask`` also vectors in evaluation.

        Raises:
            EndOfDataError: if ``batches`` is exhausted.
            RuntimeError: if the model does not fit the pipeline.
        """

    @abstractmethod
    def drain(self) -> None:
        """Wait until all threads are idle and all updates are applied; keep batches in flight.

        This changes no result.
        """

    def flush(self) -> None:
        """Drain, and write rows behind slots back, which may round them: before reading weights."""
        self.drain()

    @abstractmethod
    def close(self) -> None:
        """Stop the pipeline's threads and process groups, and restore the model's forward.

        Call on every rank, also after a failure. Idempotent.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_drained(self, held: Sized, why: str = "") -> None:
        if held:
            raise RuntimeError(
                f"pipeline {self.kind}: expected an empty pipeline{why}, got {len(held)} batches "
                "in flight. Call progress until the iterator is exhausted."
            )

    def _no_batch(self) -> EndOfDataError:
        return EndOfDataError(
            f"pipeline {self.kind}: expected another batch, got the end of the data. Reduce the "
            "number of steps to that of the loader."
        )


class MarkedOptimizer:
    """An optimizer for TorchRec's pipelines that marks stages and clips gradients.

    Step hooks cannot do this, since KeyedOptimizer never calls them.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, clipped: list[nn.Parameter], max_norm: float | None
    ) -> None:
        self._optimizer = optimizer
        self._clipped, self._max_norm = clipped, max_norm

    def zero_grad(self) -> None:
        mark("other")
        self._optimizer.zero_grad()
        mark("other")

    def step(self) -> None:
        mark("hot_exchange")  # DDP waited at the end of backward, so gradients are means
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._clipped, self._max_norm)
        self._optimizer.step()
        mark("optimizer")


def mark_lookups(model: nn.Module) -> None:
    """Mark the lookups of TorchRec's sharded collections, once per model.

    In backward, sharded lookups update their rows once the gradients have arrived. Data-parallel
    tables count as lookup in both directions. hotrec's sharded modules mark themselves.
    """
    for module in model.modules():
        if is_torchrecs(module) and not isinstance(module, ShardedPooledBags):
            for lookup in lookups(module):
                _mark_lookup(lookup)


def _mark_lookup(lookup: nn.Module) -> None:
    stage = "row_lookup" if isinstance(lookup, DistributedDataParallel) else "row_update"
    points: list[torch.Tensor | None] = []

    def before(_: nn.Module, inputs: Any) -> None:
        mark("ids_exchange")
        points.append(backward_point(stage, inputs[0].values()))

    def after(_: nn.Module, inputs: Any, pooled: torch.Tensor) -> torch.Tensor:
        mark("row_lookup")
        return mark_backward(pooled, "grads_exchange", points.pop())

    lookup.register_forward_pre_hook(before)
    lookup.register_forward_hook(after)


TORCHREC_PIPELINES: dict[str, Any] = {
    "sparse_dist": TrainPipelineSparseDist,
    "base": TrainPipelineBase,
    "prefetch": PrefetchTrainPipelineSparseDist,
}


class TorchRecPipeline(Pipeline):
    """One of TorchRec's pipelines; see ``make_pipeline`` for the arguments.

    Between steps the model has its own forward, even with batches in flight, so any loop may use it
    then.
    """

    def __init__(
        self,
        kind: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        grad_clip_norm: float | None = None,
        *,
        may_read_late: bool = False,
    ) -> None:
        if kind == "prefetch" and device.type == "cpu":
            raise ValueError(
                "pipeline prefetch: expected a CUDA device, whose caches it fills, got cpu. Use "
                "pipeline=sparse_dist."
            )
        super().__init__(kind, model, device)
        self._may_read_late = may_read_late
        clipped = list(dense_parameters(model).values())
        marked: Any = MarkedOptimizer(optimizer, clipped, grad_clip_norm)
        self._pipeline: Any = TORCHREC_PIPELINES[kind](model, marked, device)
        # Modules whose forward TorchRec replaces: its forward of each, and the module's own.
        self._forwards: list[tuple[nn.Module, Any, Any]] = []
        self._is_inside = False
        self._hooks: list[Any] = []
        if kind != "base":
            wrap_rewriting(self._pipeline, self._rewrite_once)
        mark_lookups(model)

    def start(self) -> None:
        if isinstance(self._pipeline, TrainPipelineBase):
            self._pipeline.reset()
        else:
            self._check_drained(self._pipeline.batches)

    def progress(self, batches: Iterator[Any]) -> Any:
        if not holds_batches(self._pipeline):
            self._pipeline.reset()  # otherwise it never asks an iterator again that has ended once
        with self._rewritten():
            try:
                return self._pipeline.progress(batches)
            except StopIteration:
                raise self._no_batch() from None

    @contextmanager
    def _rewritten(self) -> Iterator[None]:
        """Replace the modules' forward by TorchRec's inside the block."""
        for module, of_torchrec, _ in self._forwards:
            module.forward = of_torchrec
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
            for module, _, own in self._forwards:
                module.forward = own

    def _rewrite_once(self, rewrite: Callable[[], None]) -> None:
        """Trace the features of each module with TorchRec at the first batch.

        Raises:
            RuntimeError: If torch.fx cannot trace the model, or a module's features are computed.
        """
        pipeline, sharded = self._pipeline, outermost_sharded(self.model)
        inside = {inner for module in sharded.values() for inner in module.modules()}
        try:
            with attributes_kept(m for m in self.model.modules() if m not in inside):
                rewrite()
        except Exception as error:
            if pipelined_modules(pipeline):  # it was traced
                raise
            raise RuntimeError(
                f"pipeline {self.kind}: expected a forward that torch.fx can trace, got "
                f'{first_line(error)}. Pass pipeline="base", or avoid data-dependent control flow '
                "in the forward of modules with embeddings."
            ) from error
        finally:
            self._forwards = rewritten_forwards(pipeline)
        pipelined = pipelined_modules(pipeline)
        missing = [name for name, module in sharded.items() if module not in pipelined]
        if missing and not self._may_read_late:
            raise RuntimeError(
                f"pipeline {self.kind}: expected {len(sharded)} of {len(sharded)} sharded modules "
                f"pipelined, got {len(sharded) - len(missing)}; not pipelined: {missing}. Pass the "
                'batch\'s attributes to them unmodified, or use pipeline="base".'
            )
        if self.kind == "sparse_dist":
            for module in pipelined:
                hook = module.register_forward_pre_hook(self._check_call, with_kwargs=True)
                self._hooks.append(hook)

    def _check_call(self, module: Any, args: Any, kwargs: Any) -> None:
        """Check that a module is called as in the trace."""
        if not self._is_inside:
            return
        forward = module.forward
        expected, named = forward.args.build_args_kwargs(self._pipeline.batches[0])
        given = (*args, *kwargs.values())
        if not all(map(_is_same, given, (*expected, *named.values()))):
            raise self._unlike(forward.name, "the traced features of the batch, got different ones")
        if forward.name not in forward.get_context().input_dist_tensors_requests:
            raise self._unlike(forward.name, "one call per step, got two")

    def _unlike(self, name: str, what: str) -> RuntimeError:
        return RuntimeError(
            f"pipeline {self.kind} collection {name}: expected {what}. Call it once, with the "
            'batch\'s features that the first step reads, or use pipeline="base".'
        )

    def drain(self) -> None:
        """No-op: TorchRec's pipelines have no thread."""

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, KeyedJaggedTensor) and isinstance(other, KeyedJaggedTensor):
        return value.values() is other.values() and value.keys() == other.keys()
    return value is other or (isinstance(value, str | int | float | None) and value == other)


class LookAheadPipeline(Pipeline):
    """Prefetches rows of future batches and updates dense layers late; see ``make_pipeline``.

    Raises:
        ValueError: if DDP wraps the dense layers, or the optimizer has other parts.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        spec: PipelineSpec,
        grad_clip_norm: float | None = None,
    ) -> None:
        super().__init__("look_ahead", model, device)
        # TorchRec's sharded modules also have unused DDP lookups, but not as submodules.
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise ValueError(
                "pipeline look_ahead: expected dense layers without DDP (which would reduce "
                "gradients twice), got DDP. Shard the model with data_parallel=False."
            )
        parts = _parts_of(optimizer)
        self._hot = parts.get("hot")
        self._micro_batches = spec.micro_batches
        self._rows = RowsAhead(
            model, device, depth=spec.depth, window=spec.window, wire_type=spec.wire
        )
        self._feature_names = self._rows.feature_names
        try:
            self._dense = DenseSync(
                model, parts["dense"], spec.wire, grad_clip_norm, self._rows.line
            )
        except BaseException:
            self._rows.close()
            raise
        # Batches, and the events of their copies if these have a separate stream.
        self._held: deque[tuple[Any, Any]] = deque()
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._has_ended = False
        self._was_training: bool | None = None
        self._optimizer = optimizer
        if isinstance(optimizer, ModelOptimizer):
            optimizer.before_reading = self.flush
            optimizer.before_loading = self._drop_rows

    def watch_rows(self, ask_for_writes: Callable[[], Callable[[], bool]]) -> None:
        """Before each step ask whether rows may be other ones than those read ahead.

        Args:
            ask_for_writes: Starts to ask all ranks; returns a function that waits for the answer.
        """
        self._rows.ask_for_writes = ask_for_writes

    def start(self) -> None:
        self._check_drained(self._held)
        self.flush()
        self._has_ended = False

    def check_mode(self) -> None:
        if self.model.training is not self._was_training:
            self._check_drained(self._held, " between training and evaluation")

    def progress(self, batches: Iterator[Any]) -> Any:
        self.check_mode()
        is_training = self._was_training = self.model.training
        if not self._held:
            self._has_ended = False  # an iterator that has ended is asked again
        is_written = self._rows.ask_for_writes()
        self._fill(batches, is_training)
        self._rows.restart_if_stale(is_written)
        if not self._held:
            raise self._no_batch()
        batch, copied = self._held.popleft()
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)
            batch.record_stream(torch.cuda.current_stream())
        self._rows.start_step()
        if is_training:
            output = self._train(batch)
        else:
            output = self._compute(batch, self._rows.parts(split=False)[0])
        if not self._held and self._has_ended:
            self.flush()
        return output

    def _fill(self, batches: Iterator[Any], is_training: bool) -> None:
        num_held = self._rows.depth + self._rows.window
        while len(self._held) <= num_held and not self._has_ended:
            batch = next(batches, None)
            if batch is None:
                self._has_ended = True
                return
            # A batch that the loader has routed is only needed at its own step.
            is_routed = isinstance(batch, Batch) and isinstance(batch.sparse, RoutedFeatures)
            with torch.cuda.stream(self._copies if is_routed else None):
                batch = batch.to(self.device, non_blocking=True)
                features = features_of_each(batch, self._feature_names)
                is_all_hot = isinstance(batch, Batch) and batch.is_all_hot
                self._rows.prefetch(features, will_update=is_training, is_all_hot=is_all_hot)
                copied = self._copies.record_event() if self._copies and is_routed else None
            self._held.append((batch, copied))

    def _train(self, batch: Any) -> Any:
        parts = self._rows.parts(split=self._micro_batches)
        outputs = [self._compute(batch, part) for part in parts]
        self._rows.end_backward()
        self._dense.finish_backward()
        self._rows.send_late()
        self._rows.wait_for_hot_gradients()
        with named_range("optimizer"):
            if self._hot is not None:
                self._hot.step()
            self._dense.step()
        mark("optimizer")
        return _joined(outputs, [part.samples for part in parts])

    def _compute(self, batch: Any, part: Part) -> Any:
        self._rows.wait_for_rows(part)
        with named_range("forward"):
            loss, output = self.model(_select(batch, part))
        mark("dense")
        if self.model.training:
            with named_range("backward"), self._dense.backward(is_last=part.is_last):
                # As in TorchRec's pipelines, a loss may be a vector.
                torch.sum(loss, dim=0).backward()
            mark("dense")
        return output

    def drain(self) -> None:
        self._rows.drain()
        self._dense.flush()

    def flush(self) -> None:
        self.drain()
        self._rows.flush()

    def _drop_rows(self) -> None:
        self._rows.drop_rows()
        self._dense.flush()

    def close(self) -> None:
        self._rows.close()
        self._dense.close()
        optimizer = self._optimizer
        if isinstance(optimizer, ModelOptimizer) and optimizer.before_reading == self.flush:
            # No thread remains to wait for.
            optimizer.before_reading = optimizer.before_loading = None
        self._held.clear()


def _parts_of(optimizer: torch.optim.Optimizer) -> dict[str, KeyedOptimizer]:
    parts = dict(optimizer.optimizers) if isinstance(optimizer, CombinedOptimizer) else {}
    if "dense" not in parts or not parts.keys() <= {"fused", "hot", "dense"}:
        raise ValueError(
            "pipeline look_ahead optimizer: expected the parts fused, hot and dense, got "
            f"{sorted(parts) or type(optimizer).__name__}. Create it with "
            "hotrec.embedding.make_optimizer, or use pipeline=sparse_dist."
        )
    return parts


def _select(batch: Any, part: Part) -> Any:
    if part.samples is None:
        return batch
    [features] = part.features
    return replace(
        batch,
        dense=batch.dense.index_select(0, part.samples),
        sparse=features,
        labels=batch.labels.index_select(0, part.samples),
        weights=batch.weights.index_select(0, part.samples),
    )


def _joined(outputs: Sequence[Output], samples: Sequence[torch.Tensor | None]) -> Output:
    """Combine the outputs of the parts of a batch, samples in their original order."""
    if len(outputs) == 1:
        return outputs[0]
    order = torch.cat([part for part in samples if part is not None])
    losses, logits, labels = zip(*outputs, strict=True)
    logits_B, labels_B = torch.cat(logits), torch.cat(labels)
    return (
        torch.stack(losses).sum(),
        torch.empty_like(logits_B).index_copy_(0, order, logits_B),
        torch.empty_like(labels_B).index_copy_(0, order, labels_B),
    )


def make_pipeline(
    spec: PipelineSpec,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    grad_clip_norm: float | None = None,
    *,
    may_read_late: bool = False,
) -> Pipeline:
    """Make the pipeline that trains a sharded model with its optimizer; a collective.

    Args:
        spec: look_ahead (prefetches rows while the current batch computes), sparse_dist (prefetches
            ids only), base (only copies to the device ahead) or prefetch (TorchRec's, which fills
            the device caches of host tables). Its other settings are those of look_ahead.
        model: The sharded model.
        optimizer: The optimizer of all its parameters.
        device: The device of the model.
        grad_clip_norm: Clips the joint norm of the dense layers' mean gradients to this value; None
            disables clipping. Rows are not clipped: their owners update them in backward.
        may_read_late: Whether sparse_dist reads features that the model computes in its forward.

    Raises:
        ValueError: if the kind is auto, or does not fit the model.
    """
    if spec.is_look_ahead:
        return LookAheadPipeline(model, optimizer, device, spec, grad_clip_norm)
    if spec.kind.value not in TORCHREC_PIPELINES:
        kinds = [PipelineKind.look_ahead.value, *TORCHREC_PIPELINES]
        raise ValueError(f"pipeline: expected one of {kinds}, got {spec.kind.value}. Choose one.")
    return TorchRecPipeline(
        spec.kind.value, model, optimizer, device, grad_clip_norm, may_read_late=may_read_late
    )
