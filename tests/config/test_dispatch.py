"""The program's first words: fast, without torch, clear when misspelt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotrec.cli import main
from hotrec.cli.commands import COMMANDS
from hotrec.cli.stage import plain
from tests.policy.source import REPOSITORY


def test_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        for name, command in COMMANDS.items():
            assert f"  {name:<9}  {command.summary}" in lines


@pytest.mark.parametrize(
    ("word", "advice"),
    [("trian", "`hotrec train`"), ("xyz", "Run `hotrec`")],
)
def test_unknown_command(word: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: command: expected one of init, ")
    assert f"got {word!r}" in err
    assert advice in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hotrec ")


def test_torch_is_not_loaded() -> None:
    words = [[], ["--version"], ["train", "--help"], ["trian"]]
    program = (
        f"import sys; from hotrec.cli import main; [main(words) for words in {words!r}]; "
        "sys.exit('torch' in sys.modules or 'polars' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_figures_are_json() -> None:
    figures = {"a": float("nan"), "b": [float("inf"), 1.5, (2, None)], "c": {"d": "x"}}
    assert plain(figures) == {"a": None, "b": [None, 1.5, [2, None]], "c": {"d": "x"}}


def test_what_libraries_print_is_not_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(config: object, run_dir: Path) -> dict[str, object]:
        print("of a library")
        return {"verdict": ["fast"], "page": run_dir / "report.html"}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hotrec.cli.report.run", run)
    assert main(["report", "runs=[a]"]) == 0
    out, err = capfd.readouterr()
    [line] = out.splitlines()
    assert json.loads(line)["verdict"] == ["fast"]
    assert "of a library" in err


@pytest.mark.parametrize("words", [["train", "--help"], ["train", "--cfg", "job"]])
def test_a_reader_that_stops_reading_is_no_error(words: list[str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "hotrec", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(writer)
    assert done.stderr == b""
