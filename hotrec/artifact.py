"""Artifacts: directories that are either complete or absent.

A stage writes its files into a hidden sibling directory, the manifest last, and renames the
directory into place. A run killed at any moment leaves the old artifact or the new one. The
manifest lists every file with its size and checksum. One process at a time writes an artifact, and
none replaces one that another process has opened to read it later.
"""

from __future__ import annotations

import gc
import glob
import hashlib
import importlib.util
import json
import os
import shutil
import stat
import time
import uuid
import weakref
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import xxhash

from hotrec.lock import (
    LockedError,
    is_current,
    is_of_lock,
    lock_file,
    try_flock,
)

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
# It reads 11 GB/s, SHA-256 0.6. Neither protects from forgery, because the manifest can be changed
# with the file.
CHECKSUM = "xxh3_128"
# Marks a file in a manifest that goes with an artifact.
_IS_APART = "is_apart"
# What makes an artifact, by its kind.
_COMMANDS = {
    "dataset": "prepare",
    "profile": "prepare",
    "costs": "calibrate",
    "partition": "plan",
    "checkpoint": "train",
    "model export": "export",
}
# Longer than the two renames of a replacement, after which a reader finds the new artifact.
_REPLACEMENT_S = 10.0
# Longer than most readings of a manifest; a longer lock means that the artifact is open.
_SHORT_READ_S = 2.0
# Larger than any record of a trial, of costs, of a plan or of a run's end.
RECORD_BYTES = 64 << 20

# Exceptions from content of an unexpected form.
_FORM_ERRORS = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    zipfile.BadZipFile,
)

Verify = StrEnum("Verify", "size full")
# Size and checksum of a file, in the form of a manifest.
FileFacts = dict[str, int | str]


class ArtifactError(ValueError):
    """An artifact is missing, incomplete, altered, or made from something else."""


@dataclass(frozen=True)
class Artifact:
    """A directory whose manifest was read.

    Args:
        path: The directory.
        kind: "dataset", "profile", "partition", ...
        content: The stage's content of the manifest.
        made_from: Content hashes of its inputs, by kind.
        content_hash: Hash over the content, the inputs and every file, without those that only go
            with them; see ``commit_artifact``.
        files: Size and checksum of each file, by its path in the directory.
        lock: Keeps other processes from replacing the artifact, if it was opened to be read later.
    """

    path: Path
    kind: str
    content: Mapping[str, Any]
    made_from: Mapping[str, str]
    content_hash: str
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    lock: ReadLock | None = field(default=None, repr=False, compare=False)

    def file(self, name: str) -> Path:
        """The path of one of its files.

        Raises:
            ArtifactError: If the manifest does not list it, so that it is unchecked.
        """
        if name not in self.files:
            raise ArtifactError(
                f"{self.path / MANIFEST}: expected the file {name} among {len(self.files)} files, "
                f"got none. Make the {self.kind} again."
            )
        return self.path / name

    def check_opened(self) -> None:
        """Check that the path is still the opened artifact, after one of its files has been opened.

        Raises:
            ArtifactError: If another program replaced the directory.
        """
        if self.lock is not None:
            self.lock.check()

    def verify_file(self, name: str) -> None:
        """Compare a file with its checksum.

        Raises:
            ArtifactError: If the file was altered.
        """
        _check_file(self.path / name, self.files[name], verify=Verify.full, kind=self.kind)

    @contextmanager
    def parsing(self, file: str = MANIFEST) -> Iterator[None]:
        """Turn errors about content of an unexpected form into an ``ArtifactError`` of a file."""
        try:
            yield
        except ArtifactError:
            raise
        except _FORM_ERRORS as error:
            if ": expected " in str(error):  # says what to do as well
                raise ArtifactError(f"{self.path}: {error}") from error
            raise ArtifactError(
                f"{self.path / file}: expected the content of a {self.kind}, got "
                f"{type(error).__name__}: {error}. Make the {self.kind} again."
            ) from error


