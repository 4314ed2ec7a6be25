"""Profile: how often each row of each table is looked up, in the data and in its last part.

One streaming pass over blocks, exact or on a seeded sample of the samples. The arrays of counts may
live in memory or in the files of the artifact, so that tables of any size fit. ``np.add.at`` counts
in place (70 to 800 M ids/s on one core, from 1e8 rows down to 1e3); ``np.bincount`` would make and
add an array of the table's size for each block (40 M ids/s at 1e7 rows).

The same pass draws batches and counts the distinct rows they read, see
``hotrec.cost_model.locality``.

The manifest's content, which ``hotrec.report`` reads:
``num_samples``, ``num_heldout_samples`` (counted ones), ``num_total_samples`` (met),
``sampling`` {frac, seed, min_count, confidence},
``tables`` {name: num_rows, num_lookups, num_distinct, num_heldout_lookups, heldout_unseen_frac,
coverage}, ``coverage``, ``landmarks`` over the rows of all tables together; a coverage is the
three lists of ``coverage_curve``; and ``locality`` {train, heldout}, each null or {batch_sizes,
num_batches, tables {name: lookups, mean, spread}}: what the drawn batches of each size read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hotrec.artifact import Artifact, Verify, commit_artifact, read_artifact, scratch_directory
from hotrec.cost_model.blocks import Block, check_block, sample_mask
from hotrec.cost_model.coverage import coverage_curve, coverage_landmarks
from hotrec.cost_model.histogram import CountHistogram, build_histogram, merge_histograms
from hotrec.cost_model.locality import (
    LocalityMeter,
    TableLocality,
    localities_from_json,
    localities_to_json,
)
from hotrec.types import Rows, Schema

KIND = "profile"
TRAIN_DIRECTORY, HELDOUT_DIRECTORY = "counts", "heldout"


@dataclass(frozen=True)
class Sampling:
    """Which samples are counted, and what is made of small counts.

    Args:
        frac: Share of the samples, drawn without replacement; 1 counts all of them.
        seed: Seed of the draw.
        min_count: Sampled accesses below which a row is not to be made hot, since its place in the
            ranking is noise. Counts are kept as they are; the policies take this number.
        confidence: Confidence of the intervals that a sampled profile reports.

    Raises:
        ValueError: If a value is out of range.
    """

    frac: float = 1.0
    seed: int = 0
    min_count: int = 1
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not 0.0 < self.frac <= 1.0:
            raise ValueError(f"sampling frac: expected above 0 and at most 1, got {self.frac}.")
        if self.seed < 0:
            raise ValueError(f"sampling seed: expected at least 0, got {self.seed}.")
        if self.min_count < 1:
            raise ValueError(f"sampling min_count: expected at least 1, got {self.min_count}.")
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(
                f"sampling confidence: expected between 0 and 1, got {self.confidence}."
            )

    @property
    def is_exact(self) -> bool:
        return self.frac == 1.0


@dataclass(frozen=True)
class Profile:
    """Access counts per row.

    Args:
        num_samples: Train samples that were counted.
        num_heldout_samples: Held-out samples that were counted.
        num_total_samples: Samples read, counted or not, in both parts.
        sampling: How they were drawn.
        counts: int64 (R,) per table, train accesses; read-only memory maps when read from disk.
        heldout: int64 (R,) per table, held-out accesses; empty when nothing was held out.
        locality: Locality of train batches by table; empty if not measured.
        heldout_locality: The same for held-out batches.
    """

    num_samples: int
    num_heldout_samples: int
    num_total_samples: int
    sampling: Sampling
    counts: Mapping[str, Rows]
    heldout: Mapping[str, Rows] = field(default_factory=dict)
    locality: Mapping[str, TableLocality] = field(default_factory=dict)
    heldout_locality: Mapping[str, TableLocality] = field(default_factory=dict)

    @property
    def num_rows(self) -> dict[str, int]:
        return {table: int(counts.size) for table, counts in self.counts.items()}

    def build_histograms(self) -> dict[str, CountHistogram]:
        """The histogram of each table, with its held-out lookups."""
        return {
            table: build_histogram(counts, self.heldout.get(table))
            for table, counts in self.counts.items()
        }

    def build_heldout_histograms(self) -> dict[str, CountHistogram]:
        """The held-out counts of each table alone; what ``heldout_locality`` goes with."""
        return {table: build_histogram(counts) for table, counts in self.heldout.items()}


def count_rows(
    blocks: Iterable[Block],
    schema: Schema,
    *,
    num_samples: int | None = None,
    heldout_frac: float = 0.0,
    heldout_blocks: Iterable[Block] | None = None,
    num_heldout_samples: int | None = None,
    sampling: Sampling | None = None,
    directory: Path | None = None,
) -> Profile:
    """Count the accesses of every row in one pass; 8 bytes per row and part, however long the data.

    Args:
        blocks: The samples, oldest first.
        num_samples: How many samples the blocks hold; needed to hold out their last part.
        heldout_frac: Share of the samples, the last ones, that is counted apart.
        heldout_blocks: A stream of its own to count as held-out data instead, such as a
            validation split.
        num_heldout_samples: How many samples those hold, if known: the batches that are drawn for
            the locality are then spread over all of them.
        directory: Count in ``.npy`` files made there, so that the system may page them out; None
            counts in memory.

    Raises:
        ValueError: If a block does not fit the schema, the stream is not ``num_samples`` long, or
            the arguments contradict one another.
    """
    sampling = sampling or Sampling()
    if heldout_frac and heldout_blocks is not None:
        raise ValueError(
            f"heldout_frac: expected 0 with a held-out stream of its own, got {heldout_frac}."
        )
    if not 0.0 <= heldout_frac < 1.0:
        raise ValueError(f"heldout_frac: expected at least 0 and below 1, got {heldout_frac}.")
    if heldout_frac and num_samples is None:
        raise ValueError(
            f"num_samples: expected the length of the data to hold out its last {heldout_frac}, "
            f"got None. Pass num_samples."
        )
    boundary = None if num_samples is None else num_samples - int(num_samples * heldout_frac)
    allocate = _allocator(schema, directory)
    counts = allocate(TRAIN_DIRECTORY)
    heldout = allocate(HELDOUT_DIRECTORY) if heldout_frac or heldout_blocks is not None else {}
    seed = sampling.seed
    if heldout_frac and num_samples is not None and boundary is not None:
        num_heldout_samples = num_samples - boundary
    meter, heldout_meter = (
        LocalityMeter(schema, seed=seed, num_samples=size and math.ceil(size * sampling.frac))
        for size in (boundary, num_heldout_samples)
    )
    position = num_counted = num_heldout = 0
    for block, is_heldout in _label_parts(blocks, heldout_blocks, boundary, num_samples):
        check_block(block, schema, position=position)
        drawn = block
        if not sampling.is_exact:
            keep = sample_mask(position, block.num_samples, frac=sampling.frac, seed=seed)
            drawn = block.take(keep)
        for feature in schema.features:
            target = heldout if is_heldout else counts
            np.add.at(target[feature.table], drawn.rows[feature.name], 1)
        # Batches are drawn from all samples: a sample of them would look less clustered.
        (heldout_meter if is_heldout else meter).observe(block, num_counted=drawn.num_samples)
        position += block.num_samples
        num_heldout += drawn.num_samples if is_heldout else 0
        num_counted += 0 if is_heldout else drawn.num_samples
    return Profile(
        num_counted,
        num_heldout,
        position,
        sampling,
        counts,
        heldout,
        meter.localities(),
        heldout_meter.localities(),
    )


def _allocator(schema: Schema, directory: Path | None) -> Callable[[str], dict[str, Rows]]:
    def allocate(part: str) -> dict[str, Rows]:
        arrays: dict[str, Rows] = {}
        for table in schema.tables:
            if directory is None:
                arrays[table.name] = np.zeros(table.num_rows, np.int64)
                continue
            path = _counts_path(directory, part, table.name)
            path.parent.mkdir(exist_ok=True)
            mapped = np.lib.format.open_memmap(path, "w+", np.int64, (table.num_rows,))
            arrays[table.name] = mapped.view(np.ndarray)
        return arrays

    return allocate


def _counts_path(directory: Path, part: str, table: str) -> Path:
    if "/" in table or "\0" in table:
        raise ValueError(
            f"table {table!r}: expected a name that can be a file's, got one with '/' or NUL. "
            f"Rename the table in the dataset's schema."
        )
    return directory / part / f"{table}.npy"


def _label_parts(
    blocks: Iterable[Block],
    heldout_blocks: Iterable[Block] | None,
    boundary: int | None,
    num_samples: int | None,
) -> Iterator[tuple[Block, bool]]:
    """The blocks, cut where the held-out part starts, each with whether it is held out."""
    position = 0
    for block in blocks:
        num_train = block.num_samples if boundary is None else boundary - position
        position += block.num_samples
        if num_train >= block.num_samples:
            yield block, False
        elif num_train <= 0:
            yield block, True
        else:
            train, held = block.split(num_train)
            yield train, False
            yield held, True
    if num_samples is not None and position != num_samples:
        raise ValueError(
            f"blocks: expected {num_samples} samples in the stream, got {position}. "
            f"Pass the number that the dataset's manifest states."
        )
    for block in heldout_blocks or ():
        yield block, True


def write_profile(
    blocks: Iterable[Block],
    schema: Schema,
    output: Path,
    *,
    dataset_hash: str,
    num_samples: int | None = None,
    heldout_frac: float = 0.0,
    heldout_blocks: Iterable[Block] | None = None,
    num_heldout_samples: int | None = None,
    sampling: Sampling | None = None,
) -> tuple[Profile, Artifact]:
    """Count into the files of a new profile artifact and commit it; see ``count_rows``.

    Raises:
        ValueError: As ``count_rows``; nothing is left behind.
    """
    with scratch_directory(output, kind=KIND) as scratch:
        profile = count_rows(
            blocks,
            schema,
            num_samples=num_samples,
            heldout_frac=heldout_frac,
            heldout_blocks=heldout_blocks,
            num_heldout_samples=num_heldout_samples,
            sampling=sampling,
            directory=scratch,
        )
        commit_artifact(
            scratch,
            output,
            kind=KIND,
            content=summarize_profile(profile),
            made_from={"dataset": dataset_hash},
        )
    return read_profile(output)


def summarize_profile(profile: Profile) -> dict[str, Any]:
    """The content of the manifest, as the module's docstring lists it."""
    histograms = profile.build_histograms()
    together = merge_histograms(histograms.values())
    sampling = profile.sampling
    confidence = None if sampling.is_exact else sampling.confidence
    return {
        "num_samples": profile.num_samples,
        "num_heldout_samples": profile.num_heldout_samples,
        "num_total_samples": profile.num_total_samples,
        "sampling": dict(vars(sampling)),
        "tables": {name: _summarize_table(histogram) for name, histogram in histograms.items()},
        "coverage": coverage_curve(together),
        "landmarks": coverage_landmarks(together, confidence=confidence),
        "locality": {
            "train": localities_to_json(profile.locality),
            "heldout": localities_to_json(profile.heldout_locality),
        },
    }


