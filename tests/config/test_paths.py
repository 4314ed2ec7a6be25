"""Paths with any signs, as the first words of a command and within overrides."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hotrec.cli.app import _complete, run_command
from hotrec.cli.store import compose_config

ODD = [
    *("dt=2024-05-01", "two words", "a,b", "it's", "x#1", "100%", "\u65e5\u5fd7", "x[1]", "(p)"),
    *("a;b", "b\\c", "a${b}", 'say "x"', "label=1", "name=x", "~home", "{c: d}", "a:b", "a\\"),
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(word: str) -> Any:
    """The value of an override, as OmegaConf resolves it."""
    value = OverridesParser.create().parse_rule(word, "override").value()
    plain = [str(one) for one in value] if isinstance(value, list) else str(value)
    return OmegaConf.to_container(OmegaConf.create({"value": plain}), resolve=True)["value"]


def make_log(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    lines = [f"{n % 2},u{n % 7}\n" for n in range(60)]
    (folder / "part.csv").write_text("".join(["clicked,user\n", *lines]))


def test_the_first_word_is_a_path_whatever_signs_it_has(tmp_path: Path) -> None:
    for name in ODD:
        make_log(tmp_path / name)
        (word,) = _complete("init", [name])[1]
        assert read(word.replace("path=", "run_name=")) == name
    (word,) = _complete("predict", ODD)[1]
    assert read(word) == ODD


@pytest.mark.parametrize("name", ["dt=2024-05-01", "a${b}"])
def test_init_and_what_it_writes(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_log(tmp_path / name)
    assert run_command("init", [name, "name=log"]) == 0, capfd.readouterr().err
    assert run_command("prepare", ["data=log"]) == 0, capfd.readouterr().err
    made, prepared = map(json.loads, capfd.readouterr().out.splitlines())
    assert made["num_rows"] == sum(prepared["num_samples"].values()) == 60


def test_a_pattern_is_a_path(tmp_path: Path) -> None:
    make_log(tmp_path / "label=1")
    assert run_command("init", ["label=*/part.csv"]) == 0


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["nme=x"], "nme"),
        (["label=clicked"], "path"),
        (["dt=1/absent.csv"], "path"),
        (["a.csv", "b.csv"], "hotrec init"),
    ],
)
def test_words_that_are_no_path(
    words: list[str], key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command("init", words) == 1
    assert re.match(rf"error: {key}: expected ", capfd.readouterr().err)


def test_commands_that_take_several() -> None:
    for command, key in (("report", "runs"), ("predict", "input")):
        words = _complete(command, ["runs/a", "lr=0.1", "output=x", "b"])[1]
        assert words.pop() == "b", "after an override a word is none"
        assert compose_config(command, words)[key] == ["runs/a", "lr=0.1"]
    words = _complete("evaluate", ["runs/lr=0.1, b", "checkpoint=best"])[1]
    config = compose_config("evaluate", words)
    assert (config.run_dir, config.checkpoint) == ("runs/lr=0.1, b", "best")


def test_a_text_with_commas(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command("evaluate", ["run_dir=a,b"]) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: command line: expected")
    assert "run_dir=a,b" in err