class ReadLock:
    """A shared lock on an open artifact; released when this object is freed.

    Forked processes share it; a copy made by pickle takes its own.
    """

    def __init__(self, manifest: Path, kind: str) -> None:
        self._manifest = manifest
        self._kind = kind
        self._file = _open_locked(manifest, kind)
        weakref.finalize(self, self._file.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadLock, (self._manifest, self._kind)

    def check(self) -> None:
        """Raise an ``ArtifactError`` if the artifact is not the one that was opened."""
        if not is_current(self._file.fileno(), self._manifest):
            raise ArtifactError(
                f"{self._manifest.parent}: expected the artifact opened at the start, got another "
                "directory or none. Run the command again."
            )


def _open_locked(manifest: Path, kind: str) -> BinaryIO:
    """Open a manifest for as long as no other process may replace its artifact."""
    target, until_s = real_path(manifest.parent), time.monotonic() + _REPLACEMENT_S
    while time.monotonic() < until_s:
        try:
            file = open_file(manifest)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            if not _siblings(target, "old") and not manifest.is_file():
                command = _COMMANDS.get(kind)
                advice = f"Run `hotrec {command}`" if command else f"Make the {kind} first"
                raise ArtifactError(
                    f"{manifest}: expected the manifest of a {kind}, got no such file. "
                    f"{advice}, or correct the path."
                ) from error
            # Between the two renames of a replacement, or after them if its process was killed.
            with suppress(LockedError), lock_file(_sibling(target, "lock"), target):
                _restore_retired(target)
        else:
            is_held = try_flock(file.fileno(), manifest, is_shared=True)
            if is_held and is_current(file.fileno(), manifest):
                return file
            file.close()
        time.sleep(0.01)
    raise ArtifactError(
        f"{manifest.parent}: expected read access, got another process that has been replacing it "
        f"for more than {_REPLACEMENT_S:.0f} s. Try again."
    )


def _open_without_waiting(path: str, flags: int) -> int:
    """Of a pipe, too, whose other end nobody has."""
    return os.open(path, flags | os.O_NONBLOCK)


def open_file(path: Path) -> BinaryIO:
    """Open a file that a command wrote for another.

    Raises:
        ArtifactError: If it is a device or a pipe, which may have no end.
    """
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115 (it is returned)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ArtifactError(f"{path}: expected a file, got a pipe or a device. Remove it.")


def read_record(path: Path, max_bytes: int = RECORD_BYTES, errors: str = "strict") -> str:
    """The text of a file that a command wrote for another; ``errors`` as for ``bytes.decode``.

    Raises:
        FileNotFoundError: If there is none.
        ArtifactError: If it is a device or a pipe, which may have no end, too large, or not text.
    """
    try:
        with open_file(path) as file:
            found = f"{(num_bytes := os.fstat(file.fileno()).st_size)} bytes"
            if num_bytes <= max_bytes:
                return file.read(max_bytes).decode(errors=errors)
    except IsADirectoryError:
        found = "a directory"
    except UnicodeDecodeError:
        found = "no text"
    raise ArtifactError(
        f"{path}: expected a text file of at most {max_bytes} bytes, got {found}. Remove it."
    )


def checksum_of(path: Path) -> str:
    """Checksum of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _hash_document(document: Mapping[str, Any]) -> str:
    files = {name: f for name, f in document["files"].items() if not f.get(_IS_APART)}
    document = {**document, "files": files}
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
def scratch_directory(target: Path, *, kind: str) -> Iterator[Path]:
    """A hidden sibling of ``target`` to write an artifact into; removed at the end.

    Raises:
        ArtifactError: If ``target`` is something that may not be replaced by this kind.
        LockedError: If another process writes or reads an artifact there.
    """
    check_replaceable(target, kind)
    target = real_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(_sibling(target, "lock"), target):
        _restore_retired(target)
        check_replaceable(target, kind)
        _remove_scratch(target)
        remove_abandoned(target.parent)
        scratch = _sibling(target, f"{uuid.uuid4().hex[:8]}.tmp")
        scratch.mkdir()
        try:
            with naming(target):
                yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def remove_abandoned(directory: Path) -> None:
    """Remove scratch directories and locks of killed writers in a directory."""
    for lock in directory.glob(".?*.lock"):
        with suppress(LockedError, OSError):
            if is_of_lock(lock):
                with lock_file(lock, directory):
                    target = directory / lock.name[1:].removesuffix(".lock")
                    _restore_retired(target)
                    _remove_scratch(target)


def _remove_scratch(target: Path) -> None:
    """Remove those of a target; this process holds its lock, so their writer has exited."""
    for left in _siblings(target, "tmp"):
        shutil.rmtree(left, ignore_errors=True)


def real_path(path: Path) -> Path:
    """The target of a link, since renaming would replace the link; a link to itself is kept."""
    return Path(os.path.realpath(path))


def _sibling(target: Path, suffix: str) -> Path:
    return target.parent / f".{target.name}.{suffix}"


def _siblings(target: Path, suffix: str) -> list[Path]:
    return sorted(target.parent.glob(f".{glob.escape(target.name)}.????????.{suffix}"))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add this path to errors of the system without a file name, such as those of writing."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def check_replaceable(target: Path, kind: str) -> None:
    """Check that nothing would be lost if an artifact of this kind replaced the target.

    Raises:
        ArtifactError: If the target is neither absent, an empty directory, nor an artifact of this
            kind without any other file in it but Python's caches of its modules.
        LockedError: If another process has opened the artifact.
    """
    if target.is_symlink() and not target.exists():
        raise ArtifactError(
            f"{target}: expected a link to a directory, got a dangling one. Correct the link."
        )
    if not target.exists():
        return
    expected = f"{target}: expected an empty directory or a {kind} to replace"
    advice = "Choose another directory, or move it away."
    if not target.is_dir():
        raise ArtifactError(f"{expected}, got a file. {advice}")
    found = sorted(path for path in target.rglob("*") if not path.is_dir() or path.is_symlink())
    if not found:
        return
    manifest = target / MANIFEST
    if manifest not in found:
        raise ArtifactError(f"{expected}, got {len(found)} files without a {MANIFEST}. {advice}")
    document = _parse_manifest(manifest, kind)
    if document["kind"] != kind:
        raise ArtifactError(f"{expected}, got a {document['kind']}. {advice}")
    own = {manifest, *(target / name for name in document["files"])}
    foreign = [
        path.relative_to(target).as_posix()
        for path in found
        if path not in own and _cached_module(path) not in own
    ]
    if foreign:
        raise ArtifactError(
            f"{expected}, got a {kind} with {len(foreign)} files of others, such as {foreign[0]}. "
            f"{advice}"
        )
    with _locked_for_replacement(manifest):
        pass


def _cached_module(path: Path) -> Path | None:
    """The module whose byte code Python keeps in a file; None for other files."""
    if path.suffix != ".pyc" or path.is_symlink():
        return None
    try:
        return Path(importlib.util.source_from_cache(path))
    except ValueError:
        return None


@contextmanager
def _locked_for_replacement(manifest: Path) -> Iterator[None]:
    with manifest.open("r+b") as file:
        until_s = time.monotonic() + _SHORT_READ_S
        if not try_flock(file.fileno(), manifest):
            gc.collect()  # a reader of this process, such as that of a past run, may be in a cycle
        while not try_flock(file.fileno(), manifest):
            if time.monotonic() < until_s:
                time.sleep(0.01)
                continue
            raise LockedError(
                f"{manifest.parent}: expected no readers, got another process reading it. Wait for "
                "the end of the run that uses it, or choose another directory."
            )
        yield


def write_through(path: Path) -> FileFacts:
    """Flush a file to the disk, and describe it for a manifest."""
    sync_path(path)
    return {"num_bytes": path.stat().st_size, CHECKSUM: checksum_of(path)}


def link_file(source: Path, target: Path) -> None:
    """A hard link to a file that is never written; a copy if links are not supported."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def commit_artifact(
    scratch: Path,
    target: Path,
    *,
    kind: str,
    content: Mapping[str, Any],
    made_from: Mapping[str, str] | None = None,
    written: Mapping[str, FileFacts] | None = None,
    apart: Collection[str] = (),
) -> Artifact:
    """Write the manifest of the files in ``scratch`` and move the directory into place.

    Call within ``scratch_directory``. An artifact of the same kind is replaced. Files in
    ``written``, by their paths in it, are on the disk already and described there. Files in
    ``apart`` only accompany it, such as the code that reads it: they have a checksum, but do not
    contribute to the content hash.

    Raises:
        ArtifactError, LockedError: As ``scratch_directory``, if that has changed meanwhile.
    """
    files, known = {}, written or {}
    for path in sorted(scratch.rglob("*")):
        if path.is_dir():
            sync_path(path)
        elif path.is_file():
            name = path.relative_to(scratch).as_posix()
            files[name] = known[name] if name in known else write_through(path)
            if name in apart:
                files[name] = {**files[name], _IS_APART: True}
    document = {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "content": dict(content),
        "made_from": dict(made_from or {}),
        "files": files,
    }
    # In the form that will be read: JSON turns every key into a string.
    document = json.loads(json.dumps(document))
    document["content_hash"] = _hash_document(document)
    manifest = scratch / MANIFEST
    manifest.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    sync_path(manifest)
    sync_path(scratch)
    move_artifact(scratch, target, kind)
    return read_artifact(target, kind=kind)


