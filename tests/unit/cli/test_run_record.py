"""What a command writes into its run directory before it is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotrec.cli.app import _write_config
from hotrec.runs.record import staged_record
from hotrec.runtime.run_dir import CHECKPOINTS, CONFIG_FILE, STAGED


def test_what_a_killed_run_staged_is_gone(tmp_path: Path) -> None:
    (tmp_path / STAGED / "partition").mkdir(parents=True)
    with staged_record(tmp_path, is_first=True) as staged:
        assert list(staged.iterdir()) == []


def test_no_other_command_writes_into_a_training_run(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINTS).mkdir()
    (tmp_path / CONFIG_FILE).write_text("trained")
    with pytest.raises(ValueError, match="expected a directory without a training run"):
        _write_config("evaluate", "new", tmp_path)
    assert (tmp_path / CONFIG_FILE).read_text() == "trained"
