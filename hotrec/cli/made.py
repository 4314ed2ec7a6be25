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
from hotrec.cli.launch import environment_rank
from hotrec.cli.store import USER_CONF
from hotrec.config.roots import Config
from hotrec.config.text import as_document
from hotrec.cost_model.profile import KIND as PROFILE
from hotrec.data.chunks import DATASET, Dataset
from hotrec.data.encode import check_encoding
from hotrec.data.generation import generations_of
from hotrec.data.readers import find_files
from hotrec.runtime.run_dir import CHECKPOINTS, RECORD

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
    """The figures of a stage with exactly these inputs and all its files; None otherwise."""
    try:
        document = json.loads(read_record(record))
        found = describe_files(record.parent) if "files" in document else {}
        is_whole = document.get("files", {}).items() <= found.items()
        return dict(document["figures"]) if document["made_from"] == digest and is_whole else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def describe_files(directory: Path) -> dict[str, int]:
    """The size of each file of a stage; checkpoints kept besides the last are not described."""
    checkpoints = directory / CHECKPOINTS
    kept = {
        pointer.read_text().strip() for pointer in checkpoints.glob("[!.]*") if pointer.is_file()
    }
    return {
        str(file.relative_to(directory)): file.stat().st_size
        for file in directory.rglob("[!.]*")
        if file.is_file()
        and file.name != RECORD
        and (file.parent.parent != checkpoints or file.parent.name in kept)
    }


# Artifacts that commands make from a configuration only.


def artifact_inputs(name: str, config: Any) -> str | None:
    """The digest of what ``prepare`` or ``profile`` is about to read, on rank 0.

    None for other commands, and if an input is missing, which the command itself reports.
    """
    if environment_rank() != 0:
        return None
    with suppress(OSError, ValueError):
        if name == "prepare" and (config.prune is None or config.append):
            return digest_of(asdict(config.data), _files_of(config))
        if name == "profile":
            return digest_of(asdict(config.profile), content_hash(config.paths.dataset, DATASET))
    return None


def _files_of(config: Config) -> list[tuple[str, int, int]]:
    source = config.data.source
    if source is None:
        return []
    files = find_files(source.files, source.format)
    for side in source.joins.values():
        files += find_files(side.files, side.format)
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def content_hash(path: str, kind: str) -> str:
    """The content hash of an artifact.

    Raises:
        ArtifactError: If it is missing, incomplete or altered.
    """
    return read_artifact(Path(path), kind=kind).content_hash


def record_artifact(name: str, config: Config, digest: str | None, figures: Figures) -> None:
    """Record the result of ``prepare`` or ``profile`` for inputs with this digest."""
    if digest is not None:
        # A run started from Python may only know the path of its dataset.
        more = {"data": as_document(config.data)} if name == "prepare" else {}
        write_made(_artifact_record(name, config), digest, figures, **more)


def find_artifact(name: str, config: Config) -> Figures | None:
    """The figures of ``prepare`` or ``profile``, if they would give the same result again.

    A dataset with appended files is current, even if its first files have changed.

    Raises:
        ArtifactError: If its encoding differs from the configuration.
    """
    if name == "prepare" and (grown := _find_grown(config)) is not None:
        return grown
    digest = artifact_inputs(name, config)
    figures = None if digest is None else read_made(_artifact_record(name, config), digest)
    path, kind = _artifact_of(name, config)
    with suppress(ArtifactError):
        if figures is not None and figures["content_hash"] == content_hash(path, kind):
            return figures
    return None


def _find_grown(config: Config) -> Figures | None:
    """The figures of a dataset that files were appended to, unless it may be overwritten."""
    source = config.data.source
    if source is None or config.overwrite:
        return None
    from hotrec.cli.prepare import figures_of  # which imports torch

    dataset: Dataset | None = None
    with suppress(ArtifactError):
        dataset = Dataset.open(config.paths.dataset)
    if dataset is None or not generations_of(dataset):
        return None
    check_encoding(
        dataset,
        source,
        of="this configuration has it",
        advice="Restore the configuration used for the append, or set overwrite=true to prepare "
        "from scratch without the appended files.",
        may_grow=True,
    )
    figures = figures_of(dataset)
    logger.info("%s: generation %d", config.paths.dataset, figures["generation"])
    return figures


def _artifact_of(name: str, config: Config) -> tuple[str, str]:
    paths = config.paths
    return (paths.dataset, DATASET) if name == "prepare" else (paths.profile, PROFILE)


def _artifact_record(name: str, config: Config) -> Path:
    path = Path(_artifact_of(name, config)[0])
    return path.with_name(f"{path.name}.{RECORD}")


def command_text(command: str, words: Sequence[str]) -> str:
    """A command as typed; the directory ``conf`` can be omitted."""
    own = ["--config-dir", str(USER_CONF)]
    words = words[2:] if list(words[:2]) == own else words
    return shlex.join(["hotrec", command, *words])
