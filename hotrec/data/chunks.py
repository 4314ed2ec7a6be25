"""Chunks: the prepared samples on disk, Arrow IPC files that are memory-mapped when read.

``ChunkWriter`` cuts a stream of blocks into chunks, each one record batch; ``commit_dataset`` makes
them a dataset, manifest last; ``Dataset`` reads it back. A chunk has the columns ``label`` float32
(a fixed-size list of them with several labels), ``weight`` float32 (absent when the schema has no
weights), ``dense`` fixed-size list of float32 (absent when the schema has no dense column), and one
column per feature: integers, or lists of integers when the feature is multi-hot. No torch.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hotrec.artifact import Artifact, ArtifactError, Verify, commit_artifact, read_artifact
from hotrec.types import Feature, Rows, Schema

DATASET = "dataset"
SPLITS = ("train", "valid", "test")
HELD_OUT = SPLITS[1:]
CHUNK_DIR = "chunks"
Integers = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Jagged:
    """The bags of one multi-hot feature: bag i is ``values[offsets[i]:offsets[i + 1]]``.

    Args:
        values: integers (K,).
        offsets: integers (B + 1,), not falling.
    """

    values: Integers
    offsets: Integers

    def __len__(self) -> int:
        return int(self.offsets.size) - 1


@dataclass(frozen=True)
class Block:
    """Samples in columns, as they are written and as a chunk is read.

    Args:
        label: float32 (B,), 0 or 1; (B, L) with several labels.
        dense: float32 (B, N).
        features: For each feature its rows, integers (B,), or its bags.
        weight: float32 (B,), at least 0; None without weights.
    """

    label: Floats
    dense: Floats
    features: Mapping[str, Integers | Jagged]
    weight: Floats | None = None

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class ChunkInfo:
    """A chunk in the manifest."""

    file: str
    num_samples: int


def offsets_of(lengths: npt.NDArray[Any]) -> Rows:
    """Offsets of concatenated bags, including the end."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def id_type(num_rows: int) -> pa.DataType:
    """The integer type that holds the rows of a table in a chunk."""
    return pa.int32() if num_rows < 2**31 else pa.int64()


def arrow_schema(schema: Schema) -> pa.Schema:
    """The columns of a chunk."""
    num_labels = len(schema.labels)
    label = pa.float32() if num_labels == 1 else pa.list_(pa.float32(), num_labels)
    fields = [pa.field("label", label, nullable=False)]
    if schema.has_weights:
        fields.append(pa.field("weight", pa.float32(), nullable=False))
    if schema.dense:
        fields.append(pa.field("dense", pa.list_(pa.float32(), len(schema.dense)), nullable=False))
    for feature in schema.features:
        ids = id_type(schema.table(feature.table).num_rows)
        fields.append(
            pa.field(feature.name, pa.list_(ids) if feature.is_multi_hot else ids, nullable=False)
        )
    return pa.schema(fields)


def _feature_array(ids: Integers | Jagged, arrow_type: pa.DataType) -> pa.Array:
    if isinstance(ids, Jagged):
        if ids.offsets[-1] - ids.offsets[0] >= 2**31:
            raise ValueError(
                f"chunk of {len(ids)} samples: expected fewer than 2**31 ids in one feature, got "
                f"{ids.offsets[-1] - ids.offsets[0]}. Set a smaller rows_per_chunk."
            )
        values = ids.values[ids.offsets[0] : ids.offsets[-1]]
        offsets = (ids.offsets - ids.offsets[0]).astype(np.int32)
        return pa.ListArray.from_arrays(
            pa.array(offsets), pa.array(values).cast(arrow_type.value_type), type=arrow_type
        )
    return pa.array(ids).cast(arrow_type)


