"""The examples a TorchRec team starts from, run as they would run them."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.commands import environment, run_on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES, MOST_ADDED = 60, 6
PROGRAMS = ["dlrm", "histories"]  # of bags, of sequences; each beside TorchRec alone


def run(name: str, *given: str, num_ranks: int = 2, **variables: str) -> list[str]:
    """The lines that an example prints; the first rank alone does."""
    done = run_on_ranks([str(EXAMPLES / name), *given], num_ranks, environment(**variables))
    assert done.exit_code == 0, done.stderr
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
            run(f"{program}_torchrec.py"),
            run(f"{program}.py", HOT="off"),
            run(f"{program}.py"),
        )
    )
    np.testing.assert_allclose(off, hot, rtol=1e-4)
    assert len(plain) == len(hot)  # from other weights, which TorchRec draws on each rank
    for losses in (plain, hot):
        assert losses[-1] < 0.5 * losses[0]


def test_resume_says_how_it_is_used() -> None:
    done = run_on_ranks([str(EXAMPLES / "resume.py")])
    assert done.exit_code == 1
    assert "Traceback" not in done.stderr
    # FBGEMM may warn of its version before.
    assert done.stderr.splitlines()[-1].startswith("usage: resume.py DIRECTORY STEPS")


def test_a_model_of_several_collections() -> None:
    """As a process alone, and as a user starts ranks."""
    name = "several_collections.py"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    under_torchrun = subprocess.check_output(
        [*words, str(EXAMPLES / name)], env=environment(), text=True, timeout=120
    )
    for choice, trained in (run(name, num_ranks=1), under_torchrun.splitlines()):
        assert re.match(r"(hot_cold|torchrec) .*, \d+ hot rows: ", choice)
        losses = re.match(r"loss (\d\.\d+) -> (\d\.\d+) in 40 steps", trained)
        assert losses is not None
        assert float(losses[2]) < 0.5 * float(losses[1])


def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    straight = run("resume.py", str(tmp_path / "straight"), "12")
    first = run("resume.py", str(tmp_path / "stopped"), "6")
    second = run("resume.py", str(tmp_path / "stopped"), "12")
    assert first + second == straight
