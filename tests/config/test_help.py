"""Help texts name every key of the command, and their examples are true."""

from __future__ import annotations

import re
import shlex

import pytest

from hotrec.cli import main
from hotrec.cli.commands import COMMANDS
from hotrec.cli.help_text import _node_keys
from hotrec.cli.store import build_config, compose_config, options_of


def shown_help(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_keys_and_choices(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = COMMANDS[name]
    text = shown_help(capsys, name)
    assert text.startswith(f"hotrec {name}: {command.summary}\n")
    composed = compose_config(command.config_name, [])
    for section in filter(None, command.sections):
        for key in _node_keys(composed[section], f"{section}."):
            assert f"  {key.name}=" in text
            assert key.meaning, key.name
    if command.config_name == "config":
        for group in ("experiment", "data"):
            assert " ".join(options_of(group)) in " ".join(text.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_is_readable(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown_help(capsys, name)
    described = text[: text.index("Examples:")]
    assert max(map(len, described.splitlines())) <= 100
    assert "???" not in text
    assert COMMANDS[name].description.split()[0] in text


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_compose(name: str) -> None:
    assert len(COMMANDS[name].examples) == 3
    for _, line in COMMANDS[name].examples:
        words = shlex.split(line)
        found = " ".join(words)
        assert re.search(rf"hotrec {name}\b", found), line
        overrides = [w for w in words if "=" in w and not w.startswith("-") and "," not in w]
        build_config(compose_config(COMMANDS[name].config_name, overrides))


def test_values_follow_the_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown_help(capsys, "plan", "placement=budget", "trainer.batch_size=77")
    assert "placement.hot_budget_mib=1024" in text
    assert "trainer.batch_size=77" in text
    assert "coverage_frac" not in text


def test_limits_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown_help(capsys, "plan", "placement=coverage")
    assert re.search(r"placement\.coverage_frac=0\.8 +share of the lookups .* \[>= 0, <= 1\]", text)


def test_wrong_override(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "placement=nope", "--help"]) == 1
    assert "placement: expected one of all_cold, " in capsys.readouterr().err
