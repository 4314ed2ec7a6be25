"""README and docs: they name what exists, and the commands that they show are right."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import build_config, compose_config
from tests.policy.source import REPOSITORY
from tests.policy.test_layers import ORDER

README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
PAGES = [README, REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
# Directories whose files pages name in code spans.
NAMED = r"`((?:benchmarks|conf|docker|examples|launch|requirements|tests)/[\w./-]+)`"


def public_names() -> list[str]:
    return sorted(importlib.import_module("hotrec").__all__)


def commands_on(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each hotrec command in the page's console blocks, with the words after its name."""
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            starts = ("hotrec", "torchrun", "launch/torchrun.sh", "sbatch")
            if not words or words[0] not in starts or "examples/" in line:
                continue
            name = next((word for word in words[1:] if word in COMMANDS), None)
            assert name is not None or words == ["hotrec"], f"{page.name}: {line}"
            if name is not None:
                yield name, words[words.index(name) + 1 :]


def overrides_in(words: list[str], conf: Path) -> list[str]:
    """The overrides of a command line: of a sweep the first point; placeholders are left out."""
    kept = [f"hydra.searchpath=[file://{conf}]"]
    for word in words:
        key, is_override, value = word.partition("=")
        if is_override and not word.startswith(("-", "hydra")) and "<" not in value:
            if "(" in value:  # an interval of Optuna's sweeper
                value = re.findall(r"[\d.]+", value)[0]
            is_list = value.startswith(("[", "{"))
            kept.append(word if is_list else f"{key}={value.split(',')[0]}")
    return kept


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


def test_pictures_and_tables_hold_the_order_of_packages() -> None:
    order = [name for name in ORDER if name != "__main__"]
    drawn = re.findall(r'monospace"[^>]*>([\w, ]+)<', (DOCS / "_static" / "layers.svg").read_text())
    table = re.findall(r"^\| (`hotrec\..*?`) \|", (DOCS / "api.md").read_text(), re.MULTILINE)
    for rows in (drawn, table):
        # Two names in a row stand in the order of imports, rows from the top down.
        names = [re.findall(r"\b(?!hotrec\b)\w+", row) for row in rows]
        assert [name for row in reversed(names) for name in row] == order


def test_readme_names_every_command() -> None:
    text = README.read_text()
    assert [name for name in COMMANDS if f"hotrec {name}" not in text] == []


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


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
def test_python_on_the_page_imports_what_exists(page: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(code, page.name, "exec")
        for line in re.findall(r"^from hotrec.*", code, re.MULTILINE):
            exec(line, {})


def test_walks_are_short_and_name_files_that_exist() -> None:
    text = (DOCS / "how_it_works.md").read_text()
    _, batch, plan = re.split(r"^### Walk of .*$", text, flags=re.MULTILINE)
    for walk, most in ((batch, 15), (plan, 10)):
        files = re.findall(r"^\d+\. `([\w/]+\.py)`", walk, re.MULTILINE)
        assert 0 < len(files) <= most
        assert [name for name in files if not (REPOSITORY / "hotrec" / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_compose(page: Path, tmp_path: Path) -> None:
    # The log that examples name, as one page describes it.
    shown = r"```yaml\n# conf/data/(\w+)\.yaml\n(.*?)```"
    found = re.search(shown, (DOCS / "your_own_data.md").read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f"{found[1]}.yaml").write_text(found[2])
    for name, words in commands_on(page):
        root = COMMANDS[name].config_name
        build_config(compose_config(root, overrides_in(words, tmp_path)))


@pytest.mark.parametrize("target", ["quickstart", "test", "lint", "docs", "bench", "clean", "help"])
def test_make_help_names_the_target(target: str) -> None:
    assert re.search(rf"^{target}:.*## \S", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
