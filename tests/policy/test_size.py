"""The code gets no larger."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

import pytest

from tests.policy.source import REPOSITORY, parsed

# Lines of code. A number may only shrink: who deletes lines takes them off.
BUDGETS = {"hotrec": 39_126, "tests": 26_712, "benchmarks": 5_422}
_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


def count_code_lines(path: Path) -> int:
    """Lines with a token that is no comment or docstring."""
    docs: set[int] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body[:1]:
                case [ast.Expr(value=ast.Constant(value=str())) as first]:
                    docs.update(range(first.lineno, (first.end_lineno or 0) + 1))
    with tokenize.open(path) as file:
        tokens = [t for t in tokenize.generate_tokens(file.readline) if t.type not in _NO_CODE]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - docs)


@pytest.mark.parametrize("folder", BUDGETS)
def test_code_only_shrinks(folder: str) -> None:
    found = sum(count_code_lines(path) for path in (REPOSITORY / folder).rglob("*.py"))
    assert found <= BUDGETS[folder], f"{folder}: {found} lines of code. Delete some elsewhere."
