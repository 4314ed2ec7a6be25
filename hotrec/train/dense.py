"""Data-parallel dense layers whose all-reduce hides behind the next step; in DDP's place.

DDP averages gradients during backward and has them ready at its end. Here they may arrive later:
a layer is updated right before the next forward comes to it, and until then its all-reduce has
time. Order of work at the end of a step: gradients of inputs (see ``hotrec.train.deferred``), then
weight gradients of the layers that the next forward needs first, then those of the others; each
group's all-reduce starts as soon as its gradients are there.

Every update is made with the gradients, learning rates and order that it would have had at once,
so the weights that a forward reads are the same. Who reads them otherwise calls ``flush`` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardedModule

from hotrec.stages import mark
from hotrec.train.deferred import DeferredLinears, deferrable_layers
from hotrec.train.grad_mean import GradMean, Sender
from hotrec.wire import WireType


def _dense_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by name that are neither sharded nor inside a sharded one."""
    sharded: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule):
            sharded.append(f"{name}." if name else "")
        elif not name.startswith(tuple(sharded)):
            yield name, module


def _inside_compiled(model: nn.Module) -> set[nn.Module]:
    """The modules that are computed within another's compiled forward, where no hook may run."""
    return {
        inner
        for _, module in _dense_modules(model)
        if hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for inner in module.modules()
        if inner is not module
    }


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters outside of TorchRec's sharded modules, by their first name.

    Module by module: ``DistributedModelParallel`` renames what ``named_parameters`` returns.
    """
    names: dict[nn.Parameter, str] = {}
    for path, module in _dense_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                names.setdefault(parameter, f"{path}.{name}" if path else name)
    return {name: parameter for parameter, name in names.items()}


def _dense_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All that the dense modules hold, frozen parameters and buffers too, each once."""
    names: dict[torch.Tensor, str] = {}
    for path, module in _dense_modules(model):
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None:
                names.setdefault(tensor, f"{path}.{name}" if path else name)
    return {name: tensor for tensor, name in names.items()}


@dataclass(frozen=True)
class _Part:
    """A part of the model that forward goes through as a whole: its module, and all inside it."""

    module: nn.Module
    inside: list[nn.Module]


def _parts(model: nn.Module) -> list[_Part]:
    """The first level of modules that branches into several with dense parameters."""
    node = model
    while True:
        children = [child for child in node.children() if dense_parameters(child)]
        has_own = any(p is not None and p.requires_grad for p in node._parameters.values())
        if has_own or len(children) != 1:
            break
        node = children[0]
    parts = [_Part(child, [module for _, module in _dense_modules(child)]) for child in children]
    return [_Part(node, [node])] + parts if has_own else parts


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients travel together and that are updated together.

    Args:
        layers: those whose weight gradients are put off, which hold all parameters; or none.
        arrived: parameters whose gradient the last backward pass of the step has completed.
        noted: settings of the optimizer's groups for the update, from ``step`` to the update.
        taken: the mean gradients, from when they are there to the update.
    """

    parameters: list[nn.Parameter]
    mean: GradMean
    layers: list[nn.Linear]
    arrived: set[nn.Parameter] = field(default_factory=set)
    noted: list[dict[str, Any]] | None = None
    taken: list[torch.Tensor | None] | None = None


def _make_buckets(
    parts: Sequence[_Part], layers: Sequence[nn.Linear], sender: Sender
) -> list[_Bucket]:
    """In the order in which they are started; a shared parameter is the first part's."""
    layer_of = {p: layer for layer in layers for p in layer._parameters.values() if p is not None}
    grouped: dict[Any, dict[nn.Parameter, None]] = {}
    seen: set[nn.Parameter] = set()
    for number, part in enumerate(parts):
        for module in part.inside:
            for parameter in module._parameters.values():
                if parameter is None or not parameter.requires_grad or parameter in seen:
                    continue
                seen.add(parameter)
                key = (parameter in layer_of, number, parameter.dtype, parameter.device)
                grouped.setdefault(key, {})[parameter] = None
    direct: list[_Bucket] = []
    deferred: list[_Bucket] = []
    for (is_deferred, *_), members in grouped.items():
        parameters = list(members)
        own = dict.fromkeys(layer_of[p] for p in parameters) if is_deferred else {}
        bucket = _Bucket(parameters, GradMean(parameters, sender), list(own))
        (deferred if is_deferred else direct).append(bucket)
    return direct[::-1] + deferred


