"""Detects samples that a dataset already has, so that none is appended twice.

A sample is hashed by its parsed values, independent of the format and compression of its file. For
each file the sums of these hashes are recorded, which two files share only if they have the same
samples in any order, and the smallest hashes: these are a random subset of the samples, the same
one in every file, and show how many of a file's samples other files have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hotrec.artifact import Artifact
from hotrec.config.data import ColumnKind, ColumnSpec
from hotrec.data.chunks import write_arrow
from hotrec.data.columns import Float64s, Lists, RawBlock, Texts
from hotrec.data.encode import sources_of
from hotrec.data.hashing import Hashes, hash_text, mix
from hotrec.types import Rows

SAMPLES_DIR = "samples"
_MISSING, _STEP, _SECOND = (np.uint64(n) for n in (0x5D1, 0x9E3779B97F4A7C15, 0xA5A5A5A5A5A5A5A5))
# Number of smallest hashes kept for a file, and for all files that are prepared together.
_MOST_OF_FILE, _LEAST_OF_FILE, _OF_ALL = 1 << 16, 64, 1 << 17
# With fewer samples that could have been seen twice there is no conclusion.
_FEWEST_SEEN = 32
# Shares of repeated samples that are reported, and refused; and by what factor they must exceed the
# share of repeats within the new files, which occur by chance if few columns distinguish samples.
SAID_FRAC, REFUSED_FRAC, BY_CHANCE = 0.01, 0.1, 10


def sample_hashes(
    block: RawBlock,
    columns: Mapping[str, ColumnSpec],
    features: Mapping[str, Texts | Lists],
    times: str | None,
) -> Hashes:
    """The hash of each sample, uint64 (n,).

    Args:
        block: The samples.
        columns: Their columns.
        features: The ids of the categorical columns, by name.
        times: The column of times of the split, if there is one.
    """
    state = np.zeros(len(block), np.uint64)
    for name, ids in features.items():
        state += _factor(name) * _hashes_of(ids)
    for kind in (ColumnKind.label, ColumnKind.weight, ColumnKind.dense):
        for name, source in sources_of(columns, kind).items():
            # Normalised, because formats store them differently; a vector's numbers one by one.
            numbers = np.atleast_2d(block.numbers[source].astype(np.float32).T)
            for place, values in enumerate(numbers):
                state += _factor(f"{name}/{place}") * _number_hashes(values)
    if times is not None:
        state += _factor(f"/{times}") * _number_hashes(block.numbers[times])
    return mix(state)


def _factor(name: str) -> np.uint64:
    return np.uint64(hash_text(pa.array([name]))[0] | np.uint64(1))


def _number_hashes(numbers: npt.NDArray[np.float32] | Float64s) -> Hashes:
    whole = np.where(np.isnan(numbers), np.nan, numbers + 0.0).astype(np.float64)
    return mix(whole.view(np.uint64))


def _hashes_of(ids: Texts | Lists) -> Hashes:
    if isinstance(ids, Texts):
        hashes = ids.hashes
        if ids.values.null_count:
            is_null = ids.values.is_null().to_numpy(zero_copy_only=False)
            hashes = np.where(is_null, _MISSING, hashes)
    else:
        lengths = np.diff(ids.offsets)
        places = np.arange(ids.offsets[-1]) - np.repeat(ids.offsets[:-1], lengths)
        items = mix(_hashes_of(ids.items) + places.astype(np.uint64) * _STEP)
        ends = np.append(np.zeros(1, np.uint64), np.cumsum(items, dtype=np.uint64))[ids.offsets]
        hashes = np.where(lengths == 0, _MISSING, mix(np.diff(ends) + lengths.astype(np.uint64)))
    found: Hashes = np.append(hashes, _MISSING)[ids.codes]
    return found


@dataclass(frozen=True)
class Samples:
    """Samples in any order, some perhaps more than once; instances add up.

    Args:
        num: Their number.
        sums: Two sums of their hashes, modulo 2**64.
        smallest: The smallest of their hashes, each once, uint64 (k,), increasing.
        counts: How many samples have these hashes, int64 (k,).
        most: The maximum of k.
    """

    num: int = 0
    sums: tuple[int, int] = (0, 0)
    smallest: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    counts: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    most: int = _MOST_OF_FILE

    @staticmethod
    def none(num_files: int) -> Samples:
        """Empty samples for one of ``num_files`` files that are prepared together."""
        most = min(max(_OF_ALL // num_files, _LEAST_OF_FILE), _MOST_OF_FILE)
        return Samples(most=most)

    def added(self, hashes: Hashes) -> Samples:
        """These and others, by their hashes."""
        sums = (int(hashes.sum()), int(mix(hashes ^ _SECOND).sum()))
        smallest, counts = np.unique(hashes[hashes <= self.limit], return_counts=True)
        return self + Samples(hashes.size, sums, smallest, counts.astype(np.int64))

    def __add__(self, other: Samples) -> Samples:
        most = min(self.most, other.most)
        if other.num == 0 and most == self.most:
            return self
        both = np.concatenate([self.smallest[:most], other.smallest[:most]])
        smallest, places = np.unique(both, return_inverse=True)
        counts = np.zeros(smallest.size, np.int64)
        np.add.at(counts, places, np.concatenate([self.counts[:most], other.counts[:most]]))
        sums = [(a + b) % 2**64 for a, b in zip(self.sums, other.sums, strict=True)]
        return Samples(
            self.num + other.num, (sums[0], sums[1]), smallest[:most], counts[:most], most
        )

    @property
    def limit(self) -> np.uint64:
        """The largest hash that is kept, or would be."""
        is_whole = self.smallest.size < max(self.most, 1)
        return np.uint64(2**64 - 1) if is_whole else np.uint64(self.smallest[-1])

    @property
    def key(self) -> tuple[int, int, int]:
        """A value that two instances share only if they have the same samples."""
        return (self.num, *self.sums)

    @property
    def repeated_frac(self) -> float:
        """Estimated number of samples that repeat another of them."""
        return 1 - self.smallest.size / max(int(self.counts.sum()), 1)


@dataclass(frozen=True)
class FileSamples:
    """The samples of a file.

    Args:
        name: The name of the file.
        whole: All samples.
        train: Those that its generation took into the training split.
        new: Those that its generation took into any split; not recorded.
    """

    name: str
    whole: Samples
    train: Samples
    new: Samples = field(default_factory=Samples)


def write_samples(scratch: Path, generation: int, files: Sequence[FileSamples]) -> None:
    """Record the files of a generation in ``samples/g<generation>.arrow``."""
    columns: dict[str, pa.Array] = {"file": pa.array([file.name for file in files])}
    for part in ("whole", "train"):
        found = [getattr(file, part) for file in files]
        columns[f"{part}_num"] = pa.array([of.num for of in found], pa.int64())
        for index in range(2):
            values = pa.array([of.sums[index] for of in found], pa.uint64())
            columns[f"{part}_sum{index}"] = values
    smallest = [file.train.smallest for file in files]
    columns["train_smallest"] = pa.array(smallest, pa.list_(pa.uint64()))
    columns["train_most"] = pa.array([file.train.most for file in files], pa.int64())
    (scratch / SAMPLES_DIR).mkdir(exist_ok=True)
    write_arrow(scratch / SAMPLES_DIR / f"g{generation:04d}.arrow", pa.table(columns))


def samples_files(artifact: Artifact) -> list[str]:
    """The records of a dataset's generations."""
    return sorted(name for name in artifact.files if name.startswith(f"{SAMPLES_DIR}/"))


