"""A growing dataset: what its next generation takes over.

Each ``prepare append=...`` makes a generation: its training split is the earlier one followed by
that of the new files, its other splits come from the new files only. Ids keep their rows and dense
columns their scale, so that the chunks of the training split are reused unchanged, except that
samples whose value lost its row to another one read row 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from hotrec.artifact import Verify, link_file
from hotrec.config.data import EPOCH, SourceSpec, SplitKind, TimeUnit, tables_of
from hotrec.data.chunks import ChunkInfo, Dataset, Integers, Jagged, write_chunk
from hotrec.data.days import Times
from hotrec.data.encoding import check_encoding
from hotrec.data.vocabulary import Vocabulary, read_whole_vocabulary
from hotrec.types import Float64s, Rows

TRAIN = "train"
_ADVICE = (
    "Append files in order of time, each once, or prepare all files from scratch with "
    "overwrite=true."
)


@dataclass(frozen=True)
class FileRecord:
    """What a generation took from a file.

    Args:
        name: The file, without its directory.
        content: The hash of its bytes.
        num_train: Samples that it added to the training split.
        times: Sum of the hashes of their times, modulo 2**64; 0 without times.
    """

    name: str
    content: str
    num_train: int
    times: int


def content_of(path: Path) -> str:
    """The hash of a file's bytes, for ``FileRecord``."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_contents(
    files: Sequence[Path], contents: Sequence[str], has_samples: Sequence[bool], key: str
) -> None:
    """Check that no two files with samples that are prepared together are equal.

    Raises:
        ValueError: If two are.
    """
    first: dict[str, Path] = {}
    for path, content, is_full in zip(files, contents, has_samples, strict=True):
        if content in first and is_full:
            raise ValueError(
                f"{key}: expected each file once, got {path} with the content of {first[content]}. "
                "Remove one of them."
            )
        first[content] = path


@dataclass(frozen=True)
class Earlier:
    """The dataset that is extended.

    Args:
        dataset: The dataset.
        generations: Those before it, as in its manifest.
        scaling: The scaling of its dense columns, float64 (2, N).
        files: Its files.
    """

    dataset: Dataset
    generations: tuple[Mapping[str, Any], ...]
    scaling: Float64s
    files: Sequence[FileRecord]

    @staticmethod
    def open(directory: Path, spec: SourceSpec, verify: Verify) -> Earlier:
        """Open a dataset to extend it by a log; the caller holds its lock for writing.

        Raises:
            ArtifactError: If it is damaged, or has another encoding.
            ValueError: If a table would have to shrink, or the split is of another kind or would
                hold out samples that are trained on.
        """
        dataset = Dataset.open(directory, verify, stay_open=False)
        scaling = check_encoding(
            dataset,
            spec,
            of="this configuration has it",
            advice="Append with the configuration that prepared it.",
            may_grow=True,
        )
        for table in dataset.schema.tables:
            asked = tables_of(spec)[table.name].num_rows
            if 0 < asked < table.num_rows:
                raise ValueError(
                    f"data.source.tables.{table.name}.num_rows: expected at least the "
                    f"{table.num_rows} rows that {directory} has, got {asked}. Tables cannot "
                    "shrink: prepare from scratch."
                )
        check_split(dataset, spec)
        with dataset.artifact.parsing():
            files = [FileRecord(**of) for of in dataset.artifact.content["source"]["files"]]
        return Earlier(dataset, generations_of(dataset), scaling, files)

    @property
    def path(self) -> Path:
        return self.dataset.artifact.path

    @property
    def number(self) -> int:
        """The number of the generation that follows."""
        return len(self.generations) + 1

    def has(self, file: str, num_train: int, times: int) -> bool:
        """Whether training samples are those of the files of this name, or of all files."""
        for files in ([of for of in self.files if of.name == file], self.files):
            sum_of_times = sum(of.times for of in files) % 2**64
            if (num_train, times) == (sum(of.num_train for of in files), sum_of_times):
                return True
        return False

    def check_later(self, time_ms: float, at: str, num: int) -> None:
        """Check new samples that precede the end of the training split.

        Args:
            time_ms: The time of the first of them.
            at: Its file and line.
            num: How many samples of the file are not later.

        Raises:
            ValueError: If the training split is ordered by time, which they would break.
        """
        if self.times.unordered_at is None:
            raise ValueError(
                f"append: expected training samples from {_iso(self.times.last_ms)} on (the end of "
                f"{self.path}) or exactly the earlier ones, got one at {_iso(time_ms)} in {at}, "
                f"and {num} others. {_ADVICE}"
            )

    def check_new(self, files: Sequence[Path], contents: Sequence[str]) -> None:
        """Check that the dataset was not trained on a file to append, where there are no times.

        With times, samples that are not later than the training split are found one by one.

        Raises:
            ValueError: If it was trained on one of this content, or of this name.
        """
        if "time" in self.dataset.artifact.content["source"]:
            return
        trained = [of for of in self.files if of.num_train]
        for path, content in zip(files, contents, strict=True):
            for of in trained:
                if of.content == content:
                    raise ValueError(
                        f"append: expected new files, got {path} with the content of {of.name}, "
                        f"which is already in {self.path}. {_ADVICE}"
                    )

    def check_days(self, times: Times) -> None:
        """Check that no file that counts as a day is appended again, with other content.

        Raises:
            ValueError: If one is.
        """
        twice = sorted(self.times.days.keys() & times.days.keys())
        if "time" not in self.dataset.artifact.content["source"] and twice:
            raise ValueError(
                f"append: expected new files, got {twice[0]}, which is already in {self.path}. "
                f"{_ADVICE}"
            )

    def missing_days(self, times: Times) -> list[str]:
        """Message about held-out days that are missing in the new files."""
        recorded = self.dataset.artifact.content["source"].get("days", ())
        days = [day["day"] for day in recorded if not day[TRAIN] and day["day"] not in times.days]
        more = f" and {len(days) - 5} more" if len(days) > 5 else ""
        return days and [
            f"append: held-out days {', '.join(days[:5])}{more} are not in the new files and no "
            "longer in any split. Append them too to train on them"
        ]

    @property
    def times(self) -> Times:
        """Of the training split."""
        return Times.from_json(self.dataset.artifact.content["source"])

    def num_rows(self, table: str) -> int:
        return self.dataset.schema.table(table).num_rows

    def vocabulary(self, table: str) -> Vocabulary:
        return read_whole_vocabulary(self.path, table)

    def document(self) -> list[Mapping[str, Any]]:
        """The generations up to this one, for the manifest of the next."""
        this = {
            "content_hash": self.dataset.artifact.content_hash,
            "num_train": self.dataset.num_samples(TRAIN),
            "num_rows": {table.name: table.num_rows for table in self.dataset.schema.tables},
        }
        return [*self.generations, this]

    def take_chunk(self, index: int, scratch: Path, evicted: Mapping[str, Rows]) -> ChunkInfo:
        """Take over a chunk of the training split.

        Args:
            index: Its number.
            scratch: The directory of the next generation.
            evicted: Rows by table that now belong to another value, int64.
        """
        info = self.dataset.chunks(TRAIN)[index]
        block = self.dataset.block(TRAIN, index)
        features: dict[str, Integers | Jagged] = {}
        for name, ids in block.features.items():
            values = ids.values if isinstance(ids, Jagged) else ids
            is_lost = np.isin(values, evicted.get(self._tables[name], ()))
            if is_lost.any():
                kept = np.where(is_lost, 0, values)
                features[name] = Jagged(kept, ids.offsets) if isinstance(ids, Jagged) else kept
        target = scratch / info.file
        if features:
            changed = replace(block, features={**block.features, **features})
            write_chunk(target, changed, self.dataset.schema)
        else:
            link_file(self.path / info.file, target)
        return info

    @property
    def _tables(self) -> dict[str, str]:
        return {feature.name: feature.table for feature in self.dataset.schema.features}


