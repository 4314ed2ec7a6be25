"""``hotrec <command> --help`` and the configuration page have every key, each with its meaning."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest

from hotrec.cli import main
from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import groups_of, options_of
from hotrec.config.fields import VARIANTS
from hotrec.config.reference import Key, keys_of
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
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert "--multirun" in text
    said = " ".join(text.split())
    assert said.startswith(f"hotrec {name}: {command.summary} Usage: hotrec {name}")
    names = set(re.findall(r"^  ([\w.<>]+)(?:=| \(required\)|  \[)", text, re.MULTILINE))
    for section, keys in keys_by_section(ROOTS[command.config_name]):
        is_told = not section or not command.sections or section in command.sections
        assert all((key.name in names) == is_told for key in keys), section
        for key in keys if is_told else ():
            assert " ".join(key.meaning.replace("`", "").split()[:3]) in said, key.name
    for group, choice in groups_of(command.config_name).items():
        assert f"{group}={choice or ' (no default)'}: {', '.join(options_of(group))}" in said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("topics", "has", "has_not"),
    [
        ("trainer", ["  trainer.seed=0", "Choices of trainer=default:"], "  model."),
        ("optimizer.schedule", ["  optimizer.schedule.decay="], "  optimizer.eps="),
        ("trainer.seed order", ["  trainer.seed=0", "Choices of order=shuffled:"], "  trainer.d"),
        ("experiment", ["  quickstart: "], "["),
        ("optimizer.learning_rate", ["=0.02  [float > 0]"], "eps"),
    ],
)
def test_a_part(
    topics: str, has: list[str], has_not: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, "train", "--help", *topics.split())
    assert [part for part in has if part not in text] == []
    assert has_not not in text
    assert shown(capsys, "help", "train", *topics.split()) == text


@pytest.mark.parametrize(
    ("name", "topic", "advice"),
    [("train", "traner", "trainer"), ("init", "cake", "directory, label"), ("doctor", "cake", "")],
)
def test_an_unknown_part(
    name: str, topic: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help", topic]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.match(rf"error: hotrec {name} --help: expected .* got {topic!r}\.", err)
    assert advice in err


@pytest.mark.parametrize("flags", [[], ["--config-dir", "conf"]])
def test_the_users_own_choices(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf/data").mkdir(parents=True)
    (tmp_path / "conf/data/mine.yaml").write_text("# My log.\nsynthetic: {num_rows: [3]}\n")
    assert "  data= (no default): mine, criteo" in shown(capsys, "plan", *flags, "--help")
    assert "  mine: My log.\n" in shown(capsys, "plan", "--help", "data", *flags)


def test_every_key_and_choice_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "_ext")
    source = [(DOCS / "configuration.md").read_text()]
    importlib.import_module("configuration_reference").fill(
        SimpleNamespace(), "configuration", source
    )
    rows = [line.strip("|").split(" | ") for line in source[0].splitlines() if line[:3] == "| `"]
    meanings = {cells[0].strip(" `"): cells[1].strip(" .") for cells in rows if len(cells) > 1}
    keys = {key.name for root in ROOTS.values() for _, of in keys_by_section(root) for key in of}
    groups = ("experiment", "data", "placement", "pipeline", "trainer", "bench")
    names = keys | {f"hotrec {name}" for name in COMMANDS}
    names |= {choice for group in groups for choice in options_of(group)}
    assert {name for name in names if not meanings.get(name)} == set()
    assert "<!--" not in source[0]
