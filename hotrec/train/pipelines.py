"""The train pipelines: TorchRec's, and hotrec's own, in which rows travel ahead of their step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

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
from hotrec.runtime.ranks import new_group
from hotrec.runtime.stages import backward_point, mark, mark_backward, named_range
from hotrec.train.dense_sync import DenseSync, dense_parameters
from hotrec.types import WireType

# What the model returns beside the loss to differentiate: loss (), logits (B,), labels (B,).
Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Pipeline(ABC):
    """A model and its optimizer, and the order in which a step is made.

    While ``model`` is in training mode ``progress`` makes an update; in evaluation mode it only
    computes. The model's forward is the pipeline's to change, so evaluation goes through here too.

    Args:
        kind: its name.
        model: sharded.
        device: of the model.
    """

    def __init__(self, kind: str, model: nn.Module, device: torch.device) -> None:
        self.kind = kind
        self.model = model
        self.device = device

    @abstractmethod
    def start(self) -> None:
        """Get ready for a new iterator.

        Raises:
            RuntimeError: if batches of the last one have not been computed.
        """

    @abstractmethod
    def progress(self, batches: Iterator[Batch]) -> Output:
        """Compute the next batch of ``batches``; one update if the model is in training mode.

        Returns:
            Loss (), logits (B,) and labels (B,), detached.

        Raises:
            RuntimeError: if ``batches`` has ended, or the model does not fit the pipeline.
        """

    @abstractmethod
    def drain(self) -> None:
        """Wait until no thread is at work and every update made so far is in the weights.

        To be called before weights are read. Batches that are held stay held.
        """

    @abstractmethod
    def close(self) -> None:
        """End the pipeline's threads, if any, and give the model its own forward back."""

    def _no_batch(self) -> RuntimeError:
        # A StopIteration that escapes would silently end whatever loop stands above.
        return RuntimeError(
            f"pipeline {self.kind}: expected another batch, got the end of the data. "
            "Ask for as many steps as the loader has."
        )


class MarkedOptimizer:
    """What TorchRec's pipelines call of an optimizer, with marks.

    ``register_step_pre_hook`` would do, but KeyedOptimizer never calls the hooks.

    Args:
        optimizer: that does the work.
        clipped: parameters whose gradients are scaled down to ``max_norm`` together before it.
        max_norm: None to leave them as they are.
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
    """Mark the lookups of TorchRec's sharded ``EmbeddingBagCollection`` modules, both ways.

    To be called once for a model. In backward a sharded lookup updates its rows, and autograd comes
    to it when the gradients have arrived. That of data-parallel tables counts as lookup, both ways.
    """
    for module in model.modules():
        # hotrec's own kinds mark themselves.
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
    """One of TorchRec's pipelines; arguments as for ``make_pipeline``."""

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
            # It never asks another iterator by itself once one has ended.
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
        """TorchRec's pipelines have no thread; what they gave to the process group is its own."""

    def close(self) -> None:
        """There is nothing to end."""

    def _check_all_pipelined(self) -> None:
        if self.kind == "base":
            return
        # The one private attribute of TorchRec that hotrec reads; there is no public one.
        pipelined = {id(module) for module in self._pipeline._pipelined_modules}
        sharded = _sharded_modules(self.model)
        missing = [name for name, module in sharded.items() if id(module) not in pipelined]
        if missing:
            raise RuntimeError(
                f"pipeline {self.kind}: expected {len(sharded)} of {len(sharded)} sharded modules "
                f"pipelined, got {len(sharded) - len(missing)}; not pipelined: {missing}. Pass the "
                "batch's attributes to them unmodified, or use the base pipeline."
            )


def _sharded_modules(model: nn.Module) -> dict[str, ShardedModule[Any, Any, Any, Any]]:
    """The outermost sharded modules by name; what they hold inside is theirs to call."""
    found: dict[str, ShardedModule[Any, Any, Any, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule) and not any(
            name.startswith(f"{outer}.") for outer in found
        ):
            found[name] = module
    return found


class Part(Protocol):
    """Samples of a batch that are computed together.

    Attributes: ``samples`` int64 (B',) or None for all, ``features`` to call the model with, and
    ``is_last``, of the batch's parts.
    """

    @property
    def samples(self) -> torch.Tensor | None: ...
    @property
    def features(self) -> Any: ...
    @property
    def is_last(self) -> bool: ...


class RowSource(Protocol):
    """What brings rows and takes gradients: ``hotrec.embedding.RowsAhead``, which says more."""

    depth: int

    def prefetch(self, features: Any, *, will_update: bool, is_all_hot: bool) -> None: ...
    def start_step(self) -> None: ...
    def parts(self, *, split: bool) -> Sequence[Any]: ...
    def wait_for_rows(self, part: Any) -> None: ...
    def end_backward(self) -> None: ...
    def wait_for_hot_gradients(self) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class LookAhead:
    """What the pipeline look_ahead needs beside model and optimizer.

    Args:
        make_rows: called once, when the pipeline is made, on every rank.
        micro_batches: compute the samples first that need not wait for rows.
        wire_type: in which the dense layers' gradients travel.
    """

    make_rows: Callable[[], RowSource]
    micro_batches: bool = False
    wire_type: WireType = WireType.fp32


class LookAheadPipeline(Pipeline):
    """See the module docstring.

    Args:
        model: sharded without DDP around its dense layers.
        optimizer: from ``hotrec.embedding.make_optimizer``.

    Raises:
        ValueError: if the model or the optimizer is not of this kind.
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
        if any(_is_around_dense(module) for module in model.modules()):
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


def _is_around_dense(module: nn.Module) -> bool:
    """DDP around lookups stays in TorchRec's sharded modules, unused; it is in no module list."""
    return isinstance(module, DistributedDataParallel)


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
    """The loss of the whole batch, and its samples in their order."""
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
    """Put a sharded model and its optimizer into a pipeline.

    Args:
        kind: "look_ahead" (rows of the next batches travel while the current one computes),
            "sparse_dist" (only their ids do), "base" (only the copy to the device is ahead) or
            "prefetch" (TorchRec's, into the device caches of host tables).
        look_ahead: what the pipeline of this name needs.
        grad_clip_norm: scale the gradients of the dense layers down to this norm, that of all of
            them together, after their mean over the ranks; None not to. Rows are not clipped:
            their gradients go to their owners, who update them in backward.

    Raises:
        ValueError: if the kind is unknown, or the model does not fit it.
    """
    if kind not in PIPELINES:
        raise ValueError(f"pipeline: expected one of {PIPELINES}, got {kind!r}.")
    if kind != "look_ahead":
        return TorchRecPipeline(kind, model, optimizer, device, grad_clip_norm)
    if look_ahead is None:
        raise ValueError(
            "pipeline look_ahead: expected what feeds it rows, got none. Give make_pipeline "
            "look_ahead=LookAhead(...)."
        )
    return LookAheadPipeline(model, optimizer, device, look_ahead, grad_clip_norm)
