"""The AUC of a single column, by which a column that leaks the label is recognised.

A sample's score is the click rate of its value among the other half of the samples, so that a
column whose values are all different (a session's id) scores as chance, and one that is known only
after the click scores near 1, whatever its kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hotrec.data.auc import measure_auc
from hotrec.data.chunks import Dataset, Integers, Jagged
from hotrec.data.gather import gather_bags
from hotrec.types import Rows

# Numbers are cut into this many ranges with equally many samples.
NUM_RANGES = 256
# Samples read of the training split, from chunks all over it.
NUM_SAMPLES, NUM_CHUNKS = 200_000, 8
# Each rate is smoothed by this many samples with the overall rate.
_PRIOR = 2.0

Bools = npt.NDArray[np.bool_]


def alone_auc(
    codes: npt.NDArray[np.integer[Any]], is_click: Bools, offsets: Rows | None = None
) -> float | None:
    """The AUC of the click rate of each sample's value, learnt from the other half of the samples.

    Args:
        codes: The values as numbers from 0, int (S,); equal values have equal numbers. With offsets
            the values of all lists, (K,).
        is_click: bool (S,).
        offsets: Of lists, (S + 1,): list s has the values from ``offsets[s]`` to
            ``offsets[s + 1]``. Its score is the mean of theirs; being empty is a value, too.

    Returns:
        From 0 to 1, 0.5 by chance; None if a half has no clicks or only clicks.
    """
    num_samples = len(is_click)
    is_second = np.random.default_rng(0).permutation(num_samples) % 2 == 1
    if offsets is None:
        lengths, samples = np.ones(num_samples, np.int64), np.arange(num_samples)
    else:
        lengths = np.diff(offsets)
        samples = np.repeat(np.arange(num_samples), np.maximum(lengths, 1))
        # Empty lists share one value, which no other list has.
        codes = np.insert(codes + 1, offsets[:-1][lengths == 0], 0)
        lengths = np.maximum(lengths, 1)
    size, scores = int(codes.max(initial=0)) + 1, np.empty(num_samples)
    for half in (is_second, ~is_second):
        if len(set(is_click[half].tolist())) < 2:
            return None
        of_half, rate = half[samples], float(is_click[half].mean())
        seen = np.bincount(codes[of_half], minlength=size)
        clicks = np.bincount(codes[of_half], is_click[samples[of_half]], minlength=size)
        rates = (clicks + _PRIOR * rate) / (seen + _PRIOR)
        sums = np.bincount(samples, rates[codes], minlength=num_samples)
        # Each half against its own rate, which an unseen value has.
        scores[~half] = (sums / lengths - rate)[~half]
    return measure_auc(scores, is_click)


def codes_of_numbers(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.int64]:
    """Numbers (S,) as those of ranges with about equally many samples; NaN has one of its own."""
    is_known = ~np.isnan(values)
    codes = np.zeros(len(values), np.int64)
    if is_known.any():
        known = values[is_known]
        bounds = np.unique(np.quantile(known, np.linspace(0, 1, NUM_RANGES + 1), method="lower"))
        codes[is_known] = 1 + np.searchsorted(bounds, known, side="right")
    return codes


def alone_aucs(dataset: Dataset, split: str, label: int = 0) -> dict[str, float]:
    """The AUC of each column of a dataset alone, on a sample of a split, the highest first.

    Args:
        dataset: A prepared dataset.
        split: The split, such as "train".
        label: The index of the label if there are several.
    """
    num_chunks = len(dataset.chunks(split))
    if num_chunks == 0:
        return {}
    taken = np.unique(np.linspace(0, num_chunks - 1, min(NUM_CHUNKS, num_chunks)).astype(int))
    blocks = [dataset.block(split, index) for index in taken]
    stride = max(1, sum(map(len, blocks)) // NUM_SAMPLES)
    samples = [np.arange(0, len(block), stride) for block in blocks]
    of_blocks = list(zip(blocks, samples, strict=True))
    labels = [block.label.reshape(len(block), -1)[chosen, label] for block, chosen in of_blocks]
    is_click = np.concatenate(labels) == 1
    dense = np.concatenate([block.dense[chosen] for block, chosen in of_blocks])
    found = {
        name: alone_auc(codes_of_numbers(numbers), is_click)
        for name, numbers in zip(dataset.schema.dense, dense.T, strict=True)
    }
    for feature in dataset.schema.features:
        parts = [_take(block.features[feature.name], chosen) for block, chosen in of_blocks]
        # Rows of a large table as few numbers.
        codes = np.unique(np.concatenate([rows for rows, _ in parts]), return_inverse=True)[1]
        bags = [lengths for _, lengths in parts if lengths is not None]
        offsets = np.r_[0, np.cumsum(np.concatenate(bags))] if bags else None
        found[feature.name] = alone_auc(codes, is_click, offsets)
    known = {name: auc for name, auc in found.items() if auc is not None}
    return dict(sorted(known.items(), key=lambda item: -item[1]))


def _take(ids: Integers | Jagged, samples: Rows) -> tuple[Integers, Integers | None]:
    """The rows of some samples, of bags with their lengths."""
    return gather_bags(ids, samples) if isinstance(ids, Jagged) else (ids[samples], None)
