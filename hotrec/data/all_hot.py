"""All-hot samples: those whose every id is a hot row of a partition. One bit per sample.

A step whose samples are all-hot needs no cold row on any rank. FAE (PVLDB 15(1), 2022) and SCARS
(arXiv 2411.01611) pack such samples into batches of their own. They are determined once per dataset
and partition, with the chunks divided among the ranks, and stored as an artifact in the run
directory: ``all_hot.npy``, uint8, the concatenated bits of the chunks, each chunk starting at a new
byte. Its manifest names the dataset and the partition, so that a stale one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrec.artifact import (
    Artifact,
    ArtifactError,
    Verify,
    commit_artifact,
    read_artifact,
    scratch_directory,
)
from hotrec.data.chunks import Dataset, Integers, Jagged
from hotrec.data.order import num_steps_of
from hotrec.runtime.progress import Progress
from hotrec.runtime.ranks import all_gather_object, rank, same_verdict, world_size
from hotrec.types import Partition, Rows, Schema

KIND = "all_hot_samples"
BITS = "all_hot.npy"

Bits = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

# Bounds what classifying takes beside the chunk itself, however many ids its bags hold.
_SAMPLES_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class AllHotSamples:
    """Which samples of a split are all-hot."""

    artifact: Artifact
    chunk_sizes: tuple[int, ...]
    num_all_hot: tuple[int, ...]  # of each chunk
    bits: Bits  # mapped from the file

    @property
    def num_samples(self) -> int:
        return sum(self.chunk_sizes)

    @property
    def frac(self) -> float:
        """Share of the samples that are all-hot; 0 without samples."""
        return sum(self.num_all_hot) / self.num_samples if self.num_samples else 0.0

    def subset(self, *, is_all_hot: bool) -> SampleSubset:
        """The samples of one kind."""
        return SampleSubset(self, is_all_hot)


@dataclass(frozen=True)
class SampleSubset:
    """The all-hot or the mixed samples of a split, for a loader."""

    samples: AllHotSamples
    is_all_hot: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of these samples in each chunk."""
        pairs = zip(self.samples.chunk_sizes, self.samples.num_all_hot, strict=True)
        return tuple(hot if self.is_all_hot else size - hot for size, hot in pairs)

    @property
    def num_samples(self) -> int:
        return sum(self.sizes)

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint's position in these samples depends on."""
        return {"samples": self.samples.artifact.content_hash, "is_all_hot": self.is_all_hot}

    def rows(self, chunk: int) -> Rows:
        """Positions of the samples of this kind in a chunk, int64, increasing."""
        sizes = self.samples.chunk_sizes
        start = sum(-(-size // 8) for size in sizes[:chunk])
        flags = np.unpackbits(self.samples.bits[start:], count=sizes[chunk])
        return np.flatnonzero(flags == self.is_all_hot)


def write_all_hot(
    dataset: Dataset, split: str, partition: Partition, *, partition_hash: str, output: Path
) -> AllHotSamples:
    """Find the all-hot samples of a split and store them; collective.

    A table without hot rows (such as one whose exchange is pooled) makes every sample that reads it
    mixed. Needs one byte per row of the partly hot tables, and one bit per sample.

    Args:
        dataset: The dataset.
        split: The split to classify.
        partition: A partition of this dataset's tables.
        partition_hash: Its artifact's content hash.
        output: The artifact's path, on a file system shared by all hosts; replaced if it exists.

    Raises:
        ValueError: if the partition is of other tables, or an id lies outside its table.
        ArtifactError: if a chunk is damaged, or a host cannot see ``output``.
        RankError: on the ranks that saw no fault themselves.
    """
    mine = same_verdict(lambda: _classify_share(dataset, split, partition))
    found: dict[int, Bits] = {}
    for part in all_gather_object(mine):
        found.update(part)

    def write() -> None:
        if rank() == 0:
            _write(dataset, split, found, partition_hash, output)

    same_verdict(write)
    return read_all_hot(dataset, split, partition_hash=partition_hash, path=output)


def read_all_hot(dataset: Dataset, split: str, *, partition_hash: str, path: Path) -> AllHotSamples:
    """Read what ``write_all_hot`` kept; collective.

    Raises:
        ArtifactError: if it is missing, damaged, or of another dataset, partition or split.
        RankError: on the ranks that saw no fault themselves.
    """
    return same_verdict(lambda: _read(dataset, split, partition_hash, path))


def _read(dataset: Dataset, split: str, partition_hash: str, path: Path) -> AllHotSamples:
    artifact = read_artifact(path, kind=KIND, verify=Verify.full)
    checks = (
        ("the dataset", dataset.artifact.content_hash, artifact.made_from.get("dataset")),
        ("the partition", partition_hash, artifact.made_from.get("partition")),
        ("split", split, artifact.content["split"]),
    )
    for name, expected, got in checks:
        if got != expected:
            raise ArtifactError(
                f"{path}: expected the all-hot samples of {name} {expected[:12]}, got those of "
                f"{str(got)[:12]}. Remove the directory, or start a new run."
            )
    return AllHotSamples(
        artifact=artifact,
        chunk_sizes=tuple(chunk.num_samples for chunk in dataset.chunks(split)),
        num_all_hot=tuple(artifact.content["num_all_hot"]),
        bits=np.load(artifact.file(BITS), mmap_mode="r"),
    )


def _write(
    dataset: Dataset, split: str, found: Mapping[int, Bits], partition_hash: str, output: Path
) -> None:
    bits = [found[chunk] for chunk in range(len(dataset.chunks(split)))]
    # The bits that fill up the last byte of a chunk are zeros.
    counts = [int(np.unpackbits(part).sum()) for part in bits]
    with scratch_directory(output, kind=KIND) as scratch:
        np.save(scratch / BITS, np.concatenate([np.empty(0, np.uint8), *bits]))
        commit_artifact(
            scratch,
            output,
            kind=KIND,
            content={"split": split, "num_all_hot": counts},
            made_from={"dataset": dataset.artifact.content_hash, "partition": partition_hash},
        )


def _classify_share(dataset: Dataset, split: str, partition: Partition) -> dict[int, Bits]:
    """The bits of this rank's chunks, by chunk."""
    hot_flags = _hot_flags(dataset.schema, partition)
    chunks = dataset.chunks(split)
    my_chunks = range(rank(), len(chunks), world_size())
    total = sum(chunks[chunk].num_samples for chunk in my_chunks)
    bits = {}
    with Progress("all-hot samples", total, unit="samples", is_shown=rank() == 0) as bar:
        for chunk in my_chunks:
            features = dataset.block(split, chunk).features
            info = chunks[chunk]
            is_all_hot = np.ones(info.num_samples, np.bool_)
            for start in range(0, info.num_samples, _SAMPLES_AT_ONCE):
                samples = slice(start, min(start + _SAMPLES_AT_ONCE, info.num_samples))
                for feature in dataset.schema.features:
                    _clear_mixed(
                        is_all_hot,
                        features[feature.name],
                        samples,
                        hot_flags[feature.table],
                        f"table {feature.table}",
                        f"feature {feature.name} (chunk {info.file})",
                    )
                bar.update(samples.stop - samples.start)
            bits[chunk] = np.packbits(is_all_hot)
    return bits


def _hot_flags(schema: Schema, partition: Partition) -> dict[str, Flags]:
    """For each table whether a row is hot, bool (N,)."""
    expected = {table.name: table.num_rows for table in schema.tables}
    if dict(partition.num_rows) != expected:
        raise ValueError(
            f"partition: expected the tables and rows {expected}, got {dict(partition.num_rows)}. "
            "Make the partition from this dataset's profile."
        )
    flags = {}
    for table, num_rows in expected.items():
        hot = partition.hot(table)
        # An all-hot or all-cold table needs no memory.
        flags[table] = np.broadcast_to(np.bool_(hot.size > 0), num_rows)
        if 0 < hot.size < num_rows:
            flags[table] = np.zeros(num_rows, np.bool_)
            flags[table][hot] = True
    return flags


def _clear_mixed(
    is_all_hot: Flags,
    ids: Integers | Jagged,
    samples: slice,
    flags: Flags,
    table: str,
    where: str,
) -> None:
    """Clear the flags (B,) of the samples that hold a cold id; an empty bag holds none."""
    if isinstance(ids, Jagged):
        offsets = ids.offsets[samples.start : samples.stop + 1]
        values = ids.values[offsets[0] : offsets[-1]]
    else:
        values = ids[samples]
    if values.size and (values.min() < 0 or values.max() >= flags.size):
        outside = values[(values < 0) | (values >= flags.size)][0]
        raise ValueError(
            f"{table}: expected rows in 0..{flags.size - 1}, got row {outside} in {where}. "
            "Prepare the dataset again."
        )
    cold = np.flatnonzero(~flags[values])
    if isinstance(ids, Jagged):
        cold = np.searchsorted(offsets, cold + offsets[0], side="right") - 1
    is_all_hot[cold + samples.start] = False


def count_steps_of_kinds(
    samples: AllHotSamples, *, batch_size: int, world_size: int
) -> tuple[int, int]:
    """The steps of an epoch with all-hot and with mixed samples; the last may not be full."""
    num_all_hot = sum(samples.num_all_hot)
    counts = (num_all_hot, samples.num_samples - num_all_hot)
    all_hot, mixed = (num_steps_of(count, batch_size, world_size) for count in counts)
    return all_hot, mixed
