"""``hotrec <command> --help`` and the configuration page have every key, each with its meaning."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
from configuration_keys import Key, keys_of

from hotrec.cli import main
from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import groups_of, options_of
from hotrec.config.fields import VARIANTS
from hotrec.config.roots import ROOTS
from tests.policy.source import REPOSITORY

DOCS = REPOSITORY / "docs"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command line prints."""
    assert main(words) == 0
    return capsys.readouterr().out


def keys_by_section(root: type) -> Iterator[tuple[str, list[Key]]]:
    """The keys of a root's sections, with those of all choices; "" for its own keys."""
    for item, kind in get_type_hints(root).items():
        if is_dataclass(kind):
            kinds = VARIANTS.get(item, {"": kind}).values()
            yield item, [key for of in kinds for key in keys_of(of, f"{item}.")]
        else:
            yield "", [key for key in keys_of(root, "") if key.name == item]


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, command = shown(capsys, name, "--help"), COMMANDS[name]
    assert text.startswith(f"hotrec {name}: {command.summary}\nUsage: hotrec {name} ")
    for group, choice in groups_of(command.config_name).items():
        assert f"{group}={choice or ''}: {', '.join(options_of(group))}" in text
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [[], ["--config-dir", "conf"]])
def test_the_users_own_choices(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf/data").mkdir(parents=True)
    (tmp_path / "conf/data/mine.yaml").write_text("# My log.\nsynthetic: {num_rows: [3]}\n")
    assert "  data=: mine, criteo" in shown(capsys, "plan", *flags, "--help")


def test_every_key_and_choice_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "_ext")
    source = [(DOCS / "configuration.md").read_text()]
    importlib.import_module("configuration_reference").fill(
        SimpleNamespace(), "configuration", source
    )
    rows = [line.strip("|").split(" | ") for line in source[0].splitlines() if line[:3] == "| `"]
    meanings = {cells[0].strip(" `"): cells[1].strip(" .") for cells in rows if len(cells) > 1}
    keys = {key.name for root in ROOTS.values() for _, of in keys_by_section(root) for key in of}
    groups = ("experiment", "data", "placement", "pipeline", "plans")
    names = keys | {f"hotrec {name}" for name in COMMANDS}
    names |= {choice for group in groups for choice in options_of(group)}
    assert {name for name in names if not meanings.get(name)} == set()
    assert "<!--" not in source[0]
