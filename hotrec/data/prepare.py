"""Prepare: a raw log -> a dataset, in two streaming passes with bounded memory.

The first pass counts the values of each table (in training samples only, so that every row can be
trained), checks ids that are row numbers, and sums up dense columns; the second writes rows into
chunks. Under torchrun the
ranks divide the files and exchange their counts through the scratch directory, which must be on a
file system that all hosts share. The result does not depend on the number of ranks.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hotrec.artifact import Artifact, Verify, read_artifact
from hotrec.config.data import (
    MAX_ROWS,
    ColumnKind,
    Encoding,
    SourceFormat,
    SourceSpec,
    SplitKind,
    features_of,
    tables_of,
)
from hotrec.config.validate import validate
from hotrec.data.chunks import (
    DATASET,
    HELD_OUT,
    SPLITS,
    ChunkInfo,
    ChunkWriter,
    Integers,
    Jagged,
    commit_dataset,
    write_arrow,
)
from hotrec.data.columns import Ids, RawBlock
from hotrec.data.days import Times, count_by_split
from hotrec.data.encode import (
    check_row_numbers,
    count_missing,
    dense_values,
    encode_block,
    labels_of,
    raw_feature,
    say_missing,
    select_samples,
)
from hotrec.data.encoding import (
    dense_columns,
    encoding_document,
    feature_columns,
    label_names,
    moments_of,
    scaling_of,
    value_types_of,
)
from hotrec.data.generation import (
    Earlier,
    FileRecord,
    check_contents,
    content_of,
    evicted_rows,
    split_document,
)
from hotrec.data.hashing import hash_numbers
from hotrec.data.histories import TAILS
from hotrec.data.kept import check_not_grown, keeping
from hotrec.data.log import TRAIN, Log, Splitter, open_log
from hotrec.data.unknown import UnknownIds, count_unknown
from hotrec.data.value_types import ValueTypes, are_epochs
from hotrec.data.vocabulary import (
    EMPTY,
    Counted,
    RowEncoder,
    RowNumbers,
    ValueCounter,
    build_vocabulary,
    read_vocabulary,
    read_whole_vocabulary,
    write_vocabulary,
)
from hotrec.runtime import ranks as distributed
from hotrec.runtime.progress import Progress
from hotrec.types import Feature, Float64s, Rows, Schema, Table

_LOGGER = logging.getLogger(__name__)
_COUNTS_DIR = "counts"
_BLOCKS_AHEAD = 2
T = TypeVar("T")


@dataclass(frozen=True)
class FileFacts:
    """Counts of one file or of all files, from the first pass.

    Samples that an earlier generation has are only in ``num_left_out``.
    """

    num_samples: Rows  # int64 (3,), by split, as in SPLITS
    num_clicks: Rows  # int64 (3, L), the labels that are 1
    num_skipped: int  # samples that could not be read
    moments: Float64s  # of the dense columns over the training samples
    times: Times
    value_types: ValueTypes  # of all its samples
    sum_of_times: int = 0  # of the training samples, as in FileRecord
    num_left_out: int = 0

    def __add__(self, other: FileFacts) -> FileFacts:
        return FileFacts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class _Job:
    """Data shared by both passes on one rank."""

    spec: SourceSpec
    log: Log
    splitter: Splitter
    scratch: Path
    my_files: list[int]
    contents: tuple[str, ...]  # the hash of each file
    earlier: Earlier | None

    @property
    def generation(self) -> int:
        return 0 if self.earlier is None else self.earlier.number

    @property
    def tables(self) -> dict[str, str]:
        """The table that each feature reads, by feature."""
        return {n: column.table or n for n, column in feature_columns(self.log.columns).items()}

    @property
    def times(self) -> str | None:
        """The column of times of the split, if there is one."""
        return self.spec.split.time_column

    def is_old(self, block: RawBlock) -> npt.NDArray[np.bool_]:
        """Whether each sample is not later than the training split that is extended."""
        if self.earlier is None or self.times is None:
            return np.zeros(len(block), bool)
        is_old: npt.NDArray[np.bool_] = block.numbers(self.times) <= self.earlier.times.last_ms
        return is_old

    def first_early(self, file: int, block: RawBlock) -> tuple[float, str] | None:
        """Time and place of the first sample that is earlier than the end of that split."""
        assert self.earlier is not None
        assert self.times is not None
        times = block.numbers(self.times)
        is_early = times < self.earlier.times.last_ms
        if not is_early.any():
            return None
        first = int(np.argmax(is_early))
        return float(times[first]), f"{self.log.files[file].name} line {block.lines[first]}"

    def no_facts(self) -> FileFacts:
        moments = np.zeros((3, len(dense_columns(self.log.columns))))
        num_clicks = np.zeros((3, len(label_names(self.log.columns))), np.int64)
        return FileFacts(np.zeros(3, np.int64), num_clicks, 0, moments, Times(), ValueTypes())

    def earlier_facts(self) -> FileFacts:
        """Facts of the training split that is extended."""
        facts = self.no_facts()
        if self.earlier is None:
            return facts
        source = self.earlier.dataset.artifact.content["source"]
        labels, clicks = label_names(self.log.columns), source["num_clicks"]
        of_labels = [clicks[name] for name in labels] if len(labels) > 1 else [clicks]
        facts.num_samples[TRAIN] = source["num_samples"][SPLITS[TRAIN]]
        facts.num_clicks[TRAIN] = [of[SPLITS[TRAIN]] for of in of_labels]
        return replace(
            facts,
            num_skipped=source["num_skipped"],
            times=self.earlier.times,
            value_types=value_types_of(self.earlier.dataset),
        )


def prepare(
    source: SourceSpec,
    output: str | Path,
    *,
    append: Sequence[str] = (),
    overwrite: bool = False,
) -> Artifact:
    """Read a log, write a dataset. Every rank of the process group calls it together.

    Args:
        source: The log, and how to encode its columns.
        output: The directory of the dataset, replaced if it exists. All ranks must share its file
            system.
        append: Files that extend the dataset in ``output``, used instead of ``source.files``; see
            ``hotrec.data.generation``.
        overwrite: Whether to replace a dataset that files were appended to.

    Returns:
        The committed dataset: ``chunks/``, and ``vocab/<table>.arrow`` with the value and count of
        row 1, 2, ... of each table that has a vocabulary; ``vocab/<table>.rare.arrow`` with values
        that have no row.

    Raises:
        ValueError: on every rank, if the specification or the log is unusable.
        OSError: if the disk is full. No files are left behind.
    """
    distributed.same_verdict(lambda: validate(source, "data.source"))
    if append and source.histories:
        raise ValueError(
            f"append: expected a log without data.source.histories, got {sorted(source.histories)}:"
            " the histories of new files begin in the earlier ones. Prepare all files from scratch "
            "with overwrite=true."
        )
    if append:
        source = replace(source, files=list(append))
    key = "append" if append else "data.source.files"
    log = distributed.same_verdict(lambda: open_log(source, files_key=key))
    target = Path(output)
    is_first = distributed.rank() == 0
    with distributed.shared_scratch(target, kind=DATASET) as scratch:
        verify = Verify.full if is_first else Verify.size
        if not append and not overwrite:
            distributed.same_verdict(lambda: check_not_grown(target))
        earlier = distributed.same_verdict(
            lambda: Earlier.open(target, source, verify) if append else None
        )
        job = _start_job(source, log, scratch, earlier)
        _share_tails(job)
        facts, largest = _count(job)
        # Parts without samples are often equal.
        full = [int(of.num_samples.sum()) > 0 for of in facts.values()]
        distributed.same_verdict(lambda: check_contents(log.files, job.contents, full, key))
        # In the order of the files, so that rounding does not depend on the number of ranks.
        new = distributed.same_verdict(lambda: sum(facts.values(), start=job.no_facts()))
        distributed.same_verdict(lambda: _check_facts(job, list(facts.values()), new))
        total = distributed.same_verdict(lambda: job.earlier_facts() + new)
        encoders = _build_encoders(job, largest)
        scaling = scaling_of(log.columns, new.moments) if earlier is None else earlier.scaling
        written = _write(job, encoders, scaling, facts)
        if is_first:
            shutil.rmtree(scratch / TAILS, ignore_errors=True)
        distributed.same_verdict(
            lambda: (
                _commit(job, target, encoders, scaling, written, facts, total) if is_first else None
            )
        )
    return read_artifact(target, kind=DATASET)


def _start_job(source: SourceSpec, log: Log, scratch: Path, earlier: Earlier | None) -> _Job:
    my_files = list(range(len(log.files)))[distributed.rank() :: distributed.world_size()]
    hashes = _on_all_ranks(lambda: {file: content_of(log.files[file]) for file in my_files})
    contents = tuple(hashes.values())
    if earlier is not None:
        distributed.same_verdict(lambda: earlier.check_new(log.files, contents))
    num_samples: list[int] = []
    if source.split.kind is SplitKind.last:
        counted = _on_all_ranks(lambda: {file: log.count_samples(file) for file in my_files})
        num_samples = list(counted.values())
    header_lines = int(source.format is SourceFormat.delimited)
    splitter = Splitter(source.split, tuple(num_samples), header_lines)
    return _Job(source, log, splitter, scratch, my_files, contents, earlier)


def _share_tails(job: _Job) -> None:
    """Write what each file leaves to the histories of the next ones, if several ranks read them."""
    num_files = len(job.log.files)
    if job.log.histories is None or distributed.world_size() == 1 or num_files == 1:
        return
    job.log.histories.tails = job.scratch / TAILS
    job.log.histories.tails.mkdir(exist_ok=True)

    def write_my_tails() -> None:
        for file in job.my_files:
            if file < num_files - 1:
                job.log.write_tails(file)

    distributed.same_verdict(write_my_tails)


def _on_all_ranks(of_my_files: Callable[[], dict[int, T]]) -> dict[int, T]:
    """The ranks' results for their files, in the order of all files."""
    parts = distributed.all_gather_object(distributed.same_verdict(of_my_files))
    return dict(sorted(item for part in parts for item in part.items()))


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, with the next ones produced in a thread while one is used."""
    end = object()
    # One thread, so the calls of next() come one after the other.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read_ahead") as reader:
        pending = deque(reader.submit(next, items, end) for _ in range(_BLOCKS_AHEAD))
        while True:
            item = pending.popleft().result()
            if item is end:
                return
            pending.append(reader.submit(next, items, end))
            yield item  # type: ignore[misc]


def _progress(title: str, total: int | None = None) -> Progress:
    return Progress(title, total, unit="samples", is_shown=distributed.rank() == 0)


# First pass: count.


def _count(job: _Job) -> tuple[dict[int, FileFacts], dict[str, int]]:
    """Count values into files of the scratch directory.

    Returns:
        The facts of all files; and the largest row of each table with ``encoding: rows``, -1 if it
        is never read; equal on all ranks.
    """
    tables = tables_of(job.spec)
    counters = {n: ValueCounter() for n, t in tables.items() if t.encoding is Encoding.vocabulary}
    largest = {name: -1 for name, t in tables.items() if t.encoding is Encoding.rows}

    def count_my_files() -> dict[int, FileFacts]:
        with _progress("1/2 count") as progress:
            facts = {
                file: _count_file(job, file, counters, largest, progress) for file in job.my_files
            }
        directory = job.scratch / _COUNTS_DIR
        directory.mkdir(exist_ok=True)
        for name, counter in counters.items():
            path = directory / f"{name}-{distributed.rank()}.arrow"
            write_arrow(path, counter.counts().to_table())
        return facts

    facts = _on_all_ranks(count_my_files)
    of_ranks = distributed.all_gather_object(largest)
    return facts, {name: max(found[name] for found in of_ranks) for name in largest}


def _count_file(
    job: _Job,
    file: int,
    counters: dict[str, ValueCounter],
    largest: dict[str, int],
    progress: Progress,
) -> FileFacts:
    facts, old = job.no_facts(), job.no_facts()
    # Samples that an earlier generation may have: whether it has them is checked at the end.
    old_counters = {name: ValueCounter() for name in counters}
    early: tuple[float, str] | None = None
    missing, num_read = Counter[str](), 0
    for block in read_ahead(job.log.blocks(file)):
        split_of = job.splitter.split_of(block, file)
        is_old = (split_of == TRAIN) & job.is_old(block)
        ids = {
            name: raw_feature(block, name, column)
            for name, column in feature_columns(job.log.columns).items()
        }
        facts += replace(
            job.no_facts(), num_skipped=block.num_skipped, value_types=block.value_types
        )
        read = (job, file, block, split_of, ids)
        facts = _count_samples(facts, *read, ~is_old, counters)
        if is_old.any():
            early = early or job.first_early(file, block)
            old = _count_samples(old, *read, is_old, old_counters)
        for name in ids:
            if job.tables[name] in largest:
                row = _largest_row(job, file, block, name)
                largest[job.tables[name]] = max(largest[job.tables[name]], row)
        missing += count_missing(block, job.log.columns)
        num_read += len(block)
        progress.update(len(block))
    say_missing(job.log.files[file], missing, num_read)
    num_old = int(old.num_samples[TRAIN])
    if job.earlier is None or num_old == 0:
        return facts
    if job.earlier.has(job.log.files[file].name, num_old, old.sum_of_times % 2**64):
        return replace(facts, num_left_out=num_old)
    if early is not None:
        job.earlier.check_later(*early, num_old)
    else:
        _LOGGER.warning(
            "append: %d samples of %s are at the last time of the training split: check that it "
            "has none of them",
            *(num_old, job.log.files[file].name),
        )
    for name, counter in old_counters.items():
        counters[name].add(counter.counts())
    return old + facts


def _count_samples(
    so_far: FileFacts,
    job: _Job,
    file: int,
    block: RawBlock,
    split_of: Integers,
    ids: Mapping[str, Ids],
    is_counted: npt.NDArray[np.bool_],
    counters: Mapping[str, ValueCounter],
) -> FileFacts:
    """Add some samples of a block, with their ids, to the facts of a file."""
    columns = job.log.columns
    if not is_counted.all():
        block, split_of = block.keep(is_counted), split_of[is_counted]
    is_train = split_of == TRAIN
    train = block if is_train.all() else block.keep(is_train)
    labels = labels_of(block, columns)
    facts = job.no_facts()
    if any(column.standardize for column in columns.values()):
        facts = replace(facts, moments=moments_of(dense_values(train, columns)))
    in_training = is_counted.copy()
    in_training[is_counted] = is_train
    for name, table in job.tables.items():
        if table in counters:
            of_training = Ids(ids[name].texts, ids[name].codes.filter(in_training))
            texts, codes = of_training.flat()[0].used()
            counts = np.bincount(codes[codes >= 0], minlength=len(texts))
            counters[table].add(Counted.of(texts, counts).select(counts > 0))
    if job.times is not None:
        times = hash_numbers(0, train.numbers(job.times).view(np.int64))
        facts = replace(facts, sum_of_times=int(times.sum()))
    return so_far + replace(
        facts,
        num_samples=count_by_split(split_of),
        num_clicks=np.stack([labels[split_of == split].sum(0) for split in range(3)]).astype(
            np.int64
        ),
        times=_times_of(job, file, block, split_of),
    )


def _times_of(job: _Job, file: int, block: RawBlock, split_of: Integers) -> Times:
    """The times of the samples of a block; without times a file counts as a day."""
    path = job.log.files[file]
    if len(block) == 0:
        return Times()
    if job.times is None:
        is_unique = [other.name for other in job.log.files].count(path.name) == 1
        day = path.name if is_unique else f"{path.parent.name}/{path.name}"
        return Times(days={day: count_by_split(split_of)})
    times = block.numbers(job.times)
    return Times.of(times, split_of, block.lines, path.name, job.spec.split.utc_offset_h)


def _largest_row(job: _Job, file: int, block: RawBlock, feature: str) -> int:
    """The largest id of a feature whose ids are row numbers; all splits must be within the table.

    Raises:
        ValueError: if an id is not a row number of the table.
    """
    column, table = job.log.columns[feature], job.tables[feature]
    num_rows = tables_of(job.spec)[table].num_rows or MAX_ROWS
    advice = f"set num_rows of data.source.tables.{table}, or choose another encoding"
    return check_row_numbers(block, feature, column, num_rows, job.log.files[file], advice)


def _check_facts(job: _Job, of_files: Sequence[FileFacts], new: FileFacts) -> None:
    has_epochs = are_epochs(np.array(job.spec.split.bounds)).any()
    of_split = new.value_types.get(job.times or "")
    if of_split is not None and of_split.name == "number" and has_epochs:
        raise ValueError(
            f"{of_split.file} column {job.times}: expected times of 1990 to 2100, as in "
            f"data.source.split, got numbers{of_split.seen}. Set data.source.times.{job.times}."
        )
    for table in job.log.side_tables:
        own_type = new.value_types.get(table.on)
        if own_type is not None and own_type.name == "text":
            table.check_key(own_type)
    earlier, num_old = job.earlier, new.num_left_out
    if new.num_samples[TRAIN] == 0 and num_old:
        assert earlier is not None
        raise ValueError(
            f"append: expected new training samples, got only {num_old} that {earlier.path} "
            "already has. Append newer files, or set later data.source.split.valid_from and "
            "test_from, which turns held-out days into training data."
        )
    if new.num_samples[TRAIN] == 0:
        found = _by_split(new.num_samples)
        raise ValueError(
            f"data.source.split: expected samples in the training split, got {found} from "
            f"{len(of_files)} files. Correct the split."
        )
    said = []
    if earlier is not None:
        earlier.check_days(new.times)
        said = earlier.missing_days(new.times)
    num_train = new.num_samples[TRAIN]
    for name, num in zip(label_names(job.log.columns), new.num_clicks[TRAIN], strict=True):
        if num in (0, num_train):
            said.append(f"{name} is {int(num > 0)} in all {num_train} training samples")
    if distributed.rank() == 0:
        for text in said:
            _LOGGER.warning("%s", text)
        if num_old:
            _LOGGER.info("skipped %d samples that are already in the training split", num_old)


def _by_split(counts: Rows) -> dict[str, int]:
    return dict(zip(SPLITS, counts.tolist(), strict=True))


# Between the passes: vocabularies, each built by one rank and read by all.


def _build_encoders(job: _Job, largest: dict[str, int]) -> dict[str, RowEncoder]:
    """An encoder per table, the same on every rank.

    Args:
        largest: The largest row of each table with ``encoding: rows``.
    """
    tables = tables_of(job.spec)
    names = [name for name, table in tables.items() if table.encoding is Encoding.vocabulary]

    def build_my_vocabularies() -> None:
        for name in names[distributed.rank() :: distributed.world_size()]:
            counter = ValueCounter()
            for rank in range(distributed.world_size()):
                path = job.scratch / _COUNTS_DIR / f"{name}-{rank}.arrow"
                table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
                counter.add(Counted.from_table(table))
            vocabulary = build_vocabulary(
                counter.counts(),
                tables[name].min_count,
                tables[name].num_rows,
                earlier=EMPTY if job.earlier is None else job.earlier.vocabulary(name),
                generation=job.generation,
            )
            write_vocabulary(job.scratch, name, vocabulary)

    distributed.same_verdict(build_my_vocabularies)
    if distributed.rank() == 0:
        for path in (job.scratch / _COUNTS_DIR).iterdir():
            path.unlink()
        (job.scratch / _COUNTS_DIR).rmdir()

    def make_encoder(name: str) -> RowEncoder:
        table = tables[name]
        match table.encoding:
            case Encoding.vocabulary:
                return RowEncoder(vocabulary=read_vocabulary(job.scratch, name))
            case Encoding.hashing:
                return RowEncoder(table.num_rows)
            case Encoding.rows:
                # A table has at least one row, read or not, and never shrinks.
                least = 1 if job.earlier is None else job.earlier.num_rows(name)
                return RowNumbers(table.num_rows or max(largest[name] + 1, least))

    return distributed.same_verdict(lambda: {name: make_encoder(name) for name in tables})


# Second pass: encode and write.


def _schema(job: _Job, encoders: dict[str, RowEncoder]) -> Schema:
    features = tuple(
        Feature(feature, job.tables[name], column.kind is not ColumnKind.categorical)
        for name, column in feature_columns(job.log.columns).items()
        for feature in features_of(name, column)
    )
    tables = tuple(Table(name, encoder.num_rows) for name, encoder in encoders.items())
    columns = job.log.columns
    has_weights = any(column.kind is ColumnKind.weight for column in columns.values())
    return Schema(
        tuple(dense_columns(columns)), features, tables, label_names(columns), has_weights
    )


@dataclass(frozen=True)
class _Written:
    """The chunks of each split, and the unknown ids of held-out ones; of a file or of all."""

    chunks: dict[str, list[ChunkInfo]]
    unknown: dict[str, UnknownIds]


def _write(
    job: _Job, encoders: dict[str, RowEncoder], scaling: Float64s, facts: dict[int, FileFacts]
) -> _Written:
    """Write the chunks of all files, in their order."""
    schema = _schema(job, encoders)
    of_features = {name: encoders[table] for name, table in job.tables.items()}
    total = sum(int(facts[file].num_samples.sum()) for file in job.my_files)

    def write_my_files() -> dict[int, _Written]:
        with _progress("2/2 write", total) as progress:
            return {
                file: _write_file(
                    *(job, file, schema, of_features, scaling, progress),
                    leaves_out=facts[file].num_left_out > 0,
                )
                for file in job.my_files
            }

    written = list(_on_all_ranks(write_my_files).values())
    splits = {split: [c for of_file in written for c in of_file.chunks[split]] for split in SPLITS}
    unknown = {
        split: sum((of_file.unknown[split] for of_file in written), start=UnknownIds())
        for split in HELD_OUT
    }
    splits[SPLITS[TRAIN]] = [*_take_chunks(job), *splits[SPLITS[TRAIN]]]
    return _Written(splits, unknown)


def _take_chunks(job: _Job) -> list[ChunkInfo]:
    """Take over the chunks of the training split that is extended, on all ranks."""
    earlier = job.earlier
    if earlier is None:
        return []
    vocabularies = {
        name: read_whole_vocabulary(job.scratch, name)
        for name, table in tables_of(job.spec).items()
        if table.encoding is Encoding.vocabulary
    }
    evicted = {
        name: evicted_rows(vocabulary, earlier.num_rows(name), job.generation)
        for name, vocabulary in vocabularies.items()
    }
    mine = range(len(earlier.dataset.chunks(SPLITS[TRAIN])))
    mine = mine[distributed.rank() :: distributed.world_size()]
    taken = _on_all_ranks(
        lambda: {index: earlier.take_chunk(index, job.scratch, evicted) for index in mine}
    )
    return list(taken.values())


def _write_file(
    job: _Job,
    file: int,
    schema: Schema,
    encoders: dict[str, RowEncoder],
    scaling: Float64s,
    progress: Progress,
    *,
    leaves_out: bool,
) -> _Written:
    rows_per_chunk = job.spec.rows_per_chunk
    begin = f"g{job.generation:04d}-" if job.generation else ""
    writers = {
        split: ChunkWriter(job.scratch, f"{split}-{begin}{file:05d}", schema, rows_per_chunk)
        for split in SPLITS
    }
    unknown = dict.fromkeys(HELD_OUT, UnknownIds())
    split_of: Integers

    def count(column: str, ids: Ids, rows: Integers | Jagged) -> None:
        is_id = ids.codes.is_not_null().to_numpy()
        for split in HELD_OUT:
            is_counted = split_of == SPLITS.index(split)
            if is_counted.any():
                unknown[split] += UnknownIds({column: count_unknown(is_id, rows, is_counted)})

    for raw in read_ahead(job.log.blocks(file)):
        split_of = job.splitter.split_of(raw, file)
        if leaves_out:
            is_kept = (split_of != TRAIN) | ~job.is_old(raw)
            raw, split_of = raw.keep(is_kept), split_of[is_kept]
        block = encode_block(raw, job.log.columns, encoders, scaling, count)
        for index, writer in enumerate(writers.values()):
            samples = np.nonzero(split_of == index)[0]
            if samples.size:
                is_whole = samples.size == len(block)
                writer.write(block if is_whole else select_samples(block, samples))
        progress.update(len(raw))
    return _Written({split: writer.close() for split, writer in writers.items()}, unknown)


def _records(job: _Job, of_files: Mapping[int, FileFacts]) -> list[dict[str, Any]]:
    """The files of all generations, without directories: a log has one dataset at any path."""
    new = [
        FileRecord(path.name, content, int(facts.num_samples[TRAIN]), facts.sum_of_times % 2**64)
        for path, content, facts in zip(job.log.files, job.contents, of_files.values(), strict=True)
    ]
    return [asdict(of) for of in (*(job.earlier.files if job.earlier else ()), *new)]


def _commit(
    job: _Job,
    target: Path,
    encoders: dict[str, RowEncoder],
    scaling: Float64s,
    written: _Written,
    facts: Mapping[int, FileFacts],
    total: FileFacts,
) -> None:
    if total.num_skipped:
        _LOGGER.warning(
            "prepare: skipped %d unreadable samples, kept %d",
            total.num_skipped,
            total.num_samples.sum(),
        )
    labels = label_names(job.log.columns)
    num_clicks = {n: _by_split(of) for n, of in zip(labels, total.num_clicks.T, strict=True)}
    source = {
        "format": job.spec.format.name,
        "files": _records(job, facts),
        "num_samples": _by_split(total.num_samples),
        "num_clicks": num_clicks if len(labels) > 1 else num_clicks[labels[0]],
        "num_skipped": total.num_skipped,
        "split": split_document(job.spec),
        "unknown_ids": {split: ids.to_json() for split, ids in written.unknown.items()},
        "encoding": {
            **encoding_document(job.spec, scaling),
            "names": list(job.log.names),
            "value_types": total.value_types.to_json(),
        },
        **total.times.to_json(job.spec.split.time_column),
        **({"generations": job.earlier.document()} if job.earlier is not None else {}),
    }
    with nullcontext() if job.earlier is None else keeping(job.earlier.dataset):
        commit_dataset(job.scratch, target, _schema(job, encoders), written.chunks, source)
