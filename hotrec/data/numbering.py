"""Numbers for values as they come: 0, 1, ..., the same for the same value."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa

from hotrec.data.chunks import one_array
from hotrec.data.hashing import Hashes, find_sorted, hash_text
from hotrec.types import Rows

# New hashes are merged into all only if they are enough of them.
_MIN_MERGED, _FRAC_MERGED = 1 << 16, 8
_MOST_CHUNKS = 16


class Numbering:
    """Numbers different hashes 0, 1, ...; amortised O(log) per hash added, 16 bytes for each."""

    def __init__(self) -> None:
        none = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._all, self._recent = none, none  # hashes, increasing, with their numbers

    def __len__(self) -> int:
        return int(self._all[0].size + self._recent[0].size)

    def add(self, hashes: Hashes) -> Rows:
        """The number of each hash, int64 (n,); new ones get the next numbers, by hash."""
        distinct, inverse = np.unique(hashes, return_inverse=True)
        numbers = self._find(distinct)
        is_new = numbers < 0
        numbers[is_new] = len(self) + np.arange(np.count_nonzero(is_new))
        self._recent = _merged(self._recent, (distinct[is_new], numbers[is_new]))
        if self._recent[0].size > max(_MIN_MERGED, self._all[0].size // _FRAC_MERGED):
            self._all = _merged(self._all, self._recent)
            self._recent = self._recent[0][:0], self._recent[1][:0]
        return numbers[inverse.reshape(-1)]

    def hashes(self) -> Hashes:
        """The hash of each number, uint64 (size,)."""
        found = np.empty(len(self), np.uint64)
        for hashes, numbers in (self._all, self._recent):
            found[numbers] = hashes
        return found

    def _find(self, distinct: Hashes) -> Rows:
        found = np.full(distinct.size, -1)
        for hashes, numbers in (self._all, self._recent):
            at = find_sorted(hashes, distinct)
            found = np.where(at >= 0, np.append(numbers, -1)[at], found)
        return found


def _merged(first: tuple[Hashes, Rows], second: tuple[Hashes, Rows]) -> tuple[Hashes, Rows]:
    hashes, numbers = (np.concatenate(parts) for parts in zip(first, second, strict=True))
    order = np.argsort(hashes, kind="stable")
    return hashes[order], numbers[order]


class TextNumbers:
    """Numbers different texts, distinguished by their hashes, and keeps them."""

    def __init__(self) -> None:
        self._numbering = Numbering()
        self._texts = pa.chunked_array([], pa.large_string())

    def add(self, texts: pa.Array) -> Rows:
        """The number of each text, int64 (n,); -1 for a null."""
        is_text = texts.is_valid().to_numpy(zero_copy_only=False)
        numbers, known = np.full(len(texts), -1), len(self._numbering)
        present = texts.filter(pa.array(is_text)) if texts.null_count else texts
        numbers[is_text] = found = self._numbering.add(hash_text(present))
        new = np.flatnonzero(found >= known)
        if new.size:
            _, first = np.unique(found[new], return_index=True)
            added = present.take(pa.array(new[first])).cast(pa.large_string())
            self._texts = pa.chunked_array([*self._texts.chunks, added], pa.large_string())
        return numbers

    def used(self, numbers: Rows) -> tuple[pa.Array, Rows]:
        """The texts among some numbers, and for each number the position of its text, -1 of -1."""
        is_used = np.zeros(len(self._numbering) + 1, bool)
        is_used[numbers] = True  # -1 is the last one
        is_used[-1] = False
        if self._texts.num_chunks > _MOST_CHUNKS:
            self._texts = pa.chunked_array([one_array(self._texts)], pa.large_string())
        positions = np.cumsum(is_used) - 1
        positions[-1] = -1
        found = np.flatnonzero(is_used)
        texts = one_array(self._texts.take(pa.array(found))).cast(pa.string())
        return texts, positions[numbers]

    def values(self, numbers: pl.Series) -> pl.Series:
        """The text of each number."""
        return pl.Series(self._texts, dtype=pl.String).gather(numbers)
