"""Finds the features that each collection of a model reads in a batch of any type."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.routing.features import RoutedFeatures

# Batches are shallow: a batch, a field of it, and the items of a container there.
MOST_LEVELS = 4


def features_in(value: Any, levels: int = MOST_LEVELS) -> Iterator[Any]:
    """Iterate over the features in a batch, an object's attributes and containers included."""
    if isinstance(value, KeyedJaggedTensor | RoutedFeatures):
        yield value
        return
    inside: Collection[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    elif not isinstance(value, type):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        inside = [getattr(value, name, None) for name in slots]
        inside += getattr(value, "__dict__", {}).values()
    if levels:
        for item in inside:
            yield from features_in(item, levels - 1)


def features_of_each(batch: Any, wanted: Sequence[Collection[str]]) -> list[Any]:
    """The features in a batch that each collection reads.

    Args:
        batch: A batch of any type with one ``KeyedJaggedTensor`` or more.
        wanted: The names of the features that each collection reads.

    Returns:
        The batch's features by collection: the only ones, or those that have all the names.

    Raises:
        ValueError: If no features of the batch, or several, have a collection's names.
    """
    found = list({id(features): features for features in features_in(batch)}.values())
    if len(found) == 1:
        return found * len(wanted)
    chosen = []
    for names in wanted:
        fitting = [
            features
            for features in found
            if isinstance(features, KeyedJaggedTensor) and set(names) <= set(features.keys())
        ]
        if len(fitting) != 1:
            raise ValueError(
                f"batch {type(batch).__name__}: expected the features {sorted(names)[:4]} in one "
                f"KeyedJaggedTensor, got them in {len(fitting)} of {len(found)}. Give features of "
                'different collections different names, or train with pipeline="base".'
            )
        chosen += fitting
    return chosen
