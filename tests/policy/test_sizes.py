"""Files and functions stay small enough to be read in one go."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.policy.source import REPOSITORY, parsed, project_files

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 80
READ = ("hotrec", "launch", "benchmarks")


def program_files() -> list[Path]:
    return [
        path
        for path in project_files()
        if path.suffix == ".py" and path.relative_to(REPOSITORY).parts[0] in READ
    ]


def test_files() -> None:
    sizes = {str(path): len(path.read_text().splitlines()) for path in program_files()}
    assert sizes
    assert {path: size for path, size in sizes.items() if size > MOST_FILE_LINES} == {}


def test_functions() -> None:
    sizes = {
        f"{path}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in program_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert sizes
    assert {name: size for name, size in sizes.items() if size > MOST_FUNCTION_LINES} == {}


@pytest.mark.parametrize("suffix", [".sh", ".sbatch"])
def test_scripts(suffix: str) -> None:
    for path in project_files():
        if path.suffix == suffix:
            lines = path.read_text().splitlines()
            assert len(lines) <= MOST_FILE_LINES, path
            assert "set -euo pipefail" in lines, f"{path}: a failing command must stop it"