def split_document(spec: SourceSpec) -> dict[str, Any]:
    """The division into splits that ``append`` must repeat, as JSON values."""
    column = spec.split.time_column
    if column is None:
        return {"kind": spec.split.kind.name}
    unit = str(spec.times.get(column, TimeUnit.ms))
    return {"kind": spec.split.kind.name, "column": column, "unit": unit}


def check_split(dataset: Dataset, spec: SourceSpec) -> None:
    """Check that a log is divided like a dataset, so that no sample lands in two splits.

    Raises:
        ValueError: If the split is of another kind, or would hold out samples that are trained on.
    """
    source, path = dataset.artifact.content["source"], dataset.artifact.path
    asked = split_document(spec)
    found = source["split"]
    for name in ("kind", "column", "unit"):
        if found.get(name) != asked.get(name):
            key = (
                f"data.source.times.{asked['column']}"
                if name == "unit"
                else (f"data.source.split.{name}")
            )
            raise ValueError(
                f"{key}: expected {found.get(name)}, the split of {path}, got {asked.get(name)}. "
                "Append with the split that prepared it, or prepare all files from scratch with "
                "overwrite=true."
            )
    last_ms = Times.from_json(source).last_ms
    if spec.split.kind is SplitKind.time and spec.split.bounds[0] <= last_ms:
        raise ValueError(
            f"data.source.split.valid_from: expected a time after {_iso(last_ms)}, the end of the "
            f"training split of {path}, got {spec.split.valid_from}. Set a later time; trained "
            "samples cannot be held out."
        )


def _iso(time_ms: float) -> str:
    """A time in ISO form, or the number itself if it is not one."""
    try:
        return (EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds")
    except OverflowError:
        return f"{time_ms:g}"


def generations_of(dataset: Dataset) -> tuple[Mapping[str, Any], ...]:
    """The generations before this dataset: content hash, training samples and rows by table."""
    return tuple(dataset.artifact.content["source"].get("generations", ()))


def growth_of(dataset: Dataset) -> dict[str, dict[str, int]]:
    """New, evicted and rare values of each table with a vocabulary; empty before it has grown."""
    generations = generations_of(dataset)
    growth = {}
    for name, before in generations[-1]["num_rows"].items() if generations else ():
        if f"vocab/{name}.arrow" in dataset.artifact.files:
            vocabulary = read_whole_vocabulary(dataset.artifact.path, name)
            growth[name] = {
                "new_rows": vocabulary.num_rows - before,
                "evicted": evicted_rows(vocabulary, before, len(generations)).size,
                "without_row": vocabulary.rare.num_rows,
            }
    return growth


def evicted_rows(vocabulary: Vocabulary, num_rows: int, generation: int) -> Rows:
    """Rows below ``num_rows`` that belong to another value since a generation, int64."""
    is_new = vocabulary.generations("since")[: num_rows - 1] == generation
    return np.flatnonzero(is_new) + 1
