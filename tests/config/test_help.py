"""``hotrec <command> --help`` names the command, its groups or keys, and where the reference is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotrec.cli import main
from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import compose_config, options_of


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([name, "--help"])
    assert not exited.value.code
    text = capsys.readouterr().out
    assert text.startswith(f"hotrec {name}: {COMMANDS[name].summary}\n")
    assert "docs/configuration.md" in text
    assert "--multirun" in text
    assert "schema" not in text
    if COMMANDS[name].config_name in ("config", "bench"):
        for group in ("experiment", "data", "placement", "bench"):
            assert f"{group}: {', '.join(options_of(group))}\n" in text
    else:
        assert all(f"{key}:" in text for key in compose_config(COMMANDS[name].config_name, []))
    assert not any(tmp_path.iterdir())


def test_wrong_override(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "placement=nope", "--help"]) == 1
    assert "placement: expected one of all_cold, " in capsys.readouterr().err
