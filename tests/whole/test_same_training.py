"""The cases of ``benchmarks/same_training.py`` that ``tests/e2e`` leaves out train as recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.same_training import all_cases
from tests.e2e.test_same_training import CASES, differences


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_training_is_as_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = [name for name in all_cases() if name not in CASES]
    assert differences(tmp_path, others) == [], capsys.readouterr().err
