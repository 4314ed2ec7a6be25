"""The training pipelines: TorchRec's, and hotrec's own, which prefetches embedding rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.types import ShardedModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from hotrec.data.batch import Batch
from hotrec.embedding.prefetch.row_ahead import Part, RowsAhead
from hotrec.runtime.ranks import new_group
from hotrec.runtime.stages import backward_point, mark, mark_backward, named_range
from hotrec.train.dense_sync import DenseSync, dense_parameters
from hotrec.types import WireType

# The model's detached outputs: loss (), logits (B,), labels (B,).
Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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

    @abstractmethod
    def progress(self, batches: Iterator[Batch]) -> Output:
        """Compute the next batch and, in training mode, update the model.

        Returns:
            Loss (), logits (B,) and labels (B,), detached.

        Raises:
            RuntimeError: if ``batches`` has ended, or the model does not fit the pipeline.
        """

    @abstractmethod
    def drain(self) -> None:
        """Wait until all threads are idle and all updates are applied; held batches stay held.

        Call this before reading weights.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the pipeline's threads, if any, and restore the model's forward."""

    def _no_batch(self) -> RuntimeError:
        # An escaping StopIteration would silently end a loop of the caller.
        return RuntimeError(
            f"pipeline {self.kind}: expected another batch, got the end of the data. "
            "Ask for as many steps as the loader has."
        )


class MarkedOptimizer:
    """An optimizer for TorchRec's pipelines that marks stages and clips gradients.

    Step hooks cannot do this, since KeyedOptimizer never calls them.

    Args:
        optimizer: The optimizer to call.
        clipped: Parameters whose joint gradient norm is clipped before each step.
        max_norm: The largest joint norm; None disables clipping.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clipped: Sequence[nn.Parameter] = (),
        max_norm: float | None = None,
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
    """Mark the lookups of TorchRec's sharded ``EmbeddingBagCollection`` modules, once per model.

    In backward, sharded lookups update their rows once the gradients have arrived. Data-parallel
    tables count as lookup in both directions.
    """
    for module in model.modules():
        # hotrec's sharded modules mark themselves.
        if type(module) is ShardedEmbeddingBagCollection:
            lookups: Any = module._lookups
            for lookup in lookups:
                _mark_lookup(lookup)


def _mark_lookup(lookup: nn.Module) -> None:
    is_replicated = isinstance(lookup, DistributedDataParallel)
    points: list[torch.Tensor | None] = []

    def before(_: nn.Module, inputs: Any) -> None:
        mark("ids_exchange")
        stage = "row_lookup" if is_replicated else "row_update"
        points.append(backward_point(stage, inputs[0].values()))

    def after(_: nn.Module, inputs: Any, pooled: torch.Tensor) -> torch.Tensor:
        mark("row_lookup")
        return mark_backward(pooled, "grads_exchange", points.pop())

    lookup.register_forward_pre_hook(before)
    lookup.register_forward_hook(after)


