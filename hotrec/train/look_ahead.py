"""hotrec's own pipeline: rows of the next batches travel while the current one computes.

Also, or instead, a batch may be computed in two parts: the samples whose rows are all here first,
while the rows of the others travel (Hotline, Adnan et al. 2024); one update for both. The loss of a
part is the sum over its samples, divided by the samples of the whole global batch, so the gradients
of the parts add up to the batch's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from hotrec.batch import Batch
from hotrec.distributed import new_group
from hotrec.stages import mark, named_range
from hotrec.train.dense import DenseSync
from hotrec.train.pipeline_base import Output, Pipeline
from hotrec.wire import WireType


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

    def admit(self, features: Any, *, will_update: bool, is_all_hot: bool) -> None: ...
    def begin(self) -> None: ...
    def parts(self, *, split: bool) -> Sequence[Any]: ...
    def enter(self, part: Any) -> None: ...
    def end_backward(self) -> None: ...
    def finish(self) -> None: ...
    def settle(self) -> None: ...
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
    wire_type: WireType = WireType.FP32


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
        self.settle()
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
        self._rows.begin()
        if is_training:
            output = self._train(batch)
        else:
            output = self._compute(batch, self._rows.parts(split=False)[0])
        if not self._held and self._has_ended:
            self.settle()
        return output

    def _fill(self, batches: Iterator[Batch], is_training: bool) -> None:
        while len(self._held) <= self._rows.depth and not self._has_ended:
            batch = next(batches, None)
            if batch is None:
                self._has_ended = True
                return
            batch = batch.to(self.device, non_blocking=True)
            self._rows.admit(batch.sparse, will_update=is_training, is_all_hot=batch.is_all_hot)
            self._held.append(batch)

    def _train(self, batch: Batch) -> Output:
        outputs = []
        parts = self._rows.parts(split=self._micro_batches)
        for part in parts:
            outputs.append(self._compute(batch, part))
        self._rows.end_backward()
        self._dense.finish_backward()
        self._rows.finish()
        with named_range("optimizer"):
            if self._hot is not None:
                self._hot.step()
            self._dense.step()
        mark("optimizer")
        return _joined(outputs, [part.samples for part in parts])

    def _compute(self, batch: Batch, part: Part) -> Output:
        self._rows.enter(part)
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

    def settle(self) -> None:
        self._rows.settle()
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