def move_artifact(scratch: Path, target: Path, kind: str) -> None:
    """Move an artifact into place; it may replace one of its kind.

    Raises:
        ArtifactError, LockedError: As ``scratch_directory``.
    """
    target = real_path(target)
    check_replaceable(target, kind)
    if (target / MANIFEST).exists():
        # Two renames; if the process is killed between them, the next reader or writer of the
        # artifact restores the old one.
        with _locked_for_replacement(target / MANIFEST):
            retired = _sibling(target, f"{uuid.uuid4().hex[:8]}.old")
            target.rename(retired)
            scratch.rename(target)
        shutil.rmtree(retired, ignore_errors=True)
    else:
        scratch.rename(target)
    sync_path(target.parent)


def check_removable(target: Path, kind: str) -> None:
    """Check that ``remove_artifact`` would remove nothing else, and that it has no readers.

    Raises:
        ArtifactError, LockedError: As ``check_replaceable``.
    """
    check_replaceable(target, kind)
    _parse_manifest(target / MANIFEST, kind)


def remove_artifact(target: Path, kind: str) -> None:
    """Remove an artifact that no process has opened; a kill leaves it complete or absent.

    Raises:
        ArtifactError: If the directory has foreign files, or is not of this kind.
        LockedError: If another process has opened it.
    """
    target = real_path(target)
    with lock_file(_sibling(target, "lock"), target):
        check_removable(target, kind)
        # The name of a scratch directory, which the next writer there removes if this one is
        # killed.
        removed = _sibling(target, f"{uuid.uuid4().hex[:8]}.tmp")
        with _locked_for_replacement(target / MANIFEST):
            target.rename(removed)
        sync_path(target.parent)
        shutil.rmtree(removed)