def read_samples(artifact: Artifact) -> list[FileSamples]:
    """The recorded files of all generations, in their order."""
    found = []
    for name in samples_files(artifact):
        with artifact.parsing():
            table = pa.ipc.open_file(pa.memory_map(str(artifact.path / name))).read_all()
            smallest = table["train_smallest"]
            for index, row in enumerate(table.drop_columns("train_smallest").to_pylist()):
                whole, train = (
                    (row[f"{part}_num"], (row[f"{part}_sum0"], row[f"{part}_sum1"]))
                    for part in ("whole", "train")
                )
                hashes = smallest[index].values.to_numpy()
                kept = Samples(*train, smallest=hashes, most=row["train_most"])
                found.append(FileSamples(row["file"], Samples(*whole), kept))
    return found


def has_run(files: Sequence[FileSamples], name: str, samples: Samples) -> bool:
    """Whether samples are exactly those of consecutive files in training, or of files so named."""
    named = sum((file.train for file in files if file.name == name), start=Samples(most=0))
    if samples.key == named.key:
        return True
    of_files = np.array([(0, 0, 0), *(file.train.key for file in files)], np.uint64)
    keys = np.cumsum(of_files, axis=0, dtype=np.uint64)
    begins = {tuple(key) for key in keys.tolist()}
    needed = keys - np.array(samples.key, np.uint64)
    return any(tuple(key) in begins for key in needed.tolist())


