"""Data-parallel dense layers whose all-reduce overlaps the next step, in place of DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torchrec.distributed.types import ShardedModule

from hotrec.runtime.comm_thread import CommunicationFuture, CommunicationThread
from hotrec.runtime.stages import mark
from hotrec.runtime.traffic import counted_by_sender, note_sent
from hotrec.runtime.wire import Wire
from hotrec.types import WireType

_Future = dist.Work | CommunicationFuture[None]


class Sender:
    """Runs the all-reduces of one process group in the order in which they are started.

    Args:
        group: The ranks; nothing else may use this group.
        wire_type: The type in which float32 values are sent; sums are made in float32.
    """

    def __init__(self, group: dist.ProcessGroup, wire_type: WireType = WireType.fp32) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self._is_nccl = dist.get_backend(group) == "nccl"
        self._wire = Wire(group, wire_type)
        self._exact_wire = Wire(group)
        self._thread = CommunicationThread(torch.device("cpu"), "dense gradients")

    def agree_on(self, facts: Mapping[str, tuple[int, ...]]) -> None:
        """Check that these facts, by tensor name, are equal on all ranks.

        Raises:
            ValueError: on every rank, if they differ.
        """
        if self.world_size == 1:
            return
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, list(facts.items()), group=self.group)
        for rank, others in enumerate(gathered):
            if others != gathered[0]:
                differing = sorted(set(others) ^ set(gathered[0]))
                raise ValueError(
                    f"dense layers of rank {rank}: expected the parameters of rank 0, got others "
                    f"(name, shape, is trained): {differing[:4] or 'in another order'}. Build the "
                    "same model on every rank."
                )

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast the values of the group's first rank."""
        if self.world_size > 1:
            for tensor in tensors:
                source = dist.get_global_rank(self.group, 0)
                dist.broadcast(tensor.detach(), src=source, group=self.group)

    def start(self, message: torch.Tensor, num_values: int) -> _Future | None:
        """Start to sum ``message`` over the ranks, in place.

        Args:
            message: (n,); the first ``num_values`` are sent in the wire's type, the rest unchanged.

        Returns:
            A future to wait for; None if the current stream already orders the sum.
        """
        if self._wire.wire_type is WireType.fp32 or message.dtype != torch.float32:
            num_bytes = message.numel() * message.element_size()
            note_sent("all_reduce", 2 * num_bytes * (self.world_size - 1) // self.world_size)
            with counted_by_sender():
                work: dist.Work = dist.all_reduce(message, group=self.group, async_op=True)
                return work
        if self._is_nccl:
            # NCCL does not block the host, so no thread is needed.
            self._add_up(message, num_values)
            return None
        return self._thread.submit(lambda: self._add_up(message, num_values))

    def _add_up(self, message: torch.Tensor, num_values: int) -> None:
        self._wire.all_reduce(message[:num_values])
        self._exact_wire.all_reduce(message[num_values:])

    def close(self) -> None:
        """Let the thread end after its queued messages, without waiting for it."""
        self._thread.close()


class GradMean:
    """Averages the gradients of some parameters over the ranks.

    The message holds the gradients / W, then a flag per parameter that says whether this rank has a
    gradient: a gradient that no rank has stays None. With W > 1 it takes one copy of the gradients.

    Args:
        parameters: The parameters, all of one type and device, the same on every rank.
        sender: Runs the all-reduce.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sender: Sender) -> None:
        self._parameters = list(parameters)
        self._sender = sender
        self._has_grad: list[bool] = []
        self._is_used: torch.Tensor | None = None  # ``_has_grad`` as float (n,) on the device
        self._grads: list[torch.Tensor | None] = []
        self._work: _Future | None = None
        self._num_values = sum(parameter.numel() for parameter in parameters)
        self._message: torch.Tensor | None = None

    def start(self) -> None:
        """Take the parameters' ``grad`` (None afterwards) and start averaging."""
        grads = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if self._sender.world_size == 1:
            self._grads = grads
            return
        if self._message is None:
            self._message = self._parameters[0].new_empty(self._num_values + len(grads))
        has_grad = [grad is not None for grad in grads]
        if self._is_used is None or has_grad != self._has_grad:
            # Cached, since a copy to the device makes the host wait.
            self._is_used = torch.tensor(has_grad, dtype=self._message.dtype).to(
                self._message.device
            )
            self._has_grad = has_grad
        views = self._views(self._message)
        for view, grad in zip(views, grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                torch.mul(grad, 1 / self._sender.world_size, out=view)
        self._message[self._num_values :].copy_(self._is_used)
        self._work = self._sender.start(self._message, self._num_values)

    def _views(self, message: torch.Tensor) -> list[torch.Tensor]:
        parts = message.detach()[: self._num_values].split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def wait(self) -> None:
        """Wait for the means; on CUDA the current stream waits.

        Raises:
            RuntimeError: if a rank has failed.
        """
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()

    def take(self) -> list[torch.Tensor | None]:
        """Wait for the means, valid until the next ``start``; None where no rank has a gradient."""
        self.wait()
        if self._sender.world_size == 1:
            grads, self._grads = self._grads, []
            return grads
        assert self._message is not None
        views = self._views(self._message)
        if all(self._has_grad):  # reading the flags would wait for the device
            return [*views]
        is_used = self._message[self._num_values :].tolist()
        return [view if used else None for view, used in zip(views, is_used, strict=True)]


class _Linear(torch.autograd.Function):
    """``F.linear`` whose backward can defer the gradients of weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: nn.Linear,
        owner: DeferredLinears,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer, ctx.owner = layer, owner
        return F.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        flat_grad = grad.reshape(-1, weight.shape[0])
        flat_inputs = inputs.view(-1, weight.shape[1])
        grad_inputs = None
        if ctx.needs_input_grad[0]:
            grad_inputs = flat_grad.mm(weight).view(inputs.shape)
        if ctx.owner.is_deferring:
            ctx.owner.note(ctx.layer, flat_grad, flat_inputs)
            return grad_inputs, None, None, None, None
        grads = _weight_grads(flat_grad, flat_inputs, has_bias=ctx.needs_input_grad[2])
        return grad_inputs, *grads, None, None


def _weight_grads(
    grad: torch.Tensor, inputs: torch.Tensor, *, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of weight and bias with autograd's own products for ``F.linear``."""
    return grad.t().mm(inputs), grad.sum(0) if has_bias else None


def deferrable_layers(modules: Iterable[nn.Module]) -> list[nn.Linear]:
    """Select the layers whose weight gradients can be deferred, in the order of the modules.

    These are plain ``nn.Linear`` layers: no subclass (such as a parametrized layer), with their own
    ``forward``, and with trained parameters that no other module shares.
    """
    distinct = list(dict.fromkeys(modules))
    holders: dict[int, int] = {}
    for module in distinct:
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return [
        module
        for module in distinct
        if type(module) is nn.Linear
        and "forward" not in vars(module)
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and all(
            parameter is None or (parameter.requires_grad and holders[id(parameter)] == 1)
            for parameter in module._parameters.values()
        )
    ]


class DeferredLinears:
    """Linear layers whose weight gradients are computed after backward.

    Inside ``deferring()`` a backward pass does not touch the ``grad`` of their parameters;
    ``compute(layer)`` then adds what the passes would have added.

    Args:
        layers: Layers from ``deferrable_layers``; their ``forward`` is replaced until ``restore``.
    """

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        self.is_deferring = False
        self._layers = list(layers)
        # For each layer, one list per backward pass.
        self._noted: dict[nn.Linear, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        self._pass = 0
        self._last_pass: dict[nn.Linear, int] = {}
        for layer in self._layers:
            layer.forward = partial(self._forward, layer)  # type: ignore[method-assign]

    def _forward(self, layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        if (
            not torch.is_grad_enabled()
            # Autograd's products differ for other strides.
            or not inputs.is_contiguous()
            or not layer.weight.requires_grad
        ):
            return F.linear(inputs, layer.weight, layer.bias)
        weight: torch.Tensor = layer.weight
        bias: torch.Tensor | None = layer.bias
        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            # Autocast would cast inside the custom function, hidden from autograd.
            dtype = torch.get_autocast_dtype(device)
            inputs, weight = inputs.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        out: torch.Tensor = _Linear.apply(inputs, weight, bias, layer, self)
        return out

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Defer the weight gradients of one backward pass."""
        self._pass += 1
        self.is_deferring = True
        try:
            yield
        except BaseException:
            self._noted.clear()
            raise
        finally:
            self.is_deferring = False

    def note(self, layer: nn.Linear, grad: torch.Tensor, inputs: torch.Tensor) -> None:
        """Record the gradient (B, out) of a layer's output and its input (B, in)."""
        passes = self._noted.setdefault(layer, [])
        if not passes or self._last_pass[layer] != self._pass:
            passes.append([])
            self._last_pass[layer] = self._pass
        passes[-1].append((grad, inputs))

    def has_noted(self, layer: nn.Linear) -> bool:
        return layer in self._noted

    @torch.no_grad()
    def compute(self, layer: nn.Linear) -> None:
        """Add the deferred gradients to the layer's parameters and release the inputs."""
        for calls in self._noted.pop(layer, []):
            # Autograd adds up the calls of one pass before it adds to ``grad``.
            totals: list[torch.Tensor | None] = [None, None]
            for grad, inputs in calls:
                parts = _weight_grads(grad, inputs, has_bias=layer.bias is not None)
                for index, raw in enumerate(parts):
                    part = None if raw is None else raw.to(layer.weight.dtype)
                    total = totals[index]
                    totals[index] = part if total is None or part is None else total.add_(part)
            for parameter, total in zip((layer.weight, layer.bias), totals, strict=True):
                if total is not None:
                    parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)

    def restore(self) -> None:
        """Restore the layers' ``forward`` and drop what is deferred."""
        self._noted.clear()
        for layer in self._layers:
            vars(layer).pop("forward", None)


def _dense_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules that are neither sharded nor inside a sharded one, with names."""
    sharded: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule):
            sharded.append(f"{name}." if name else "")
        elif not name.startswith(tuple(sharded)):
            yield name, module


def _inside_compiled(model: nn.Module) -> set[nn.Module]:
    """Find the modules inside another's compiled forward, where hooks cannot run."""
    return {
        inner
        for _, module in _dense_modules(model)
        if hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for inner in module.modules()
        if inner is not module
    }


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters outside of TorchRec's sharded modules, by their first name."""
    return {
        name: tensor
        for name, tensor in _dense_tensors(model).items()
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
    }


def _dense_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of the dense modules, frozen ones too, each once.

    Collected module by module: ``DistributedModelParallel`` renames ``named_parameters``.
    """
    names: dict[torch.Tensor, str] = {}
    for path, module in _dense_modules(model):
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None:
                names.setdefault(tensor, f"{path}.{name}" if path else name)
    return {name: tensor for tensor, name in names.items()}


def _parts(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """The first modules of the tree that have dense siblings, with all modules inside each."""
    node = model
    while True:
        children = [child for child in node.children() if dense_parameters(child)]
        has_own = any(p is not None and p.requires_grad for p in node._parameters.values())
        if has_own or len(children) != 1:
            break
        node = children[0]
    parts = {child: [module for _, module in _dense_modules(child)] for child in children}
    return {node: [node], **parts} if has_own else parts


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are reduced together and that are updated together.

    Args:
        layers: The layers of the parameters if their gradients are deferred; else empty.
        arrived: Parameters whose gradient the step's last backward pass has completed.
        noted: Settings of the optimizer's groups for the pending update; None without one.
        taken: The mean gradients, once received and until the update.
    """

    parameters: list[nn.Parameter]
    mean: GradMean
    layers: list[nn.Linear]
    arrived: set[nn.Parameter] = field(default_factory=set)
    noted: list[dict[str, Any]] | None = None
    taken: list[torch.Tensor | None] | None = None


def _make_buckets(
    parts: Mapping[nn.Module, Sequence[nn.Module]], layers: Sequence[nn.Linear], sender: Sender
) -> list[_Bucket]:
    """Make the buckets in the order of their messages; the first part owns shared parameters."""
    layer_of = {p: layer for layer in layers for p in layer._parameters.values() if p is not None}
    grouped: dict[Any, dict[nn.Parameter, None]] = {}
    seen: set[nn.Parameter] = set()
    for number, inside in enumerate(parts.values()):
        for module in inside:
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
    ``dense.finish_backward()`` and ``dense.step()``. Gradients are cleared and the optimizer is
    called here only. As in DDP, every rank starts with the first rank's weights and buffers.

    The ranks exchange one message per bucket: a part of the model (for DLRM the bottom and the top
    layers), split by whether gradients are deferred. Direct buckets are sent as backward completes
    them, last part first; then the deferred ones, first part first.

    A parameter is updated on every rank if some rank used it in the step, else on none.

    Args:
        model: The model, not wrapped in DDP, the same on every rank. Its parts, or their
            submodules, must be called as modules, so that pending updates are applied in time.
        optimizer: An optimizer of exactly the model's dense parameters that keeps its state by
            parameter and skips those without ``grad``, such as TorchRec's KeyedOptimizerWrapper.
        group: The ranks; nothing else may use this group.
        wire_type: The type in which float32 gradients are sent; sums are made in float32.
        max_norm: Clips the joint norm of all mean gradients to this value; None disables clipping.
            With it the first update of a step waits for the gradients of all buckets.

    Raises:
        ValueError: if the optimizer's parameters are not the model's dense ones, a layer keeps
            running statistics, or the ranks hold different parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        wire_type: WireType = WireType.fp32,
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

    def _watch_forward(
        self, parts: Mapping[nn.Module, Sequence[nn.Module]], compiled: set[nn.Module]
    ) -> None:
        """Apply pending updates before a part, or a module in it with weights, is called."""
        bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        used_by: dict[nn.Module, dict[_Bucket, None]] = {}
        for part, inside in parts.items():
            for module in inside:
                own = {bucket_of[p]: None for p in module._parameters.values() if p in bucket_of}
                for holder in (part, module):
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
        """Wrap one backward pass of the step.

        Args:
            is_last: Whether it is the step's last pass; gradients of earlier ones add up locally.
            defer: Whether to defer weight gradients; else this pass computes them.
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
        """Compute the deferred weight gradients and start the remaining reductions.

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
            # No forward has used it since the last step, so there must be no gradient.
            used = [p for p in bucket.parameters if p.grad is not None]
            if used:
                raise RuntimeError(
                    f"dense parameter {self._names[used[0]]}: expected its module to be called in "
                    "forward, got a gradient without a call, computed with a stale weight. Call "
                    "the module, or the part of the model it is in."
                )
            self._update(bucket)
        bucket.mean.start()
        self._num_started += 1

    def step(self) -> None:
        """Schedule the update with the current settings of the optimizer's groups.

        Raises:
            RuntimeError: if ``finish_backward`` has not been called.
        """
        if self._num_started != len(self._buckets) or not self._is_backward_done:
            raise RuntimeError(
                f"dense layers step: expected {len(self._buckets)} buckets of gradients started, "
                f"got {self._num_started}. Call finish_backward() first."
            )
        noted = _settings(self._optimizer)
        for bucket in self._buckets:
            bucket.noted = noted
            bucket.arrived.clear()
        self._num_started = 0
        self._is_backward_done, self._is_new_step = False, True

    # An evaluation may trigger the update, and the optimizer state made here outlives it.
    @torch.inference_mode(False)
    def _update(self, bucket: _Bucket) -> None:
        """Wait for the bucket's gradients and update its parameters alone."""
        assert bucket.noted is not None
        mark("dense")
        if bucket.taken is None:
            # The joint norm needs all gradients of the step.
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
        """Set ``grad`` to the means of these buckets, and to None elsewhere, inside the block."""
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
        """Apply all pending updates, before weights or optimizer state are read or written."""
        for bucket in self._buckets:
            if bucket.noted is not None:
                self._update(bucket)

    def drain(self) -> None:
        """Wait for all started reductions without updating."""
        for bucket in self._buckets:
            bucket.mean.wait()

    def close(self) -> None:
        """Restore the model without waiting; pending updates are dropped."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._deferred.restore()
        self._sender.close()


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copy the settings of the optimizer's groups, such as learning rates."""
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
    unknown = [tuple(parameter.shape) for parameter in held if parameter not in expected]
    if missing or unknown:
        raise ValueError(
            f"optimizer of the dense layers: expected exactly their {len(expected)} parameters, "
            f"got it without {missing[:4]} and with others of shapes {sorted(unknown)[:4]}. "
            "Make it from dense_parameters(model) and freeze what is not trained."
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