class TorchRecPipeline(Pipeline):
    """One of TorchRec's pipelines; see ``make_pipeline`` for the arguments."""

    def __init__(
        self,
        kind: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        grad_clip_norm: float | None = None,
    ) -> None:
        super().__init__(kind, model, device)
        self._is_checked = False
        self._pipeline: TrainPipelineBase[Batch, Output] | TrainPipelineSparseDist[Batch, Output]
        clipped = list(dense_parameters(model).values()) if grad_clip_norm is not None else []
        marked: Any = MarkedOptimizer(optimizer, clipped, grad_clip_norm)
        if kind == "prefetch" and device.type == "cpu":
            raise ValueError(
                "pipeline prefetch: expected a CUDA device, whose caches it fills, got cpu. Use "
                "pipeline=sparse_dist."
            )
        if kind == "sparse_dist":
            self._pipeline = TrainPipelineSparseDist(model, marked, device)
        elif kind == "prefetch":
            self._pipeline = PrefetchTrainPipelineSparseDist(model, marked, device)
        else:
            self._pipeline = TrainPipelineBase(model, marked, device)
        mark_lookups(model)

    def start(self) -> None:
        if isinstance(self._pipeline, TrainPipelineBase):
            # Without a reset it ignores new iterators after the end of one.
            self._pipeline.reset()
        elif self._pipeline.batches:
            raise RuntimeError(
                f"pipeline {self.kind}: expected it drained, got {len(self._pipeline.batches)} "
                "batches in it. Progress until the iterator's last batch is computed."
            )

    def progress(self, batches: Iterator[Batch]) -> Output:
        try:
            output = self._pipeline.progress(batches)
        except StopIteration:
            raise self._no_batch() from None
        if not self._is_checked:
            self._check_all_pipelined()
            self._is_checked = True
        return output

    def drain(self) -> None:
        """Do nothing: TorchRec's pipelines have no thread."""

    def close(self) -> None:
        """Do nothing: TorchRec's pipelines have no thread."""

    def _check_all_pipelined(self) -> None:
        if self.kind == "base":
            return
        # TorchRec has no public attribute for this.
        pipelined = {id(module) for module in self._pipeline._pipelined_modules}
        sharded: dict[str, nn.Module] = {}
        for name, module in self.model.named_modules():
            is_inside = any(name.startswith(f"{outer}.") for outer in sharded)
            if isinstance(module, ShardedModule) and not is_inside:
                sharded[name] = module
        missing = [name for name, module in sharded.items() if id(module) not in pipelined]
        if missing:
            raise RuntimeError(
                f"pipeline {self.kind}: expected {len(sharded)} of {len(sharded)} sharded modules "
                f"pipelined, got {len(sharded) - len(missing)}; not pipelined: {missing}. Pass the "
                "batch's attributes to them unmodified, or use the base pipeline."
            )


@dataclass(frozen=True)
class LookAhead:
    """Settings of the look-ahead pipeline.

    Args:
        make_rows: Makes the row prefetcher; called on every rank when the pipeline is made.
        micro_batches: Whether to compute samples first whose rows have already arrived.
        wire_type: The type in which gradients of the dense layers are sent.
    """

    make_rows: Callable[[], RowsAhead]
    micro_batches: bool = False
    wire_type: WireType = WireType.fp32


