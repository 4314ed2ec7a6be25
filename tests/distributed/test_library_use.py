"""The examples a TorchRec team starts from, run as they would run them."""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import forked

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
]  # fmt: skip
MOST_LINES, MOST_ADDED = 60, 6
PROGRAMS = ["dlrm", "histories"]  # of bags, of sequences; each beside TorchRec alone


def run(launcher: list[str], name: str, *given: str, **variables: str) -> list[str]:
    """The lines that an example prints; the first rank alone does."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent), **variables}
    words = [*launcher, str(EXAMPLES / name), *given]
    done = forked.run(words, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def losses_of(lines: list[str]) -> list[float]:
    return [float(line.split()[1]) for line in lines]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_torchrec_program_changes_a_few_lines(program: str) -> None:
    plain, ours = (
        (EXAMPLES / f"{program}{end}.py").read_text().splitlines() for end in ("_torchrec", "")
    )
    assert max(len(plain), len(ours)) <= MOST_LINES
    changes = [line for line in difflib.ndiff(plain[1:], ours[1:]) if line.startswith("+ ")]
    assert len([line for line in changes if line[2:].strip()]) <= MOST_ADDED, changes


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_trains_alike_with_torchrec_alone(program: str) -> None:
    plain, off, hot = (
        losses_of(lines)
        for lines in (
            run(TORCHRUN, f"{program}_torchrec.py"),
            run(TORCHRUN, f"{program}.py", HOT="off"),
            run(TORCHRUN, f"{program}.py"),
        )
    )
    np.testing.assert_allclose(off, hot, rtol=1e-4)
    assert len(plain) == len(hot)  # from other weights, which TorchRec draws on each rank
    for losses in (plain, hot):
        assert losses[-1] < 0.5 * losses[0]


def test_resume_says_how_it_is_used() -> None:
    done = forked.run([sys.executable, str(EXAMPLES / "resume.py")], env=forked.environment())
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    # FBGEMM may warn of its version before.
    assert done.stderr.splitlines()[-1].startswith("usage: resume.py DIRECTORY STEPS")


@pytest.mark.parametrize("launcher", [[sys.executable], TORCHRUN], ids=["python", "torchrun"])
def test_a_model_of_several_collections(launcher: list[str]) -> None:
    choice, trained = run(launcher, "several_collections.py")
    assert re.match(r"(hot_cold|torchrec) .*, \d+ hot rows: ", choice)
    losses = re.match(r"loss (\d\.\d+) -> (\d\.\d+) in 40 steps", trained)
    assert losses is not None
    assert float(losses[2]) < 0.5 * float(losses[1])


def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    straight = run(TORCHRUN, "resume.py", str(tmp_path / "straight"), "12")
    first = run(TORCHRUN, "resume.py", str(tmp_path / "stopped"), "6")
    second = run(TORCHRUN, "resume.py", str(tmp_path / "stopped"), "12")
    assert first + second == straight
