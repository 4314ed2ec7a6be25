"""Where the files of a log are: on this host, or in a store such as S3 that fsspec reads.

A remote file is a ``UPath`` of universal-pathlib, which has the methods of ``Path`` that are called
here. A library that takes the path of a file must get the result of ``open_file`` instead.
"""

from __future__ import annotations

import glob
import stat
from pathlib import Path, PurePath
from typing import Any

import pyarrow as pa

from hotrec.config.data import SourceFormat

_SUFFIXES = {
    SourceFormat.parquet: (".parquet", ".pq"),
    SourceFormat.arrow: (".arrow", ".feather", ".ipc"),
}
_COMPRESSIONS = {".bz2": "bz2", ".gz": "gzip", ".lz4": "lz4", ".zst": "zstd"}
# The first bytes of files of other formats.
_BEGINNINGS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def find_files(patterns: list[str], log_format: SourceFormat, *, key: str = "files") -> list[Path]:
    """The files that match paths, directories and patterns, in order; remote ones as UPaths.

    Raises:
        ValueError: if one of them matches no file, or see ``find_paths``.
    """
    files: list[Path] = []
    for pattern in patterns:
        found = find_paths(pattern, _SUFFIXES.get(log_format), key=key)
        if not found:
            raise ValueError(
                f"{key}: expected files of format {log_format.name} at {pattern!r} "
                f"(current directory {Path.cwd()}), got none. Correct the path or the pattern."
            )
        files += found
    return files


def find_paths(pattern: str, suffixes: tuple[str, ...] | None, *, key: str) -> list[Path]:
    """The files of a path, a directory or a pattern, in order; none if there is none.

    Args:
        pattern: Of this host, or with a protocol: ``s3://bucket/log/*.parquet``.
        suffixes: The suffixes accepted in a directory; None for all.
        key: The configuration key that names the pattern.

    Raises:
        ValueError: If it names a special file, which might have no end, no installed package reads
            the protocol, or the store is unreachable or denies access.
    """
    path = locate(pattern, key)
    if is_local(path):
        return _find(path, suffixes, key)
    try:
        return _find(path, suffixes, key)
    except Exception as error:  # each store raises its own errors
        reason = (str(error) or "no reason").splitlines()[0]
        raise ValueError(
            f"{key}: expected a listing of {pattern!r}, got {type(error).__name__}: "
            f"{reason.removesuffix('.')}. Check network access and credentials."
        ) from error


def _find(path: Path, suffixes: tuple[str, ...] | None, key: str) -> list[Path]:
    if path.is_dir():
        entries = [e for e in sorted(path.iterdir(), key=str) if not e.name.startswith((".", "_"))]
        return [
            file
            for entry in entries
            for file in (_find(entry, suffixes, key) if _is_part(entry) else [entry])
            if file.is_file() and (suffixes is None or file.suffix in suffixes)
        ]
    if path.exists():
        _check_regular(path, key)
        return [path]
    found = sorted(_glob(path), key=str)
    return [file for file in found if file.is_file() and not _is_unfinished(file, path)]


def is_partition(name: str) -> bool:
    """Whether a directory is named like a part of a log, such as dt=2024-05-01."""
    return name.find("=") > 0


def _is_part(path: Path) -> bool:
    return is_partition(path.name) and path.is_dir()


def _is_unfinished(file: Path, pattern: Path) -> bool:
    """Whether a match is inside a directory such as _temporary, which Spark leaves behind."""
    hidden = {part for part in file.parts[:-1] if part.startswith("_")}
    return not hidden <= set(pattern.parts)


def locate(pattern: str, key: str) -> Path:
    """A path of this host or of a store; see ``find_paths``."""
    protocol, has_protocol, rest = pattern.partition("://")
    if not has_protocol:
        return Path(pattern)
    if protocol == "file":
        return Path(rest)
    try:
        from upath import UPath

        path: Any = UPath(pattern)
        path.fs  # noqa: B018 (imports the package for the protocol)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{key}: expected a package that reads {protocol}://, got {error} for {pattern!r}. Run "
            "`pip install 'hotrec[remote]'` and fsspec's package for it, such as s3fs or gcsfs."
        ) from error
    return path


def _glob(path: Path) -> list[Path]:
    if is_local(path):
        return [Path(name) for name in glob.glob(str(path), recursive=True)]
    remote: Any = path
    # Unlike that of a shell, fsspec's * also stands for a dot at the beginning of a name.
    num_hidden = _count_hidden(remote.path)
    names = [name for name in remote.fs.glob(remote.path) if _count_hidden(name) <= num_hidden]
    return [
        type(remote)(remote.fs.unstrip_protocol(name), **remote.storage_options) for name in names
    ]


def _count_hidden(path: str) -> int:
    return sum(part.startswith(".") for part in path.split("/"))


def _check_regular(path: Path, key: str) -> None:
    mode = path.stat().st_mode
    if is_local(path) and not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ValueError(
            f"{key}: expected regular files, got {kind} at {str(path)!r}. Copy its content to a "
            "file."
        )


def is_local(path: Path) -> bool:
    """Whether a file is in this host's file system."""
    return isinstance(path, PurePath)


def beginning_of(path: Path) -> str:
    """The first bytes of a file and what they are, for a message."""
    try:
        with path.open("rb") as file:
            data = file.read(16)
    except OSError as error:
        return f"no first bytes ({error.strerror})"
    kind = next((kind for begin, kind in _BEGINNINGS.items() if data.startswith(begin)), "")
    return f"first bytes {data!r}" + (f", as in {kind}" if kind else "") if data else "no bytes"


def open_file(path: Path) -> pa.NativeFile:
    """Open a file for reading at any position, memory-mapped where it is local."""
    if is_local(path):
        return pa.memory_map(str(path))
    return pa.PythonFile(path.open("rb"), mode="r")


def open_stream(path: Path, buffer_bytes: int) -> pa.NativeFile:
    """Open a file for reading from its beginning; .gz, .zst and .bz2 are decompressed."""
    if is_local(path):
        return pa.input_stream(str(path), compression="detect", buffer_size=buffer_bytes)
    compression = _COMPRESSIONS.get(path.suffix)
    return pa.input_stream(open_file(path), compression=compression, buffer_size=buffer_bytes)
