"""What the project offers is written down where a newcomer looks."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from tests.policy.source import REPOSITORY

README = REPOSITORY / "README.md"


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


def test_readme_names_every_command() -> None:
    commands = importlib.import_module("hotrec.cli.commands").COMMANDS
    text = README.read_text()
    assert [name for name in commands if f"hotrec {name}" not in text] == []


def test_readme_names_files_that_exist() -> None:
    named = set(re.findall(r"\]\((?!https?:|#)([^)#\s]+)", README.read_text()))
    assert [name for name in sorted(named) if not (REPOSITORY / name).exists()] == []


@pytest.mark.parametrize("target", ["quickstart", "test", "lint", "bench", "clean", "help"])
def test_make_help_names_the_target(target: str) -> None:
    assert re.search(rf"^{target}:.*## \S", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
