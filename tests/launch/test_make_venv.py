"""requirements/make_venv.sh: which interpreter it takes, and what it says when it takes none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch.conftest import REPOSITORY

SCRIPT = REPOSITORY / "requirements" / "make_venv.sh"
# What pyenv leaves on PATH for a version that is installed but not chosen.
DEAD_SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"
# Answers the question of the script, then records how it is asked to make the environment.
RECORDER = """#!/bin/sh
case "$1" in
    -) exit 0 ;;
    --version) echo "Python 3.11.9" ;;
    *) echo "$0 $*" >> "$RECORD"; exit 9 ;;
esac
"""
# An environment's Python: records what pip is to install from.
PIP_RECORDER = """#!/bin/sh
case "$*" in
    *" -r "*) for file; do :; done; cat "$file" >> "$RECORD" ;;
    *" show "*) exit 1 ;;
    -c*) echo True ;;
esac
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory to be the whole PATH, with what a shell script needs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "sh", "dirname", "head"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def add(programs: Path, name: str, text: str) -> str:
    (programs / name).write_text(text)
    (programs / name).chmod(0o755)
    return str(programs / name)


def run(programs: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    venv = programs.parent / "venv"
    return subprocess.run(
        [str(programs / "bash"), str(SCRIPT), str(venv), *arguments],
        env={"PATH": str(programs), "RECORD": str(programs.parent / "record"), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_shim_without_a_python_behind_it_is_passed_over(programs: Path) -> None:
    add(programs, "python3.12", DEAD_SHIM)
    add(programs, "python3.11", RECORDER)
    done = run(programs)
    assert done.returncode == 9
    assert done.stderr.endswith(f"making {programs.parent / 'venv'} with Python 3.11.9\n")
    record = (programs.parent / "record").read_text()
    assert record == f"{programs / 'python3.11'} -m venv {programs.parent / 'venv'}\n"


def test_pins_are_the_pairs_where_it_has_others(programs: Path) -> None:
    """pip is given the whole set, with the versions of the pair and no CPU build of torch."""
    for name in ("awk", "sed", "rm", "cat"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    venv = programs.parent / "venv"
    (venv / "bin").mkdir(parents=True)
    add(venv / "bin", "python", PIP_RECORDER)
    done = run(programs, "cuda", "pins", TORCH="2.11")
    assert done.returncode == 0, done.stderr
    pins = (programs.parent / "record").read_text().splitlines()
    lock = REPOSITORY / "requirements"
    files = ("common.lock", "cuda-libs.lock", "cuda.lock")
    lines = [line for file in files for line in (lock / file).read_text().splitlines()]
    expected = {line for line in lines if "==" in line}
    assert len(pins) == len(set(pins)) == len(expected)
    pair = set((lock / "torch-2.11.lock").read_text().splitlines())
    changed = set(pins) - expected
    assert "torch===2.11.0" in changed
    assert changed - {"torch===2.11.0"} == set(pins) & pair
