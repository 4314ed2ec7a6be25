"""Runs the program as a user does: words in, exit code, one JSON line and files out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import REPOSITORY, Outcome, environment, hotrec

__all__ = ["REPOSITORY", "Outcome", "environment", "hotrec"]
SMOKE = "experiment=synthetic_smoke"


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
        hotrec("profile", SMOKE, cwd=folder).figures,
        hotrec("plan", SMOKE, "placement=coverage", "plan.world_size=2", cwd=folder).figures,
    )


@pytest.fixture(scope="session")
def trained(workspace: Workspace) -> dict[str, Any]:
    """A hot/cold run of two ranks, with the partition that plan wrote."""
    words = [SMOKE, "placement=saved", "launch.num_ranks=2"]
    outcome = hotrec("train", *words, cwd=workspace.folder, HOTREC_RUN_DIR="runs/hotcold")
    return outcome.figures
