"""A stand-in for hotrec that records how each rank was started, and how to start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hotrec.runtime.watchdog import EXIT_CODE
from tests.e2e.conftest import workspace  # noqa: F401

REPOSITORY = Path(__file__).parents[2]
# Whatever starts the tests must not leak into what they start.
LEAKS = ("HOTREC_", "SLURM_", "TORCHELASTIC_", "TORCHX_", "PET_", "PYTEST_")
RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}

STAND_IN = """
import json, os, pathlib, signal, sys, time

rank = os.environ["RANK"]
folder = pathlib.Path(__file__).parents[1] / "seen"
folder.mkdir(exist_ok=True)
facts = {"arguments": sys.argv[1:], "environment": dict(os.environ)}
(folder / f"{rank}.json.part").write_text(json.dumps(facts))
(folder / f"{rank}.json.part").rename(folder / f"{rank}.json")
if sys.argv[1] == "fail":
    sys.exit(int(sys.argv[2]))
if sys.argv[1] == "wait":
    def save(number, frame):
        (folder / f"{rank}.saved").touch()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    (folder / f"{rank}.ready").touch()
    time.sleep(60)
"""


@dataclass(frozen=True)
class Place:
    """A directory from which launchers start the stand-in instead of hotrec."""

    path: Path

    def environment(self, **added: str) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(LEAKS) and name not in RANK_VARIABLES
        }
        return kept | added

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.path,
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(command, **environment)
        try:
            output, errors = process.communicate(timeout=90)
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def torchrun(self, *arguments: str) -> list[str]:
        script = str(self.path / "launch" / "torchrun.sh")
        return [script, "--python", sys.executable, *arguments]

    def seen(self) -> list[dict[str, Any]]:
        """What each rank saw, in the order of ranks."""
        files = sorted((self.path / "seen").glob("*.json"), key=lambda file: int(file.stem))
        return [json.loads(file.read_text()) for file in files]

    def seen_variable(self, name: str) -> list[str | None]:
        return [facts["environment"].get(name) for facts in self.seen()]

    def wait_for(self, *names: str) -> None:
        end_s = time.monotonic() + 60
        while not all((self.path / "seen" / name).exists() for name in names):
            assert time.monotonic() < end_s, f"{names} did not appear within a minute"
            time.sleep(0.05)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    package = tmp_path / "hotrec"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    # torchrun as hotrec starts it is the real one.
    (package / "cli").mkdir()
    (package / "cli" / "__init__.py").touch()
    for name in ("launch.py", "ranks.py"):
        (package / "cli" / name).symlink_to(REPOSITORY / "hotrec" / "cli" / name)
    (package / "runtime").mkdir()
    (package / "runtime" / "__init__.py").touch()
    (package / "runtime" / "watchdog.py").write_text(f"EXIT_CODE = {EXIT_CODE}\n")
    (tmp_path / "launch").symlink_to(REPOSITORY / "launch")
    # Where the launchers look for an interpreter by themselves.
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return Place(tmp_path)
