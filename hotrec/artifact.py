"""Artifacts: directories that are either whole or absent.

A stage writes its files into a hidden sibling directory, the manifest last, and renames the
directory into place. A run killed at any moment leaves the old artifact or the new one. The
manifest lists every file with its size and hash, so an edited or cut file is found at reading.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


class ArtifactError(ValueError):
    """An artifact is missing, incomplete, altered, or made from something else."""


@dataclass(frozen=True)
class Artifact:
    """A directory that was read back whole.

    Args:
        path: the directory.
        kind: "dataset", "profile", "partition", ...
        content: what the stage stored in the manifest.
        made_from: content hashes of its inputs, by kind.
        content_hash: hash over the content, the inputs and every file.
    """

    path: Path
    kind: str
    content: Mapping[str, Any]
    made_from: Mapping[str, str]
    content_hash: str


def hash_file(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_document(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sync_path(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """A hidden sibling of ``target`` to write into; removed if the block fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _finish_replacement(target)
    scratch = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def commit_artifact(
    scratch: Path,
    target: Path,
    *,
    kind: str,
    content: Mapping[str, Any],
    made_from: Mapping[str, str] | None = None,
) -> Artifact:
    """Write the manifest of the files in ``scratch`` and move the whole into place.

    An artifact that already stands at ``target`` is replaced; another kind of directory is not.

    Raises:
        ArtifactError: if ``target`` exists and is not an artifact.
    """
    files = {}
    for path in sorted(scratch.rglob("*")):
        if path.is_file():
            sync_path(path)
            files[path.relative_to(scratch).as_posix()] = {
                "num_bytes": path.stat().st_size,
                "sha256": hash_file(path),
            }
    document = {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "content": dict(content),
        "made_from": dict(made_from or {}),
        "files": files,
    }
    # As it will be read: JSON makes every key a string.
    document = json.loads(json.dumps(document))
    document["content_hash"] = _hash_document(document)
    manifest = scratch / MANIFEST
    manifest.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    sync_path(manifest)
    sync_path(scratch)
    if target.exists():
        others = [target] if not target.is_dir() else list(target.iterdir())
        if others and not (target / MANIFEST).exists():
            raise ArtifactError(
                f"{target}: expected a hotrec artifact or an empty directory to replace, "
                f"got {len(others)} other files. Choose another directory."
            )
        # Two renames; a run killed between them left the old artifact under its retired name, and
        # whoever reads or writes next puts it back.
        retired = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.old"
        target.rename(retired)
        scratch.rename(target)
        shutil.rmtree(retired, ignore_errors=True)
    else:
        scratch.rename(target)
    sync_path(target.parent)
    return read_artifact(target, kind=kind, verify="size")


def _finish_replacement(target: Path) -> None:
    """Put back what a run killed between the two renames of a replacement left."""
    if target.exists() or not target.parent.is_dir():
        return
    for retired in sorted(target.parent.glob(f".{target.name}.*.old")):
        if (retired / MANIFEST).exists():
            with suppress(FileNotFoundError):  # another rank was faster
                retired.rename(target)
            return


def read_artifact(path: Path, *, kind: str, verify: str = "size") -> Artifact:
    """Read the manifest of an artifact and check its files.

    Args:
        path: the artifact's directory.
        kind: the kind that is expected there.
        verify: "size" compares file sizes (milliseconds); "hash" reads every byte.

    Raises:
        ArtifactError: if it is missing, of another kind, incomplete or altered.
    """
    _finish_replacement(path)
    manifest = path / MANIFEST
    if not manifest.exists():
        raise ArtifactError(
            f"{manifest}: expected the manifest of a {kind}, got no such file. "
            f"Make the {kind} first, or correct the path."
        )
    try:
        document = json.loads(manifest.read_text())
        claimed = document.pop("content_hash")
        files = document["files"]
        found_kind, version = document["kind"], document["format_version"]
    except (
        json.JSONDecodeError,
        AttributeError,
        KeyError,
        TypeError,
        UnicodeDecodeError,
    ) as error:
        raise ArtifactError(
            f"{manifest}: expected a hotrec manifest, got {error!r}. Make the {kind} again."
        ) from error
    if found_kind != kind:
        raise ArtifactError(f"{manifest}: expected kind {kind!r}, got {found_kind!r}.")
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{manifest}: expected format version {FORMAT_VERSION}, got {version}. "
            f"Make the {kind} again with this version of hotrec."
        )
    if _hash_document(document) != claimed:
        raise ArtifactError(
            f"{manifest}: expected content hash {claimed[:12]}, got "
            f"{_hash_document(document)[:12]}: it was edited. Make the {kind} again."
        )
    for name, facts in files.items():
        _check_file(path / name, facts, verify=verify, kind=kind)
    return Artifact(
        path=path,
        kind=kind,
        content=document["content"],
        made_from=document["made_from"],
        content_hash=claimed,
    )


def _check_file(file: Path, facts: Mapping[str, Any], *, verify: str, kind: str) -> None:
    if not file.exists():
        raise ArtifactError(
            f"{file}: expected a file of {facts['num_bytes']} bytes, got none. "
            f"Make the {kind} again."
        )
    num_bytes = file.stat().st_size
    if num_bytes != facts["num_bytes"]:
        raise ArtifactError(
            f"{file}: expected {facts['num_bytes']} bytes, got {num_bytes}. Make the {kind} again."
        )
    if verify == "hash":
        found = hash_file(file)
        if found != facts["sha256"]:
            raise ArtifactError(
                f"{file}: expected sha256 {facts['sha256'][:12]}, got {found[:12]}: it was edited "
                f"after the manifest. Make the {kind} again."
            )


def check_made_from(artifact: Artifact, source: Artifact) -> None:
    """Refuse an artifact that was made from another source.

    Raises:
        ArtifactError: if ``artifact`` does not name ``source``'s content hash.
    """
    claimed = artifact.made_from.get(source.kind)
    if claimed != source.content_hash:
        raise ArtifactError(
            f"{artifact.path}: expected a {artifact.kind} made from the {source.kind} "
            f"{source.content_hash[:12]} at {source.path}, got one made from "
            f"{claimed[:12] if claimed else None}. Make the {artifact.kind} again."
        )
