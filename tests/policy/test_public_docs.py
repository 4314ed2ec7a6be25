"""README and docs: they name what exists, and the commands that they show are right."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from hotrec.cli.commands import COMMANDS
from tests.policy.source import REPOSITORY

README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
PAGES = [README, REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
# What is imported under these names everywhere; others in small letters may be the reader's own.
USUAL = {"hotrec", "torch", "nn", "partial", "np", "pl"}
# Directories whose files pages name in code spans.
NAMED = r"`((?:benchmarks|conf|docker|examples|launch|requirements|tests)/[\w./-]+)`"


def public_names() -> list[str]:
    return sorted(importlib.import_module("hotrec").__all__)


def test_public_names_have_docstrings() -> None:
    hotrec = importlib.import_module("hotrec")
    bare = [
        name
        for name in public_names()
        if (inspect.isclass(thing := getattr(hotrec, name)) or inspect.isfunction(thing))
        and not inspect.getdoc(thing)
    ]
    assert bare == []


def test_type_checkers_see_every_public_name() -> None:
    text = (REPOSITORY / "hotrec" / "__init__.py").read_text()
    [block] = [node for node in ast.parse(text).body if isinstance(node, ast.If)]
    imported = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(imported) == public_names()
    hotrec = importlib.import_module("hotrec")
    for name, module in imported.items():
        assert getattr(hotrec, name) is getattr(importlib.import_module(module or ""), name)


def test_the_api_page_has_every_public_name() -> None:
    shown = re.findall(r"^\.\. auto\w+:: hotrec\.(\w+)$", (DOCS / "api.md").read_text(), re.M)
    assert sorted(shown) == public_names()


def test_readme_names_every_command() -> None:
    text = README.read_text()
    assert [name for name in COMMANDS if f"hotrec {name}" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = page.read_text()
    linked = set(re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text))
    assert [name for name in sorted(linked) if not (page.parent / name).exists()] == []


@pytest.mark.parametrize("page", [README, *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    named = set(re.findall(NAMED, page.read_text()))
    assert [name for name in sorted(named) if not (REPOSITORY / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_the_page_imports_what_it_uses(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks compile, import what exists, and work without the imports of the blocks above."""
    # Every export brings files of this directory.
    monkeypatch.syspath_prepend(REPOSITORY / "hotrec" / "models")
    modules: set[str] = set()
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        nodes = list(ast.walk(ast.parse(code, page.name)))
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        names: dict[str, Any] = {}
        for line in map(ast.unparse, imports):
            exec(line, names)
        modules |= {name for name, value in names.items() if inspect.ismodule(value)}
        of_code = [node for node in nodes if isinstance(node, ast.Name)]
        bound = {node.id for node in of_code if isinstance(node.ctx, ast.Store)}
        free = (
            {node.id for node in of_code} - bound - names.keys() - modules - vars(builtins).keys()
        )
        assert [name for name in free if name[0].isupper() or name in USUAL] == [], code