def _restore_retired(target: Path) -> None:
    """Restore the artifact of an interrupted replacement; the caller holds the lock."""
    for retired in _siblings(target, "old"):
        if (retired / MANIFEST).exists() and not target.exists():
            retired.rename(target)
        else:
            shutil.rmtree(retired, ignore_errors=True)


def read_artifact(
    path: Path, *, kind: str, verify: Verify = Verify.size, stay_open: bool = False
) -> Artifact:
    """Read the manifest of an artifact and check its files.

    Args:
        path: The artifact's directory.
        kind: The kind that is expected there.
        verify: "size" compares file sizes (milliseconds); "full" compares every checksum.
        stay_open: Whether files are read later: no other process replaces the artifact meanwhile.

    Raises:
        ArtifactError: If it is missing, of another kind, incomplete or altered.
    """
    manifest = path / MANIFEST
    lock = ReadLock(manifest, kind)  # so that manifest and files belong together
    document = _parse_manifest(manifest, kind)
    if document["kind"] != kind:
        raise ArtifactError(
            f"{manifest}: expected kind {kind!r}, got {document['kind']!r}. Correct the path."
        )
    claimed = document.pop("content_hash")
    if _hash_document(document) != claimed:
        raise ArtifactError(
            f"{manifest}: expected content hash {claimed[:12]}, got "
            f"{_hash_document(document)[:12]}: it was edited. Make the {kind} again."
        )
    for name, facts in document["files"].items():
        _check_file(path / name, facts, verify=verify, kind=kind)
    return Artifact(
        path=path,
        kind=kind,
        content=document["content"],
        made_from=document["made_from"],
        content_hash=claimed,
        files=document["files"],
        lock=lock if stay_open else None,
    )


