"""A twentieth of the cases; ``make faults`` runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.process import REPOSITORY
from tests.faults.table import all_cases

NAMES = [case.name for case in all_cases() if case.is_fast]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of the fast cases, all run at once by a process that imports the program once."""
    document: Path = tmp_path_factory.mktemp("faults") / "results.json"
    command = [sys.executable, "-m", "tests.faults", "run", "--fast", "--results", str(document)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert document.exists(), done.stderr
    return {result["name"]: result for result in json.loads(document.read_text())["results"]}


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    if result["verdict"] == "skipped":
        pytest.skip(result["reasons"][0])
    assert result["verdict"] == "ok", "\n".join([*result["reasons"], result["got"]])
