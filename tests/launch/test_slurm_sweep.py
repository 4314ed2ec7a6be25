"""A sweep whose jobs Slurm runs, on nodes that are all this host."""

from __future__ import annotations

import csv
import json
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.conftest import SMOKE, Workspace
from tests.helpers.commands import program

# Takes the jobs of an array at once, as one with many nodes would; each has two of them.
SBATCH = """#!/usr/bin/env bash
set -euo pipefail
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
grep -q '^#SBATCH --nodes=2$' "$1" && grep -q '^#SBATCH --signal=TERM@180$' "$1"
export SLURM_ARRAY_JOB_ID=$((JOBS)) SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=2
export SLURM_JOB_NODELIST=localhost,node2
for ((task = 0; task <= last; task++)); do
    SLURM_JOB_ID=$((JOBS + task)) SLURM_ARRAY_TASK_ID=$task \\
        nohup bash "$1" >/dev/null 2>&1 </dev/null &
done
echo "Submitted batch job $SLURM_ARRAY_JOB_ID"
"""
SRUN = """#!/usr/bin/env bash
set -euo pipefail
while [[ $1 == --* ]]; do
    case $1 in
        --output) output=$2 && shift ;;
        --error) shift ;;
    esac
    shift
done
output=${output//%A/$SLURM_ARRAY_JOB_ID}
output=${output//%a/$SLURM_ARRAY_TASK_ID}
for node in 0 1; do
    SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 "$@" &>"${output//%t/$node}" &
done
wait
"""


@pytest.fixture
def free_job() -> int:
    """A job's number whose port is free: job n has 20000 + n % 10000."""
    for number in range(5000, 10000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", 20000 + number))
            return number
    raise AssertionError("no port is free")


def write_programs(folder: Path, **programs: str) -> str:
    """A directory for PATH with these programs."""
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return str(folder)


def test_each_job_on_slurm_is_a_group_over_its_nodes(
    workspace: Workspace, tmp_path: Path, free_job: int
) -> None:
    """With stand-ins for Slurm's programs, whose nodes are all this host."""
    programs = write_programs(tmp_path / "bin", sbatch=SBATCH, srun=SRUN, sacct="#!/bin/sh\n")
    words = ["--multirun", SMOKE, "hydra/launcher=slurm", "hydra.launcher.nodes=2"]
    outcome = program(
        "train",
        *words,
        "placement=coverage",
        "trainer.max_steps=3,-1",
        cwd=workspace.folder,
        HOTREC_RUN_DIR=str(tmp_path / "sweep"),
        PATH=f"{programs}:{os.environ['PATH']}",
        JOBS=str(free_job),
    )
    assert outcome.exit_code == 1, outcome.stderr  # of the job with an impossible setting
    summary = json.loads((tmp_path / "sweep" / "0" / "summary.json").read_text())
    assert (summary["num_steps"], summary["world_size"]) == (3, 2)
    environment = json.loads((tmp_path / "sweep" / "0" / "environment.json").read_text())
    assert environment["world_size"] == 2
    with (tmp_path / "sweep" / "sweep.csv").open() as file:
        assert [row["finished"] for row in csv.DictReader(file)] == ["True", "False"]
    assert list((tmp_path / "sweep").rglob("exit_code")) == []
