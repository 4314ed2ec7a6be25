"""FBGEMM's operators that hotrec names are in every supported CUDA wheel, as the CPU's are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from hotrec.doctor import PAIRS
from tests.policy.source import REPOSITORY
from tests.stand_in.operators import REPLACED, argument_names, read, schemas

RELEASES = [pair.fbgemm for pair in PAIRS.values()]


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Calls of ``torch.ops.fbgemm.<name>`` in hotrec, with where they are."""
    for path in sorted((REPOSITORY / "hotrec").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and "ops.fbgemm." in ast.unparse(node.func):
                yield f"{path.relative_to(REPOSITORY)}:{node.lineno}", node


def test_calls_are_found() -> None:
    text = "".join(path.read_text() for path in (REPOSITORY / "hotrec").rglob("*.py"))
    assert len(list(calls())) == text.count("torch.ops.fbgemm.") > 1


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_what_hotrec_calls(release: str) -> None:
    known = schemas(release)
    for where, call in calls():
        assert isinstance(call.func, ast.Attribute)
        name = call.func.attr
        assert name in known, f"{where}: {name} is not in fbgemm {release}"
        arguments = argument_names(known[name])
        assert len(call.args) <= len(arguments), where
        assert {keyword.arg for keyword in call.keywords} <= set(arguments), where


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_what_the_stand_in_implements(release: str) -> None:
    assert set(REPLACED) <= set(schemas(release))


def test_the_table_is_of_whole_operators() -> None:
    table = read()
    assert table["schemas"].keys() == table["kernels"].keys()
    for name, facts in table["schemas"].items():
        for schema in facts.values():
            assert schema is None or schema.startswith(f"{name}(")
