"""Profile: the lookups of each row of each table, in the data and in its held-out last part.

One streaming pass over blocks. The arrays of counts may be in memory or in the files of the
artifact, so that tables of any size fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from hotrec.artifact import Artifact, Verify, commit_artifact, read_artifact, scratch_directory
from hotrec.cost_model.blocks import Block, check_block
from hotrec.cost_model.costs import Floats
from hotrec.cost_model.histogram import CountHistogram, build_histogram, merge_histograms
from hotrec.cost_model.locality import (
    LocalityMeter,
    TableLocality,
    localities_from_json,
    localities_to_json,
)
from hotrec.cost_model.reuse import LogReuse, TableReuse, reuses_from_json, reuses_to_json
from hotrec.types import Rows, Schema

KIND = "profile"
TRAIN_DIRECTORY, HELDOUT_DIRECTORY = "counts", "heldout"
# The fact of a table in the manifest that is the sum of the counts of a part.
LOOKUPS = {TRAIN_DIRECTORY: "num_lookups", HELDOUT_DIRECTORY: "num_heldout_lookups"}
NUM_CURVE_POINTS = 65
# Points of the coverage curve in tables and messages.
LANDMARK_FRACS = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class Profile:
    """Access counts per row.

    Args:
        num_samples: Train samples that were counted.
        num_heldout_samples: Held-out samples that were counted.
        counts: int64 (R,) per table, train accesses; read-only memory maps when read from disk.
        heldout: int64 (R,) per table, held-out accesses; empty when nothing was held out.
        locality: Locality of train batches by table; empty if not measured.
        heldout_locality: The same for held-out batches.
        batch_size: Samples of a batch, if a loader's batches were counted.
        reuse: Rows that batches share with those before, by table; empty unless the batches of a
            loader or the chunks of a log were counted.
        shuffled_reuse: The same of batches of shuffled chunks; empty unless chunks were counted.
    """

    num_samples: int
    num_heldout_samples: int
    counts: Mapping[str, Rows]
    heldout: Mapping[str, Rows] = field(default_factory=dict)
    locality: Mapping[str, TableLocality] = field(default_factory=dict)
    heldout_locality: Mapping[str, TableLocality] = field(default_factory=dict)
    batch_size: int | None = None
    reuse: Mapping[str, TableReuse] = field(default_factory=dict)
    shuffled_reuse: Mapping[str, TableReuse] = field(default_factory=dict)

    @property
    def num_rows(self) -> dict[str, int]:
        return {table: int(counts.size) for table, counts in self.counts.items()}

    def build_histograms(self) -> dict[str, CountHistogram]:
        """The histogram of each table, with its held-out lookups."""
        return {
            table: build_histogram(counts, self.heldout.get(table))
            for table, counts in self.counts.items()
        }

    def save(self, path: Path) -> Artifact:
        """Write the profile for ``read_profile``, on one rank; an earlier profile is replaced.

        Raises:
            ArtifactError: If the path is something else.
        """
        with scratch_directory(path, kind=KIND) as scratch:
            for part, arrays in ((TRAIN_DIRECTORY, self.counts), (HELDOUT_DIRECTORY, self.heldout)):
                for table, counts in arrays.items():
                    file = scratch / _counts_name(part, table)
                    file.parent.mkdir(exist_ok=True)
                    np.save(file, counts)
            return commit_artifact(scratch, path, kind=KIND, content=summarize_profile(self))


# The samples of a part, their counts and their locality.
_Part = tuple[int, dict[str, Rows], dict[str, TableLocality]]


class CountOptions(TypedDict, total=False):
    """What ``count_rows`` counts besides the blocks.

    Args:
        num_samples: Number of samples in the blocks, if known: the batches drawn for the locality
            are then spread over all of them.
        heldout_blocks: A separate stream to count as held-out data, such as a validation split.
        num_heldout_samples: Number of samples in that stream, if known.
        reuse: Counts the rows that batches share, if the blocks are the chunks of a log.
    """

    num_samples: int | None
    heldout_blocks: Iterable[Block] | None
    num_heldout_samples: int | None
    reuse: LogReuse | None


def count_rows(
    blocks: Iterable[Block],
    schema: Schema,
    *,
    directory: Path | None = None,
    **options: Unpack[CountOptions],
) -> Profile:
    """Count the accesses of every row in one pass; 8 bytes per row and part for data of any length.

    Args:
        blocks: The samples, oldest first.
        directory: Count in ``.npy`` files created there, which the system can page out; None counts
            in memory.

    Raises:
        ValueError: If a block does not fit the schema, or the stream is not ``num_samples`` long.
    """
    reuse, heldout_blocks = options.get("reuse"), options.get("heldout_blocks")
    num_samples, num_heldout = options.get("num_samples"), options.get("num_heldout_samples")
    position = 0

    def count(part: str, stream: Iterable[Block], size: int | None) -> _Part:
        nonlocal position
        counts, start = allocate_counts(schema, directory, part), position
        meter = LocalityMeter(schema, num_samples=size)
        for block in stream:
            check_block(block, schema, position=position)
            for feature in schema.features:
                # In place: 70 to 800 M ids/s; np.bincount would add an array of the table's size.
                np.add.at(counts[feature.table], block.rows[feature.name], 1)
            meter.observe(block)
            if reuse is not None and part == TRAIN_DIRECTORY:
                reuse.observe(block)
            position += block.num_samples
        return position - start, counts, meter.localities()

    num_counted, counts, locality = count(TRAIN_DIRECTORY, blocks, num_samples)
    if num_samples is not None and num_counted != num_samples:
        raise ValueError(
            f"blocks: expected {num_samples} samples in the stream, got {num_counted}. "
            f"Pass the number that the dataset's manifest states."
        )
    held: _Part = 0, {}, {}
    if heldout_blocks is not None:
        held = count(HELDOUT_DIRECTORY, heldout_blocks, num_heldout)
    in_order, shuffled = ({}, {}) if reuse is None else reuse.reuses()
    return Profile(
        num_samples=num_counted,
        num_heldout_samples=held[0],
        counts=counts,
        heldout=held[1],
        locality=locality,
        heldout_locality=held[2],
        reuse=in_order,
        shuffled_reuse=shuffled,
    )


def allocate_counts(schema: Schema, directory: Path | None, part: str) -> dict[str, Rows]:
    """Counts of 0 for every row, in memory or in files of the artifact's directory ``part``."""
    if directory is None:
        return {table.name: np.zeros(table.num_rows, np.int64) for table in schema.tables}
    arrays: dict[str, Rows] = {}
    for table in schema.tables:
        path = directory / _counts_name(part, table.name)
        path.parent.mkdir(exist_ok=True)
        mapped = np.lib.format.open_memmap(path, "w+", np.int64, (table.num_rows,))
        arrays[table.name] = mapped.view(np.ndarray)
    return arrays


