"""Uses of TorchRec, FBGEMM's modules, DDP and autograd beyond their public interfaces.

The only file that uses their private names, which may change with every release: check it first
with a new pair of libraries. Functions document how releases differ. tests/policy lists the few
private names of torch's runtime and of Python that other files use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.fused import EmptyFusedOptimizer

# ---- Sharded collections -------------------------------------------------------------------------


def lookups(collection: Any) -> list[Any]:
    """The lookups of a sharded collection, one for each way of sharding; in DDP if data-parallel.

    The list is TorchRec's own, which is no submodule: ``model.modules()`` does not reach it.
    """
    found: list[Any] = collection._lookups
    return found


def table_configs(collection: nn.Module) -> list[BaseEmbeddingConfig]:
    """The tables of a sharded collection; only unsharded collections have a method for them."""
    is_pooled = isinstance(collection, ShardedEmbeddingBagCollection)
    found: Any = collection._embedding_bag_configs if is_pooled else collection._embedding_configs
    return list(found)


def is_torchrecs(module: nn.Module) -> bool:
    """Whether it is a sharded collection of TorchRec's, with its exchange."""
    return isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection)


def is_weighted(collection: ShardedEmbeddingBagCollection) -> bool:
    """Whether a sharded collection multiplies rows by the weights of its features."""
    return bool(collection._is_weighted)


# ---- Kernels -------------------------------------------------------------------------------------


class Kernel:
    """The tables of a lookup that are in one of FBGEMM's modules."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def fbgemm(self) -> Any:
        """FBGEMM's module, which owns the rows and, unless it is dense, their optimizer state."""
        return self._module.emb_module


def kernels(module: nn.Module) -> Iterator[Kernel]:
    """The kernels of a lookup, of a sharded collection or of a whole model."""
    for inner in module.modules():
        for kernel in getattr(inner, "_emb_modules", ()):
            yield Kernel(kernel)
        for lookup in getattr(inner, "_lookups", ()):
            yield from kernels(lookup)


# ---- DDP -----------------------------------------------------------------------------------------


def ddp_modules(model: nn.Module) -> list[DistributedDataParallel]:
    """DDP's wrappers of the dense layers and of the tables that a TorchRec plan replicates.

    There may be none, for example on one rank. Hot rows have their own exchange.
    """
    found: list[Any] = [getattr(model, "_dmp_wrapped_module", None)]
    for module in model.modules():
        if is_torchrecs(module):
            found += lookups(module)
    return [module for module in found if isinstance(module, DistributedDataParallel)]


def keep_buckets(ddp: DistributedDataParallel) -> None:
    """Declare DDP's buckets final; otherwise it would rebuild them in its third step."""
    ddp.reducer._push_all_rebuilt_params()


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Build DDP's final buckets now, in the reverse order of its parameters."""
    parameters, is_sparse = ddp._build_params_for_reducer()
    parameters.reverse()
    is_sparse.reverse()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, is_sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
    keep_buckets(ddp)


# ---- Pipelines -----------------------------------------------------------------------------------


def holds_batches(pipeline: Any) -> bool:
    """Whether one of TorchRec's pipelines has taken batches that it has not computed."""
    is_base = isinstance(pipeline, TrainPipelineBase)
    return pipeline._cur_batch is not None if is_base else bool(pipeline.batches)


def wrap_rewriting(pipeline: Any, around: Callable[[Callable[[], None]], None]) -> None:
    """Wrap the rewrite of the model at a pipeline's first batch: ``around`` gets and calls it.

    The rewrite traces the model and replaces the forward of each module that TorchRec pipelines.
    """
    rewrite = pipeline._pipeline_model
    pipeline._pipeline_model = lambda *args, **kwargs: around(partial(rewrite, *args, **kwargs))


def pipelined_modules(pipeline: Any) -> list[nn.Module]:
    """The sharded modules whose ids a pipeline sends ahead; none before its first batch."""
    return list(pipeline._pipelined_modules)


def rewritten_forwards(pipeline: Any) -> list[tuple[nn.Module, Any, Any]]:
    """The modules that a pipeline calls in parts: each with TorchRec's forward, and its own."""
    modules = pipelined_modules(pipeline)
    dists = [
        of_sharding._dist
        for module in modules
        for inner in module.modules()
        for of_sharding in getattr(inner, "_input_dists", ())
        if hasattr(of_sharding, "_dist")
    ]
    own = [*pipeline._original_forwards, *pipeline._original_kjt_dist_forwards]
    pairs = zip([*modules, *dists], own, strict=False)
    return [(module, module.forward, forward) for module, forward in pairs]


# ---- Optimizers in backward ----------------------------------------------------------------------

Rule = tuple[type[torch.optim.Optimizer], Mapping[str, Any]]


def apply_in_backward(rule: Rule, parameters: Iterable[nn.Parameter]) -> None:
    """Attach update rules to parameters for TorchRec; its own function warns about this one."""
    kind, kwargs = rule
    for parameter in parameters:
        # A dictionary each, since TorchRec writes into it.
        _apply_optimizer_in_backward(kind, [parameter], dict(kwargs))


def rules_in_backward(parameter: torch.Tensor) -> list[Rule]:
    """The rules that ``apply_in_backward`` attached to a parameter, with their arguments."""
    kinds = getattr(parameter, "_optimizer_classes", ())
    return list(zip(kinds, getattr(parameter, "_optimizer_kwargs", ()), strict=True))


def mark_updated_in_backward(parameter: nn.Parameter) -> None:
    """Mark a parameter as TorchRec marks those of its fused kernels, for other optimizers."""
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]


def tensor_of_autograd(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd accumulates gradients in, if TorchRec's parameter is a view."""
    whole: torch.Tensor = getattr(parameter, "_original_tensor", parameter)
    return whole


# ---- Modules -------------------------------------------------------------------------------------


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """A module's children by name; ``named_children`` omits the second name of a child."""
    return {name: child for name, child in module._modules.items() if child is not None}


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own parameters by name; TorchRec's modules override ``named_parameters``."""
    return dict(nn.Module.named_parameters(module, recurse=False, remove_duplicate=False))


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters and buffers by name."""
    return parameters_of(module) | dict(nn.Module.named_buffers(module, recurse=False))


def name_of_user(name: str) -> str:
    """The name of a module or parameter in the model before it was wrapped."""
    return name.replace("_dmp_wrapped_module.", "").removeprefix("module.")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's forward is compiled by ``torch.compile``, so that no hook runs inside."""
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


# ---- Autograd and operators ----------------------------------------------------------------------


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass, after DDP's own callback.

    Call this from a hook. DDP queues its callback during the pass, so this one is queued at its
    end.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(function))


def num_writes(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place."""
    return tensor._version


def has_fused_optimizer(name: str, devices: set[str]) -> bool:
    """Whether torch has the fused kernel of an optimizer ("sgd", "adagrad", "adam") for devices."""
    # torch 2.11 has Adagrad's kernel for CUDA, but its Python half refuses the first step.
    if name == "adagrad" and "cuda" in devices and torch.__version__ < "2.13":
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return devices <= {"cpu", "cuda"} and all(
        has_kernel(f"aten::_fused_{name}_", device.upper()) for device in devices
    )
