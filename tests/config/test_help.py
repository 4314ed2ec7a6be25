"""``hotrec <command> --help`` names the command, its groups or keys, and where the reference is."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from hotrec.cli import main
from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import options_of
from hotrec.config.fields import VARIANTS
from hotrec.config.reference import keys_of
from hotrec.config.roots import ROOTS


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([name, "--help"])
    assert not exited.value.code
    text = capsys.readouterr().out
    command = COMMANDS[name]
    assert text.startswith(f"hotrec {name}: {command.summary}\n")
    assert "docs/configuration.md" in text
    assert "--multirun" in text
    assert "schema" not in text
    shown = dict(re.findall(r"^  (\S+)(?:=| \()(.*?)\)?$", text, re.MULTILINE))
    root = ROOTS[command.config_name]
    for item, kind in get_type_hints(root).items():
        if command.sections and is_dataclass(kind) and item not in command.sections:
            assert not any(key.startswith(f"{item}.") for key in shown)
            assert re.search(rf"keys of .*\b{item}\b", text, re.DOTALL)
            continue
        variants = VARIANTS.get(item, {"": kind}) if is_dataclass(kind) else {}
        keys = [key for variant in variants.values() for key in keys_of(variant, f"{item}.")]
        for key in keys or [key for key in keys_of(root, "") if key.name == item]:
            assert key.name in shown, key.name
            first = key.meaning.replace("`", "").split()[:3]
            assert " ".join(first) in " ".join(text.split()), key.name
    if command.config_name in ("config", "bench"):
        assert f"  placement: {', '.join(options_of('placement'))}\n" in text or name == "bench"
        assert f"  experiment: {', '.join(options_of('experiment'))}\n" in text
    assert not any(tmp_path.iterdir())


def test_defaults_are_those_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for line in (
        "  trainer.batch_size=2048",
        "  trainer.save_every_s=600",
        "  placement.partition_dir=${paths.partition}",
        "  optimizer.learning_rate (required)",
        "  launch.num_ranks=1",
    ):
        assert f"\n{line}\n" in text


def test_first_words(capsys: pytest.CaptureFixture[str]) -> None:
    for name, usage in (("init", "hotrec init [<path>]"), ("report", "hotrec report [<runs> ...]")):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert f"Usage: {usage} [key=value ...]" in capsys.readouterr().out


def test_wrong_override(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "placement=nope", "--help"]) == 1
    assert "placement: expected one of all_cold, " in capsys.readouterr().err