def _counts_name(part: str, table: str) -> str:
    if "/" in table or "\0" in table:
        raise ValueError(
            f"table {table!r}: expected a valid file name, got one with '/' or NUL. Rename the "
            "table in the dataset's schema."
        )
    return f"{part}/{table}.npy"


def write_profile(
    blocks: Iterable[Block],
    schema: Schema,
    output: Path,
    *,
    dataset_hash: str,
    **options: Unpack[CountOptions],
) -> tuple[Profile, Artifact]:
    """Count into the files of a new profile artifact and commit it; see ``count_rows``.

    Raises:
        ValueError: As ``count_rows``; no files are left on failure.
    """
    with scratch_directory(output, kind=KIND) as scratch:
        content = summarize_profile(count_rows(blocks, schema, directory=scratch, **options))
        made_from = {"dataset": dataset_hash}
        commit_artifact(scratch, output, kind=KIND, content=content, made_from=made_from)
    return read_profile(output)


def summarize_profile(profile: Profile) -> dict[str, Any]:
    """The content of the manifest, which ``hotrec.report`` reads.

    A coverage is the three lists of ``coverage_curve``. ``landmarks`` are over the rows of all
    tables together.
    """
    histograms = profile.build_histograms()
    together = merge_histograms(histograms.values())
    of_batches: dict[str, Any] = {
        key: reuses_to_json(of_order)
        for key, of_order in (("reuse", profile.reuse), ("shuffled_reuse", profile.shuffled_reuse))
        if of_order
    }
    if profile.batch_size is not None:
        of_batches["batch_size"] = profile.batch_size
    return of_batches | {
        "num_samples": profile.num_samples,
        "num_heldout_samples": profile.num_heldout_samples,
        "tables": {name: _summarize_table(histogram) for name, histogram in histograms.items()},
        "coverage": coverage_curve(together),
        "landmarks": landmarks(together),
        "locality": {
            "train": localities_to_json(profile.locality),
            "heldout": localities_to_json(profile.heldout_locality),
        },
    }


def landmarks(histogram: CountHistogram) -> list[dict[str, Any]]:
    """The shares of lookups that the most accessed rows serve, at round fractions of the rows."""
    train, heldout = cover_lookups(histogram, np.array(LANDMARK_FRACS))
    return [
        {
            "rows_frac": frac,
            "train": float(train[at]),
            "heldout": None if heldout is None else float(heldout[at]),
        }
        for at, frac in enumerate(LANDMARK_FRACS)
    ]