def _summarize_table(histogram: CountHistogram) -> dict[str, Any]:
    num_heldout = histogram.num_heldout_lookups
    return {
        "num_rows": histogram.total_rows,
        "num_lookups": histogram.num_lookups,
        "num_distinct": histogram.num_distinct,
        "num_heldout_lookups": num_heldout,
        # Held-out lookups of rows that the train part never saw: what no profile could make hot.
        "heldout_unseen_frac": histogram.heldout_unseen / num_heldout if num_heldout else None,
        "coverage": coverage_curve(histogram),
    }


def read_profile(path: Path, *, verify: Verify = "full") -> tuple[Profile, Artifact]:
    """Open a profile; its counts are memory-mapped, read-only.

    Args:
        verify: See ``hotrec.artifact.read_artifact``.

    Raises:
        ArtifactError: If it is missing, incomplete or altered.
    """
    artifact = read_artifact(path, kind=KIND, verify=verify)
    with artifact.parsing():
        content = artifact.content
        parts = [TRAIN_DIRECTORY]
        if (path / HELDOUT_DIRECTORY).exists():
            parts.append(HELDOUT_DIRECTORY)
        arrays: dict[str, dict[str, Rows]] = {HELDOUT_DIRECTORY: {}}
        for part in parts:
            arrays[part] = {
                table: np.load(_counts_path(path, part, table), mmap_mode="r")
                for table in content["tables"]
            }
        locality = content.get("locality", {})  # profiles of older versions lack it
        profile = Profile(
            num_samples=content["num_samples"],
            num_heldout_samples=content["num_heldout_samples"],
            num_total_samples=content["num_total_samples"],
            sampling=Sampling(**content["sampling"]),
            counts=arrays[TRAIN_DIRECTORY],
            heldout=arrays[HELDOUT_DIRECTORY],
            locality=localities_from_json(locality.get("train")),
            heldout_locality=localities_from_json(locality.get("heldout")),
        )
    return profile, artifact
