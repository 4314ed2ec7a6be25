"""The project's own files, and the imports of its modules as ``ast`` sees them."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "hotrec"


@dataclass(frozen=True)
class Import:
    """One imported module.

    Args:
        importer: dotted name of the module that imports.
        imported: dotted name of what is imported; ``from a import b`` gives ``a.b`` where that is
            a module of the project, else ``a``.
        line: where.
    """

    importer: str
    imported: str
    line: int


@cache
def modules() -> dict[str, Path]:
    """The files of the package by dotted module name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for name, path in modules().items() for found in imports_of(name, path))


def imports_of(importer: str, path: Path) -> Iterator[Import]:
    is_package = path.name == "__init__.py"
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (Import(importer, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = importer.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(importer, full if full in modules() else base, node.lineno)


@cache
def project_files() -> tuple[Path, ...]:
    """Every file that is or would be committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, timeout=60)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a git checkout: {error}")
    names = sorted(set(done.stdout.decode().split("\0")) - {""})
    return tuple(REPOSITORY / name for name in names if (REPOSITORY / name).is_file())


def text_of(path: Path) -> str | None:
    """The text of a file; None for data."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
