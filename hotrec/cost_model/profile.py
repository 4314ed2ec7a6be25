"""Profile: the lookups of each row of each table, in the data and in its held-out last part.

One streaming pass over blocks, exact or on a seeded sample of the samples. The arrays of counts may
be in memory or in the files of the artifact, so that tables of any size fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, TypedDict, Unpack

import numpy as np

from hotrec.artifact import Artifact, Verify, commit_artifact, read_artifact, scratch_directory
from hotrec.cost_model.blocks import Block, check_block, sample_mask
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
CONFIDENCE = 0.95  # of the intervals of a sampled profile


@dataclass(frozen=True)
class Sampling:
    """Which samples are counted, and how small counts are treated.

    Args:
        frac: Share of the samples, drawn without replacement; 1 counts all of them.
        seed: Seed of the draw.
        min_count: Minimum sampled accesses of a hot row; below it, a row's rank is noise. The
            counts are unchanged; policies use this number.
        half_life: Training samples after which a sample is drawn half as often as the last one;
            None to draw all alike.
    """

    frac: float = 1.0
    seed: int = 0
    min_count: int = 1
    half_life: float | None = None

    @property
    def is_exact(self) -> bool:
        return self.frac == 1.0 and self.half_life is None

    def fracs(self, ages: Rows) -> Floats:
        """The probability float64 (n,) of samples at these distances from the end, int64 (n,)."""
        return self.frac * np.exp2(-ages / (self.half_life or math.inf))

    def num_drawn(self, num_samples: int) -> int:
        """About how many of the last ``num_samples`` samples are drawn."""
        if self.half_life is None:
            return math.ceil(num_samples * self.frac)
        of_all = (
            self.half_life / math.log(2) * -math.expm1(-num_samples * math.log(2) / self.half_life)
        )
        return math.ceil(self.frac * min(num_samples, of_all))


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
        batch_size: Samples of a batch, if a loader's batches were counted.
        reuse: Rows that batches share with those before, by table; empty unless the batches of a
            loader or the chunks of a log were counted.
        shuffled_reuse: The same of batches of shuffled chunks; empty unless chunks were counted.
    """

    num_samples: int
    num_heldout_samples: int
    num_total_samples: int
    sampling: Sampling
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


class CountOptions(TypedDict, total=False):
    """Which samples ``count_rows`` counts, and which of them separately.

    Args:
        num_samples: Number of samples in the blocks; needed to hold out their last part.
        heldout_frac: Share of the samples, at the end, that is counted separately.
        heldout_blocks: A separate stream to count as held-out data instead, such as a validation
            split.
        num_heldout_samples: Number of samples in that stream, if known: the batches drawn for the
            locality are then spread over all of it.
        sampling: Which samples are counted; by default all.
        reuse: Counts the rows that batches share, if the blocks are the chunks of a log.
    """

    num_samples: int | None
    heldout_frac: float
    heldout_blocks: Iterable[Block] | None
    num_heldout_samples: int | None
    sampling: Sampling
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
        ValueError: If a block does not fit the schema, the stream is not ``num_samples`` long, or
            the arguments contradict one another.
    """
    sampling = options.get("sampling", Sampling())
    num_samples, heldout_blocks = options.get("num_samples"), options.get("heldout_blocks")
    num_heldout_samples = options.get("num_heldout_samples")
    heldout_frac, reuse = options.get("heldout_frac", 0.0), options.get("reuse")
    if heldout_frac and not 0.0 < heldout_frac < (1.0 if heldout_blocks is None else 0.0):
        raise ValueError(
            "heldout_frac: expected at least 0 and below 1, and 0 with a separate held-out "
            f"stream, got {heldout_frac}."
        )
    if sampling.half_life is not None and num_samples is None:
        raise ValueError(
            "num_samples: expected the length of the data to count its last part more than the "
            "first, got None. Pass num_samples."
        )
    if heldout_frac and num_samples is None:
        raise ValueError(
            f"num_samples: expected the length of the data to hold out its last {heldout_frac}, "
            f"got None. Pass num_samples."
        )
    boundary = num_samples
    if num_samples is not None and heldout_frac:
        num_heldout_samples = int(num_samples * heldout_frac)
        boundary = num_samples - num_heldout_samples
    has_heldout = heldout_frac > 0 or heldout_blocks is not None
    parts = [
        (
            allocate_counts(schema, directory, part)
            if part == TRAIN_DIRECTORY or has_heldout
            else {},
            LocalityMeter(schema, seed=sampling.seed, num_samples=size and of_part.num_drawn(size)),
        )
        for part, size, of_part in (
            (TRAIN_DIRECTORY, boundary, sampling),
            (HELDOUT_DIRECTORY, num_heldout_samples, replace(sampling, half_life=None)),
        )
    ]
    position, num_counted = 0, [0, 0]  # train, held out
    for block, is_heldout in _label_parts(blocks, heldout_blocks, boundary, num_samples):
        check_block(block, schema, position=position)
        drawn = block
        if not sampling.is_exact:
            fracs: float | Floats = sampling.frac
            if boundary is not None and not is_heldout:
                fracs = sampling.fracs(boundary - 1 - position - np.arange(block.num_samples))
            drawn = block.take(
                sample_mask(position, block.num_samples, frac=fracs, seed=sampling.seed)
            )
        counts, meter = parts[is_heldout]
        for feature in schema.features:
            # In place: 70 to 800 M ids/s; np.bincount would add an array of the table's size.
            np.add.at(counts[feature.table], drawn.rows[feature.name], 1)
        # Batches are drawn from all samples: batches of sampled samples would look less clustered.
        meter.observe(block, num_counted=drawn.num_samples)
        if reuse is not None and not is_heldout:
            reuse.observe(block)
        position += block.num_samples
        num_counted[is_heldout] += drawn.num_samples
    (train, meter), (heldout, heldout_meter) = parts
    in_order, shuffled = ({}, {}) if reuse is None else reuse.reuses()
    return Profile(
        num_samples=num_counted[False],
        num_heldout_samples=num_counted[True],
        num_total_samples=position,
        sampling=sampling,
        counts=train,
        heldout=heldout,
        locality=meter.localities(),
        heldout_locality=heldout_meter.localities(),
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


def _label_parts(
    blocks: Iterable[Block],
    heldout_blocks: Iterable[Block] | None,
    boundary: int | None,
    num_samples: int | None,
) -> Iterator[tuple[Block, bool]]:
    """The blocks, split at the start of the held-out part, each with whether it is held out."""
    position = 0
    for block in blocks:
        num_train = block.num_samples if boundary is None else boundary - position
        position += block.num_samples
        if 0 < num_train < block.num_samples:
            train, held = block.split(num_train)
            yield train, False
            yield held, True
        else:
            yield block, num_train <= 0 < block.num_samples
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
    tables together, and carry intervals if the profile is sampled.
    """
    histograms = profile.build_histograms()
    together = merge_histograms(histograms.values())
    sampling = profile.sampling
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
        "num_total_samples": profile.num_total_samples,
        "sampling": dict(vars(sampling)),
        "tables": {name: _summarize_table(histogram) for name, histogram in histograms.items()},
        "coverage": coverage_curve(together),
        "landmarks": landmarks(together, sampling),
        "locality": {
            "train": localities_to_json(profile.locality),
            "heldout": localities_to_json(profile.heldout_locality),
        },
    }


