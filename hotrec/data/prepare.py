"""Prepare: a raw log -> a dataset, in two streaming passes with bounded memory.

The first pass counts the values of each table (in training samples only, so that every row can be
trained) and the moments of dense columns; the second writes rows into chunks. Under torchrun the
ranks divide the files and exchange their counts through the scratch directory, which must be on a
file system that all hosts share. The result does not depend on the number of ranks.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from hotrec.artifact import Artifact, read_artifact, scratch_directory
from hotrec.config.data import (
    ColumnKind,
    Encoding,
    SourceFormat,
    SourceSpec,
    SplitKind,
    tables_of,
)
from hotrec.config.validate import validate
from hotrec.data.chunks import SPLITS, ChunkInfo, ChunkWriter, commit_dataset, write_arrow
from hotrec.data.columns import RawBlock, Texts
from hotrec.data.encode import (
    Moments,
    Scaling,
    dense_columns,
    dense_values,
    encode_block,
    feature_columns,
    label_source,
    raw_feature,
    scaling_of,
    select_samples,
)
from hotrec.data.log import TRAIN, Log, Splitter, open_log
from hotrec.data.readers import keep_samples, numbers_of
from hotrec.data.vocabulary import (
    Counted,
    HashEncoder,
    RowEncoder,
    ValueCounter,
    VocabularyEncoder,
    build_vocabulary,
    count_lists,
    count_texts,
    read_vocabulary,
    write_vocabulary,
)
from hotrec.runtime import ranks as distributed
from hotrec.types import Feature, Schema, Table

_LOGGER = logging.getLogger(__name__)
_COUNTS_DIR = "counts"
_BLOCKS_AHEAD = 2
T = TypeVar("T")


@dataclass(frozen=True)
class FileFacts:
    """Counts of one file or of all files, from the first pass.

    Args:
        num_samples: The number of samples by split.
        num_clicks: The number of labels that are 1, by split.
        num_skipped: The number of samples that could not be read.
        moments: Moments of the dense columns over the training samples.
    """

    num_samples: Counter[str]
    num_clicks: Counter[str]
    num_skipped: int
    moments: Moments

    def __add__(self, other: FileFacts) -> FileFacts:
        return FileFacts(
            # Not by the counters' own +, which drops splits without samples.
            Counter({s: self.num_samples[s] + other.num_samples[s] for s in SPLITS}),
            Counter({s: self.num_clicks[s] + other.num_clicks[s] for s in SPLITS}),
            self.num_skipped + other.num_skipped,
            self.moments + other.moments,
        )


@dataclass(frozen=True)
class _Job:
    """What both passes share on one rank."""

    spec: SourceSpec
    log: Log
    splitter: Splitter
    scratch: Path
    my_files: list[int]
    show_progress: bool | None

    @property
    def tables(self) -> dict[str, str]:
        """The table that each feature reads, by feature."""
        return {n: column.table or n for n, column in feature_columns(self.log.columns).items()}

    def no_facts(self) -> FileFacts:
        num_dense = len(dense_columns(self.log.columns))
        return FileFacts(Counter(), Counter(), 0, Moments.none(num_dense))


def prepare(
    source: SourceSpec, output: str | Path, *, show_progress: bool | None = None
) -> Artifact:
    """Read a log, write a dataset. Every rank of the process group calls it together.

    Args:
        source: The log, and what to make of its columns.
        output: The directory of the dataset, replaced if it exists. All ranks must share its file
            system.
        show_progress: Whether rank 0 shows progress; None shows it on a terminal.

    Returns:
        The committed dataset: ``chunks/``, and ``vocab/<table>.arrow`` with the value and count of
        row 1, 2, ... of each table that has a vocabulary.

    Raises:
        ValueError: on every rank, if the specification or the log is unusable.
        OSError: if the disk is full. Nothing is left behind.
    """
    distributed.same_verdict(lambda: validate(source, "data.source"))
    log = distributed.same_verdict(lambda: open_log(source))
    target = Path(output)
    is_first = distributed.rank() == 0
    with scratch_directory(target) if is_first else nullcontext() as made:
        scratch = Path(distributed.broadcast_object(str(made)))
        distributed.same_verdict(lambda: _check_shared(scratch))
        show = show_progress if is_first else False
        job = _start_job(source, log, scratch, show)
        facts = _count(job)
        # In the order of the files, so that rounding does not depend on the number of ranks.
        total = sum(facts.values(), start=job.no_facts())
        distributed.same_verdict(lambda: _check_facts(total, len(facts)))
        encoders = _build_encoders(job)
        splits = _write(job, encoders, scaling_of(log.columns, total.moments), facts)
        distributed.same_verdict(
            lambda: _commit(job, target, encoders, splits, total) if is_first else None
        )
    return read_artifact(target, kind="dataset")


def _check_shared(scratch: Path) -> None:
    if not scratch.is_dir():
        raise ValueError(
            f"output {scratch.parent}: expected a file system that all ranks share, got none of "
            f"rank 0's files on rank {distributed.rank()}. Choose another output directory."
        )


def _start_job(source: SourceSpec, log: Log, scratch: Path, show_progress: bool | None) -> _Job:
    my_files = list(range(len(log.files)))[distributed.rank() :: distributed.world_size()]
    num_samples = [0] * len(log.files)
    if source.split.kind is SplitKind.last:
        mine = distributed.same_verdict(
            lambda: {file: log.count_samples(file) for file in my_files}
        )
        for counts in distributed.all_gather_object(mine):
            for file, count in counts.items():
                num_samples[file] = count
    return _Job(
        spec=source,
        log=log,
        splitter=Splitter(
            source.split, tuple(num_samples), int(source.format is SourceFormat.delimited)
        ),
        scratch=scratch,
        my_files=my_files,
        show_progress=show_progress,
    )


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, the next ones made in a thread while this one is used."""
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


