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
        is_eager: whether importing the importer imports it (not in a function, not for typing).
    """

    importer: str
    imported: str
    line: int
    is_eager: bool


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
    pending: list[tuple[ast.AST, bool]] = [(parsed(path), True)]
    while pending:
        node, is_eager = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, node.lineno, is_eager)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = importer.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(importer, full if full in modules() else base, node.lineno, is_eager)
        for child in ast.iter_child_nodes(node):
            is_deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            pending.append(
                (child, is_eager and not is_deferred and not _is_for_typing(node, child))
            )


def _is_for_typing(node: ast.AST, child: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and "TYPE_CHECKING" in ast.unparse(node.test)
        and child in node.body
    )


def loaded_by(module: str) -> dict[str, str]:
    """What importing a module of the project imports, own and foreign, and through which module."""
    loaded: dict[str, str] = {}
    pending = [(module, "")]
    while pending:
        name, through = pending.pop()
        if name in loaded:
            continue
        loaded[name] = through
        if "." in name:
            # import a.b.c runs a/__init__ and a/b/__init__ first.
            pending.append((name.rpartition(".")[0], name))
        pending += [(i.imported, name) for i in imports() if i.importer == name and i.is_eager]
    return loaded


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
