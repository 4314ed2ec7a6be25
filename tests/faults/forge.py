"""Faults of files: each function gives the change that makes one."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from tests.faults.case import Change
from tests.faults.workspace import hash_document

MARKER = "marker"


def change_bytes(change: Callable[[bytes], bytes]) -> Change:
    """Of the file at a path."""
    return lambda path: _write(path, change(path.read_bytes()))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def other_of(path: Path) -> Path | None:
    """The next file of its kind, or its like in a neighbouring artifact, with another content."""
    alike, content = sorted(path.parent.glob(f"*{path.suffix}")), path.read_bytes()
    at = alike.index(path)
    root = next(parent for parent in path.parents if (parent / "manifest.json").exists())
    beside = sorted(root.parent.glob(f"*/{path.relative_to(root)}"))
    others = [
        one for one in (*alike[at + 1 :], *alike[:at], *beside) if one.name != "manifest.json"
    ]
    return next((other for other in others if other.read_bytes() != content), None)


def _swap(path: Path) -> None:
    other = other_of(path)
    assert other is not None
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _in_its_place(make: Callable[[Path], object]) -> Change:
    def change(path: Path) -> None:
        if path.exists():
            _delete(path)
        make(path)

    return change


def _make_directory(path: Path) -> None:
    _write(path / "notes.txt", b"mine\n")


class _Payload:
    """Makes the directory ``marker`` when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (MARKER,)


def payload(suffix: str) -> bytes:
    """A file that runs code when it is unpickled, in the form that readers of its suffix know."""
    import numpy as np
    import torch

    stream, array = io.BytesIO(), np.array([_Payload()], dtype=object)
    match suffix:
        case ".pt":
            torch.save({"loader": _Payload(), "random": _Payload()}, stream)
        case ".npy":
            np.save(stream, array, allow_pickle=True)
        case ".npz":
            np.savez(stream, t0=array, t1=array)
        case _:
            return pickle.dumps(_Payload())
    return stream.getvalue()


# By name: what may happen to a file.
DAMAGES: dict[str, Change] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "grown": change_bytes(lambda data: data + b"\0" * 64),
    "flipped": change_bytes(
        lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1])
        + data[len(data) // 2 + 1 :]
    ),
    "garbled": change_bytes(lambda data: b"?" * len(data)),
    "swapped": _swap,
    "deleted": _delete,
    "directory": _in_its_place(_make_directory),
    "pipe": _in_its_place(os.mkfifo),
    "looped": _in_its_place(lambda path: path.symlink_to(path.name)),
    "unreadable": lambda path: path.chmod(0),
}  # fmt: skip
NESTED = b"[" * 200_000
# By name: what may stand in a file instead of a text.
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "words": b"hot: rows: [\n",
    "null": b"null\n",
    "list": b"[]\n",
    "binary": bytes(range(128, 256)),
    "nested": NESTED,
    "pickle": pickle.dumps(_Payload()),
}


def damaged(name: str, kind: str) -> Change:
    return lambda folder: DAMAGES[kind](folder / name)


def written(name: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: _write(folder / name, data)


def copied(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        if (folder / target).exists():
            _delete(folder / target)
        copy = shutil.copytree if (folder / name).is_dir() else shutil.copy
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        copy(folder / name, folder / target)

    return change


def replaced(name: str, old: str, new: str) -> Change:
    """A piece of a text; it must be there."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text, f"{name} has no {old}"
        (folder / name).write_text(text.replace(old, new))

    return change


def several(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


# ------------------------------------------------------------- manifests, and what they list

Document = dict[str, Any]
Place = tuple[str | int, ...]
GONE = object()


def rehashed(
    artifact: str, edit: Callable[[Document], object], *, is_hashed: bool = True
) -> Change:
    """A manifest that is changed, and then agrees with its own hash again."""

    def change(folder: Path) -> None:
        manifest = folder / artifact / "manifest.json"
        document = json.loads(manifest.read_text())
        edit(document)
        if is_hashed:
            document.pop("content_hash", None)
            document["content_hash"] = hash_document(document)
        manifest.write_text(json.dumps(document))

    return change


def put(place: Place | str, value: Any) -> Callable[[Document], None]:
    """An edit of what stands deep in a document; ``GONE`` removes it."""
    at = (
        tuple(int(p) if p.isdigit() else p for p in place.split("/"))
        if isinstance(place, str)
        else place
    )

    def edit(document: Any) -> None:
        for part in at[:-1]:
            document = document[part]
        if value is GONE:
            del document[at[-1]]
        else:
            document[at[-1]] = value

    return edit


def with_file(artifact: str, file: str, change: Change) -> Change:
    """A file that is changed, in a manifest that agrees with it."""

    def edit(folder: Path) -> None:
        path = folder / artifact / file
        change(path)
        content = path.read_bytes()
        facts = {"num_bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
        rehashed(artifact, lambda document: document["files"][file].update(facts))(folder)

    return edit


def places(document: Any, at: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every value of a document and where it is; of values that are alike, the first."""
    if at:
        yield at, document
    items = list(enumerate(document[:1])) if isinstance(document, list) else []
    if isinstance(document, dict):
        items = list(document.items())
        forms = {
            str(sorted(value)) if isinstance(value, dict) else "" for value in document.values()
        }
        if len(forms) == 1 and "" not in forms:
            items = items[:1]
    for key, value in items:
        yield from places(value, (*at, key))


def other_types(value: Any) -> list[Any]:
    """What may not stand where this value does: nothing, and other types."""
    others = ["x", 7, [], {"x": 1}, None, GONE]
    return [other for other in others if other is GONE or not _is_like(other, value)]


def _is_like(one: Any, other: Any) -> bool:
    return type(one) is type(other) or {type(one), type(other)} <= {int, float, bool}


def zeros(num_bytes: int) -> bytes:
    """So many, compressed."""
    return gzip.compress(b"\0" * num_bytes, 1)
