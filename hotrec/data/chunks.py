"""Chunks: the prepared samples on disk, Arrow IPC files that are memory-mapped when read.

``ChunkWriter`` cuts a stream of blocks into chunks, each one record batch; ``commit_dataset`` makes
them a dataset, manifest last; ``Dataset`` reads it back. A chunk has the columns ``label`` float32,
``dense`` fixed-size list of float32 (absent when the schema has no dense column), and one column
per feature: integers, or lists of integers when the feature is multi-hot. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hotrec.artifact import Artifact, ArtifactError, commit_artifact, read_artifact
from hotrec.types import Feature, Rows, Schema

SPLITS = ("train", "valid", "test")
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
        label: float32 (B,), 0 or 1.
        dense: float32 (B, N).
        features: per feature the rows, integers (B,), or their bags.
    """

    label: Floats
    dense: Floats
    features: Mapping[str, Integers | Jagged]

    def __len__(self) -> int:
        return int(self.label.size)


@dataclass(frozen=True)
class ChunkInfo:
    """A chunk in the manifest."""

    file: str
    num_samples: int


def id_type(num_rows: int) -> pa.DataType:
    """The integer type that holds the rows of a table in a chunk."""
    return pa.int32() if num_rows < 2**31 else pa.int64()


def arrow_schema(schema: Schema) -> pa.Schema:
    """The columns of a chunk."""
    fields = [pa.field("label", pa.float32(), nullable=False)]
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
        if column.name == "label":
            arrays.append(pa.array(np.ascontiguousarray(block.label, np.float32)))
        elif column.name == "dense":
            flat = np.ascontiguousarray(block.dense, np.float32).reshape(-1)
            arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(flat), type=column.type))
        else:
            arrays.append(_feature_array(block.features[column.name], column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


class ChunkWriter:
    """Cuts the samples of one split into chunks of ``rows_per_chunk``, the last one shorter.

    Holds at most one chunk and one block in memory.

    Args:
        directory: the dataset's (scratch) directory.
        stem: beginning of the file names, e.g. "train" or "train-00012".
        schema: what a sample holds.
        rows_per_chunk: samples per chunk.
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
        """Write what is left; the chunks, in order."""
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


def write_arrow(path: Path, table: pa.Table) -> None:
    """Write a table as one Arrow IPC file.

    Raises:
        OSError: if it cannot be written; the message names the file and what to do.
    """
    try:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path}: expected to write {table.nbytes} bytes, got {error}. "
            "Free disk space or choose another output directory",
        ) from error


def commit_dataset(
    scratch: Path,
    target: Path,
    schema: Schema,
    splits: Mapping[str, Sequence[ChunkInfo]],
    source: Mapping[str, Any],
) -> Artifact:
    """Write the manifest of a dataset and move it into place, see ``hotrec.artifact``.

    Args:
        scratch: the directory that holds the chunks.
        target: where the dataset is to stand.
        schema: what a sample holds.
        splits: chunks of each split, in order.
        source: facts about where the samples come from, as JSON values.
    """
    content = {
        "schema": schema.to_json(),
        "splits": {split: [vars(chunk) for chunk in chunks] for split, chunks in splits.items()},
        "source": dict(source),
    }
    return commit_artifact(scratch, target, kind="dataset", content=content)


@dataclass(frozen=True)
class Dataset:
    """A prepared dataset.

    Args:
        artifact: the directory and its manifest.
        schema: what a sample holds.
        splits: chunks of each split, in order. A split may be missing or empty.
    """

    artifact: Artifact
    schema: Schema
    splits: Mapping[str, tuple[ChunkInfo, ...]]
    _arrow_schema: pa.Schema = field(repr=False)

    @staticmethod
    def open(path: str | Path, verify: str = "size") -> Dataset:
        """Read the manifest and check the files.

        Args:
            path: the dataset's directory.
            verify: "size", or "hash" to read every byte.

        Raises:
            ArtifactError: if there is no whole dataset at ``path``.
        """
        artifact = read_artifact(Path(path), kind="dataset", verify=verify)
        try:
            schema = Schema.from_json(artifact.content["schema"])
            splits = {
                split: tuple(ChunkInfo(**chunk) for chunk in chunks)
                for split, chunks in artifact.content["splits"].items()
            }
        except (KeyError, TypeError) as error:
            raise ArtifactError(
                f"{artifact.path}: expected a schema and splits in the manifest, got {error!r}. "
                "Prepare the dataset again."
            ) from error
        for chunks in splits.values():
            for chunk in chunks:
                if not (artifact.path / chunk.file).exists():
                    raise ArtifactError(
                        f"{artifact.path / chunk.file}: expected a chunk of {chunk.num_samples} "
                        "samples, got no such file. Prepare the dataset again."
                    )
        return Dataset(artifact, schema, splits, arrow_schema(schema))

    def chunks(self, split: str) -> tuple[ChunkInfo, ...]:
        """The chunks of a split; none if the dataset lacks it."""
        return self.splits.get(split, ())

    def num_samples(self, split: str) -> int:
        """Samples of a split; 0 if the dataset lacks it."""
        return sum(chunk.num_samples for chunk in self.chunks(split))

    def chunk(self, split: str, index: int) -> pa.Table:
        """A chunk, memory-mapped; reading it touches only the pages that are used.

        Raises:
            ArtifactError: if the file is no chunk of this dataset's schema and length.
        """
        info = self.chunks(split)[index]
        path = self.artifact.path / info.file
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except (pa.ArrowInvalid, OSError) as error:
            raise ArtifactError(
                f"{path}: expected an Arrow file of {info.num_samples} samples, got "
                f"{type(error).__name__}: {error}. Prepare the dataset again."
            ) from error
        if table.num_rows != info.num_samples:
            raise ArtifactError(
                f"{path}: expected {info.num_samples} samples, got {table.num_rows}. "
                "Prepare the dataset again."
            )
        _check_columns(path, table, self._arrow_schema)
        return table

    def block(self, split: str, index: int) -> Block:
        """A chunk as numpy arrays over the mapped file, nothing copied.

        The bounds of bags are checked here; ids are not (the loader checks those it reads).

        Raises:
            ArtifactError: if the file does not hold what the manifest says.
        """
        table = self.chunk(split, index)
        where = self.chunks(split)[index].file
        num_dense = len(self.schema.dense)
        if num_dense:
            dense = _numpy(_one_array(table, "dense").flatten(), where, "dense")
        else:
            dense = np.empty(0, np.float32)
        return Block(
            label=_numpy(_one_array(table, "label"), where, "label"),
            dense=dense.reshape(table.num_rows, num_dense),
            features={
                feature.name: _ids(_one_array(table, feature.name), where, feature)
                for feature in self.schema.features
            },
        )

    def row_blocks(self, split: str) -> Iterator[dict[str, Rows]]:
        """The rows that each chunk reads: int64 (K,) per feature, bags laid end to end."""
        for index in range(len(self.chunks(split))):
            features = self.block(split, index).features
            yield {
                name: (ids.values if isinstance(ids, Jagged) else ids).astype(np.int64)
                for name, ids in features.items()
            }


def _check_columns(path: Path, table: pa.Table, expected: pa.Schema) -> None:
    for column in expected:
        position = table.schema.get_field_index(column.name)
        found = table.schema.field(position).type if position >= 0 else "no such column"
        if found != column.type:
            raise ArtifactError(
                f"{path}: expected column {column.name} of type {column.type}, got {found}. "
                "Prepare the dataset again."
            )
        if table.column(position).null_count:
            raise ArtifactError(
                f"{path}: expected column {column.name} without nulls, got "
                f"{table.column(position).null_count}. Prepare the dataset again."
            )


def _one_array(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    # combine_chunks copies, which only a chunk of several record batches needs.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _numpy(array: pa.Array, where: str, name: str) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=True)
    if values.size != len(array):
        raise ArtifactError(f"{where}: expected {len(array)} values of {name}, got {values.size}.")
    return values


def _ids(array: pa.Array, where: str, feature: Feature) -> Integers | Jagged:
    if not feature.is_multi_hot:
        return _numpy(array, where, feature.name)
    offsets = array.offsets.to_numpy(zero_copy_only=True)
    values = array.values.to_numpy(zero_copy_only=True)
    lengths = np.diff(offsets)
    if lengths.size and (lengths.min() < 0 or offsets[0] < 0 or offsets[-1] > values.size):
        sample = int(np.argmin(lengths))
        raise ArtifactError(
            f"{where} feature {feature.name}: expected lengths >= 0 that add up to the "
            f"{values.size} ids, got length {lengths[sample]} at sample {sample} and "
            f"{offsets[-1] - offsets[0]} ids in all. Prepare the dataset again."
        )
    return Jagged(values, offsets)
