"""The example a TorchRec team starts from, run as they would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "dlrm_library_use.py"
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
]  # fmt: skip


@pytest.mark.parametrize("launcher", [[sys.executable], TORCHRUN], ids=["python", "torchrun"])
def test_example_trains(launcher: list[str]) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1])}
    done = subprocess.run(
        [*launcher, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout  # the first rank alone prints
    losses = re.fullmatch(r"loss (\d\.\d+) -> (\d\.\d+)", lines[0])
    hot = re.fullmatch(r"hot fraction of lookups (0\.\d+)", lines[1])
    assert losses is not None
    assert hot is not None
    assert float(losses[2]) < 0.5 * float(losses[1])
    assert 0.5 < float(hot[1]) < 0.9  # neither none nor all


def test_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
