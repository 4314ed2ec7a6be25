"""Runs the program as a user does: words in, exit code, one JSON line and files out."""

from __future__ import annotations

import json
import os
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hotrec.cli.app import run_command
from tests.helpers import forked
from tests.helpers.forked import environment

REPOSITORY = Path(__file__).resolve().parents[2]
SMOKE = "experiment=synthetic_smoke"


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code, the last line of standard output, standard error."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def figures(self) -> dict[str, Any]:
        assert self.exit_code == 0, self.stderr
        (line,) = self.stdout.splitlines()
        return json.loads(line)


def hotrec(*words: str, cwd: Path, timeout_s: float = 150, **variables: str) -> Outcome:
    """The program in a process of its own; see ``forked``."""
    done = forked.run(
        [sys.executable, "-m", "hotrec", *words],
        cwd=cwd,
        env=environment(**variables),
        timeout=timeout_s,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def hotrec_here(*words: str, cwd: Path, **variables: str) -> Outcome:
    """``hotrec`` in this process, which has imported torch already; for commands without ranks."""
    out, err = StringIO(), StringIO()
    with (
        chdir(cwd),
        mock.patch.dict(os.environ, environment(**variables), clear=True),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        exit_code = run_command(words[0], words[1:])
    return Outcome(exit_code, out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class Workspace:
    """A directory in which the dataset, its profile and a plan have been made."""

    folder: Path
    prepared: dict[str, Any]
    profiled: dict[str, Any]
    planned: dict[str, Any]


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("workspace")
    return Workspace(
        folder,
        hotrec("prepare", SMOKE, cwd=folder).figures,
        hotrec_here("profile", SMOKE, cwd=folder).figures,
        hotrec_here("plan", SMOKE, "placement=coverage", "plan.world_size=2", cwd=folder).figures,
    )


@pytest.fixture(scope="session")
def trained(workspace: Workspace) -> dict[str, Any]:
    """A hot/cold run of two ranks, with the partition that plan wrote."""
    words = [SMOKE, "placement=saved", "launch.num_ranks=2"]
    outcome = hotrec("train", *words, cwd=workspace.folder, HOTREC_RUN_DIR="runs/hotcold")
    return outcome.figures
