"""``hotrec <command> --help`` has every key of the command with type, meaning and default."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from hotrec.cli import main
from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import groups_of, options_of
from hotrec.config.fields import VARIANTS
from hotrec.config.reference import keys_of
from hotrec.config.roots import ROOTS


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command line prints."""
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, name, "--help")
    command = COMMANDS[name]
    assert " ".join(text.split()).startswith(f"hotrec {name}: {command.summary} Usage: ")
    assert "--multirun" in text
    assert "schema" not in text
    names = re.findall(r"^  ([\w.<>]+)(?:=| \(required\)|  \[)", text, re.MULTILINE)
    root = ROOTS[command.config_name]
    for item, kind in get_type_hints(root).items():
        if command.sections and is_dataclass(kind) and item not in command.sections:
            assert not any(key.startswith(f"{item}.") for key in names)
            assert re.search(rf"keys of .*\b{item}\b", text, re.DOTALL)
            continue
        variants = VARIANTS.get(item, {"": kind}) if is_dataclass(kind) else {}
        keys = [key for variant in variants.values() for key in keys_of(variant, f"{item}.")]
        for key in keys or [key for key in keys_of(root, "") if key.name == item]:
            assert re.search(rf"^  {re.escape(key.name)}\b", text, re.MULTILINE), key.name
            first = key.meaning.replace("`", "").split()[:3]
            assert " ".join(first) in " ".join(text.split()), key.name
    for group, choice in groups_of(command.config_name).items():
        options = ", ".join(options_of(group))
        line = f"{group}={choice or ' (no default)'}: {options}"
        assert line in " ".join(text.split()), group
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_lines_fit(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in COMMANDS:
        longest = max(shown(capsys, name, "--help").splitlines(), key=len)
        assert len(longest) <= min(columns, 100), longest


def test_defaults_are_those_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "train", "--help")
    for line in (
        "  trainer.batch_size=2048  [int >= 1]",
        "  trainer.save_every_s=600  [float >= 0, <= 1000000]",
        "  placement.partition_dir=${paths.partition}  [str]",
        "  model.pooling=sum  [sum, mean]",
        "  model.item_columns (required)  [list of str]",
        "  optimizer.learning_rate=0.02  [float > 0]",
        "  launch.num_ranks=1  [int >= 1, <= 1024]",
    ):
        assert f"\n{line}\n" in text, line
    said = " ".join(text.split())
    assert "With sgd by default 0.1. With adam by default 0.001." in said
    bench = shown(capsys, "bench", "--help", "optimizer.learning_rate")
    assert bench.startswith("  optimizer.learning_rate=0.001  [")


@pytest.mark.parametrize(
    ("topics", "has", "has_not"),
    [
        ("trainer", ["Choices of trainer=default:", "trainer: the training run"], "  model."),
        ("optimizer.schedule", ["  optimizer.schedule.decay="], "  optimizer.eps="),
        ("optimizer.schedule.", ["  optimizer.schedule.power="], "  optimizer.eps="),
        ("trainer.seed order", ["  trainer.seed=0", "Choices of order=shuffled:"], "  trainer.d"),
        ("experiment", ["  quickstart: A DLRM on"], "["),
        ("append", ["  append=[]  [list of str]"], "  overwrite"),
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
    ("line", "advice"),
    [
        ("train --help traner", "Did you mean trainer "),
        ("train --help optimzer.schedule", "Did you mean optimizer.schedule "),
        ("plan --help xyz", "Name one of allow_repeats, append, "),
        ("init --help cake", "Name one of directory, label, name, path, time."),
        ("doctor --help cake", "It has none."),
    ],
)
def test_an_unknown_part(line: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 1
    out, err = capsys.readouterr()
    name, _, topic = line.split()
    start = f"error: hotrec {name} --help: expected a section, a group or a key, got {topic!r}. "
    assert (out, err.startswith(start), err.count("\n")) == ("", True, 1)
    assert advice in err


@pytest.mark.parametrize("flags", [[], ["--config-dir", "conf"], ["--config-dir=conf"]])
def test_the_users_own_choices(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf/data").mkdir(parents=True)
    (tmp_path / "conf/data/mine.yaml").write_text("# My log.\nsynthetic: {num_rows: [3]}\n")
    assert "  data= (no default): mine, criteo" in shown(capsys, "plan", *flags, "--help")
    assert "  mine: My log.\n" in shown(capsys, "plan", "--help", "data", *flags)


def test_first_words(capsys: pytest.CaptureFixture[str]) -> None:
    for name, usage in (("init", "hotrec init [<path>]"), ("report", "hotrec report [<runs> ...]")):
        assert f"Usage: {usage} [key=value ...]" in shown(capsys, name, "--help")
