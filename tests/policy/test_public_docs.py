"""README and docs: they name what exists, and the commands that they show are right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import hotrec
from tests.policy.source import REPOSITORY

README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
PAGES = [README, REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
# Directories whose files pages name in code spans.
NAMED = r"`((?:benchmarks|conf|docker|examples|launch|requirements|tests)/[\w./-]+)`"


def test_the_api_page_has_every_public_name() -> None:
    shown = re.findall(r"^\.\. auto\w+:: hotrec\.(\w+)$", (DOCS / "api.md").read_text(), re.M)
    assert sorted(shown) == sorted(hotrec.__all__)


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
def test_python_on_the_page_imports_what_exists(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every export brings files of this directory.
    monkeypatch.syspath_prepend(REPOSITORY / "hotrec" / "models")
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(code, page.name)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node))
