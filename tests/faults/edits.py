"""Faults of files: each function gives the change that makes one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.case import Change
from tests.faults.workspace import hash_document

Document = dict[str, Any]


def cut(name: str) -> Change:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def emptied(name: str) -> Change:
    return lambda folder: os.truncate(folder / name, 0)


def grown(name: str) -> Change:
    return lambda folder: _change_bytes(folder / name, lambda data: data + b"\0" * 64)


def garbled(name: str) -> Change:
    """Other bytes, as many."""
    return lambda folder: _change_bytes(folder / name, lambda data: b"?" * len(data))


def flipped(name: str, at: float = 0.5) -> Change:
    """One bit, at this fraction of the file."""

    def flip(data: bytes) -> bytes:
        position = int(len(data) * at)
        return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]

    return lambda folder: _change_bytes(folder / name, flip)


def swapped(name: str, other: str) -> Change:
    def change(folder: Path) -> None:
        one, two = folder / name, folder / other
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)

    return change


def deleted(name: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    return change


def directory(name: str) -> Change:
    """A directory with one file in it, in the place of what was there, if anything."""

    def change(folder: Path) -> None:
        if (folder / name).exists():
            deleted(name)(folder)
        (folder / name).mkdir(parents=True)
        (folder / name / "notes.txt").write_text("mine\n")

    return change


def unreadable(name: str) -> Change:
    return lambda folder: (folder / name).chmod(0)


def mode(name: str, bits: int) -> Change:
    return lambda folder: (folder / name).chmod(bits)


def looped(name: str) -> Change:
    """A symbolic link to itself."""

    def change(folder: Path) -> None:
        deleted(name)(folder)
        (folder / name).symlink_to(Path(name).name)

    return change


def linked(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)

    return change


def written(name: str, content: str | bytes) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def copied(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        if (folder / target).exists():
            deleted(target)(folder)
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        if (folder / name).is_dir():
            shutil.copytree(folder / name, folder / target)
        else:
            shutil.copy(folder / name, folder / target)

    return change


def replaced(name: str, old: str, new: str) -> Change:
    """A piece of a text; it must be there."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text, f"{name} has no {old}"
        (folder / name).write_text(text.replace(old, new))

    return change


def edited(name: str, edit: Callable[[Document], object]) -> Change:
    """A JSON file, changed in place."""

    def change(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        edit(document)
        (folder / name).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")

    return change


def rehashed(artifact: str, edit: Callable[[Document], object]) -> Change:
    """A manifest that is changed and then agrees with its own hash again."""

    def edit_and_hash(document: Document) -> None:
        edit(document)
        document.pop("content_hash", None)
        document["content_hash"] = hash_document(document)

    return edited(f"{artifact}/manifest.json", edit_and_hash)


def several(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def _change_bytes(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))