def _record_batch(block: Block, columns: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for column in columns:
        if column.name in block.features:
            arrays.append(_feature_array(block.features[column.name], column.type))
            continue
        values: Any = getattr(block, column.name)
        flat = pa.array(np.ascontiguousarray(values, np.float32).reshape(-1))
        is_list = pa.types.is_fixed_size_list(column.type)
        arrays.append(
            pa.FixedSizeListArray.from_arrays(flat, type=column.type) if is_list else flat
        )
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


class ChunkWriter:
    """Cuts the samples of one split into chunks of ``rows_per_chunk``, the last one shorter.

    Holds at most one chunk and one block in memory.

    Args:
        directory: The scratch directory of the dataset.
        stem: The beginning of the file names, e.g. "train" or "train-00012".
        schema: The columns of a sample.
        rows_per_chunk: The number of samples per chunk.
    """

    def __init__(self, directory: Path, stem: str, schema: Schema, rows_per_chunk: int) -> None:
        self._directory = directory
        self._stem = stem
        self._columns = arrow_schema(schema)
        self._rows_per_chunk = rows_per_chunk
        self._pending: list[pa.RecordBatch] = []
        self._num_pending = 0
        self._chunks: list[ChunkInfo] = []
        (directory / CHUNK_DIR).mkdir(exist_ok=True)

    def write(self, block: Block) -> None:
        """Append samples.

        Raises:
            OSError: if the disk is full; the message names the file.
        """
        batch = _record_batch(block, self._columns)
        while self._num_pending + batch.num_rows >= self._rows_per_chunk:
            room = self._rows_per_chunk - self._num_pending
            self._pending.append(batch.slice(0, room))
            self._flush()
            batch = batch.slice(room)
        if batch.num_rows:
            self._pending.append(batch)
            self._num_pending += batch.num_rows

    def close(self) -> list[ChunkInfo]:
        """Write the rest; returns the chunks, in order."""
        if self._num_pending:
            self._flush()
        return self._chunks

    def _flush(self) -> None:
        name = f"{CHUNK_DIR}/{self._stem}-{len(self._chunks):05d}.arrow"
        # One record batch per chunk, so that every column is one array when it is mapped.
        table = pa.Table.from_batches(self._pending, self._columns).combine_chunks()
        write_arrow(self._directory / name, table)
        self._chunks.append(ChunkInfo(name, table.num_rows))
        self._pending = []
        self._num_pending = 0


def write_chunk(path: Path, block: Block, schema: Schema) -> None:
    """Write samples as one chunk.

    Raises:
        OSError: if the disk is full; the message names the file.
    """
    columns = arrow_schema(schema)
    write_arrow(path, pa.Table.from_batches([_record_batch(block, columns)], columns))


def write_arrow(path: Path, table: pa.Table) -> None:
    """Write a table as one Arrow IPC file.

    Raises:
        OSError: if it cannot be written; it names the file, which Arrow's own error does not.
    """
    try:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    except OSError as error:
        number = error.errno or errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


def commit_dataset(
    scratch: Path,
    target: Path,
    schema: Schema,
    splits: Mapping[str, Sequence[ChunkInfo]],
    source: Mapping[str, Any],
) -> Artifact:
    """Write the manifest of a dataset and move it into place, see ``hotrec.artifact``.

    Args:
        scratch: The directory that holds the chunks.
        target: The directory that the dataset is moved to.
        schema: The columns of a sample.
        splits: The chunks of each split, in order.
        source: Facts about the origin of the samples, as JSON values.
    """
    content = {
        "schema": schema.to_json(),
        "splits": {split: [vars(chunk) for chunk in chunks] for split, chunks in splits.items()},
        "source": dict(source),
    }
    return commit_artifact(scratch, target, kind=DATASET, content=content)


@dataclass(frozen=True)
class Dataset:
    """A prepared dataset.

    Args:
        artifact: The directory and its manifest.
        schema: The columns of a sample.
        splits: The chunks of each split, in order. A split may be missing or empty.
    """

    artifact: Artifact
    schema: Schema
    splits: Mapping[str, tuple[ChunkInfo, ...]]
    _verified: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    @staticmethod
    def open(
        directory: str | Path, verify: Verify = Verify.size, *, stay_open: bool = True
    ) -> Dataset:
        """Read the manifest and check the files; the dataset cannot be replaced while it is open.

        Args:
            directory: The directory of the dataset.
            verify: "size" compares the checksum of a chunk when it is first read; "full" compares
                those of all chunks now.
            stay_open: False for a caller that will replace it.

        Raises:
            ArtifactError: if there is no whole dataset in ``directory``.
        """
        artifact = read_artifact(Path(directory), kind=DATASET, verify=verify, stay_open=stay_open)
        with artifact.parsing():
            schema = Schema.from_json(artifact.content["schema"])
            splits = {
                split: tuple(ChunkInfo(**chunk) for chunk in chunks)
                for split, chunks in artifact.content["splits"].items()
            }
            chunks = [chunk for part in splits.values() for chunk in part]
            seen: set[str] = set()
            for chunk in chunks:
                artifact.file(chunk.file)
                if chunk.file in seen:
                    raise ValueError(f"{chunk.file} twice")
                seen.add(chunk.file)
                if chunk.num_samples < 1:
                    raise ValueError(f"{chunk.file} with {chunk.num_samples} samples")
            for name in artifact.files:
                if name.startswith(f"{CHUNK_DIR}/") and name not in seen:
                    raise ValueError(f"{name} in no split")
        return Dataset(artifact, schema, splits)

    def chunks(self, split: str) -> tuple[ChunkInfo, ...]:
        """The chunks of a split; none if the dataset lacks it."""
        return self.splits.get(split, ())

    def num_samples(self, split: str) -> int:
        """Samples of a split; 0 if the dataset lacks it."""
        return sum(chunk.num_samples for chunk in self.chunks(split))

    def chunk(self, split: str, index: int) -> pa.Table:
        """A chunk, memory-mapped; reading it touches only the pages that are used.

        Raises:
            ArtifactError: if the file is not a chunk of this dataset's schema and length.
        """
        info = self.chunks(split)[index]
        path = self.artifact.path / info.file
        try:
            # Checked at the first read, because nothing needs all chunks at the start.
            if info.file not in self._verified:
                self.artifact.verify_file(info.file)
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except (pa.ArrowInvalid, OSError) as error:
            expected = f"an Arrow file of {info.num_samples} samples"
            raise _damaged(path, expected, f"{type(error).__name__}: {error}") from error
        self.artifact.check_opened()
        self._verified.add(info.file)
        if table.num_rows != info.num_samples:
            raise _damaged(path, f"{info.num_samples} samples", table.num_rows)
        _check_columns(path, table, arrow_schema(self.schema))
        return table

    def block(self, split: str, index: int) -> Block:
        """A chunk as numpy arrays over the mapped file, nothing copied.

        The bounds of bags are checked here; ids are not (the loader checks those it reads).

        Raises:
            ArtifactError: if the file does not match the manifest.
        """
        table = self.chunk(split, index)
        where = self.chunks(split)[index].file
        schema = self.schema
        label = _matrix(table["label"], len(schema.labels))
        dense = np.empty((table.num_rows, 0), np.float32)
        if schema.dense:
            dense = _matrix(table["dense"], len(schema.dense))
        return Block(
            label=label.reshape(-1) if len(schema.labels) == 1 else label,
            dense=dense,
            weight=_matrix(table["weight"], 1).reshape(-1) if schema.has_weights else None,
            features={
                feature.name: _ids(one_array(table[feature.name]), where, feature)
                for feature in self.schema.features
            },
        )


def _matrix(column: pa.ChunkedArray, width: int) -> Floats:
    """Numbers, or lists of ``width`` numbers, as float32 (B, width) over the mapped file."""
    array = one_array(column)
    flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
    values: Floats = flat.to_numpy(zero_copy_only=True)
    return values.reshape(len(array), width)


def _check_columns(path: Path, table: pa.Table, expected: pa.Schema) -> None:
    for column in expected:
        position = table.schema.get_field_index(column.name)
        found = table.schema.field(position).type if position >= 0 else "no such column"
        if found != column.type:
            raise _damaged(path, f"column {column.name} of type {column.type}", found)
        num_nulls = table.column(position).null_count
        if num_nulls:
            raise _damaged(path, f"column {column.name} without nulls", num_nulls)


def _damaged(where: Path | str, expected: str, got: object) -> ArtifactError:
    return ArtifactError(f"{where}: expected {expected}, got {got}. Prepare the dataset again.")


def one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The column as one array; dictionaries are unified."""
    if isinstance(column, pa.Array):
        return column
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    # combine_chunks copies, which is only needed for several chunks.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _ids(array: pa.Array, where: str, feature: Feature) -> Integers | Jagged:
    if not feature.is_multi_hot:
        rows: Integers = array.to_numpy(zero_copy_only=True)
        return rows
    offsets = array.offsets.to_numpy(zero_copy_only=True)
    values = array.values.to_numpy(zero_copy_only=True)
    lengths = np.diff(offsets)
    if lengths.size and (lengths.min() < 0 or offsets[0] < 0 or offsets[-1] > values.size):
        sample = int(np.argmin(lengths))
        raise _damaged(
            f"{where} feature {feature.name}",
            f"lengths >= 0 with the sum {values.size}, the number of ids",
            f"length {lengths[sample]} at sample {sample}, {offsets[-1] - offsets[0]} ids in all",
        )
    return Jagged(values, offsets)
