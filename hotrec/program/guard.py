"""Refuses loops that would train the model of ``parallelize`` incorrectly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from hotrec.embedding.optimizers import TABLES, ModelOptimizer
from hotrec.embedding.sharding import ShardedHotColdCollection
from hotrec.embedding.tables import outermost_sharded
from hotrec.embedding.torchrec import (
    call_after_backward,
    name_of_user,
    num_writes,
    table_configs,
    tensor_of_autograd,
)
from hotrec.program.choice import OFF, Choice
from hotrec.program.feed import Agreement, Feed, Source, check_sizes, factor_of
from hotrec.program.output import loss_and_output
from hotrec.routing.batches import features_in, features_of_each
from hotrec.routing.checks import check_features
from hotrec.routing.features import Column
from hotrec.runtime.ranks import same_verdict
from hotrec.train.dense_sync import dense_parameters, unlike_first
from hotrec.train.traced import Path, features_read, follow
from hotrec.types import PipelineKind

# What a sharded module looks up: the columns that it reads, and the rows of each table.
Lookup = tuple[Sequence[Column], Mapping[str, int]]


def _lookup_of(module: nn.Module) -> Lookup | None:
    """None for modules of other kinds, whose features TorchRec checks."""
    tables: Any
    if isinstance(module, ShardedHotColdCollection):
        tables = module.tables
    elif type(module) in (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection):
        tables = table_configs(module)
    else:
        return None
    columns = [
        Column(feature, feature, table.name, is_mean=False)
        for table in tables
        for feature in table.feature_names
    ]
    return columns, {table.name: table.num_embeddings for table in tables}


class Guard:
    """Watches the steps of a model, in ``hotrec.Pipeline`` and in other loops.

    Under look-ahead a pass outside of a ``Pipeline`` would train the dense layers of each rank on
    its own samples. It is refused instead of corrected: it would lose the overlap that the plan was
    chosen for. The other choices train in any loop that calls the model once per step, since rows
    are updated in backward, as those of TorchRec are.
    """

    def __init__(
        self, model: DistributedModelParallel, choice: Choice, optimizer: ModelOptimizer
    ) -> None:
        self._model, self._kind, self.optimizer = model, choice.pipeline, optimizer
        self._is_ahead = choice.pipeline is PipelineKind.look_ahead
        self._is_plain = choice.name == OFF
        sharded = outermost_sharded(model)
        # What DDP, the optimizer and the rows were made for.
        of_tables = {p for m in sharded.values() for p in m.parameters()}
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
        self._lookups: dict[str, Lookup] = {}
        self._dense: dict[torch.Tensor, str] = {
            p: name_of_user(path) for path, p in dense_parameters(model).items()
        }
        self._agreement: Agreement | None = None
        # Since the last step: the modules called to train, the parameters with a gradient, and by
        # module the bags that the ranks read.
        self._called: set[nn.Module] = set()
        self._arrived: set[torch.Tensor] = set()
        self._sizes: dict[str, Callable[[], list[list[int]]]] = {}
        self._used: set[torch.Tensor] | None = None  # ``_arrived`` in the first step
        # First options of the optimizer's groups that update rows.
        self._row_options = [
            (group, _options_of(group, group.keys() - {"params"}))
            for group in optimizer.param_groups
            if self._dense.keys().isdisjoint(group["params"])
        ]
        optimizer.before_step = self._before_step
        # The gradients of rows that TorchRec replicates, from backward to the step. No parameter
        # shows them, since no plan may decide whether a program clips those of rows.
        self._kept: dict[torch.Tensor, torch.Tensor | None] = {}
        for name, part in () if self._is_plain else optimizer.optimizers:
            for rows in map(tensor_of_autograd, part.params.values() if name == TABLES else ()):
                self._kept[rows] = None
                rows.register_hook(lambda _: call_after_backward(self._keep_gradients))
        for module in (model, _unwrapped(model)):
            module.register_forward_pre_hook(self._before_call)
        model.register_forward_hook(self._after_call)
        for path, module in sharded.items():
            name, lookup = name_of_user(path), _lookup_of(module)
            if lookup is not None:
                self._lookups[name] = lookup
            hook = partial(self._before_lookup, name)
            module.register_forward_pre_hook(hook, with_kwargs=True)
        for parameter in () if self._is_ahead else self._dense:
            parameter.register_hook(partial(self._before_gradient, parameter))

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
        wanted = [{column.feature for column in columns} for columns, _ in self._lookups.values()]
        found = features_of_each(batch, wanted)
        for name, features in zip(self._lookups, found, strict=True):
            self._check(name, features)
        return found

    def _check_by_paths(self, paths: Mapping[str, Path], batch: Any) -> Sequence[Any]:
        found = {name: follow(path, batch) for name, path in paths.items()}
        for name in self._lookups.keys() & found.keys():
            self._check(name, found[name])
        return [*found.values()]

    def _check(self, name: str, features: Any) -> None:
        """Raise a ValueError if these features cannot be looked up; routed ones are checked."""
        if isinstance(features, KeyedJaggedTensor) and name in self._lookups:
            # On a GPU FBGEMM reads bags that samples share.
            is_shared = features.variable_stride_per_key() and features.device().type != "cpu"
            if not (self._is_plain and is_shared):
                check_features(features, *self._lookups[name])

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

    def _check_inside(self, what: str) -> None:
        """Under look-ahead, raise a RuntimeError unless a pipeline's step is being computed."""
        if self._is_ahead and self._feed is None:
            raise RuntimeError(
                "pipeline look_ahead: expected hotrec.Pipeline to train the model, got "
                f"{what} outside of its progress, which would not average the dense layers. Train "
                'with hotrec.Pipeline(model, optimizer), or pass pipeline="base" to '
                "hotrec.parallelize."
            )

    def _keep_gradients(self) -> None:
        for rows in self._kept:
            if rows.grad is not None:
                self._kept[rows], rows.grad = rows.grad, None

    def _before_step(self) -> None:
        self.check_step()
        for rows, gradient in self._kept.items():
            rows.grad = gradient

    def check_step(self) -> None:
        """Raise a RuntimeError if ``optimizer.step()`` is called in an incorrect loop."""
        arrived, self._arrived = self._arrived, set()
        self._called.clear()
        self._check_inside("optimizer.step()")
        if arrived:
            self._used = self._used or arrived
            for layer in self._used - arrived:
                raise unlike_first(self._dense[layer], is_used=False)
        if self._is_own_loop and self._pipeline is not None and self._dense and not arrived:
            raise RuntimeError(
                "optimizer.step(): expected a backward pass before it, got none since the last "
                "step. hotrec.Pipeline.progress calls it itself; remove this call."
            )
        if self._is_own_loop and arrived and all(layer.grad is None for layer in arrived):
            raise RuntimeError(
                "optimizer.step(): expected the gradients of backward, got none, while rows were "
                "updated in backward. Call optimizer.zero_grad() before backward."
            )

    def check_unchanged(self) -> None:
        """Check what was read at the start, and what must be alike.

        Raises:
            RuntimeError: If a parameter is frozen, unfrozen or converted since; if rows have
                several learning rates, or other options than at the start.
        """
        rates: dict[float, float] = {}
        for group, first in self._row_options:
            now, rate = _options_of(group, first), first["lr"]
            if not self._is_plain:
                rate = rates.setdefault(rate, now["lr"])
            # Schedulers multiply what is rounded.
            is_alike = self._is_plain or abs(now["lr"] - rate) <= 1e-4 * abs(rate)
            if {**now, "lr": 0} != {**first, "lr": 0} or not is_alike:
                raise RuntimeError(
                    f"optimizer options of embedding rows: expected {first | {'lr': rate}}, got "
                    f"{now}. Change lr alone, in all groups of rows that began with the same: the "
                    "plan decides which part updates a row."
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

    def _before_call(self, module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            if self._feed is None:  # a pipeline has checked it
                self.check_whole("model")
            self._check_inside("a forward pass")
        if module is not self._model:
            return
        if self._feed is None:
            self.check_unchanged()
        if not self._is_own_loop:
            self._called.clear()
        if torch.is_grad_enabled():
            self._called.add(module)
            for rows in self._kept:  # of the step before
                self._kept[rows] = rows.grad = None

    def _before_gradient(self, parameter: torch.Tensor, _: torch.Tensor) -> None:
        if self._used is not None and parameter not in self._used:
            raise unlike_first(self._dense[parameter], is_used=True)  # before DDP's error
        if self._is_own_loop:
            kept = parameter.grad
            if parameter in self._arrived:
                raise RuntimeError(
                    f"parameter {self._dense[parameter]}: expected one backward pass in a step, "
                    "got a second, and rows would be updated twice. Add losses up instead."
                )
            if kept is not None and bool(kept.any()):
                raise RuntimeError(
                    f"parameter {self._dense[parameter]}: expected no gradient before backward, "
                    "got that of an earlier step, which rows do not have. Call "
                    "optimizer.zero_grad() before it."
                )
        self._arrived.add(parameter)

    def _before_lookup(
        self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        is_trained = module.training and torch.is_grad_enabled()
        if is_trained:
            self._check_inside("a forward pass")
        if is_trained and not self._is_ahead:  # which adds the gradients of several calls up
            if self._model not in self._called:
                raise RuntimeError(
                    f"embedding module {name}: expected a call of the model that "
                    "hotrec.parallelize returned, got one of a part of it, whose gradients DDP "
                    "would not average. Call model(batch), not model.module(batch)."
                )
            if module in self._called:
                raise RuntimeError(
                    f"embedding module {name}: expected one call in a step, got a second, and rows "
                    "would be updated twice. Look all features up in one call, compute what is not "
                    "trained under torch.no_grad(), and call optimizer.step() after each backward "
                    'pass. To accumulate gradients as TorchRec does, pass hot="off".'
                )
            self._called.add(module)
        features = next(iter((*args, *kwargs.values())), None)
        if self._feed is None:
            if not isinstance(module, ShardedHotColdCollection):  # it checks itself
                self._check(name, features)
        elif self._factor is None:
            same_verdict(lambda: self._check(name, features))
        features = next(features_in([*args, *kwargs.values()]), None)
        if is_trained and features is not None and self._factor is None and not self._is_ahead:
            self._agreement = self._agreement or Agreement()
            # Not used yet, so it costs no time: the model's forward, or its step, waits.
            self._sizes[name] = self._agreement.start([features.stride()])

    @property
    def _is_own_loop(self) -> bool:
        """Whether the program computes a step itself, of rows that a plan of hotrec updates."""
        return self._feed is None and not self._is_plain

    @property
    def _factor(self) -> float | None:
        """The factor of the losses of a pipeline's batch; None for those it could not check."""
        held = None if self._feed is None else self._feed.held
        return held[0].factor if held else None

    def _after_call(self, model: nn.Module, _: Any, output: Any) -> Any:
        """Weight the losses, if batches differ in size, so that the mean is over all samples."""
        if self._feed is not None:
            output = loss_and_output(model, output)
        if not (model.training and torch.is_grad_enabled()):
            return output
        factor, sizes = self._factor, [_first(found) for found in self._sizes.values()]
        self._sizes = {}
        if sizes:
            if self._feed is None and not _has_loss(output):
                check_sizes(sizes[0])
            factor = factor_of(*sizes)
        if factor not in (None, 1.0):
            loss, *rest = output
            kind, parts = type(output), [loss * factor, *rest]
            output = kind(parts) if kind in (tuple, list) else kind(*parts)  # of a NamedTuple
        return output


def _options_of(group: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """These options of an optimizer's group, with its rate as FBGEMM rounds it.

    Schedulers add others.
    """
    return {name: group[name] for name in names} | {"lr": float(np.float32(group["lr"]))}


def _unwrapped(model: DistributedModelParallel) -> nn.Module:
    module: nn.Module = model.module
    return module


def _facts_of(parameter: torch.Tensor, *, in_place: bool) -> tuple[Any, ...]:
    """What DDP, the optimizer and, if it stays in place, the kernels of its table know of it."""
    address = parameter.data_ptr() if in_place else None
    return parameter.requires_grad, parameter.dtype, parameter.device, address


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, ShardedModule)


def _first(found: Callable[[], list[list[int]]]) -> list[int]:
    return [first for first, *_ in found()]


def _has_loss(output: Any) -> bool:
    """Whether a model's output is (loss, anything), as pipelines expect it."""
    is_pair = isinstance(output, tuple | list) and len(output) == 2
    return is_pair and isinstance(output[0], torch.Tensor) and output[0].dim() == 0
