"""What launchers leave in the environment, against each other and the command line."""

import os
import signal
import sys
import tempfile
import threading
import time
from unittest.mock import Mock

import pytest

from hotrec.cli.launch import (
    PARENT,
    check_environment,
    end_with_parent,
    is_under_torchrun,
    wait_for_child,
)

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "PET_", "SLURM_", "TORCHELASTIC_")
MASTER = {"MASTER_ADDR": "localhost", "MASTER_PORT": "23456"}
LEFT_OVER = {"RANK": "0", "WORLD_SIZE": "1", **MASTER}
TWO = {"RANK": "0", "WORLD_SIZE": "2", **MASTER}
TORCHRUN = {**TWO, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
TWO_HOSTS = {**TORCHRUN, "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a"}
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
PYTORCH_JOB = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "0"}


@pytest.fixture
def given(monkeypatch):
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)

    def set_all(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


IN_STEP = {"SLURM_STEP_NUM_TASKS": "2"}
ELASTIC = {**LEFT_OVER, "TORCHELASTIC_RUN_ID": "a"}


@pytest.mark.parametrize(
    ("variables", "num_ranks", "is_rank"),
    [
        ({}, 2, False),
        ({**LEFT_OVER, **PYTORCH_JOB}, 2, False),
        ({**SALLOC, "SLURM_STEP_NUM_TASKS": "1"}, 2, False),
        (TORCHRUN, 2, True),
        (TWO, None, True),
        (ELASTIC, None, True),
        ({**TWO_HOSTS, **IN_STEP, "SLURM_PROCID": "1"}, 2, True),
        ({"OMPI_COMM_WORLD_SIZE": "2", **TWO}, None, True),
        ({**TWO_HOSTS, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2"}, None, True),
    ],
)
def test_right(variables, num_ranks, is_rank, given):
    given(variables)
    check_environment(num_ranks)
    assert is_under_torchrun() is is_rank


@pytest.mark.parametrize(
    ("variables", "num_ranks", "key", "expected"),
    [
        (TWO, 2, "launch.num_ranks", "none"),
        (TORCHRUN, 1, "launch.num_ranks", "2"),
        ({"WORLD_SIZE": "2", **MASTER}, None, "RANK", "a rank below WORLD_SIZE 2"),
        ({"LOCAL_WORLD_SIZE": "8"}, None, "LOCAL_WORLD_SIZE", "at most WORLD_SIZE"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, None, "LOCAL_WORLD_SIZE", ".* LOCAL_RANK 2"),
        ({"LOCAL_RANK": "first"}, None, "LOCAL_RANK", "a count, got 'first'"),
        ({"PET_NNODES": "2"}, 2, "PET_NNODES", "1"),
        ({**SALLOC, **IN_STEP}, 2, "SLURM_STEP_NUM_TASKS", ".*srun"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, None, "SLURM_PROCID", ".*srun"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, None, "OMPI_COMM_WORLD_SIZE", ".*mpirun"),
        ({"PMI_SIZE": "4"}, 2, "PMI_SIZE", ".*mpirun, got at least 4"),
    ],
)
def test_refused(variables, num_ranks, key, expected, given):
    given(variables)
    with pytest.raises(ValueError, match=rf"^(environment )?{key}: expected {expected}"):
        check_environment(num_ranks)
    if key.startswith("PET_"):  # a command of one process may run in a pod
        check_environment(is_parallel=False)


def test_a_rank_whose_launcher_is_gone_ends(monkeypatch):
    monkeypatch.setattr("hotrec.cli.launch.ctypes", Mock())
    monkeypatch.setenv(PARENT, str(os.getppid()))
    end_with_parent()
    assert os.environ[PARENT] == str(os.getpid()), "for its own children"
    with pytest.raises(SystemExit):
        end_with_parent()


@pytest.mark.parametrize("end", ["os.abort()", "os._exit(0)"])
def test_a_signal_ends_what_a_child_does_not_end_by_it(end: str) -> None:
    """A library may abort where an interrupt meets its own code; a child may be done already."""
    code = f"import os, signal, time; signal.signal(signal.SIGINT, lambda *_: {end})\n"
    code += "print('ready', flush=True)\ntime.sleep(60)"
    with tempfile.TemporaryFile("w+") as stdout:

        def interrupt() -> None:
            while not os.fstat(stdout.fileno()).st_size:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(SystemExit) as ended:
            wait_for_child([sys.executable, "-c", code], dict(os.environ), stdout)
        thread.join()
    assert ended.value.code == 128 + signal.SIGINT
