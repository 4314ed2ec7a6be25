"""Histories: beside each sample of a log, lists of the earlier rows of the same user.

They are made while the log is read, from the last rows of each user, in memory bounded by users x
``max_length``. Ranks that read only some files exchange the last rows of each file through tails in
the scratch directory, so that the histories do not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hotrec.config.data import SourceSpec, columns_of, is_list_of_numbers
from hotrec.config.histories import UserHistorySpec
from hotrec.data.chunks import Integers, Jagged, one_array, write_arrow
from hotrec.data.columns import (
    Lists,
    NumberLists,
    RawBlock,
    Texts,
    lists_from_texts,
    offsets_of,
    whole_ids,
)
from hotrec.data.gather import gather_bags
from hotrec.data.hashing import hash_text
from hotrec.data.last_events import TIME, EventHistories, LastEvents, Values
from hotrec.data.numbering import TextNumbers
from hotrec.types import Rows

TAILS = "tails"
# Blocks are cut to about this many places of lists, so that memory does not grow with max_length.
_PLACES_PER_PART = 1 << 20
_NO_FILE = 2**62


class Histories:
    """The histories of a log, which is read file after file.

    Args:
        spec: The log.
    """

    def __init__(self, spec: SourceSpec) -> None:
        columns = columns_of(spec)
        self._spec = {
            name: (history, {n for n in history.lists if is_list_of_numbers(columns, n)})
            for name, history in spec.histories.items()
        }
        self._next_file = 0
        self._restart()
        # Where the tails of files are that this process does not read.
        self.tails: Path | None = None

    def blocks(self, file: int, path: Path, blocks: Iterator[RawBlock]) -> Iterator[RawBlock]:
        """The blocks of a file with the lists of its samples.

        Args:
            file: The number of the file in the log.
            path: The file.
            blocks: Its joined blocks.

        Raises:
            ValueError: If rows of a user are not in order of time, or lists that precede the
                histories of a sample differ in length; it names the line.
        """
        self._go_to(file)
        most = max(history.max_length for history, _ in self._spec.values())
        size = max(_PLACES_PER_PART // most, 1)
        for block in blocks:
            for begin in range(0, max(len(block), 1), size):
                part = block.part(begin, begin + size)
                for history in self._histories.values():
                    part = history.add(part, path)
                yield part
        self._next_file = file + 1

    def write_tails(self, file: int, path: Path, blocks: Iterator[RawBlock]) -> None:
        """Write what a file, read alone, leaves to the files after it."""
        assert self.tails is not None
        self._restart()
        self._next_file = _NO_FILE
        for block in blocks:
            for history in self._histories.values():
                history.add_events(block, path)
        for name, history in self._histories.items():
            write_arrow(_tail(self.tails, name, file), history.tail())

    def _restart(self) -> None:
        self._histories = {
            name: _History(name, spec, numbers) for name, (spec, numbers) in self._spec.items()
        }

    def _go_to(self, file: int) -> None:
        if file < self._next_file:
            self._restart()
            self._next_file = 0
        for skipped in range(self._next_file, file):
            assert self.tails is not None, f"file {file} after {skipped}: expected its tail"
            for name, history in self._histories.items():
                path = _tail(self.tails, name, skipped)
                history.add_tail(pa.ipc.open_file(pa.memory_map(str(path))).read_all())
        self._next_file = _NO_FILE  # until the whole file is read


def _tail(directory: Path, history: str, file: int) -> Path:
    return directory / f"{history}-{file:05d}.arrow"


class _History:
    """A history: the last rows of each user of the blocks so far."""

    def __init__(self, name: str, spec: UserHistorySpec, numbers: set[str]) -> None:
        self._name, self._spec = name, spec
        stored = [of for of in spec.lists if of != spec.age]
        self._numbers = [of for of in stored if of in numbers]
        self._texts = {of: TextNumbers() for of in stored if of not in numbers}
        types: dict[str, Any] = {TIME: np.float64, **dict.fromkeys(self._numbers, np.float64)}
        self._events = LastEvents(
            spec.max_length, {**types, **dict.fromkeys(self._texts, np.int32)}
        )

    def add(self, block: RawBlock, path: Path) -> RawBlock:
        """The block with its lists."""
        events, num_events = self.add_events(block, path)
        before = self._before(block, path)
        room = self._spec.max_length - num_events
        num_before = np.zeros(len(block), np.int64)
        for _, lengths in before.values():
            num_before = np.minimum(lengths, room)
        offsets = offsets_of(num_before + num_events)
        places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], num_before + num_events)
        is_event = places >= np.repeat(num_before, num_before + num_events)
        samples = np.arange(len(block))
        ids: dict[str, Texts | Lists] = {}
        for name, texts in self._texts.items():
            numbers = np.full(offsets[-1], self._fill_number(name))
            numbers[is_event] = events.columns[name][events.positions]
            if name in before:
                bags, lengths = before[name]
                numbers[~is_event] = _last(bags, lengths, num_before)
            values, codes = texts.used(numbers)
            ids[name] = Lists(Texts(values, codes), offsets, samples)
        lists: dict[str, NumberLists] = {}
        for name in (*self._numbers, *([self._spec.age] if self._spec.age else ())):
            values_K = np.full(offsets[-1], float(self._spec.fill.get(name, math.nan)))
            if name == self._spec.age:
                ages = np.repeat(block.numbers[self._spec.time], num_events)
                values_K[is_event] = ages - events.columns[TIME][events.positions]
            else:
                values_K[is_event] = events.columns[name][events.positions]
            lists[name] = NumberLists(values_K, offsets, samples)
        return replace(block, ids={**block.ids, **ids}, lists={**block.lists, **lists})

    def add_events(self, block: RawBlock, path: Path) -> tuple[EventHistories, Rows]:
        """Add the rows of a block; their histories, and the length of each row's, int64 (n,)."""
        spec = self._spec
        by = block.ids[spec.by]
        assert isinstance(by, Texts), f"{spec.by}: expected one id, as the reader has checked"
        users = whole_ids(by)
        is_user = np.append(users.values.is_valid().to_numpy(zero_copy_only=False), False)
        rows = np.flatnonzero(is_user[users.codes])
        columns: dict[str, Values] = {TIME: block.numbers[spec.time][rows]}
        for name in self._numbers:
            columns[name] = block.numbers[spec.columns[name]][rows]
        for name in self._texts:
            columns[name] = self._number_texts(name, self._texts_of(block, name))[rows]
        hashes = np.append(hash_text(users.values), np.uint64(0))
        found = self._events.add(hashes[users.codes[rows]], columns)
        if found.back is not None:
            self._refuse_order(block, rows[found.back[0]], found.back[1], path)
        lengths = np.zeros(len(block), np.int64)
        lengths[rows] = found.lengths
        return found, lengths

    def tail(self) -> pa.Table:
        """The last rows of each user."""
        users, columns = self._events.events()
        arrays = {"user": pa.array(users), "time": pa.array(columns[TIME])}
        arrays |= {f"list_{name}": pa.array(columns[name]) for name in self._numbers}
        for name, texts in self._texts.items():
            values, codes = texts.used(columns[name].astype(np.int64))
            indices = pa.array(codes, pa.int64(), mask=codes < 0)
            arrays[f"list_{name}"] = pa.DictionaryArray.from_arrays(indices, values)
        return pa.table(arrays)

    def add_tail(self, tail: pa.Table) -> None:
        """Add the last rows of a file after the blocks so far."""
        columns: dict[str, Values] = {TIME: tail["time"].to_numpy()}
        for name in self._numbers:
            columns[name] = tail[f"list_{name}"].to_numpy()
        for name in self._texts:
            array = one_array(tail[f"list_{name}"])
            codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            columns[name] = self._number_texts(name, Texts(array.dictionary, codes))
        self._events.add(tail["user"].to_numpy(), columns)

    def _texts_of(self, block: RawBlock, name: str) -> Texts:
        texts = block.ids[self._spec.columns[name]]
        assert isinstance(texts, Texts), f"{name}: expected one id, as the reader has checked"
        return whole_ids(texts)

    def _number_texts(self, name: str, texts: Texts) -> Rows:
        numbers: Rows = np.append(self._texts[name].add(texts.values), -1)[texts.codes]
        return numbers

    def _fill_number(self, name: str) -> int:
        fill = self._spec.fill.get(name)
        return -1 if fill is None else int(self._texts[name].add(pa.array([fill]))[0])

    def _before(self, block: RawBlock, path: Path) -> dict[str, tuple[Jagged, Rows]]:
        """The lists before the histories as numbers of texts, with the length of each sample's."""
        found: dict[str, tuple[Jagged, Rows]] = {}
        first: str | None = None
        for name, source in self._spec.before.items():
            raw = block.ids[source]
            lists = lists_from_texts(raw, self._spec.separator) if isinstance(raw, Texts) else raw
            items = self._number_texts(name, whole_ids(lists.items))
            offsets = np.append(lists.offsets, lists.offsets[-1])  # an empty one for the code -1
            bags = Jagged(items, offsets), lists.codes
            lengths = np.diff(offsets)[lists.codes]
            found[name] = (_of_samples(*bags), lengths)
            first = first or name
            differs = lengths != found[first][1]
            if differs.any():
                at = int(np.argmax(differs))
                raise ValueError(
                    f"{path} line {block.lines[at]}: expected lists of one length in "
                    f"data.source.histories.{self._name}.before, got {found[first][1][at]} values "
                    f"in {self._spec.before[first]} and {lengths[at]} in {source}. Correct them, "
                    "or use one."
                )
        return found

    def _refuse_order(self, block: RawBlock, row: int, later: float, path: Path) -> None:
        spec, time = self._spec, block.numbers[self._spec.time][row]
        raise ValueError(
            f"{path} line {block.lines[row]}: expected the rows of each {spec.by} in order of "
            f"{spec.time}, for data.source.histories.{self._name}, got {time:.0f} after "
            f"{later:.0f}. Sort the log by {spec.time}, and list its files in this order."
        )


def _of_samples(bags: Jagged, codes: Integers) -> Jagged:
    """The bag of each sample; the code -1 is the last bag."""
    values, lengths = gather_bags(bags, np.asarray(codes, np.int64) % len(bags))
    return Jagged(values, offsets_of(lengths))


def _last(bags: Jagged, lengths: Rows, kept: npt.NDArray[np.int64]) -> Integers:
    """The last ``kept`` values of each bag."""
    place_from_end = np.repeat(bags.offsets[1:], lengths) - np.arange(bags.offsets[-1])
    values: Integers = bags.values[place_from_end <= np.repeat(kept, lengths)]
    return values