class DenseSync:
    """Averages the gradients of a model's dense layers over the ranks and updates them late.

    A step is one or more of ``with dense.backward(is_last=...): loss.backward()``, then
    ``dense.finish_backward()`` and ``dense.step()``. The optimizer is called from in here only,
    and gradients are cleared here. As in DDP every rank starts with the weights and
    buffers of the first.

    What the ranks send is one message per bucket: a part of the model (for DLRM the bottom and the
    top layers), apart by whether its gradients are put off. Order of messages: buckets that are
    not put off as backward completes them, last part first; then the others, first part first.

    A parameter that no rank used in a step is not updated, as in a single process; one that some
    rank used is, everywhere.

    Args:
        model: not wrapped in DDP; the same on every rank. Its parts must be called as modules, or
            at least their submodules, so that a pending update is seen.
        optimizer: of exactly the model's dense parameters, e.g. TorchRec's KeyedOptimizerWrapper;
            one that keeps its state by parameter and leaves those without ``grad`` alone.
        group: the ranks; nothing else may use it.
        wire_type: in which float32 gradients travel; they are added up in float32.
        max_norm: scale the mean gradients down to this norm, that of all of them together; None
            not to. The first update of a step then waits for the gradients of all buckets.

    Raises:
        ValueError: if the optimizer's parameters are not the model's dense ones, if a layer keeps
            running statistics, or if the ranks hold different parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        wire_type: WireType = WireType.FP32,
        max_norm: float | None = None,
    ) -> None:
        named = dense_parameters(model)
        _check_optimizer(named, optimizer)
        _check_modules(model)
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._names = {parameter: name for name, parameter in named.items()}
        self._sender = Sender(group, wire_type)
        held = _dense_tensors(model)
        self._sender.agree_on({n: (*t.shape, t.requires_grad) for n, t in held.items()})
        self._sender.copy_from_first(list(held.values()))
        parts = _parts(model)
        compiled = _inside_compiled(model)
        layers = [
            layer
            for layer in deferrable_layers(module for _, module in _dense_modules(model))
            if layer not in compiled
        ]
        self._buckets = _make_buckets(parts, layers, self._sender)
        self._num_direct = sum(not bucket.layers for bucket in self._buckets)
        self._num_started = 0
        self._is_last = False
        self._is_backward_done = False
        self._is_new_step = True
        self._deferred = DeferredLinears(layers)
        self._hooks: list[Any] = []
        self._watch_forward(parts, compiled)
        for bucket in self._buckets[: self._num_direct]:
            for parameter in bucket.parameters:
                hook = parameter.register_post_accumulate_grad_hook(self._arrival(bucket))
                self._hooks.append(hook)

    def _watch_forward(self, parts: Sequence[_Part], compiled: set[nn.Module]) -> None:
        """Update what is due before a part is called, or a module of it that holds weights."""
        bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        used_by: dict[nn.Module, dict[_Bucket, None]] = {}
        for part in parts:
            for module in part.inside:
                own = {bucket_of[p]: None for p in module._parameters.values() if p in bucket_of}
                for holder in (part.module, module):
                    used_by.setdefault(holder, {}).update(own)
        for module, buckets in used_by.items():
            if buckets:
                before = self._before_use(list(buckets))
                if module not in compiled:
                    self._hooks.append(module.register_forward_pre_hook(before))
                self._hooks.append(module.register_state_dict_pre_hook(before))

    def _before_use(self, buckets: list[_Bucket]) -> Callable[..., None]:
        def apply_pending(*_: Any) -> None:
            for bucket in buckets:
                if bucket.noted is not None:
                    self._update(bucket)

        return apply_pending

    @contextmanager
    def backward(self, is_last: bool = True, defer: bool = True) -> Iterator[None]:
        """Around one backward pass of the step.

        Args:
            is_last: of the step's passes; gradients of earlier ones add up on the rank.
            defer: put weight gradients off; else this pass computes them in its course.
        """
        if self._is_new_step:
            for parameter in self._names:
                parameter.grad = None
        self._is_new_step, self._is_last = False, is_last
        with self._deferred.deferring() if defer else nullcontext():
            yield
        self._is_last, self._is_backward_done = False, is_last

    def _arrival(self, bucket: _Bucket) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            if not self._is_last:
                return
            assert isinstance(parameter, nn.Parameter)
            if parameter in bucket.arrived:
                raise RuntimeError(
                    f"dense parameter {self._names[parameter]}: expected one gradient in a "
                    "backward pass, got a second. Do not nest backward passes (re-entrant "
                    "checkpointing) or make two of them inside one dense.backward()."
                )
            bucket.arrived.add(parameter)
            while self._num_started < self._num_direct and len(
                (upcoming := self._buckets[self._num_started]).arrived
            ) == len(upcoming.parameters):
                self._start(upcoming)

        return note

    def finish_backward(self) -> None:
        """Compute the weight gradients that were put off, and start what has not been started.

        Raises:
            RuntimeError: if no last backward pass has been made.
        """
        if not self._is_backward_done:
            raise RuntimeError(
                "dense layers finish_backward: expected a last backward pass in this step, got "
                "none. Call it after `with dense.backward(is_last=True)`."
            )
        for bucket in self._buckets[self._num_started :]:
            for layer in bucket.layers:
                self._deferred.compute(layer)
            self._start(bucket)
        mark("dense")

    def _start(self, bucket: _Bucket) -> None:
        if bucket.noted is not None:
            # No forward came to it since the last step, so nothing may have come back.
            used = [p for p in bucket.parameters if p.grad is not None]
            if used:
                raise RuntimeError(
                    f"dense parameter {self._names[used[0]]}: expected its module to be called in "
                    "forward, got a gradient without a call; the weight it was computed with "
                    "lacked its last update. Call the module, or the part of the model it is in."
                )
            self._update(bucket)
        bucket.mean.start()
        self._num_started += 1

    def step(self) -> None:
        """Make the update due, with the settings that the optimizer's groups have now.

        Raises:
            RuntimeError: if ``finish_backward`` has not been called.
        """
        if self._num_started != len(self._buckets) or not self._is_backward_done:
            raise RuntimeError(
                f"dense layers step: expected the gradients of {len(self._buckets)} buckets under "
                f"way, got {self._num_started}. Call finish_backward() first."
            )
        noted = _settings(self._optimizer)
        for bucket in self._buckets:
            bucket.noted = noted
            bucket.arrived.clear()
        self._num_started = 0
        self._is_backward_done, self._is_new_step = False, True

    # Optimizer state made in here outlives an evaluation that is the first to ask for the update.
    @torch.inference_mode(False)
    def _update(self, bucket: _Bucket) -> None:
        """Wait for the bucket's gradients and make its update, of these parameters alone."""
        assert bucket.noted is not None
        mark("dense")
        if bucket.taken is None:
            # The norm is that of all gradients of the step, so all of them must be there.
            for one in self._buckets if self._max_norm is not None else [bucket]:
                one.taken = one.mean.take()
            mark("grads_exchange")
            if self._max_norm is not None:
                with self._only_grads_of(self._buckets):
                    nn.utils.clip_grad_norm_(self._names, self._max_norm)
        with self._only_grads_of([bucket]):
            current = _settings(self._optimizer)
            _set(self._optimizer, bucket.noted)
            self._optimizer.step()
            _set(self._optimizer, current)
        bucket.noted = bucket.taken = None
        mark("optimizer")

    @contextmanager
    def _only_grads_of(self, buckets: Sequence[_Bucket]) -> Iterator[None]:
        """Inside the block parameters have the means of these buckets as ``grad``, or none."""
        aside = [parameter.grad for parameter in self._names]
        for parameter in self._names:
            parameter.grad = None
        for bucket in buckets:
            assert bucket.taken is not None
            for parameter, grad in zip(bucket.parameters, bucket.taken, strict=True):
                parameter.grad = grad
        yield
        for parameter, grad in zip(self._names, aside, strict=True):
            parameter.grad = grad

    def flush(self) -> None:
        """Make all updates that are due: before weights or optimizer state are read or written."""
        for bucket in self._buckets:
            if bucket.noted is not None:
                self._update(bucket)

    def settle(self) -> None:
        """Wait until nothing of the gradients is under way; makes no update."""
        for bucket in self._buckets:
            bucket.mean.wait()

    def close(self) -> None:
        """Leave the model as it was found; waits for nothing, and drops updates not yet made."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._deferred.restore()
        self._sender.close()


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A copy of everything in the optimizer's groups but the parameters, e.g. learning rates."""
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _set(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def _check_optimizer(named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    expected = {parameter: name for name, parameter in named.items()}
    held = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    missing = [name for parameter, name in expected.items() if parameter not in held]
    strange = [tuple(parameter.shape) for parameter in held if parameter not in expected]
    if missing or strange:
        raise ValueError(
            f"optimizer of the dense layers: expected exactly their {len(expected)} parameters, "
            f"got it without {missing[:4]} and with others of shapes {sorted(strange)[:4]}. "
            "Make it of dense_parameters(model); freeze what is not to be trained."
        )


def _check_modules(model: nn.Module) -> None:
    for path, module in _dense_modules(model):
        if getattr(module, "track_running_stats", False):
            raise ValueError(
                f"dense layer {path}: expected no running statistics, which differ between ranks, "
                f"got {type(module).__name__}. Use a layer without, such as LayerNorm."
            )
        is_sparse = getattr(module, "sparse", False)
        if is_sparse and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ValueError(
                f"dense layer {path}: expected dense gradients, got an embedding with sparse=True. "
                "Shard the table, or set sparse=False."
            )
