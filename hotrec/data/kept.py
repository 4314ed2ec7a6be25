"""Earlier generations of a dataset, kept next to it so that runs on them remain usable.

The generations before that of ``data/events/dataset`` are in ``data/events/dataset.generations``,
each a complete dataset, ``0000-b3d2147eea61`` by its number and content hash. Their files are hard
links to those of later generations where these are the same, so that each generation only needs
space for its held-out samples, its vocabularies and the chunks that lost rows.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hotrec.artifact import (
    MANIFEST,
    ArtifactError,
    check_removable,
    link_file,
    move_artifact,
    read_record,
    remove_artifact,
    scratch_directory,
)
from hotrec.data.chunks import DATASET, Dataset
from hotrec.data.generation import generations_of

_LOGGER = logging.getLogger(__name__)
_NAME = re.compile(r"\d{4,}-[0-9a-f]{12}")


def kept_directory(directory: str | Path) -> Path:
    """Where the earlier generations of a dataset are."""
    path = Path(os.path.realpath(directory))
    return path.with_name(f"{path.name}.generations")


def kept_generations(directory: str | Path) -> list[Path]:
    """The earlier generations of a dataset that are kept, the oldest first."""
    found = kept_directory(directory).glob("*-*")
    return sorted(
        (path for path in found if _NAME.fullmatch(path.name)),
        key=lambda path: (int(path.name.partition("-")[0]), path.stat().st_mtime_ns),
    )


def open_generation(directory: str | Path, content_hash: str, checkpoint: Path) -> Dataset:
    """Open the generation of a dataset that a checkpoint was trained on: the newest, or a kept one.

    Its files are in ``artifact.path`` of the returned dataset, which need not be ``directory``.

    Args:
        directory: The directory of the dataset.
        content_hash: The generation's hash, as recorded in the checkpoint.
        checkpoint: For messages.

    Raises:
        ArtifactError: If there is no such generation, or it is damaged.
    """
    newest = Dataset.open(directory)
    if newest.artifact.content_hash == content_hash:
        return newest
    hashes = [generation["content_hash"] for generation in generations_of(newest)]
    found = newest.artifact.content_hash
    del newest  # until here it could not be replaced
    for path in kept_generations(directory):
        if path.name.endswith(f"-{content_hash[:12]}"):
            dataset = Dataset.open(path)
            if dataset.artifact.content_hash == content_hash:
                _LOGGER.info("%s was trained on an earlier generation: %s", checkpoint, path)
                return dataset
    if content_hash not in hashes:
        raise ArtifactError(
            f"{directory}: expected the dataset {content_hash[:12]} that {checkpoint} was trained "
            f"on, got {found[:12]}. Restore that dataset, or train on this one."
        )
    raise ArtifactError(
        f"{directory}: expected generation {hashes.index(content_hash)} ({content_hash[:12]}), "
        f"which {checkpoint} was trained on, got generation {len(hashes)}; the other one is not in "
        f"{kept_directory(directory)} (pruned or never kept). Continue with "
        f"trainer.warm_start={checkpoint}, or restore that generation."
    )


def check_not_grown(directory: Path) -> None:
    """Check that a dataset may be replaced by one that is prepared from scratch.

    Raises:
        ArtifactError: If files were appended to it, which the new one would lack.
    """
    number = 0
    # Damaged ones too. Anything else in the directory is refused by the code that replaces it.
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        manifest = json.loads(read_record(directory / MANIFEST))
        number = len(manifest["content"]["source"].get("generations", ()))
    if number > 0:
        raise ArtifactError(
            f"{directory}: expected no appended files, got generation {number}. Use append=..., "
            "train on it as it is, or set overwrite=true to prepare it from scratch without them."
        )


@contextmanager
def keeping(dataset: Dataset) -> Iterator[None]:
    """Keep a dataset that is replaced inside the block; the caller holds its lock for writing."""
    kept = _keep(dataset)
    try:
        yield
    except BaseException:
        if kept is not None:
            remove_artifact(kept, DATASET)
            with suppress(OSError):  # that of other generations
                kept.parent.rmdir()
        raise


def _keep(dataset: Dataset) -> Path | None:
    """Keep a dataset; its directory, or None if it is kept already."""
    artifact, number = dataset.artifact, len(generations_of(dataset))
    name = f"{number:04d}-{artifact.content_hash[:12]}"
    target = kept_directory(artifact.path) / name
    if (target / MANIFEST).exists():
        return None
    with scratch_directory(target, kind=DATASET) as scratch:
        for file in artifact.files:
            (scratch / file).parent.mkdir(parents=True, exist_ok=True)
            link_file(artifact.path / file, scratch / file)
        # A copy, because readers of a generation lock its manifest, and not that of another one.
        shutil.copyfile(artifact.path / MANIFEST, scratch / MANIFEST)
        move_artifact(scratch, target, DATASET)
    return target


def prune_generations(directory: str | Path, num_kept: int) -> tuple[list[Path], int]:
    """Remove earlier generations, the oldest first, until ``keep`` are left.

    Returns:
        The removed ones, and the bytes freed on the disk.

    Raises:
        ArtifactError: If one of them contains foreign files. Nothing is removed.
        LockedError: If a process reads one of them. Nothing is removed.
    """
    kept = kept_generations(directory)
    pruned = kept[: max(len(kept) - num_kept, 0)]
    for path in pruned:
        check_removable(path, DATASET)
    num_bytes = 0
    for path in pruned:
        status = [file.stat() for file in path.rglob("*") if file.is_file()]
        remove_artifact(path, DATASET)
        num_bytes += sum(file.st_size for file in status if file.st_nlink == 1)
    with suppress(OSError):  # that of others
        kept_directory(directory).rmdir()
    return pruned, num_bytes