def _summarize_table(histogram: CountHistogram) -> dict[str, Any]:
    num_heldout = histogram.num_heldout_lookups
    return {
        "num_rows": histogram.total_rows,
        "num_lookups": histogram.num_lookups,
        "num_distinct": histogram.num_distinct,
        "num_heldout_lookups": num_heldout,
        # Held-out lookups of rows that the train part never saw, which no profile could make hot.
        "heldout_unseen_frac": histogram.heldout_unseen / num_heldout if num_heldout else None,
        "coverage": coverage_curve(histogram),
    }


def cover_lookups(histogram: CountHistogram, fracs: Floats) -> tuple[Floats, Floats | None]:
    """The share of lookups that the most accessed rows serve.

    Rows are ranked by their train counts for both shares, so the held-out one shows drift. Inside a
    group of equal counts the held-out share is interpolated, which is the mean over all orders of
    the ties.

    Args:
        fracs: float64 (P,), fractions of all rows.

    Returns:
        float64 (P,) for train, and for the held-out data or None without any. Zeros if there are no
        lookups.
    """
    ends = np.concatenate([[0], np.cumsum(histogram.num_rows), [histogram.total_rows]])
    position = fracs * histogram.total_rows
    train = np.concatenate([[0], np.cumsum(histogram.values * histogram.num_rows)])
    train_at = np.interp(position, ends, np.append(train, train[-1]))
    train_share = train_at / max(int(train[-1]), 1)
    total = histogram.num_heldout_lookups
    if total == 0:
        return train_share, None
    heldout = np.concatenate([[0], np.cumsum(histogram.heldout), [total]])
    return train_share, np.interp(position, ends, heldout) / total


def coverage_curve(histogram: CountHistogram) -> dict[str, Any]:
    """The coverage curve as plain lists: ``rows_frac``, ``train``, ``heldout`` (list or None).

    The points are spaced by ratio, from one row to all of them, with 0 in front.
    """
    total = max(histogram.total_rows, 1)
    fracs = np.geomspace(1 / total, 1.0, NUM_CURVE_POINTS)
    fracs = np.union1d(np.concatenate([[0.0], fracs]), [f for f in LANDMARK_FRACS if f > 1 / total])
    fracs[-1] = 1.0
    train, heldout = cover_lookups(histogram, fracs)
    return {
        "rows_frac": fracs.tolist(),
        "train": train.tolist(),
        "heldout": None if heldout is None else heldout.tolist(),
    }


def read_profile(path: Path) -> tuple[Profile, Artifact]:
    """Open a profile; its counts are memory-mapped, read-only.

    Raises:
        ArtifactError: If it is missing, incomplete or altered.
    """
    artifact = read_artifact(path, kind=KIND, verify=Verify.full)
    with artifact.parsing():
        content = artifact.content

        def load_file(name: str) -> Rows:
            with artifact.parsing(name):
                rows: Rows = np.load(artifact.file(name), mmap_mode="r")
                return rows

        def load(part: str) -> dict[str, Rows]:
            if not (path / part).exists():
                return {}
            counts = {table: load_file(_counts_name(part, table)) for table in content["tables"]}
            names = {name for name in artifact.files if name.startswith(f"{part}/")}
            if names != {_counts_name(part, table) for table in counts}:
                raise ValueError(f"tables {sorted(counts)} and files {sorted(names)}")
            for table, rows in counts.items():
                facts = content["tables"][table]
                if rows.shape != (facts["num_rows"],):
                    raise ValueError(f"{part}/{table}.npy of shape {rows.shape}")
                if int(rows.sum()) != facts[LOOKUPS[part]]:
                    raise ValueError(
                        f"{LOOKUPS[part]} {facts[LOOKUPS[part]]} of table {table}, whose counts "
                        f"add up to {rows.sum()}"
                    )
            return counts

        for name in ("num_samples", "num_heldout_samples"):
            if not isinstance(content[name], int) or content[name] < 0:
                raise ValueError(f"{name} {content[name]!r}")
        profile = Profile(
            num_samples=content["num_samples"],
            num_heldout_samples=content["num_heldout_samples"],
            counts=load(TRAIN_DIRECTORY),
            heldout=load(HELDOUT_DIRECTORY),
            locality=localities_from_json(content["locality"]["train"]),
            heldout_locality=localities_from_json(content["locality"]["heldout"]),
            batch_size=content.get("batch_size"),
            reuse=reuses_from_json(content.get("reuse", {})),
            shuffled_reuse=reuses_from_json(content.get("shuffled_reuse", {})),
        )
    return profile, artifact
