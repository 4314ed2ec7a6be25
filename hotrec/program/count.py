"""Counts the ids in a loader's batches: the profile from which hot rows are chosen."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hotrec.cost_model.blocks import Block
from hotrec.cost_model.profile import Profile, count_rows, read_profile
from hotrec.cost_model.reuse import ReuseMeter
from hotrec.program.tables import SplitCollection, configs_of, split_collections, tables_of
from hotrec.routing.batches import features_of_each
from hotrec.routing.checks import check_names
from hotrec.runtime.ranks import all_gather_object, same_verdict, world_size
from hotrec.types import Feature, Schema, Table


def profile(
    source: Iterable[Any] | str | Path,
    model: nn.Module | None = None,
    *,
    num_batches: int | None = None,
) -> Profile:
    """Count how often each row of each embedding table is read.

    ::

        hot = hotrec.profile(loader, model, num_batches=500)

    With a process group it is a collective: every rank counts its own loader, and all ranks get the
    sums.

    Args:
        source: Batches that contain a ``KeyedJaggedTensor``, such as a loader, whose first batches
            are read; or the directory of a profile written by ``Profile.save`` or `hotrec prepare`.
        model: The unsharded model, whose ``EmbeddingBagCollection`` and ``EmbeddingCollection``
            modules define the tables and their features; not needed for a saved profile.
        num_batches: Batches to count on this rank; None for all.

    Returns:
        The profile, with 8 bytes per row; ``save`` writes it.

    Raises:
        ValueError: If there is no batch, a feature is missing, or an id is outside its table.
        ArtifactError: If there is no profile in the directory.
    """
    if isinstance(source, str | Path):
        return read_profile(Path(source))[0]
    if model is None:
        raise ValueError(
            "profile model: expected the model whose tables are counted, got None. Pass it."
        )
    collections = split_collections(model)
    schema = _schema(collections)
    meter, sizes = ReuseMeter(schema), list[int]()

    def blocks() -> Iterator[Block]:
        names = [
            {name for table in configs_of(collection) for name in table.feature_names}
            for collection in collections
        ]
        for batch in itertools.islice(source, num_batches):
            features = features_of_each(batch, names)
            block = _block_of(dict(zip(collections, features, strict=True)))
            sizes.append(block.num_samples)
            yield block
            if block.num_samples:
                meter.observe(block)  # after the ids are checked

    def count() -> Profile:
        is_integer = hasattr(num_batches, "__index__")
        if num_batches is not None and not (is_integer and 1 <= num_batches <= sys.maxsize):
            raise ValueError(
                "profile num_batches: expected an integer of at least 1, or None for all, got "
                f"{num_batches!r}. Correct it."
            )
        counted = count_rows(blocks(), schema)
        return replace(
            counted,
            locality=counted.locality or meter.localities(),
            batch_size=max(sizes, default=None),
            reuse=meter.reuse(),
        )

    counted = _summed(same_verdict(count))
    if counted.num_samples == 0:
        raise ValueError(
            "profile: expected at least one sample to count, got none. Pass a loader that has "
            "batches left."
        )
    return counted


def _schema(collections: Sequence[SplitCollection]) -> Schema:
    """The tables, each with its columns: several tables may read one feature."""
    tables = tables_of(collections)
    return Schema(
        dense=(),
        features=tuple(
            Feature(_column(name, table.name), table.name, is_multi_hot=True)
            for table in tables
            for name in table.feature_names
        ),
        tables=tuple(Table(table.name, table.num_embeddings) for table in tables),
    )


def _column(feature: str, table: str) -> str:
    return f"{feature}@{table}"


def _block_of(features_of: Mapping[Any, Any]) -> Block:
    rows, lengths, stride = {}, {}, 0
    for collection, features in features_of.items():
        ids, stride = features.to(torch.device("cpu")), features.stride()
        for table in configs_of(collection):
            check_names(ids, table.feature_names)
            for name in table.feature_names:
                column = _column(name, table.name)
                rows[column] = ids[name].values().numpy()
                lengths[column] = ids[name].lengths().numpy()
    return Block(stride, rows, lengths)


def _summed(counted: Profile) -> Profile:
    """The counts of all ranks, and the locality and reuse of the one with the most samples.

    Collective.
    """
    if world_size() == 1:
        return counted
    device = torch.device("cpu")
    assert dist.group.WORLD is not None
    if "gloo" not in dist.get_backend_config(dist.group.WORLD):
        device = torch.device("cuda", torch.cuda.current_device())
    for counts in counted.counts.values():
        total = torch.from_numpy(counts).to(device)
        dist.all_reduce(total)
        counts[:] = total.cpu().numpy()
    num_samples = torch.tensor(counted.num_samples, device=device)
    dist.all_reduce(num_samples)
    of_ranks = all_gather_object(
        (counted.num_samples, counted.locality, counted.batch_size, counted.reuse)
    )
    _, locality, batch_size, reuse = max(of_ranks, key=itemgetter(0))
    return replace(
        counted,
        num_samples=int(num_samples),
        locality=locality,
        batch_size=batch_size,
        reuse=reuse,
    )