def landmarks(histogram: CountHistogram, sampling: Sampling) -> list[dict[str, Any]]:
    """The shares of lookups that the most accessed rows serve, at round fractions of the rows."""
    confidence = None if sampling.is_exact else CONFIDENCE
    return [_landmark(histogram, frac, confidence) for frac in LANDMARK_FRACS]


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


def _landmark(histogram: CountHistogram, frac: float, confidence: float | None) -> dict[str, Any]:
    """Coverage at a fraction of the rows, with Wilson intervals for a sampled profile.

    The train share of a sample is biased high, since the same sample ranked the rows.
    """
    train, heldout = cover_lookups(histogram, np.array([frac]))
    shares = {"train": (float(train[0]), histogram.num_lookups)}
    if heldout is not None:
        shares["heldout"] = (float(heldout[0]), histogram.num_heldout_lookups)
    point: dict[str, Any] = {"rows_frac": frac, "train": None, "heldout": None}
    for part, (share, num_trials) in shares.items():
        point[part] = share
        if confidence is not None:
            point[f"{part}_interval"] = wilson_interval(share, num_trials, confidence=confidence)
    return point


def wilson_interval(share: float, num_trials: int, *, confidence: float) -> list[float]:
    """Wilson's score interval of a proportion (Wilson, JASA 1927); 0..1 without trials.

    The trials are assumed independent. Lookups of a multi-hot bag are not quite independent, so
    their interval is somewhat too narrow.
    """
    if num_trials == 0:
        return [0.0, 1.0]
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    spread = z * z / num_trials
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * share * (1 - share) + spread * spread / 4) / (1 + spread)
    # An interval must contain its own estimate, up to rounding.
    return [min(max(centre - half, 0.0), share), max(min(centre + half, 1.0), share)]


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

        for name in ("num_samples", "num_heldout_samples", "num_total_samples"):
            if not isinstance(content[name], int) or content[name] < 0:
                raise ValueError(f"{name} {content[name]!r}")
        if content["num_samples"] + content["num_heldout_samples"] > content["num_total_samples"]:
            raise ValueError(f"num_total_samples {content['num_total_samples']}")
        locality = content.get("locality", {})  # profiles of older versions lack it
        profile = Profile(
            num_samples=content["num_samples"],
            num_heldout_samples=content["num_heldout_samples"],
            num_total_samples=content["num_total_samples"],
            sampling=Sampling(**content["sampling"]),
            counts=load(TRAIN_DIRECTORY),
            heldout=load(HELDOUT_DIRECTORY),
            locality=localities_from_json(locality.get("train")),
            heldout_locality=localities_from_json(locality.get("heldout")),
            batch_size=content.get("batch_size"),
            reuse=reuses_from_json(content.get("reuse", {})),
            shuffled_reuse=reuses_from_json(content.get("shuffled_reuse", {})),
        )
    return profile, artifact
