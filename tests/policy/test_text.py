"""What a file may say: nothing of its author's machine, ASCII, errors with values."""

from __future__ import annotations

import ast
import re

import pytest

from tests.policy.source import modules, parsed, project_files, text_of

# Spelt in pieces, so that this file does not find itself.
FORBIDDEN = {
    "a path of somebody's machine": r"(?<![\w.$}~-])/(?:" + "root|home|Users|work" + r")/\w",
    "a registry's host": "|".join(
        re.escape(host) for host in ("pypi." + "org", "python" + "hosted", "download." + "pytorch")
    ),
    "a ticket": r"\b" + "issue" + r" #?\d",
}
PROSE = {
    *(".md", ".ipynb", ".py", ".sh", ".sbatch", ".toml", ".yaml", ".yml", ".lock"),
    *(".Dockerfile", ""),
}


@pytest.mark.parametrize("what", sorted(FORBIDDEN))
def test_no_file_holds(what: str) -> None:
    found = []
    for path in project_files():
        text = text_of(path) if path.suffix in PROSE else None
        for number, line in enumerate((text or "").splitlines(), start=1):
            if re.search(FORBIDDEN[what], line, re.IGNORECASE):
                found.append(f"{path}:{number}: {line.strip()}")
    assert found == []


def test_program_text_is_ascii() -> None:
    found = [
        f"{path}:{number}"
        for path in project_files()
        if path.suffix in PROSE - {".md", ""}
        for number, line in enumerate((text_of(path) or "").splitlines(), start=1)
        if not line.isascii()
    ]
    assert found == []


def test_scripts_stop_at_the_first_command_that_fails() -> None:
    paths = [path for path in project_files() if path.suffix in (".sh", ".sbatch")]
    assert paths
    assert [p for p in paths if "set -euo pipefail" not in p.read_text().splitlines()] == []


def test_errors_carry_their_values() -> None:
    """A constant text cannot say what was found, unless only one thing can be."""
    bare = [
        f"{path}:{node.lineno}"
        for path in modules().values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Raise) and _is_without_value(node.exc)
    ]
    assert bare == []


def _is_without_value(error: ast.expr | None) -> bool:
    return (
        isinstance(error, ast.Call)
        and isinstance(error.func, ast.Name)
        and error.func.id in {"ValueError", "RuntimeError", "ArtifactError", "TypeError"}
        and all(isinstance(argument, ast.Constant) for argument in error.args)
        and ", got " not in ast.unparse(error)
    )
