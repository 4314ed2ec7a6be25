"""Records the inputs of each stage, so that ``hotrec run`` skips stages with a current result.

Next to an artifact, or in a run directory, is a record with a digest of the configuration that the
stage read and of its inputs: content hashes of artifacts, and for the files of a log, which may
take an hour to read, their names, sizes and modification times.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotrec.artifact import ArtifactError, read_artifact, read_record
from hotrec.cli.store import USER_CONF
from hotrec.config.roots import Config
from hotrec.config.text import as_document
from hotrec.data.chunks import Dataset
from hotrec.data.encoding import check_encoding
from hotrec.data.files import find_files
from hotrec.data.generation import generations_of
from hotrec.runtime.run_dir import RECORD

logger = logging.getLogger(__name__)
Figures = dict[str, Any]


def digest_of(*parts: Any) -> str:
    """A digest of JSON values, and of other values by their text."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def write_made(record: Path, digest: str, figures: Mapping[str, Any], **more: Any) -> None:
    """Record a stage's inputs, its figures, and more."""
    scratch = record.with_name(f".{record.name}.{os.getpid()}")
    document = {"made_from": digest, "figures": figures, **more}
    scratch.write_text(json.dumps(document, default=str) + "\n")
    scratch.replace(record)


def read_made(record: Path, digest: str) -> Figures | None:
    """The figures of a stage with exactly these inputs; None otherwise."""
    try:
        document = json.loads(read_record(record))
        return dict(document["figures"]) if document["made_from"] == digest else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def dataset_inputs(config: Config) -> str | None:
    """The digest of what ``prepare`` is about to read; None if a file of it is missing."""
    source = config.data.source
    with suppress(OSError, ValueError):
        files = [] if source is None else find_files(source.files, source.format)
        for side in () if source is None else source.joins.values():
            files += find_files(side.files, side.format)
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return digest_of(asdict(config.data), stats)
    return None


def content_hash(path: str, kind: str) -> str:
    """The content hash of an artifact.

    Raises:
        ArtifactError: If it is missing, incomplete or altered.
    """
    return read_artifact(Path(path), kind=kind).content_hash


def record_dataset(config: Config, digest: str | None, figures: Figures) -> None:
    """Record the dataset that ``prepare`` made of inputs with this digest."""
    if digest is not None:
        kept = {"content_hash": figures["content_hash"]}
        # A run started from Python may only know the path of its dataset.
        write_made(_dataset_record(config), digest, kept, data=as_document(config.data))


def find_dataset(config: Config) -> Dataset | None:
    """The dataset, if ``prepare`` would make it again; the caller closes it by forgetting it.

    A dataset with appended files is current, even if its first files have changed.

    Raises:
        ArtifactError: If its encoding differs from the configuration.
    """
    dataset: Dataset | None = None
    with suppress(ArtifactError):
        dataset = Dataset.open(config.paths.dataset)
    source = config.data.source
    if dataset is None:
        return None
    if source is not None and generations_of(dataset) and not config.overwrite:
        check_encoding(
            dataset,
            source,
            of="this configuration has it",
            advice="Restore the configuration used for the append, or set overwrite=true to "
            "prepare from scratch without the appended files.",
            may_grow=True,
        )
        logger.info("%s: generation %d", config.paths.dataset, len(generations_of(dataset)))
        return dataset
    digest = dataset_inputs(config)
    made = None if digest is None else read_made(_dataset_record(config), digest)
    is_same = made is not None and made["content_hash"] == dataset.artifact.content_hash
    return dataset if is_same else None


def _dataset_record(config: Config) -> Path:
    path = Path(config.paths.dataset)
    return path.with_name(f"{path.name}.{RECORD}")


def command_text(command: str, words: Sequence[str]) -> str:
    """A command as typed; the directory ``conf`` can be omitted."""
    own = ["--config-dir", str(USER_CONF)]
    words = words[2:] if list(words[:2]) == own else words
    return shlex.join(["hotrec", command, *words])
