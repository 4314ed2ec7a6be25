"""tests/gpu on the stand-in: no test of a GPU waits for one to be found wrong."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.stand_in.build import why_not
from tests.stand_in.log import REPOSITORY


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.timeout(600)
def test_tests_of_a_gpu_pass() -> None:
    # Of a process alone, whatever started this one.
    ours = ("PYTEST_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    words = ["tests/gpu", "-q", "--no-header"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.stand_in.run_tests", *words],
        cwd=REPOSITORY,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
