"""Histories: beside each sample of a log, lists of the earlier rows of the same user.

They are made while the log is read, from the last rows of each user, in memory bounded by users x
``max_length``. An event does not see events of the same instant: they may be duplicates of it, or
of the same page, and their labels are its own. Ranks that read only some files exchange the last
rows of each file through tails in the scratch directory, so that the histories do not depend on the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from hotrec.config.data import SourceSpec, columns_of, is_list_of_numbers
from hotrec.config.histories import UserHistorySpec
from hotrec.data.chunks import offsets_of, write_arrow
from hotrec.data.columns import (
    ID,
    NUMBER,
    NUMBERS,
    Ids,
    Mask,
    RawBlock,
    ids_from_arrow,
    items_of,
    lists_from_texts,
    lists_of,
    of_items,
    whole_ids,
)
from hotrec.data.hashing import hash_text
from hotrec.data.numbering import TextNumbers
from hotrec.types import Rows

TAILS = "tails"
# Blocks are cut to about this many places of lists, so that memory does not grow with max_length.
_PLACES_PER_PART = 1 << 20
# Blocks are added together, once they have a share of the events that are kept.
_EVENTS_PER_ROW = 16
_NO_FILE = 2**62
_USER, _TIME, _ROW = "user", "time", "row"  # of events, beside their lists' columns


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
        for group in self._groups(blocks):
            found = [history.add(group, path) for history in self._histories.values()]
            first = 0
            for block in group:
                for begin in range(0, max(len(block), 1), size):
                    part = block.part(begin, size)
                    for of in found:
                        part = of.lists(part, first + begin, path)
                    yield part
                first += len(block)
        self._next_file = file + 1

    def _groups(self, blocks: Iterator[RawBlock]) -> Iterator[list[RawBlock]]:
        group: list[RawBlock] = []
        for block in blocks:
            group.append(block)
            num_kept = max(len(history.kept) for history in self._histories.values())
            if sum(map(len, group)) * _EVENTS_PER_ROW >= num_kept:
                yield group
                group = []
        if group:
            yield group

    def write_tails(self, file: int, path: Path, blocks: Iterator[RawBlock]) -> None:
        """Write what a file, read alone, leaves to the files after it."""
        assert self.tails is not None
        self._restart()
        self._next_file = _NO_FILE
        for group in self._groups(blocks):
            for history in self._histories.values():
                history.add(group, path)
        for name, history in self._histories.items():
            write_arrow(_tail(self.tails, name, file), history.tail().to_arrow())

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
                history.add_tail(pl.read_ipc(_tail(self.tails, name, skipped)))
        self._next_file = _NO_FILE  # until the whole file is read


def _tail(directory: Path, history: str, file: int) -> Path:
    return directory / f"{history}-{file:05d}.arrow"


class _History:
    """A history: the last rows of each user of the blocks so far.

    Of each user the last events before the last instant are kept, and the last ones at it.

    Attributes:
        kept: Them, in order: the hash of the user, the time, and the columns of the lists.
    """

    def __init__(self, name: str, spec: UserHistorySpec, numbers: set[str]) -> None:
        self.name, self.spec, self.numbers = name, spec, numbers
        self.texts = {name: TextNumbers() for name in spec.columns if name not in numbers}
        types = {of: pl.Int64 if of in self.texts else pl.Float64 for of in spec.columns}
        self.kept = pl.DataFrame(schema={_USER: pl.UInt64, _TIME: pl.Float64, **types})

    def add(self, blocks: list[RawBlock], path: Path) -> _Found:
        """Add the rows of blocks, and find their histories.

        Raises:
            ValueError: If rows of a user are not in order of time; it names the line.
        """
        events = pl.concat([self._events_of(block) for block in blocks])
        begins, ends = np.zeros((2, len(events)), np.int64)
        events = events.with_row_index(_ROW).with_columns(pl.col(_ROW).cast(pl.Int64))
        both, is_first, instants = self.add_events(events.drop_nulls(_USER))
        rows, times = (both[of].to_numpy() for of in (_ROW, _TIME))
        # A tail is checked where its file is read.
        is_back = np.append(False, times[1:] < times[:-1])[: rows.size] & ~is_first & (rows >= 0)
        if is_back.any():
            at = min(np.flatnonzero(is_back), key=lambda event: int(rows[event]))
            line, spec = np.concatenate([block.lines for block in blocks])[rows[at]], self.spec
            raise ValueError(
                f"{path} line {line}: expected the rows of each {spec.by} in order of "
                f"{spec.time}, for data.source.histories.{self.name}, got {times[at]:.0f} after "
                f"{times[at - 1]:.0f}. Sort the log by {spec.time}, and list its files in this "
                "order."
            )
        new = np.flatnonzero(rows >= 0)
        user_begins = np.maximum.accumulate(np.where(is_first, np.arange(rows.size), 0))
        begins[rows[new]] = np.maximum(user_begins, instants - self.spec.max_length)[new]
        ends[rows[new]] = instants[new]
        return _Found(self, both, begins, ends)

    def _events_of(self, block: RawBlock) -> pl.DataFrame:
        users = whole_ids(block.ids(self.spec.by))
        hashes = pl.Series(hash_text(users.texts), dtype=pl.UInt64).gather(users.codes)
        columns = {
            name: block.frame[f"{NUMBER}{source}"]
            if name in self.numbers
            else self.number(name, whole_ids(block.ids(source)))
            for name, source in self.spec.columns.items()
        }
        return pl.DataFrame({_USER: hashes, _TIME: block.numbers(self.spec.time), **columns})

    def number(self, name: str, ids: Ids) -> pl.Series:
        """Ids as numbers of the texts of a list."""
        codes = pl.Series(self.texts[name].add(ids.texts), dtype=pl.Int64)
        if not ids.is_list:
            return codes.gather(ids.codes)
        return of_items(ids.codes, codes.gather)

    def fill(self, name: str) -> pl.Expr:
        """The value of a list at the places of those before the histories."""
        fill = self.spec.fill.get(name)
        if name not in self.texts:
            return pl.lit(float(fill or "nan"), pl.Float64)
        number = None if fill is None else int(self.texts[name].add(pa.array([fill]))[0])
        return pl.lit(number, pl.Int64)

    def tail(self) -> pl.DataFrame:
        """What is kept, with texts."""
        values = {name: texts.values(self.kept[name]) for name, texts in self.texts.items()}
        return self.kept.with_columns(**values)

    def add_tail(self, tail: pl.DataFrame) -> None:
        """Add the last rows of a file after the blocks so far."""
        numbered = {
            name: self.number(name, ids_from_arrow(tail[name].to_arrow())[0]) for name in self.texts
        }
        self.add_events(tail.with_columns(**numbered))

    def add_events(self, events: pl.DataFrame) -> tuple[pl.DataFrame, Mask, Rows]:
        """Add events, of which those of a user are in order of time.

        Returns:
            These and the ones that were kept, by user; which are a user's first; and of each the
            first event of its instant.
        """
        if _ROW not in events.columns:
            events = events.with_columns(pl.lit(-1, pl.Int64).alias(_ROW))
        kept = self.kept.with_columns(pl.lit(-1, pl.Int64).alias(_ROW))
        both = pl.concat([kept, events.select(kept.columns)])
        # Of each user the earlier events first, then the new ones in their order.
        both = both[np.argsort(both[_USER].to_numpy(), kind="stable")]
        users, times = (both[of].to_numpy() for of in (_USER, _TIME))
        number, size = np.arange(len(both)), self.spec.max_length
        is_first = np.append(True, users[1:] != users[:-1])[: len(both)]
        is_later = is_first | np.append(True, times[1:] != times[:-1])[: len(both)]
        instants = np.maximum.accumulate(np.where(is_later, number, 0))
        ends = np.append(np.flatnonzero(is_first)[1:], len(both))[np.cumsum(is_first) - 1]
        last = instants[ends - 1]
        is_kept = (number >= ends - size) | ((number < last) & (number >= last - size))
        self.kept = both.filter(is_kept).drop(_ROW)
        return both, is_first, instants


@dataclass(frozen=True)
class _Found:
    """Events by user, and where the history of each added row begins and ends among them."""

    history: _History
    events: pl.DataFrame
    begins: Rows
    ends: Rows

    def lists(self, part: RawBlock, first: int, path: Path) -> RawBlock:
        """Samples, of which the first is this row, with their lists."""
        spec = self.history.spec
        begins, ends = (of[first : first + len(part)] for of in (self.begins, self.ends))
        offsets = offsets_of(ends - begins)
        events = self.events[
            np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], ends - begins)
        ]
        before = self._before(part, path)
        num_before = pl.Series(spec.max_length - (ends - begins))
        for lists in before.values():
            lengths = lists.list.len().cast(pl.Int64)
            num_before = num_before.zip_with(num_before < lengths, lengths)
        columns: list[pl.Series] = []
        texts = dict(part.texts)
        for name in spec.lists:
            of_texts, values = self.history.texts.get(name), None
            if name == spec.age:
                values = np.repeat(part.numbers(spec.time), ends - begins) - events[_TIME]
            made = lists_of(events[name] if values is None else values, offsets)
            if name in before:
                made = _joined(pl.lit(before[name]).list.tail(num_before), made)
            elif before:
                made = _joined(self.history.fill(name).repeat_by(num_before), made)
            if of_texts is not None:
                items, places = items_of(made)
                texts[name], used = of_texts.used(items.fill_null(-1).to_numpy())
                codes = pl.Series(used, dtype=pl.Int32)
                made = lists_of(codes.set(codes < 0, None), places)
            columns.append(made.alias(f"{NUMBERS if of_texts is None else ID}{name}"))
        return replace(part, frame=part.frame.with_columns(columns), texts=texts)

    def _before(self, part: RawBlock, path: Path) -> dict[str, pl.Series]:
        """The lists before the histories, of one length for each sample."""
        spec = self.history.spec
        found: dict[str, pl.Series] = {}
        for name, source in spec.before.items():
            raw = part.ids(source)
            lists = raw if raw.is_list else lists_from_texts(raw, spec.separator)
            found[name] = self.history.number(name, whole_ids(lists)).fill_null([])
            first = next(iter(found))
            lengths, others = found[name].list.len(), found[first].list.len()
            if (lengths != others).any():
                at = int((lengths != others).arg_max() or 0)
                raise ValueError(
                    f"{path} line {part.lines[at]}: expected lists of one length in "
                    f"data.source.histories.{self.history.name}.before, got {others[at]} values "
                    f"in {spec.before[first]} and {lengths[at]} in {source}. Correct them, "
                    "or use one."
                )
        return found


def _joined(first: pl.Expr, second: pl.Series) -> pl.Series:
    return pl.select(pl.concat_list(first, second)).to_series()
