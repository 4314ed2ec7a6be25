"""Runs the program as a user does: words in, exit code, one JSON line and files out."""

from __future__ import annotations

from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faulty import Fault, put_in
from tests.helpers.commands import REPOSITORY, Outcome, environment, hotrec, run_on_ranks

__all__ = ["REPOSITORY", "Outcome", "environment", "hotrec"]
SMOKE = "experiment=synthetic_smoke"


@dataclass(frozen=True)
class Workspace:
    """A directory in which the dataset, its profile and a plan have been made."""

    folder: Path
    prepared: dict[str, Any]
    planned: dict[str, Any]

    def train(self, name: str, *words: str) -> dict[str, Any]:
        """Figures of a run of the dataset in ``runs/NAME``."""
        given = ("train", SMOKE, *words)
        return hotrec(*given, cwd=self.folder, HOTREC_RUN_DIR=f"runs/{name}").figures

    def faulty(self, run_dir: Path, fault: Fault, *words: str) -> Outcome:
        """A run of two ranks, of which one goes wrong."""
        variables = environment(HOTREC_RUN_DIR=str(run_dir))
        given = ["train", SMOKE, *words]
        with chdir(self.folder):
            return run_on_ranks(given, 2, variables, before=partial(put_in, fault))


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("workspace")
    return Workspace(
        folder,
        hotrec("prepare", SMOKE, cwd=folder).figures,
        hotrec("plan", SMOKE, "placement=coverage", "plan.world_size=2", cwd=folder).figures,
    )


@pytest.fixture(scope="session")
def trained(workspace: Workspace) -> dict[str, Any]:
    """A hot/cold run of two ranks, with the partition that plan wrote."""
    return workspace.train("hotcold", "placement=saved", "launch.num_ranks=2")


def refusal(*words: str, cwd: Path, **variables: str) -> str:
    """The one line in which a command must end."""
    outcome = hotrec(*words, cwd=cwd, **variables)
    assert (outcome.exit_code, outcome.stdout) == (1, ""), outcome.stderr
    assert "Traceback" not in outcome.stderr
    (said,) = (line for line in outcome.stderr.splitlines() if "error: " in line)
    return said
