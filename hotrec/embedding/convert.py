"""Library use: replace the collections of a TorchRec model and shard it, in one call each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from hotrec.embedding.collection import (
    HotColdCollection,
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    SequenceLayout,
)
from hotrec.embedding.initialize import copy_weights
from hotrec.embedding.optimizers import hot_replicas
from hotrec.embedding.packed import PackedLayout, is_packed
from hotrec.embedding.table_memory import fill_empty_tables, leave_tables_out_of_forks
from hotrec.embedding.torchrec import children_of, ddp_modules, rebuild_buckets
from hotrec.embedding.unsplit_form import keep_unsplit_form
from hotrec.types import Partition, Placement


def use_hot_cold(model: nn.Module, placement: Placement | Partition) -> nn.Module:
    """Replace the ``EmbeddingBagCollection`` and ``EmbeddingCollection`` modules of a model.

    This happens in place. Weights are kept: the unsharded model computes the same as before. An
    ``EmbeddingCollection`` without a table in the placement is left to TorchRec.

    Returns:
        The model, or the new collection if the model itself was one.

    Raises:
        ValueError: if the model has no collection, weights are not float32, or the placement does
            not fit its tables.
    """
    if _is_split(model, placement):
        return _convert(model, placement)
    inside = {m for c in model.modules() if isinstance(c, HotColdCollection) for m in c.modules()}
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in children_of(parent).items()
        if child not in inside and _is_split(child, placement)
    ]
    if not found:
        raise ValueError(
            f"model {type(model).__name__}: expected an EmbeddingBagCollection or an "
            "EmbeddingCollection in it, got none. Pass the unsharded model."
        )
    # A collection used in several places stays one collection.
    converted: dict[nn.Module, nn.Module] = {}
    for parent, name, child in found:
        if child not in converted:
            converted[child] = _convert(child, placement)
        setattr(parent, name, converted[child])
    return model


def _is_split(module: nn.Module, placement: Placement | Partition) -> bool:
    if isinstance(module, EmbeddingCollection):
        partition = placement if isinstance(placement, Partition) else placement.partition
        return any(table.name in partition.num_rows for table in module.embedding_configs())
    return isinstance(module, EmbeddingBagCollection)


def _convert(module: nn.Module, placement: Placement | Partition) -> nn.Module:
    assert isinstance(module, EmbeddingBagCollection | EmbeddingCollection), type(module)
    is_pooled = isinstance(module, EmbeddingBagCollection)
    tables = module.embedding_bags if is_pooled else module.embeddings
    # The configurations keep the type that tables were created with, even after `.double()`.
    for name, table in tables.items():
        if table.weight.dtype != torch.float32:
            raise ValueError(
                f"table {name} weight: expected torch.float32, got {table.weight.dtype}. Convert "
                "the model with .float() first."
            )
    converted: HotColdCollection[Any]
    if is_pooled:
        converted = HotColdEmbeddingBagCollection(
            module.embedding_bag_configs(),
            placement,
            is_weighted=module.is_weighted(),
            device=module.device,
        )
    else:
        converted = HotColdEmbeddingCollection(
            module.embedding_configs(),
            placement,
            device=module.device,
            need_indices=module.need_indices(),
            layout=PackedLayout if is_packed(module) else SequenceLayout,
        )
    if torch.device(module.device).type != "meta":
        copy_weights(tables, converted)
    return converted.train(module.training)


def shard(
    model: nn.Module,
    plan: ShardingPlan | None,
    sharders: list[ModuleSharder[nn.Module]],
    device: torch.device,
    *,
    data_parallel: bool = True,
    broadcast_hot: bool = True,
) -> DistributedModelParallel:
    """Shard a model by a plan and make the hot replicas of all ranks equal to rank 0's.

    Without a plan TorchRec's wrapper makes its own. Modules keep the inputs and outputs of the
    unsharded ones.

    Without ``data_parallel`` the dense layers are not wrapped in DDP, for the pipeline look_ahead,
    which reduces their gradients itself. Without ``broadcast_hot`` the caller must make the
    replicas equal, for example with ``initialize_embeddings``: sending large ones takes minutes on
    a slow network.
    """
    sharded = DistributedModelParallel(
        model,
        device=device,
        plan=plan,
        sharders=sharders,
        init_data_parallel=data_parallel,
    )
    fill_empty_tables(sharded)
    keep_unsplit_form(sharded)
    _keep_buckets(sharded)
    leave_tables_out_of_forks(sharded)
    for replica in hot_replicas(sharded).values() if broadcast_hot else ():
        replica.broadcast()
    return sharded


def _keep_buckets(model: nn.Module) -> None:
    """Build DDP's final buckets before the first step, in the reverse order of the parameters.

    It builds them after a process's first step, in the order in which gradients were ready, and the
    sums of three ranks or more depend on a value's place in its bucket: the first step of a resumed
    run would differ. The last layers' gradients are ready first, so all-reduces overlap as before.
    """
    for ddp in ddp_modules(model):
        rebuild_buckets(ddp)


def check_replicas(model: nn.Module) -> None:
    """Raise RuntimeError on every rank if the hot replicas of the ranks differ, by checksum."""
    if dist.is_initialized():
        for replica in hot_replicas(model).values():
            replica.check_equal()
