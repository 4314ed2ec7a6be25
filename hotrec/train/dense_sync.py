"""Data-parallel dense layers whose all-reduce overlaps the next step, instead of DDP."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torchrec.distributed.types import ShardedModule

from hotrec.embedding.torchrec import is_compiled, name_of_user, parameters_of, tensors_of
from hotrec.runtime.comm_thread import CommunicationFuture, CommunicationThread
from hotrec.runtime.hosts import make_two_levels
from hotrec.runtime.ranks import Group, all_gather_object, backend_of, world_size
from hotrec.runtime.stages import mark
from hotrec.runtime.wire import Wire
from hotrec.types import WireType

# A group, and the thread that calls its collectives.
Line = tuple[Group, CommunicationThread]
_Future = dist.Work | CommunicationFuture[None]


class Sender:
    """Runs all-reduces in the order of their start, in its own group or among other tasks.

    ``line`` is the group and thread to share; its owner calls ``start`` in the same order among its
    other tasks on every rank, and closes both.
    """

    def __init__(self, wire_type: WireType, line: Line | None = None) -> None:
        self.world_size = world_size()
        self.is_in_line = line is not None
        self._group, self._thread = line or (
            Group("dense gradients"),
            CommunicationThread(torch.device("cpu"), "dense gradients"),
        )
        self._wire, self._exact_wire = Wire(self._group, wire_type), Wire(self._group)
        # A flat sum in 16 bits goes to all peers directly, so a host would send it once per rank.
        is_flat = wire_type is WireType.fp32
        self._two_levels = None if is_flat else make_two_levels(wire_type, "dense gradients")

    def start(self, message: torch.Tensor, num_values: int) -> _Future | None:
        """Start to sum ``message`` over the ranks, in place.

        Args:
            message: (n,); the first ``num_values`` are sent in the wire's type, the rest unchanged.

        Returns:
            A future to wait for; None if the current stream already orders the sum.
        """
        if self.is_in_line:
            self._thread.will_use(message)
            return self._thread.submit(lambda: self._add_up(message, num_values))
        if self._wire.type_of(message) is WireType.fp32:
            return self._exact_wire.start_all_reduce(message)
        if backend_of(self._group.group, message.device) == "nccl":
            # NCCL does not block the host, so no thread is needed.
            self._add_up(message, num_values)
            return None
        return self._thread.submit(lambda: self._add_up(message, num_values))

    def _add_up(self, message: torch.Tensor, num_values: int) -> None:
        if self._wire.type_of(message) is WireType.fp32:
            self._exact_wire.all_reduce(message)
            return
        (self._two_levels or self._wire).all_reduce(message[:num_values])
        self._exact_wire.all_reduce(message[num_values:])

    def close(self) -> None:
        """Stop its thread after the queued messages, and close its groups."""
        if not self.is_in_line:
            self._thread.close()
            self._group.close(after=self._thread.join)
        if self._two_levels is not None:
            self._two_levels.close(after=self._thread.join)


def share_first(model: nn.Module) -> None:
    """Broadcast rank 0's weights and buffers of the dense layers.

    Raises:
        ValueError: if ranks have different ones, by name, shape or whether they are trained.
    """
    if world_size() == 1:
        return
    tensors = _dense_tensors(model)
    facts = [(name, (*tensor.shape, tensor.requires_grad)) for name, tensor in tensors.items()]
    gathered = all_gather_object(facts)
    for rank, others in enumerate(gathered):
        if others != gathered[0]:
            differing = sorted(set(others) ^ set(gathered[0]))
            raise ValueError(
                f"dense layers of rank {rank}: expected the parameters of rank 0 (name, shape, is "
                f"trained), got {differing[:4] or 'another order'}. Build the same model on every "
                "rank."
            )
    for tensor in tensors.values():
        dist.broadcast(tensor.detach(), src=0)


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
        grads = _weight_grads(flat_grad, flat_inputs, ctx.needs_input_grad[2])
        return grad_inputs, *grads, None, None


def _weight_grads(
    grad: torch.Tensor, inputs: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of weight and bias with autograd's own products for ``F.linear``."""
    return grad.t().mm(inputs), grad.sum(0) if has_bias else None