def _parse_manifest(manifest: Path, kind: str) -> dict[str, Any]:
    with open_file(manifest) as file:
        data = file.read()
    try:
        document = json.loads(data.decode())
        version = document["format_version"]
        texts = (document["kind"], document["content_hash"], *document["made_from"].values())
        is_sound = (
            all(isinstance(text, str) for text in texts)
            and isinstance(document["content"], dict)
            and all(_is_sound_entry(*entry) for entry in document["files"].items())
        )
    except _FORM_ERRORS as error:
        raise ArtifactError(
            f"{manifest}: expected the manifest of a {kind} by hotrec, got {error!r}. "
            f"Make the {kind} again, or correct the path."
        ) from error
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{manifest}: expected format version {FORMAT_VERSION}, got {version}. "
            f"Make the {kind} again with this version of hotrec."
        )
    if not is_sound:
        raise ArtifactError(
            f"{manifest}: expected the manifest of a {kind} by hotrec, got entries of other types. "
            f"Make the {kind} again, or correct the path."
        )
    return dict(document)


def _is_sound_entry(name: str, facts: Mapping[str, Any]) -> bool:
    path = PurePosixPath(name)
    is_inside = not path.is_absolute() and ".." not in path.parts
    has_checksum = isinstance(facts[CHECKSUM], str)
    return is_inside and has_checksum and isinstance(facts["num_bytes"], int)


def _check_file(file: Path, facts: Mapping[str, Any], *, verify: Verify, kind: str) -> None:
    if not file.is_file():
        raise ArtifactError(
            f"{file}: expected a file of {facts['num_bytes']} bytes, got none. "
            f"Make the {kind} again."
        )
    num_bytes = file.stat().st_size
    if num_bytes != facts["num_bytes"]:
        raise ArtifactError(
            f"{file}: expected {facts['num_bytes']} bytes, got {num_bytes}. Make the {kind} again."
        )
    if verify == Verify.full:
        found, wanted = checksum_of(file), facts[CHECKSUM]
        if found != wanted:
            raise ArtifactError(
                f"{file}: expected checksum {wanted[:12]}, got {found[:12]}: it was changed "
                f"after it was written. Make the {kind} again."
            )


def check_made_from(artifact: Artifact, source: Artifact) -> None:
    """Refuse an artifact that was made from another source.

    Raises:
        ArtifactError: If ``artifact`` does not have ``source``'s content hash.
    """
    claimed = artifact.made_from.get(source.kind)
    if claimed != source.content_hash:
        raise ArtifactError(
            f"{artifact.path}: expected a {artifact.kind} made from the {source.kind} "
            f"{source.content_hash[:12]} at {source.path}, got one made from "
            f"{claimed[:12] if claimed else None}. Make the {artifact.kind} again."
        )
