"""The examples a TorchRec team starts from, run as they would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.commands import environment, run_on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *given: str, num_ranks: int = 2, **variables: str) -> list[str]:
    """The lines that an example prints; the first rank alone does."""
    done = run_on_ranks([str(EXAMPLES / name), *given], num_ranks, environment(**variables))
    assert done.exit_code == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("program", ["dlrm", "histories"])  # of bags, of sequences
def test_the_program_trains_alike_with_torchrec_alone(program: str) -> None:
    plain, off, hot = (
        [float(line.split()[1]) for line in lines]
        for lines in (
            run(f"{program}_torchrec.py"),
            run(f"{program}.py", HOT="off"),
            run(f"{program}.py"),
        )
    )
    np.testing.assert_allclose(off, hot, rtol=1e-4)
    assert len(plain) == len(hot)  # from other weights, which TorchRec draws on each rank
    for losses in (plain, hot):
        assert losses[-1] < 0.5 * losses[0]


def test_a_model_of_several_collections() -> None:
    """As a process alone, and as a user starts ranks."""
    name = "several_collections.py"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    under_torchrun = subprocess.check_output(
        [*words, str(EXAMPLES / name)], env=environment(), text=True, timeout=120
    )
    for _, trained in (run(name, num_ranks=1), under_torchrun.splitlines()):
        first, last = map(float, re.findall(r"\d\.\d+", trained)[:2])
        assert last < 0.5 * first


def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    done = run_on_ranks([str(EXAMPLES / "resume.py")])
    assert done.exit_code == 1
    assert "Traceback" not in done.stderr
    straight = run("resume.py", str(tmp_path / "straight"), "12")
    first = run("resume.py", str(tmp_path / "stopped"), "6")
    assert first + run("resume.py", str(tmp_path / "stopped"), "12") == straight