class LookAheadPipeline(Pipeline):
    """Prefetches rows of future batches and updates dense layers late; see ``make_pipeline``.

    Args:
        model: A model sharded without DDP around its dense layers.
        optimizer: The optimizer from ``hotrec.embedding.make_optimizer``.

    Raises:
        ValueError: if DDP wraps the dense layers, or the optimizer has other parts.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        look_ahead: LookAhead,
        grad_clip_norm: float | None = None,
    ) -> None:
        super().__init__("look_ahead", model, device)
        # TorchRec's sharded modules also hold unused DDP lookups, but not as submodules.
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise ValueError(
                "pipeline look_ahead: expected dense layers without DDP, which would reduce their "
                "gradients a second time, got DDP. Shard the model with data_parallel=False."
            )
        parts = _parts_of(optimizer)
        self._hot = parts.get("hot")
        self._micro_batches = look_ahead.micro_batches
        self._rows = look_ahead.make_rows()
        self._dense = DenseSync(
            model, parts["dense"], new_group(), look_ahead.wire_type, grad_clip_norm
        )
        self._held: deque[Batch] = deque()
        self._has_ended = False
        self._was_training: bool | None = None

    def start(self) -> None:
        if self._held:
            raise RuntimeError(
                f"pipeline look_ahead: expected it drained, got {len(self._held)} batches in it. "
                "Progress until the iterator's last batch is computed."
            )
        self.drain()
        self._has_ended = False

    def progress(self, batches: Iterator[Batch]) -> Output:
        is_training = self.model.training
        if self._held and is_training is not self._was_training:
            raise RuntimeError(
                "pipeline look_ahead: expected it drained between training and evaluation, got "
                f"{len(self._held)} batches in it."
            )
        self._was_training = is_training
        self._fill(batches, is_training)
        if not self._held:
            raise self._no_batch()
        batch = self._held.popleft()
        self._rows.start_step()
        if is_training:
            output = self._train(batch)
        else:
            output = self._compute(batch, self._rows.parts(split=False)[0])
        if not self._held and self._has_ended:
            self.drain()
        return output

    def _fill(self, batches: Iterator[Batch], is_training: bool) -> None:
        while len(self._held) <= self._rows.depth and not self._has_ended:
            batch = next(batches, None)
            if batch is None:
                self._has_ended = True
                return
            batch = batch.to(self.device, non_blocking=True)
            self._rows.prefetch(batch.sparse, will_update=is_training, is_all_hot=batch.is_all_hot)
            self._held.append(batch)

    def _train(self, batch: Batch) -> Output:
        outputs = []
        parts = self._rows.parts(split=self._micro_batches)
        for part in parts:
            outputs.append(self._compute(batch, part))
        self._rows.end_backward()
        self._dense.finish_backward()
        self._rows.wait_for_hot_gradients()
        with named_range("optimizer"):
            if self._hot is not None:
                self._hot.step()
            self._dense.step()
        mark("optimizer")
        return _joined(outputs, [part.samples for part in parts])

    def _compute(self, batch: Batch, part: Part) -> Output:
        self._rows.wait_for_rows(part)
        some = _select(batch, part)
        with named_range("forward"):
            loss, output = self.model(some)
        mark("dense")
        if self.model.training:
            with named_range("backward"), self._dense.backward(is_last=part.is_last):
                loss.backward()
            mark("dense")
        detached: Output = output
        return detached

    def drain(self) -> None:
        self._rows.drain()
        self._dense.flush()

    def close(self) -> None:
        self._rows.close()
        self._dense.close()


def _parts_of(optimizer: torch.optim.Optimizer) -> dict[str, KeyedOptimizer]:
    if not isinstance(optimizer, CombinedOptimizer):
        raise ValueError(
            f"pipeline look_ahead optimizer: expected a CombinedOptimizer of the parts fused, hot "
            f"and dense, got {type(optimizer).__name__}. Make it with "
            "hotrec.embedding.make_optimizer."
        )
    parts = dict(optimizer.optimizers)
    unknown = sorted(set(parts) - {"fused", "hot", "dense"})
    if unknown or "dense" not in parts:
        raise ValueError(
            f"pipeline look_ahead optimizer: expected the parts fused, hot and dense, got "
            f"{sorted(parts)}. Use pipeline=sparse_dist."
        )
    return parts


def _select(batch: Batch, part: Part) -> Batch:
    if part.samples is None:
        return replace(batch, sparse=part.features)
    return replace(
        batch,
        dense=batch.dense.index_select(0, part.samples),
        sparse=part.features,
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


__all__ = ["PIPELINES", "LookAhead", "Output", "Pipeline", "make_pipeline"]

PIPELINES = ("look_ahead", "sparse_dist", "base", "prefetch")


def make_pipeline(
    kind: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    look_ahead: LookAhead | None = None,
    grad_clip_norm: float | None = None,
) -> Pipeline:
    """Make the pipeline that trains a sharded model with its optimizer.

    Args:
        kind: "look_ahead" (prefetches rows while the current batch computes), "sparse_dist"
            (prefetches ids only), "base" (only copies to the device ahead) or "prefetch"
            (TorchRec's, which fills the device caches of host tables).
        look_ahead: Settings of the look-ahead pipeline, which requires them.
        grad_clip_norm: Clips the joint norm of the dense layers' mean gradients to this value; None
            disables clipping. Rows are not clipped: their owners update them in backward.

    Raises:
        ValueError: if the kind is unknown, or does not fit the model.
    """
    if kind not in PIPELINES:
        raise ValueError(f"pipeline: expected one of {PIPELINES}, got {kind!r}.")
    if kind != "look_ahead":
        return TorchRecPipeline(kind, model, optimizer, device, grad_clip_norm)
    if look_ahead is None:
        raise ValueError(
            "pipeline look_ahead: expected its settings, got none. Pass look_ahead=LookAhead(...)."
        )
    return LookAheadPipeline(model, optimizer, device, look_ahead, grad_clip_norm)
