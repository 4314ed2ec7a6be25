"""TorchRec's own sharded collections, with the inputs and outputs of the unsplit ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from hotrec.embedding.collection import names_by_table
from hotrec.embedding.pooled import ShardedPooledBags
from hotrec.embedding.tables import torchrec_collections
from hotrec.embedding.torchrec import is_weighted, table_configs
from hotrec.routing.checks import (
    check_names,
    check_own_bags,
    check_types,
    declared_weights,
    select_features,
)

Stage = Callable[[Any, Any], Any]
# Of ids and lengths, on every rank.
SENT_TYPES = torch.int64, torch.int32


def keep_unsplit_form(model: nn.Module) -> None:
    """Give TorchRec's own collections the form of the unsplit ones, whatever the plan is.

    TorchRec returns keys grouped by sharding type and owner, reads the features of later batches in
    the order of the first batch's, cannot read sequences of a batch without samples, multiplies by
    any weights of the features, and by one if there are none.
    """
    for _, collection in torchrec_collections(model):
        if not isinstance(collection, ShardedPooledBags):  # its router and its layout do so
            _keep_form(collection)


def _keep_form(collection: Any) -> None:
    tables = table_configs(collection)
    names = list(chain.from_iterable(names_by_table(tables)))
    wanted = [name for table in tables for name in table.feature_names]
    is_bags = isinstance(collection, ShardedEmbeddingBagCollection)
    has_weights = is_bags and is_weighted(collection)
    collection.input_dist = partial(_input_dist, collection.input_dist, wanted, [], has_weights)
    # TorchRec's pipelines call the first, some of its modules around a collection the second.
    for stage in ("compute_and_output_dist", "output_dist"):
        setattr(collection, stage, partial(_output_dist, getattr(collection, stage), names))


def _input_dist(
    of_torchrec: Stage,
    wanted: list[str],
    order: list[str],
    has_weights: bool,
    ctx: Any,
    features: Any,
) -> Any:
    """Send the features that are wanted, in the order of the first batch, which is kept."""
    if isinstance(features, KeyedJaggedTensor):
        check_names(features, wanted)
        check_types(features)
        if features.device().type == "cpu":  # FBGEMM has no kernel for shared bags there
            check_own_bags(features)
        weights = declared_weights(features, has_weights)
        types = features.values().dtype, features.lengths().dtype
        ctx.hotrec_is_empty, ctx.hotrec_type = _is_empty(features), types[1]
        is_same = types == SENT_TYPES and weights is features.weights_or_none()
        if ctx.hotrec_is_empty or not is_same:
            features = _with_weights(features, weights)
        order[:] = order or sorted(set(wanted), key=features.keys().index)
        features = select_features(features, order)
    return of_torchrec(ctx, features)


def _is_empty(features: KeyedJaggedTensor) -> bool:
    return not features.variable_stride_per_key() and features.stride() == 0


def _with_weights(features: KeyedJaggedTensor, weights: torch.Tensor | None) -> KeyedJaggedTensor:
    """The features with these weights, in the types that are sent.

    With a sample without ids if there is none.

    Ranks that exchange integers of different types would read other ids.
    """
    is_variable, lengths = features.variable_stride_per_key(), features.lengths().int()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values().long(),
        weights=weights,
        lengths=lengths.new_zeros(len(features.keys())) if _is_empty(features) else lengths,
        stride=None if is_variable else max(features.stride(), 1),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if is_variable else None,
        inverse_indices=features.inverse_indices_or_none(),
    )


def _output_dist(of_torchrec: Stage, names: list[str], ctx: Any, found: Any) -> LazyAwaitable[Any]:
    started: LazyAwaitable[Any] = of_torchrec(ctx, found)
    is_empty, lengths = getattr(ctx, "hotrec_is_empty", False), getattr(ctx, "hotrec_type", None)
    started.callbacks.append(partial(_in_order, names, is_empty=is_empty, lengths_type=lengths))
    return started


def _in_order(
    names: list[str], output: Any, *, is_empty: bool, lengths_type: torch.dtype | None
) -> Any:
    """The output with the keys in this order, and without the sample of an empty batch."""
    if not isinstance(output, KeyedTensor):
        jagged: dict[str, JaggedTensor] = {name: output[name] for name in names}
        for name, one in jagged.items():
            lengths = one.lengths().to(lengths_type or one.lengths().dtype)
            if is_empty:
                lengths = lengths[:0]
            if lengths is not one.lengths():
                jagged[name] = JaggedTensor(one.values(), one.weights_or_none(), lengths)
        return jagged
    if output.keys() != names:
        columns = output.to_dict()
        values = torch.cat([columns[name] for name in names], dim=1)
        output = KeyedTensor(names, [columns[name].shape[1] for name in names], values)
    if is_empty:
        output = KeyedTensor(names, output.length_per_key(), output.values()[:0])
    return output
