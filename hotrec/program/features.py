"""How a sharded model calls its embedding modules, so that each means what the unsplit one does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.pooled import ShardedPooledBags
from hotrec.embedding.tables import torchrec_collections
from hotrec.routing.checks import check_names, declared_weights


def read_as_declared(model: nn.Module) -> None:
    """Let TorchRec's own collections ignore weights that they do not declare, and miss others.

    TorchRec multiplies by any weights that features have, and by one where they have none.
    """
    for _, collection in torchrec_collections(model):
        if isinstance(collection, ShardedPooledBags):  # whose router does so
            continue
        wanted = [n for t in collection._embedding_bag_configs for n in t.feature_names]
        of_torchrec: Any = collection.input_dist
        reads: Any = partial(_input_dist, of_torchrec, wanted, collection._is_weighted)
        collection.input_dist = reads


def _input_dist(
    of_torchrec: Callable[[Any, Any], Any],
    wanted: Sequence[str],
    is_weighted: bool,
    ctx: Any,
    features: Any,
) -> Any:
    if isinstance(features, KeyedJaggedTensor):
        check_names(features, wanted)
        if declared_weights(features, is_weighted) is not features.weights_or_none():
            features = _without_weights(features)
    return of_torchrec(ctx, features)


def _without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    is_variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=features.lengths(),
        stride=None if is_variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if is_variable else None,
        inverse_indices=features.inverse_indices_or_none(),
    )


def allow_one_call(model: nn.Module) -> None:
    """Refuse a second call of an embedding module in one forward of the model.

    Its kernels would update rows once for each call, each time by a part of the gradient.
    """
    calls: dict[nn.Module, int] = {}

    def count(name: str, module: nn.Module, _: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        calls[module] = calls.get(module, 0) + 1
        if calls[module] > 1:
            raise RuntimeError(
                f"embedding module {name}: expected one call in a forward of the model, got a "
                "second, and rows would be updated twice. Look all features up in one call."
            )

    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule) and module not in inside:
            inside.update(module.modules())
            of_user = name.replace("_dmp_wrapped_module.", "").removeprefix("module.")
            module.register_forward_pre_hook(partial(count, of_user))
    model.register_forward_pre_hook(lambda *_: calls.clear())