def shared_fracs(new: Samples, files: Sequence[FileSamples]) -> Float64s:
    """Estimated share of the samples among the training samples of each file, 0 to 1 (n,)."""
    sizes = [file.train.smallest.size for file in files]
    hashes = np.concatenate([np.empty(0, np.uint64), *(file.train.smallest for file in files)])
    of_file = np.repeat(np.arange(len(files)), sizes)
    is_new = np.isin(hashes, new.smallest)
    # Only hashes that both sides would have kept can be seen twice.
    is_new &= hashes <= new.limit
    num_shared = np.bincount(of_file[is_new], minlength=len(files))
    limits = np.array([min(file.train.limit, new.limit) for file in files], np.uint64)
    num_seen = np.searchsorted(new.smallest, limits, "right")
    return np.where(num_seen >= _FEWEST_SEEN, num_shared / np.maximum(num_seen, 1), 0.0)


def check_repeats(files: Sequence[FileSamples], key: str) -> list[str]:
    """Check that files that are prepared together have no samples in common.

    Args:
        files: The files.
        key: The configuration key that lists them.

    Returns:
        Messages about files with a few in common.

    Raises:
        ValueError: If one has the samples of another, or more of them than by chance.
    """
    first: dict[tuple[int, int, int], FileSamples] = {}
    for file in files:
        if file.whole.num and (other := first.setdefault(file.whole.key, file)) is not file:
            raise _repeated(key, file.whole.num, 1.0, file.name, other.name)
    # Up to here every file would have kept a hash.
    limit = min((file.whole.limit for file in files), default=np.uint64(0))
    seen = [file.whole.smallest[file.whole.smallest <= limit] for file in files]
    hashes = np.concatenate([np.empty(0, np.uint64), *seen])
    of_file = np.repeat(np.arange(len(files)), [part.size for part in seen])
    order = np.lexsort((of_file, hashes))
    hashes, of_file = hashes[order], of_file[order]
    same = np.flatnonzero(hashes[1:] == hashes[:-1])
    is_shared = np.zeros(hashes.size, bool)
    is_shared[same] = is_shared[same + 1] = True
    num_shared = np.bincount(of_file[is_shared], minlength=len(files))
    # For each file that shares samples, one of those it shares them with.
    others = dict(zip(of_file[same].tolist(), of_file[same + 1].tolist(), strict=True))
    others |= dict(zip(of_file[same + 1].tolist(), of_file[same].tolist(), strict=True))
    said = []
    for index, other in sorted(others.items()):
        if seen[index].size >= _FEWEST_SEEN:
            file, share = files[index], float(num_shared[index] / seen[index].size)
            said += _check_share(share, file.whole, key, file.name, files[other].name)
    return said


def check_not_among(
    files: Sequence[FileSamples], known: Sequence[FileSamples], where: Path
) -> list[str]:
    """Check that files to append have no samples of a training split.

    Args:
        files: The files to append.
        known: The files of the dataset.
        where: The dataset.

    Returns:
        Messages about files with a few.

    Raises:
        ValueError: If one has only known samples, or more of them than by chance.
    """
    trains = {file.train.key: file.name for file in known if file.train.num}
    wholes = {file.whole.key: file.name for file in known if file.train.num}
    for file in files:
        is_old = file.whole.num > 0 and file.new.num == 0
        other = trains.get(file.train.key, wholes.get(file.whole.key))
        if is_old or (other is not None and file.new.num == file.whole.num):
            at = f"{where}, of {other or file.name}"
            raise _repeated("append", file.whole.num, 1.0, file.name, at)
    new = sum((file.new for file in files), start=Samples())
    shares = shared_fracs(new, known)
    if not shares.any():
        return []
    at = f"{where}, of {known[int(shares.argmax())].name}"
    return _check_share(min(float(shares.sum()), 1.0), new, "append", "the files", at)


def _check_share(share: float, samples: Samples, key: str, name: str, other: str) -> list[str]:
    """Refuse or report a share of repeated samples, unless it may be chance."""
    if share < max(SAID_FRAC, BY_CHANCE * samples.repeated_frac):
        return []
    if share >= REFUSED_FRAC:
        raise _repeated(key, round(share * samples.num), share, name, other)
    return [f"{key}: about {share:.1%} of the samples of {name} are also in {other}"]


def _repeated(key: str, num: int, share: float, name: str, other: str) -> ValueError:
    amount = f"all {num}" if share == 1.0 else f"about {num} ({share:.0%})"
    return ValueError(
        f"{key}: expected each sample once, got {amount} of {name} that are also in {other}. "
        "Remove them, or set allow_repeats=true if they only look alike."
    )
