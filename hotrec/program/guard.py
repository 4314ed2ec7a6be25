"""Refuses loops that would train the model of ``parallelize`` incorrectly."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.hot_rows import HotReplicas
from hotrec.embedding.optimizers import TABLES, ModelOptimizer, hot_replicas
from hotrec.embedding.sharding import ShardedHotColdCollection
from hotrec.embedding.tables import outermost_sharded
from hotrec.embedding.torchrec import (
    call_after_backward,
    is_in_backward,
    name_of_user,
    num_writes,
    table_configs,
    tensor_of_autograd,
    tensors_in,
)
from hotrec.program.choice import OFF, Choice
from hotrec.program.feed import Agreement, Feed, Source, check_sizes, factor_of
from hotrec.routing.batches import features_in, features_of_each
from hotrec.routing.checks import check_features
from hotrec.routing.features import Column
from hotrec.runtime.ranks import same_verdict
from hotrec.train.dense_sync import dense_parameters, unlike_first
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
        # What DDP, the optimizer and the rows were made for.
        of_tables = {p for m in outermost_sharded(model).values() for p in m.parameters()}
        self._facts = [
            (name, p, p in of_tables, _facts_of(p, in_place=p in of_tables))
            for name, p in model.named_parameters()
        ]
        # The batches of the pipeline whose step is being computed.
        self._feed: Feed | None = None
        self._pipeline: object | None = None
        # Of a pipeline's step, and whether the model remains failed when the pipeline is closed.
        self.failure, self._is_final = "", False
        # Iterators of which a pipeline took batches that it did not compute.
        self.waiting: list[Source] = []
        self._writes: list[int] = []
        self._lookups = lookups(_unwrapped(model))
        self._dense = {p: name_of_user(path) for path, p in dense_parameters(model).items()}
        # Parameters with a gradient since the last step, and in the first one.
        self._arrived: set[torch.Tensor] = set()
        self._used: set[torch.Tensor] | None = None
        self._is_called = False  # with gradients, since the last step
        self._agreement: Agreement | None = None
        # By sharded module, the bags that the ranks read in it since the last step.
        self._sizes: dict[str, Callable[[], list[list[int]]]] = {}
        model.register_forward_pre_hook(self._note_call)
        model.register_forward_hook(self._weigh)
        for lookup in self._lookups:
            check = partial(self._check_features, lookup)
            lookup.module.register_forward_pre_hook(check, with_kwargs=True)
        if self._is_ahead:
            for module in (model, _unwrapped(model), *(lookup.module for lookup in self._lookups)):
                module.register_forward_pre_hook(self._check_forward)
        else:
            for name, module in outermost_sharded(model).items():
                module.register_forward_pre_hook(partial(self._note_sizes, name), with_kwargs=True)
        # Gradients of replicated rows after backward.
        self._left: dict[torch.Tensor, tuple[int, int] | None] = {}
        self._replicas: dict[torch.Tensor, Callable[[], torch.Tensor | None]] = {}
        # First rates and options of the optimizer's groups that update rows, by position.
        self._row_rates: dict[int, float] = {}
        self._row_options: dict[int, dict[str, Any]] = {}
        # What the last forward passes returned. No more: they keep the memory of their graphs.
        self._outputs: deque[tuple[object, list[torch.Tensor]]] = deque(maxlen=2)
        for parameter, name in self._dense.items():
            if not (self._is_plain or self._is_ahead):
                parameter.register_hook(partial(self._check_cleared, name, parameter))
            parameter.register_post_accumulate_grad_hook(partial(self._note_gradient, name))

    def watch_optimizer(self, model: DistributedModelParallel, optimizer: ModelOptimizer) -> None:
        """Watch how rows are updated, by ``optimizer.step()`` or in backward."""
        self.optimizer, optimizer.before_step = optimizer, self.check_step
        self._row_options = {
            at: {name: group[name] for name in group.keys() - {"params", "lr"}}
            for at, group in enumerate(optimizer.param_groups)
            if self._dense.keys().isdisjoint(group["params"])
        }
        if not self._is_plain:
            groups = optimizer.param_groups
            self._row_rates = {at: float(np.float32(groups[at]["lr"])) for at in self._row_options}
        for replica in hot_replicas(model).values():
            self._replicas[replica.weight] = partial(_gradient_of, replica)
        for name, part in optimizer.optimizers:
            if name == TABLES:
                for rows in map(tensor_of_autograd, part.params.values()):
                    self._replicas[rows] = partial(getattr, rows, "grad")
        if not model.fused_optimizer.params:
            self._replicas = {}
        if not (self._is_plain or self._is_ahead):
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

    def choose_check(
        self, model: DistributedModelParallel
    ) -> tuple[Callable[[Any], Sequence[Any]], bool]:
        """How a pipeline checks batches before any rank computes them.

        Returns:
            A function that raises a ValueError if a batch cannot be looked up unchanged, and
            returns the features that are; and whether a batch for which it raises is certainly
            wrong, or forward may compute features from it.
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

    def _check_by_names(self, batch: Any) -> Sequence[Any]:
        wanted = [{column.feature for column in lookup.columns} for lookup in self._lookups]
        found = features_of_each(batch, wanted)
        for lookup, features in zip(self._lookups, found, strict=True):
            self._check(lookup, features)
        return found

    def _check_by_paths(self, paths: Mapping[str, Path], batch: Any) -> Sequence[Any]:
        found = {name: follow(path, batch) for name, path in paths.items()}
        for lookup in self._lookups:
            if lookup.name in found:
                self._check(lookup, found[lookup.name])
        return [*found.values()]

    def _check(self, lookup: GuardedLookup, features: Any) -> None:
        if not (self._is_plain and _has_kernel_for_variable(features)):
            lookup.check(features)

    def enter_pipeline(self, pipeline: object) -> None:
        """Register a pipeline that trains the model.

        Raises:
            RuntimeError: If another one does, under look-ahead; if the model has failed.
        """
        self.check_whole("hotrec.Pipeline")
        if self._is_ahead and self._pipeline is not None:
            raise RuntimeError(
                "hotrec.Pipeline: expected one at a time for a model with look-ahead, got a "
                "second. Close the first, or use the same one for training and evaluation."
            )
        self._pipeline = pipeline

    def leave_pipeline(self, pipeline: object) -> None:
        if self._pipeline is pipeline:
            self._pipeline = None
        if not self._is_final:
            self.failure = ""

    def fail(self, failure: str, *, is_final: bool) -> None:
        """Refuse training and checkpoints: ranks or rows may be apart."""
        self.failure, self._is_final = failure, is_final

    def check_whole(self, name: str, expected: str = "a model trained in whole steps") -> None:
        """Raise a RuntimeError if a step has failed; not a collective, which would hang."""
        if self.failure:
            raise RuntimeError(f"{name}: expected {expected}, got one whose step {self.failure}")

    def were_rows_written(self) -> bool:
        """Whether the program wrote tables in place since the last call; kernels do not count."""
        writes = [num_writes(p) for _, p, is_of_table, _ in self._facts if is_of_table]
        is_new, self._writes = writes != self._writes, writes
        return is_new

    def check_step(self) -> None:
        """Raise a RuntimeError if ``optimizer.step()`` is called in an incorrect loop."""
        arrived, sizes, left = self._arrived, self._sizes, self._left
        is_changed = any(_state_of(self._replicas[rows]()) != was for rows, was in left.items())
        is_cleared = bool(arrived) and all(layer.grad is None for layer in arrived)
        self._arrived, self._is_called, self._sizes, self._left = set(), False, {}, {}
        self._outputs.clear()
        if self._is_ahead and self._feed is None:
            raise _outside("optimizer.step()")
        if arrived:
            self._used = self._used or arrived
            for layer in self._dense:
                if layer in self._used and layer not in arrived:
                    raise unlike_first(self._dense[layer], is_used=False)
        if self._feed is not None or self._is_plain:
            return
        if self._pipeline is not None and self._dense and not arrived:
            raise RuntimeError(
                "optimizer.step(): expected a backward pass before it, got none since the last "
                "step. hotrec.Pipeline.progress calls it itself; remove this call."
            )
        if is_changed or is_cleared:
            raise RuntimeError(
                "optimizer.step(): expected the gradients of backward, got "
                f"{'none' if is_cleared else 'others of replicated rows'}, while all other rows "
                "were updated in backward. Only clip or scale those of dense layers, and call "
                "optimizer.zero_grad() before backward."
            )
        for of_module in sizes.values():
            check_sizes(_first(of_module))

    def check_unchanged(self) -> None:
        """Check what was read at the start, and what must be alike.

        Raises:
            RuntimeError: If a parameter is frozen, unfrozen or converted since; if rows have
                several learning rates, or other options than at the start.
        """
        groups, now = self.optimizer.param_groups, dict[float, float]()
        for at, first in self._row_rates.items():
            rate = float(groups[at]["lr"])
            other = now.setdefault(first, rate)
            if abs(rate - other) > 1e-4 * abs(other):  # FBGEMM rounds them
                raise RuntimeError(
                    "optimizer learning rates of embedding rows: expected one, since the plan "
                    f"decides which part updates a row, got {other:g} and {rate:g}. Set lr in all "
                    f"groups of rows that began with {first:g}."
                )
        for at, options in self._row_options.items():
            if (changed := {name: groups[at][name] for name in options}) != options:
                raise RuntimeError(
                    f"optimizer options of embedding rows: expected {options}, as at "
                    f"hotrec.parallelize, got {changed}. Change lr alone: the plan decides which "
                    "rows would follow."
                )
        for name, parameter, in_place, known in self._facts:
            found = _facts_of(parameter, in_place=in_place)
            if found != known:
                words = [
                    f"{dtype} on {device}, {'trained' if is_trained else 'frozen'}"
                    for is_trained, dtype, device, _ in (known, found)
                ]
                moved = ", in other memory" if words[0] == words[1] else ""
                raise RuntimeError(
                    f"parameter {name_of_user(name)}: expected {words[0]}, as at "
                    f"hotrec.parallelize, got {words[1]}{moved}. To change it, save a checkpoint, "
                    "change a new model, call hotrec.parallelize and load it."
                )

    def _note_call(self, model: nn.Module, _: Any) -> None:
        if self._feed is None:  # a pipeline has checked it
            if model.training and torch.is_grad_enabled():
                self.check_whole("model")
            self.check_unchanged()
        self._is_called |= torch.is_grad_enabled()

    def _check_forward(self, module: nn.Module, _: Any) -> None:
        if self._feed is None and module.training and torch.is_grad_enabled():
            raise _outside("a forward pass")

    def _note_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if self._is_ahead:
            if self._feed is None:
                raise _outside("a backward pass")
        elif self._used is not None and parameter not in self._used:
            raise unlike_first(name, is_used=True)  # before DDP's error
        elif self._is_plain:
            self._arrived.add(parameter)
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
        parts = [part for part in tensors_in(output) if part.requires_grad]
        of_pass = object()  # a hook with the tensors themselves would keep their graph forever
        self._outputs.append((of_pass, parts))
        for part in parts:
            part.register_hook(partial(self._note_backward, of_pass))

    def _note_backward(self, of_pass: object, _: torch.Tensor) -> None:
        others = [part for other, parts in self._outputs if other is not of_pass for part in parts]
        if any(map(is_in_backward, others)):
            raise RuntimeError(
                "model: expected one forward pass in a backward pass, got two, each of which "
                "updates rows. Compute both batches in one forward pass, or make a step of each."
            )
        if self._replicas:
            call_after_backward(self._note_rows)  # once DDP has averaged gradients in place

    def _note_rows(self) -> None:
        self._left = {rows: _state_of(find()) for rows, find in self._replicas.items()}

    def _check_features(
        self, lookup: GuardedLookup, module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        features = next(iter((*args, *kwargs.values())), None)
        if self._feed is None:
            if not isinstance(module, ShardedHotColdCollection):  # it checks itself
                self._check(lookup, features)
        elif self._factor is None:
            same_verdict(lambda: self._check(lookup, features))

    @property
    def _factor(self) -> float | None:
        """The factor of the losses of a pipeline's batch; None for those it could not check."""
        held = None if self._feed is None else self._feed.held
        return held[0].factor if held else None

    def _note_sizes(
        self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        features = next(features_in([*args, *kwargs.values()]), None)
        is_trained = module.training and torch.is_grad_enabled()
        if features is not None and is_trained and self._factor is None:
            self._agreement = self._agreement or Agreement()
            # Not used yet, so it costs no time: the model's forward, or its step, waits.
            self._sizes[name] = self._agreement.start([features.stride()])

    def _weigh(self, model: nn.Module, _: Any, output: Any) -> Any:
        """Weight the losses, if batches differ in size, so that the mean is over all samples."""
        if not (model.training and torch.is_grad_enabled()):
            return None
        factor, sizes = self._factor, [_first(found) for found in self._sizes.values()]
        self._sizes = {}
        if sizes:
            if self._feed is None and not _has_loss(output):
                check_sizes(sizes[0])
            factor = factor_of(*sizes)
        if factor in (None, 1.0):
            return None
        loss, *rest = output
        kind, parts = type(output), [loss * factor, *rest]
        return kind(parts) if kind in (tuple, list) else kind(*parts)  # of a NamedTuple


def guard(model: DistributedModelParallel, choice: Choice, optimizer: ModelOptimizer) -> None:
    """Store the choice for a model, and watch how it is trained."""
    model.hotrec_choice, model.hotrec_guard = choice, Guard(model, choice)
    model.hotrec_guard.watch_optimizer(model, optimizer)


def _outside(what: str) -> RuntimeError:
    return RuntimeError(
        f"pipeline look_ahead: expected hotrec.Pipeline to train the model, got {what} outside of "
        "its progress, which would not average the dense layers. Train with "
        'hotrec.Pipeline(model, optimizer), or pass pipeline="base" to hotrec.parallelize.'
    )


def _unwrapped(model: DistributedModelParallel) -> nn.Module:
    module: nn.Module = model.module
    return module


def _gradient_of(replica: HotReplicas) -> torch.Tensor | None:
    """The gradient that awaits the optimizer's step."""
    return None if replica.reduced is None else replica.reduced[1]


def _state_of(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """A value that changes when a gradient is modified or replaced."""
    return None if gradient is None else (gradient.data_ptr(), num_writes(gradient))


def _facts_of(parameter: torch.Tensor, *, in_place: bool) -> tuple[Any, ...]:
    """What DDP, the optimizer and, if it stays in place, the kernels of its table know of it."""
    address = parameter.data_ptr() if in_place else None
    return parameter.requires_grad, parameter.dtype, parameter.device, address


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
    is_pair = isinstance(output, tuple | list) and len(output) == 2
    return is_pair and isinstance(output[0], torch.Tensor) and output[0].dim() == 0