def deferrable_layers(modules: Iterable[nn.Module]) -> list[nn.Linear]:
    """Select the layers whose weight gradients can be deferred, in the order of the modules.

    These are plain ``nn.Linear`` layers: no subclass (such as a parametrized layer), with their own
    ``forward``, and with trained parameters that no other module shares.
    """
    distinct = list(dict.fromkeys(modules))
    holders = Counter(id(p) for module in distinct for p in parameters_of(module).values())
    return [
        module
        for module in distinct
        if type(module) is nn.Linear
        and "forward" not in vars(module)
        and "weight" in parameters_of(module)
        and all(p.requires_grad and holders[id(p)] == 1 for p in parameters_of(module).values())
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
        self._pass = 0
        # By layer, its calls: the pass, the gradient (B, out) of the output, the input (B, in).
        self._noted: dict[nn.Linear, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
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
        tensors: list[torch.Tensor | None] = [inputs, layer.weight, layer.bias]
        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            # Autocast would cast inside the custom function, hidden from autograd.
            dtype = torch.get_autocast_dtype(device)
            tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
        out: torch.Tensor = _Linear.apply(*tensors, layer, self)
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
        self._noted.setdefault(layer, []).append((self._pass, grad, inputs))

    @torch.no_grad()
    def compute(self, layer: nn.Linear) -> None:
        """Add the deferred gradients to the layer's parameters and release the inputs."""
        for _, calls in groupby(self._noted.pop(layer, []), key=lambda call: call[0]):
            # Autograd adds up the calls of one pass before it adds to ``grad``.
            totals: list[torch.Tensor | None] = [None, None]
            for _, grad, inputs in calls:
                for index, raw in enumerate(_weight_grads(grad, inputs, layer.bias is not None)):
                    part = None if raw is None else raw.to(layer.weight.dtype)
                    total = totals[index]
                    totals[index] = part if total is None or part is None else total.add_(part)
            for parameter, total in zip((layer.weight, layer.bias), totals, strict=True):
                if total is not None:
                    parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)

    def restore(self) -> None:
        """Restore the layers' ``forward`` and drop deferred gradients."""
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
    """The modules inside another's compiled forward, where hooks cannot run."""
    return {
        inner
        for _, module in _dense_modules(model)
        if is_compiled(module)
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


def count_dense_values(model: nn.Module) -> int:
    """The number of trained values in the dense layers."""
    return sum(parameter.numel() for parameter in dense_parameters(model).values())


def _dense_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of the dense modules, frozen ones too, each once."""
    names: dict[torch.Tensor, str] = {}
    for path, module in _dense_modules(model):
        for name, tensor in tensors_of(module).items():
            names.setdefault(tensor, f"{path}.{name}" if path else name)
    return {name: tensor for tensor, name in names.items()}


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in parameters_of(module).values() if p.requires_grad]


def _parts(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """The first modules of the tree that have dense siblings, with all modules inside each."""
    node = model
    while True:
        children = [child for child in node.children() if dense_parameters(child)]
        if _trained(node) or len(children) != 1:
            break
        node = children[0]
    parts = {child: [module for _, module in _dense_modules(child)] for child in children}
    return {node: [node], **parts} if _trained(node) else parts


class _Bucket:
    """Parameters whose gradients are averaged in one message and that are updated together.

    The message has the gradients / W, then a flag per parameter: whether this rank has a gradient.
    A gradient that no rank has stays None. With W > 1 it takes one copy of the gradients.
    The parameters have one type and device; ``layers`` are theirs if gradients are deferred.
    """

    def __init__(
        self, parameters: list[nn.Parameter], layers: list[nn.Linear], sender: Sender
    ) -> None:
        self.parameters, self.layers, self._sender = parameters, layers, sender
        # Parameters whose gradient the step's last backward pass has completed.
        self.arrived: set[nn.Parameter] = set()
        # Settings of the optimizer's groups for the pending update; None without one.
        self.noted: list[dict[str, Any]] | None = None
        # The mean gradients, once received and until the update.
        self.taken: list[torch.Tensor | None] | None = None
        self._grads: list[torch.Tensor | None] = []
        self._has_grad: list[bool] = []
        self._message: torch.Tensor | None = None
        self._work: _Future | None = None

    def start(self) -> None:
        """Move out the parameters' ``grad`` (None afterwards) and start averaging."""
        grads = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if self._sender.world_size == 1:
            self._grads = grads
            return
        num_values = sum(parameter.numel() for parameter in self.parameters)
        if self._message is None:
            self._message = self.parameters[0].new_empty(num_values + len(grads))
        for view, grad in zip(self._views(self._message), grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                torch.mul(grad, 1 / self._sender.world_size, out=view)
        self._has_grad = [grad is not None for grad in grads]
        if all(self._has_grad):
            self._message[num_values:].fill_(1)  # a copy to the device would block the host
        else:
            self._message[num_values:].copy_(torch.tensor(self._has_grad))
        self._work = self._sender.start(self._message, num_values)

    def drop(self) -> None:
        """Drop pending messages, which keep connections open."""
        self._work = None

    def _views(self, message: torch.Tensor) -> list[torch.Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = message.detach()[: sum(sizes)].split(sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def take(self) -> list[torch.Tensor | None]:
        """Wait for the means, valid until the next ``start``; None if no rank has a gradient.

        Raises:
            RuntimeError: if a rank has failed.
        """
        if self._message is None:  # one rank
            grads, self._grads = self._grads, []
            return grads
        if self._work is not None:
            self._work.wait()  # on CUDA the current stream waits
            self._work = None
        views = self._views(self._message)
        if all(self._has_grad):  # reading the flags would wait for the device
            return [*views]
        is_used = self._message[-len(views) :].tolist()
        return [view if used else None for view, used in zip(views, is_used, strict=True)]


def _make_buckets(
    parts: Mapping[nn.Module, Sequence[nn.Module]], layers: Sequence[nn.Linear], sender: Sender
) -> list[_Bucket]:
    """Make the buckets in the order of their messages; the first part owns shared parameters."""
    layer_of = {parameter: layer for layer in layers for parameter in _trained(layer)}
    grouped: dict[Any, dict[nn.Parameter, None]] = {}
    seen: set[nn.Parameter] = set()
    for number, inside in enumerate(parts.values()):
        for parameter in dict.fromkeys(p for module in inside for p in _trained(module)):
            if parameter not in seen:
                key = (parameter in layer_of, number, parameter.dtype, parameter.device)
                grouped.setdefault(key, {})[parameter] = None
        seen.update(p for module in inside for p in _trained(module))
    buckets = [
        _Bucket([*own], [*dict.fromkeys(layer_of[p] for p in own if p in layer_of)], sender)
        for own in grouped.values()
    ]
    direct = [bucket for bucket in buckets if not bucket.layers]
    return direct[::-1] + [bucket for bucket in buckets if bucket.layers]


class DenseSync:
    """Averages the gradients of a model's dense layers over the ranks and updates them late.

    A step is one or more of ``with dense.backward(is_last=...): loss.backward()``, then
    ``dense.finish_backward()`` and ``dense.step()``. Gradients are cleared and the optimizer is
    called here only. As in DDP, every rank starts with the first rank's weights and buffers.

    The ranks exchange one message per bucket: a part of the model (for DLRM the bottom and the top
    layers), split by whether gradients are deferred. Direct buckets are sent as backward completes
    them, last part first; then the deferred ones, first part first.

    A parameter is updated on every rank if some rank uses it, else on none. As in DDP with a static
    graph, which TorchRec's wrapper makes, a rank uses the same ones in every step.

    Args:
        model: The model, not wrapped in DDP, the same on every rank. Its parts, or their
            submodules, must be called as modules, so that pending updates are applied in time.
        optimizer: An optimizer of exactly the model's dense parameters that keeps its state by
            parameter and skips those without ``grad``, such as TorchRec's KeyedOptimizerWrapper.
        wire_type: The type in which float32 gradients are sent; sums are made in float32.
        max_norm: Clips the joint norm of all mean gradients to this value; None disables clipping.
            With it the first update of a step waits for the gradients of all buckets.
        line: The group and thread to share, see ``Sender``; then all messages are sent by
            ``finish_backward``. None for a separate group.

    Raises:
        ValueError: if the optimizer's parameters are not the model's dense ones, a layer keeps
            running statistics, or the ranks have different parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        wire_type: WireType = WireType.fp32,
        max_norm: float | None = None,
        line: Line | None = None,
    ) -> None:
        named = dense_parameters(model)
        _check_optimizer(named, optimizer)
        check_modules(model)
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._names = {parameter: name_of_user(name) for name, parameter in named.items()}
        self._was_used: dict[nn.Parameter, bool] = {}  # in the first step
        share_first(model)
        self._sender = Sender(wire_type, line)
        parts, compiled = _parts(model), _inside_compiled(model)
        modules = [module for _, module in _dense_modules(model)]
        layers = [layer for layer in deferrable_layers(modules) if layer not in compiled]
        self._buckets = _make_buckets(parts, layers, self._sender)
        self._direct = [bucket for bucket in self._buckets if not bucket.layers]
        self._num_started = 0
        self._is_last = False
        self._is_new_step = True
        self._deferred = DeferredLinears(layers)
        self._hooks: list[Any] = []
        self._watch_forward(parts, compiled)
        for bucket in self._direct:
            for parameter in bucket.parameters:
                arrival = partial(self._note_arrival, bucket)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(arrival))

    def _watch_forward(
        self, parts: Mapping[nn.Module, Sequence[nn.Module]], compiled: set[nn.Module]
    ) -> None:
        """Apply pending updates before a part, or a module in it with weights, is called."""
        bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        used_by: dict[nn.Module, dict[_Bucket, None]] = {}
        for part, inside in parts.items():
            for module in inside:
                own = dict.fromkeys(bucket_of[p] for p in _trained(module))
                for holder in (part, module):
                    used_by.setdefault(holder, {}).update(own)
        for module, buckets in used_by.items():
            if buckets:
                before = partial(self._apply_pending, list(buckets))
                if module not in compiled:
                    self._hooks.append(module.register_forward_pre_hook(before))
                self._hooks.append(module.register_state_dict_pre_hook(before))
                self._hooks.append(module.register_load_state_dict_pre_hook(before))

    def _apply_pending(self, buckets: list[_Bucket], *_: Any) -> None:
        for bucket in buckets:
            if bucket.noted is not None:
                self._update(bucket)

    @contextmanager
    def backward(self, is_last: bool = True) -> Iterator[None]:
        """Wrap one backward pass of the step; gradients of passes before the last add up."""
        if self._is_new_step:
            for parameter in self._names:
                parameter.grad = None
        self._is_new_step, self._is_last = False, is_last
        with self._deferred.deferring():
            yield
        self._is_last = False

    def _note_arrival(self, bucket: _Bucket, parameter: torch.Tensor) -> None:
        if not self._is_last:
            return
        assert isinstance(parameter, nn.Parameter)
        if parameter in bucket.arrived:
            raise RuntimeError(
                f"dense parameter {self._names[parameter]}: expected one gradient in a backward "
                "pass, got a second. Do not nest backward passes (re-entrant checkpointing) or "
                "run two inside one dense.backward()."
            )
        bucket.arrived.add(parameter)
        if self._sender.is_in_line:
            return  # the order of messages must not depend on when this rank has its gradients
        for upcoming in self._direct[self._num_started :]:
            if len(upcoming.arrived) < len(upcoming.parameters):
                break
            self._start(upcoming)

    def finish_backward(self) -> None:
        """After the last pass: compute deferred gradients and start the remaining reductions."""
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
                    "forward, got a gradient without a call (computed from a stale weight). Call "
                    "the module itself or a parent."
                )
            self._update(bucket)
        for parameter in bucket.parameters:
            is_used = parameter.grad is not None
            if is_used != self._was_used.setdefault(parameter, is_used):
                raise unlike_first(self._names[parameter], is_used=is_used)
        bucket.start()
        self._num_started += 1

    def step(self) -> None:
        """Schedule the update with the current settings of the optimizer's groups."""
        noted = _settings(self._optimizer)
        for bucket in self._buckets:
            bucket.noted = noted
            bucket.arrived.clear()
        self._num_started, self._is_new_step = 0, True

    # An evaluation may trigger the update, and the optimizer state created here outlives it.
    @torch.inference_mode(False)
    def _update(self, bucket: _Bucket) -> None:
        """Wait for the bucket's gradients and update only its parameters."""
        assert bucket.noted is not None
        mark("dense")
        if bucket.taken is None:
            # The joint norm needs all gradients of the step.
            for one in self._buckets if self._max_norm is not None else [bucket]:
                one.taken = one.take()
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
        self._apply_pending(self._buckets)

    def close(self) -> None:
        """Restore the model and leave the group; pending updates are dropped."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._deferred.restore()
        for bucket in self._buckets:
            bucket.drop()
        self._sender.close()


def unlike_first(name: str, *, is_used: bool) -> RuntimeError:
    """The error of a parameter that is used in some steps only."""
    wanted, found = ("no", "one") if is_used else ("a", "none")
    return RuntimeError(
        f"parameter {name}: expected {wanted} gradient, as in the first step, got {found}. Use the "
        "same layers in every step, for example by adding 0 times their outputs to the loss."
    )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copy the settings of the optimizer's groups, such as learning rates."""
    groups = ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    return [copy.deepcopy(group) for group in groups]


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
            f"got {missing[:4]} missing and additional ones of shapes {sorted(unknown)[:4]}. "
            "Create it from dense_parameters(model) and freeze untrained layers."
        )


def check_modules(model: nn.Module) -> None:
    """Raise ValueError if ``DenseSync`` cannot train a dense layer of a model, sharded or not."""
    for path, module in _dense_modules(model):
        for name, expected in (
            ("track_running_stats", "no running statistics, which differ between ranks"),
            ("sparse", "dense gradients"),
        ):
            if getattr(module, name, False):
                raise ValueError(
                    f"dense layer {path}: expected {expected}, got {type(module).__name__} with "
                    f"{name}=True. Set {name}=False, or use another layer."
                )
