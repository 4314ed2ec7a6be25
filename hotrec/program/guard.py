"""Refuses loops that would train the model of ``parallelize`` incorrectly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.optimizers import TABLES, ModelOptimizer, hot_replicas
from hotrec.embedding.sharding import ShardedHotColdCollection
from hotrec.embedding.tables import outermost_sharded
from hotrec.embedding.torchrec import (
    call_after_backward,
    num_writes,
    table_configs,
    tensor_of_autograd,
    tensors_in,
)
from hotrec.program.choice import OFF, Choice
from hotrec.program.features import name_of_user
from hotrec.program.feed import Agreement, Feed, check_sizes, factor_of, num_samples
from hotrec.routing.batches import features_of_each
from hotrec.routing.checks import check_features
from hotrec.routing.features import Column
from hotrec.runtime.ranks import same_verdict
from hotrec.train.dense_sync import dense_parameters
from hotrec.train.traced import Path, features_read, follow
from hotrec.types import PipelineKind


@dataclass(frozen=True)
class GuardedLookup:
    """The features of a batch that a sharded module reads."""

    name: str
    module: nn.Module
    columns: Sequence[Column]
    num_rows: Mapping[str, int]

    def check(self, features: Any) -> None:
        """Raise a ValueError if these features cannot be looked up; routed ones are checked."""
        if isinstance(features, KeyedJaggedTensor):
            check_features(features, self.columns, self.num_rows)


def lookups(model: nn.Module) -> list[GuardedLookup]:
    """The modules of a sharded model whose ids are rows of their tables."""
    found = []
    for name, module in outermost_sharded(model).items():
        tables: Any
        if isinstance(module, ShardedHotColdCollection):
            tables = module.tables
        elif type(module) in (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection):
            tables = table_configs(module)
        else:
            continue
        columns = [
            Column(feature, feature, table.name, is_mean=False)
            for table in tables
            for feature in table.feature_names
        ]
        found.append(
            GuardedLookup(name, module, columns, {t.name: t.num_embeddings for t in tables})
        )
    return found


class Guard:
    """Watches the steps of a model, in ``hotrec.Pipeline`` and in other loops; by ``guard``.

    Under look-ahead a pass outside of a ``Pipeline`` would train the dense layers of each rank on
    its own samples. It is refused instead of corrected: it would lose the overlap that the plan was
    chosen for. The other choices train in any loop with one backward pass per step, since cold rows
    are updated in backward.
    """

    def __init__(self, model: DistributedModelParallel, choice: Choice) -> None:
        self._kind = choice.pipeline
        self._is_ahead = choice.pipeline is PipelineKind.look_ahead
        self._is_plain = choice.name == OFF
        # The batches of the pipeline whose step is being computed.
        self._feed: Feed | None = None
        self._pipeline: object | None = None
        self._lookups = lookups(_unwrapped(model))
        self._has_dense = bool(dense_parameters(model))
        # Parameters with a gradient since the last step.
        self._arrived: set[torch.Tensor] = set()
        self._is_called = False  # with gradients, since the last step
        self._agreement: Agreement | None = None
        self._sizes: Callable[[], list[list[int]]] | None = None
        model.register_forward_pre_hook(self._note_call)
        model.register_forward_hook(self._weigh)
        for lookup in self._lookups:
            check = partial(self._check_features, lookup)
            lookup.module.register_forward_pre_hook(check, with_kwargs=True)
        if self._is_ahead:
            for module in (model, _unwrapped(model), *(lookup.module for lookup in self._lookups)):
                module.register_forward_pre_hook(self._check_forward)
        # Gradients of replicated rows after backward.
        self._left: dict[torch.Tensor, tuple[int, int] | None] = {}
        self._rows: list[torch.Tensor] = []
        if self._is_plain:
            return
        for path, parameter in dense_parameters(model).items():
            name = name_of_user(path)
            if not self._is_ahead:
                parameter.register_hook(partial(self._check_cleared, name, parameter))
            parameter.register_post_accumulate_grad_hook(partial(self._note_gradient, name))

    def watch_rows(self, model: DistributedModelParallel, optimizer: ModelOptimizer) -> None:
        """Watch the gradients of rows that are updated by ``optimizer.step()``, not in backward."""
        self._rows = [replica.weight for replica in hot_replicas(model).values()]
        for name, part in optimizer.optimizers:
            if name == TABLES:
                self._rows += map(tensor_of_autograd, part.params.values())
        has_others = bool(model.fused_optimizer.params)
        if self._rows and has_others and not (self._is_plain or self._is_ahead):
            model.register_forward_hook(self._note_output)

    @contextmanager
    def inside(self, feed: Feed) -> Iterator[None]:
        """Around a step of a pipeline."""
        self._feed = feed
        self._arrived.clear()
        try:
            yield
        finally:
            self._feed = None

    def choose_check(self, model: DistributedModelParallel) -> tuple[Callable[[Any], None], bool]:
        """How a pipeline checks batches before any rank computes them.

        Returns:
            A function that raises a ValueError if a batch cannot be looked up unchanged; and
            whether such a batch is certainly wrong, or forward may compute features from it.
        """
        if self._is_ahead:
            return self._check_by_names, True
        if self._kind is PipelineKind.base:  # it need not be traceable
            return self._check_by_names, False
        try:
            paths = features_read(_unwrapped(model), _is_sharded)
        except ValueError:  # TorchRec's pipeline reports it, or reads in line
            return self._check_by_names, False
        return partial(self._check_by_paths, paths), True

    def _check_by_names(self, batch: Any) -> None:
        wanted = [{column.feature for column in lookup.columns} for lookup in self._lookups]
        found = features_of_each(batch, wanted)
        for lookup, features in zip(self._lookups, found, strict=True):
            self._check(lookup, features)

    def _check_by_paths(self, paths: Mapping[str, Path], batch: Any) -> None:
        for lookup in self._lookups:
            if lookup.name in paths:
                self._check(lookup, follow(paths[lookup.name], batch))

    def _check(self, lookup: GuardedLookup, features: Any) -> None:
        if not (self._is_plain and _has_kernel_for_variable(features)):
            lookup.check(features)

    def enter_pipeline(self, pipeline: object) -> None:
        """Register a pipeline that trains the model.

        Raises:
            RuntimeError: If another one does, under look-ahead.
        """
        if self._is_ahead and self._pipeline is not None:
            raise RuntimeError(
                "hotrec.Pipeline: expected one at a time for a model with look-ahead, got a "
                "second. Close the first, or use the same one for training and evaluation."
            )
        self._pipeline = pipeline

    def leave_pipeline(self, pipeline: object) -> None:
        if self._pipeline is pipeline:
            self._pipeline = None

    def check_step(self) -> None:
        """Raise a RuntimeError if ``optimizer.step()`` is called in an incorrect loop."""
        has_gradient, sizes, left = bool(self._arrived), self._sizes, self._left
        is_changed = any(_state_of(rows.grad) != state for rows, state in left.items())
        is_cleared = has_gradient and all(layer.grad is None for layer in self._arrived)
        self._arrived.clear()
        self._is_called, self._sizes, self._left = False, None, {}
        if self._feed is not None:
            return
        if self._is_ahead:
            raise _outside("optimizer.step()")
        if self._pipeline is not None and self._has_dense and not has_gradient:
            raise RuntimeError(
                "optimizer.step(): expected a backward pass before it, got none since the last "
                "step. hotrec.Pipeline.progress calls it itself; remove this call."
            )
        if is_changed or (is_cleared and not self._is_plain):
            raise RuntimeError(
                "optimizer.step(): expected the gradients of backward, got "
                f"{'none' if is_cleared else 'others of replicated rows'}, while all other rows "
                "were updated in backward. Only clip or scale those of dense layers, and call "
                "optimizer.zero_grad() before backward."
            )
        if sizes is not None:
            check_sizes(_first(sizes))

    def _note_call(self, *_: Any) -> None:
        self._is_called |= torch.is_grad_enabled()

    def _check_forward(self, module: nn.Module, _: Any) -> None:
        if self._feed is None and module.training and torch.is_grad_enabled():
            raise _outside("a forward pass")

    def _note_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if self._is_ahead:
            if self._feed is None:
                raise _outside("a backward pass")
        elif not self._is_called:
            raise RuntimeError(
                f"parameter {name}: expected a gradient of the model that hotrec.parallelize "
                "returned, got one of a part of it, which DDP would not average. Call "
                "model(batch), not model.module(batch) or a layer."
            )
        elif parameter in self._arrived:
            raise RuntimeError(
                f"parameter {name}: expected one backward pass per step, got a second before "
                "optimizer.step(). Rows are updated in backward, so add up losses instead, or "
                'accumulate gradients as TorchRec does with hot="off".'
            )
        else:
            self._arrived.add(parameter)

    def _check_cleared(self, name: str, parameter: torch.Tensor, _: torch.Tensor) -> None:
        if self._feed is not None or not self._is_called or parameter in self._arrived:
            return  # inside a pipeline, or refused by the next check
        if parameter.grad is not None and bool(parameter.grad.any()):
            raise RuntimeError(
                f"parameter {name}: expected no gradient before backward, got that of an earlier "
                "step. Rows are updated in backward, only by the gradients of that step: call "
                "optimizer.zero_grad() before it."
            )

    def _note_output(self, model: nn.Module, _: Any, output: Any) -> None:
        if self._feed is not None or not (model.training and torch.is_grad_enabled()):
            return
        for part in tensors_in(output):
            if part.requires_grad:
                part.register_hook(self._note_backward)

    def _note_backward(self, _: torch.Tensor) -> None:
        call_after_backward(self._note_rows)  # once DDP has averaged gradients in place

    def _note_rows(self) -> None:
        self._left = {rows: _state_of(rows.grad) for rows in self._rows}

    def _check_features(
        self, lookup: GuardedLookup, module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        features = next(iter((*args, *kwargs.values())), None)
        if self._feed is not None:
            if self._feed.held and self._feed.held[0].is_doubtful:
                same_verdict(lambda: self._check(lookup, features))
            return
        if self._is_plain:
            return
        if not isinstance(module, ShardedHotColdCollection):  # it checks itself
            lookup.check(features)
        is_first = lookup is self._lookups[0]
        if is_first and module.training and torch.is_grad_enabled() and not self._is_ahead:
            self._agreement = self._agreement or Agreement()
            # Not used yet, so it costs no time: the model's forward, or its step, waits.
            self._sizes = self._agreement.start([num_samples(features)])

    def _weigh(self, model: nn.Module, _: Any, output: Any) -> Any:
        """Weight the losses, if batches differ in size, so that the mean is over all samples."""
        if not (model.training and torch.is_grad_enabled()):
            return None
        if self._feed is not None:
            factor = self._feed.held[0].factor
        elif self._sizes is not None:
            sizes, self._sizes = _first(self._sizes), None
            if not _has_loss(output):
                check_sizes(sizes)
            factor = factor_of(sizes)
        else:
            return None
        if factor == 1.0:
            return None
        loss, *rest = output
        return (loss * factor, *rest)


def guard(model: DistributedModelParallel, choice: Choice, optimizer: CombinedOptimizer) -> None:
    """Store the choice for a model, and watch how it is trained."""
    model.hotrec_choice, model.hotrec_guard = choice, Guard(model, choice)
    if isinstance(optimizer, ModelOptimizer):
        optimizer.before_step = model.hotrec_guard.check_step
        model.hotrec_guard.watch_rows(model, optimizer)


def _outside(what: str) -> RuntimeError:
    return RuntimeError(
        f"pipeline look_ahead: expected hotrec.Pipeline to train the model, got {what} outside of "
        "its progress, which would not average the dense layers. Train with "
        'hotrec.Pipeline(model, optimizer), or pass pipeline="base" to hotrec.parallelize.'
    )


def _unwrapped(model: DistributedModelParallel) -> nn.Module:
    module: nn.Module = model.module
    return module


def _state_of(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """A value that changes when a gradient is modified or replaced."""
    return None if gradient is None else (gradient.data_ptr(), num_writes(gradient))


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, ShardedModule)


def _has_kernel_for_variable(features: Any) -> bool:
    """Whether features have bags shared by samples, on a device where FBGEMM reads them."""
    is_variable = isinstance(features, KeyedJaggedTensor) and features.variable_stride_per_key()
    return is_variable and features.device().type != "cpu"


def _first(found: Callable[[], list[list[int]]]) -> list[int]:
    return [first for first, *_ in found()]


def _has_loss(output: Any) -> bool:
    """Whether a model's output is (loss, anything), as pipelines expect it."""
    is_pair = isinstance(output, tuple) and len(output) == 2
    return is_pair and isinstance(output[0], torch.Tensor) and output[0].dim() == 0