def _progress(job: _Job, title: str, total: int | None = None) -> tqdm[Any]:
    disable = None if job.show_progress is None else not job.show_progress
    return tqdm(desc=title, total=total, unit=" samples", unit_scale=True, disable=disable)


# First pass: count.


def _count(job: _Job) -> dict[int, FileFacts]:
    """Count values into files of the scratch directory; the facts of all files on all ranks."""
    counters = {
        name: ValueCounter()
        for name, table in tables_of(job.spec).items()
        if table.encoding is Encoding.vocabulary
    }

    def count_my_files() -> dict[int, FileFacts]:
        with _progress(job, "1/2 count") as progress:
            facts = {file: _count_file(job, file, counters, progress) for file in job.my_files}
        directory = job.scratch / _COUNTS_DIR
        directory.mkdir(exist_ok=True)
        for name, counter in counters.items():
            path = directory / f"{name}-{distributed.rank()}.arrow"
            write_arrow(path, counter.counts().to_table())
        return facts

    mine = distributed.same_verdict(count_my_files)
    facts: dict[int, FileFacts] = {}
    for part in distributed.all_gather_object(mine):
        facts.update(part)
    return dict(sorted(facts.items()))


def _count_file(
    job: _Job, file: int, counters: dict[str, ValueCounter], progress: tqdm[Any]
) -> FileFacts:
    columns = job.log.columns
    needs_moments = any(column.standardize for column in columns.values())
    facts = job.no_facts()
    num_samples, num_clicks = facts.num_samples, facts.num_clicks
    num_skipped, moments = 0, facts.moments
    for block in read_ahead(job.log.blocks(file)):
        split_of = job.splitter.split_of(block, file)
        labels = numbers_of(block, label_source(columns)).values
        for index, split in enumerate(SPLITS):
            num_samples[split] += int((split_of == index).sum())
            num_clicks[split] += int(labels[split_of == index].sum())
        num_skipped += block.num_skipped
        is_train = split_of == TRAIN
        train = block if is_train.all() else keep_samples(block, is_train)
        _count_values(job, train, counters)
        if needs_moments:
            moments = moments + Moments.of(dense_values(train, columns))
        progress.update(len(block))
    return FileFacts(num_samples, num_clicks, num_skipped, moments)


def _count_values(job: _Job, train: RawBlock, counters: dict[str, ValueCounter]) -> None:
    for name, column in feature_columns(job.log.columns).items():
        counter = counters.get(job.tables[name])
        if counter is None:
            continue
        raw = raw_feature(train, name, column)
        if isinstance(raw, Texts):
            count_texts(raw, counter)
        else:
            count_lists(raw, counter)


def _check_facts(total: FileFacts, num_files: int) -> None:
    if total.num_samples["train"] == 0:
        found = {split: total.num_samples[split] for split in SPLITS}
        raise ValueError(
            f"data.source.split: expected samples in the training split, got {found} from "
            f"{num_files} files. Correct the split."
        )


