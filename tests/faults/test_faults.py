"""A twentieth of the cases; ``make faults`` runs all of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.process import REPOSITORY


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_every_case_is_as_it_should_be() -> None:
    """All are run by a process that imports the program once."""
    command = [sys.executable, "-m", "tests.faults", "--fast"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