# Between the passes: vocabularies, each built by one rank and read by all.


def _build_encoders(job: _Job) -> dict[str, RowEncoder]:
    """An encoder per table, the same on every rank."""
    tables = tables_of(job.spec)
    names = [name for name, table in tables.items() if table.encoding is Encoding.vocabulary]

    def build_my_vocabularies() -> None:
        for name in names[distributed.rank() :: distributed.world_size()]:
            counter = ValueCounter()
            for rank in range(distributed.world_size()):
                path = job.scratch / _COUNTS_DIR / f"{name}-{rank}.arrow"
                table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
                counter.add_counted(Counted.from_table(table))
            vocabulary = build_vocabulary(counter.counts(), tables[name].min_count)
            write_vocabulary(job.scratch, name, vocabulary)

    distributed.same_verdict(build_my_vocabularies)
    if distributed.rank() == 0:
        for path in (job.scratch / _COUNTS_DIR).iterdir():
            path.unlink()
        (job.scratch / _COUNTS_DIR).rmdir()
    return distributed.same_verdict(
        lambda: {
            name: VocabularyEncoder(read_vocabulary(job.scratch, name))
            if table.encoding is Encoding.vocabulary
            else HashEncoder(table.num_rows)
            for name, table in tables.items()
        }
    )


# Second pass: encode and write.


def _schema(job: _Job, encoders: dict[str, RowEncoder]) -> Schema:
    features = tuple(
        Feature(name, job.tables[name], column.kind is ColumnKind.categorical_list)
        for name, column in feature_columns(job.log.columns).items()
    )
    tables = tuple(Table(name, encoder.num_rows) for name, encoder in encoders.items())
    return Schema(tuple(dense_columns(job.log.columns)), features, tables)


def _write(
    job: _Job, encoders: dict[str, RowEncoder], scaling: Scaling, facts: dict[int, FileFacts]
) -> dict[str, list[ChunkInfo]]:
    """Write the chunks of all files; the chunks of each split, in order of files."""
    schema = _schema(job, encoders)
    of_features = {name: encoders[table] for name, table in job.tables.items()}
    total = sum(facts[file].num_samples.total() for file in job.my_files)

    def write_my_files() -> dict[int, dict[str, list[ChunkInfo]]]:
        with _progress(job, "2/2 write", total) as progress:
            return {
                file: _write_file(job, file, schema, of_features, scaling, progress)
                for file in job.my_files
            }

    chunks: dict[int, dict[str, list[ChunkInfo]]] = {}
    for part in distributed.all_gather_object(distributed.same_verdict(write_my_files)):
        chunks.update(part)
    return {split: [c for _, of in sorted(chunks.items()) for c in of[split]] for split in SPLITS}


def _write_file(
    job: _Job,
    file: int,
    schema: Schema,
    encoders: dict[str, RowEncoder],
    scaling: Scaling,
    progress: tqdm[Any],
) -> dict[str, list[ChunkInfo]]:
    rows_per_chunk = job.spec.rows_per_chunk
    writers = {
        split: ChunkWriter(job.scratch, f"{split}-{file:05d}", schema, rows_per_chunk)
        for split in SPLITS
    }
    for raw in read_ahead(job.log.blocks(file)):
        split_of = job.splitter.split_of(raw, file)
        block = encode_block(raw, job.log.columns, encoders, scaling)
        for index, writer in enumerate(writers.values()):
            samples = np.nonzero(split_of == index)[0]
            if samples.size:
                is_whole = samples.size == len(block)
                writer.write(block if is_whole else select_samples(block, samples))
        progress.update(len(raw))
    return {split: writer.close() for split, writer in writers.items()}


def _commit(
    job: _Job,
    target: Path,
    encoders: dict[str, RowEncoder],
    splits: dict[str, list[ChunkInfo]],
    total: FileFacts,
) -> None:
    if total.num_skipped:
        _LOGGER.warning(
            "prepare: left out %d samples that could not be read, kept %d",
            total.num_skipped,
            total.num_samples.total(),
        )
    source = {
        "format": job.spec.format.name,
        # Names without directories: the same log makes the same dataset wherever it lies.
        "files": [path.name for path in job.log.files],
        "num_samples": dict(total.num_samples),
        "num_clicks": dict(total.num_clicks),
        "num_skipped": total.num_skipped,
    }
    commit_dataset(job.scratch, target, _schema(job, encoders), splits, source)
