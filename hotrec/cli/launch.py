"""How a command is launched: its place under torchrun, its run directory, and its ranks.

Hydra would name the run directory by the time at which each process starts, so ranks would
disagree, and two runs that start within a second would share one. Here ``HOTREC_RUN_DIR`` wins;
without it a single process makes a new directory, and ranks take the id of their run from torchrun.
With ``launch.num_ranks=N`` the command runs again as N ranks in a child torchrun.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import IO

RUN_DIR = "HOTREC_RUN_DIR"
# The expected parent of a child process.
PARENT = "HOTREC_PARENT"
# Set for the stages of ``hotrec run``, which write their tables only to files.
BRIEF = "HOTREC_BRIEF"
# Set for a process whose parent reports the signal that ended it.
TOLD = "HOTREC_TOLD"
# Set by torchrun for its ranks.
_AGENT = "TORCHELASTIC_RUN_ID"
_WORKER_END_S = 5.0
_SHUTDOWN_S = 150  # in which ranks save after a signal; as in launch/slurm.sbatch
_PR_SET_PDEATHSIG = 1  # prctl(2)
# Created directories of this process's runs; existing parents are not removed.
_made_parents: list[Path] = []


def is_under_torchrun() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process.

    A single rank that torchrun did not start is an ordinary process: clusters and notebooks set
    RANK=0 and WORLD_SIZE=1 for all their processes.
    """
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return is_rank and (environment_world_size() > 1 or _AGENT in os.environ)


def environment_rank() -> int:
    """This process's rank, 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def environment_world_size() -> int:
    """The number of ranks, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_prefix() -> str:
    """``"[rank 1] "`` if there are several ranks, otherwise empty."""
    return f"[rank {environment_rank()}] " if environment_world_size() > 1 else ""


def this_process() -> str:
    """A name of this process that is unique over all hosts."""
    return f"{platform.node()}:{os.getpid()}"


@dataclass(frozen=True)
class Host:
    """This host among those that share a job of a sweep.

    Args:
        number: From 0, the host of the rendezvous.
        num_hosts: Number of hosts.
        endpoint: Address and port of host 0.
        job: The cluster's unique id of the job.
    """

    number: int = 0
    num_hosts: int = 1
    endpoint: str = ""
    job: str = ""


def this_host() -> Host:
    """From submitit in a job's process; a single host elsewhere, and in the job's ranks."""
    if "SUBMITIT_EXECUTOR" not in os.environ or is_under_torchrun():
        return Host()
    from submitit import JobEnvironment

    job = JobEnvironment()
    if job.num_tasks != job.num_nodes:
        raise ValueError(
            "hydra.launcher.tasks_per_node: expected 1, which starts launch.num_ranks ranks, got "
            f"{job.num_tasks // job.num_nodes}. Leave it at 1."
        )
    if job.num_nodes == 1:
        return Host()
    # Jobs that share their first host must not share a port; as in launch/slurm.sbatch.
    port = 20000 + int(job.raw_job_id) % 10000
    return Host(job.node, job.num_nodes, f"{job.hostnames[0]}:{port}", job.job_id)


def check_num_ranks(num_ranks: int | None) -> None:
    """Refuse another number of ranks than torchrun started on this host."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "none")
    if is_under_torchrun() and num_ranks is not None and str(num_ranks) != here:
        raise ValueError(
            f"launch.num_ranks: expected {here}, as many as torchrun started on this host, got "
            f"{num_ranks}. Omit it, or unset RANK and WORLD_SIZE to start ranks here."
        )


def decide_run_dir(
    command: str, overrides: Sequence[str], *, is_multirun: bool, is_made: bool = True
) -> str:
    """The run's directory, the same on every rank; also set in the environment for Hydra.

    Args:
        command: The command.
        overrides: Its words; the experiment names the directory of a run.
        is_multirun: Whether it is a sweep.
        is_made: Whether to create the directory, unless the environment has one, so that no
            command that starts at the same time can use it.
    """
    _made_parents.clear()
    chosen = os.environ.get(RUN_DIR)
    if chosen and "://" in chosen:
        raise ValueError(
            f"{RUN_DIR}: expected a directory of this host, got {chosen!r}. Use one, and copy it "
            "to the store afterwards."
        )
    if not chosen:
        folder = Path("runs") / ("sweep" if is_multirun else "") / _name_of(command, overrides)
        if is_under_torchrun():
            chosen = str(folder / _id_of_torchrun())
        else:
            folder /= time.strftime("%Y%m%d-%H%M%S")
            chosen = str(_make_new(folder) if is_made else folder)
        os.environ[RUN_DIR] = chosen
    return chosen


def _name_of(command: str, overrides: Sequence[str]) -> str:
    for override in overrides if command == "train" else ():
        key, _, value = override.partition("=")
        if key.lstrip("+") == "experiment" and value.isidentifier():
            return value
    return command


def _id_of_torchrun() -> str:
    """The id of the run, equal on all ranks and after a restart."""
    chosen, error_file = os.environ.get(_AGENT, "none"), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if chosen == "none" and error_file and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # Below a directory of the agent, which makes it for all its attempts.
        chosen = Path(error_file).parents[2].name
    if chosen == "none":
        raise ValueError(
            f"{RUN_DIR}: expected a directory for ranks on several hosts without torchrun's "
            "--rdzv-id, got none. Set one of them."
        )
    return chosen


def _make_new(folder: Path) -> Path:
    """Create the directory, or one with a number after its name if it was just created.

    If none can be created, all ranks get the same error from Hydra, which tries again.
    """
    candidate, number = folder, 0
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            number += 1
            candidate = folder.with_name(f"{folder.name}-{number}")
        except FileNotFoundError:  # a finished command may have removed the empty parent
            _made_parents.extend(p.absolute() for p in folder.parents if not p.exists())
            with suppress(OSError):
                candidate.parent.mkdir(parents=True, exist_ok=True)
                continue
            return candidate
        except OSError:
            return candidate


def remove_if_empty(run_dir: Path) -> None:
    """Remove a run's empty directory, and parents that were only created for it."""
    with suppress(OSError):
        run_dir.rmdir()
        for parent in run_dir.absolute().parents:
            if parent in _made_parents:
                parent.rmdir()


def run_under_torchrun(
    command: str,
    overrides: Sequence[str],
    *,
    num_ranks: int,
    run_dir: str,
    environment: Mapping[str, str],
    host: Host = Host(),  # noqa: B008 (immutable)
    stdout: IO[str] | None = None,
) -> int:
    """Run the command as ``num_ranks`` processes on this host and wait for them.

    Args:
        host: This host among several, each of which calls this with the same number.
        overrides: The overrides of this job, without those of the sweep.
        environment: The environment of the child, which also gets HOTREC_RUN_DIR.
        stdout: Standard output of the child; None for that of this process.

    Returns:
        The exit code; 128 + n after signal n.

    Raises:
        SystemExit: If this process received a signal, so that a sweep stops.
    """
    # The command line is complete. Variables of Kubeflow would be torchrun's defaults.
    variables = {name: v for name, v in environment.items() if not name.startswith("PET_")}
    variables |= {RUN_DIR: run_dir, "TMPDIR": tempfile.gettempdir()}
    variables[PARENT] = str(os.getpid())
    # The ranks share the host's cores; torchrun would set 1, with a warning.
    variables.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    launcher = [sys.executable, "-m", "hotrec.cli.ranks", "--nproc-per-node", str(num_ranks)]
    launcher += ["--shutdown-timeout", str(_SHUTDOWN_S)]
    if host.num_hosts == 1:
        # By default ranks connect to this host's name, and wait for minutes if it has no address.
        launcher += ["--standalone", "--local-addr", "localhost"]
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        launcher += ["--nnodes", str(host.num_hosts), "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", host.endpoint, "--rdzv-id", host.job]
        launcher += ["--rdzv-conf", f"is_host={str(host.number == 0).lower()}"]
    return wait_for_child([*launcher, "-m", "hotrec", command, *overrides], variables, stdout)


def wait_for_child(
    words: Sequence[str], environment: Mapping[str, str], stdout: IO[str] | None = None
) -> int:
    """Run a program, forward this process's signals to it, and wait for its end.

    Returns:
        The exit code; 128 + n after signal n.

    Raises:
        SystemExit: If this process received a signal; never with 0, even if the program finished
            before the signal reached it: later steps must not start.
    """
    # In its own session it gets the terminal's Ctrl-C once, forwarded by this process.
    variables = {**environment, TOLD: "1"}
    child = subprocess.Popen(words, env=variables, stdout=stdout, start_new_session=True)
    with _forward_signals(child) as received:
        exit_code = child.wait()
    exit_code = exit_code if exit_code >= 0 else 128 - exit_code
    if received:
        # A library that is interrupted by a signal, such as during import, may abort.
        is_of_program = exit_code not in (0, 128 + signal.SIGABRT)
        raise SystemExit(exit_code if is_of_program else 128 + received[0])
    return exit_code


def end_with_parent() -> None:
    """Get SIGTERM when the process that started this one ends, even by SIGKILL; Linux only.

    Without it the ranks of a killed launcher would keep training.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # It may have exited already, while the interpreter started.
        if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
            raise SystemExit(128 + signal.SIGTERM)
        os.environ[PARENT] = str(os.getpid())


@contextmanager
def private_temporary_directory() -> Iterator[None]:
    """A temporary directory for this process and those that it starts, removed at its exit.

    torchrun and multiprocessing leave theirs behind when they are killed.
    """
    previous = os.environ.get("TMPDIR")
    parent = tempfile.gettempdir()
    # A socket's path has at most 107 bytes, of which multiprocessing adds about 40 to this.
    made = tempfile.mkdtemp(prefix="hotrec-", dir=parent if len(parent) <= 60 else "/tmp")
    # After multiprocessing has removed its own directory in it, with priority -100.
    Finalize(None, shutil.rmtree, args=(made, True), exitpriority=-200)
    os.environ["TMPDIR"] = tempfile.tempdir = made
    try:
        yield
    finally:
        tempfile.tempdir = None
        os.environ.pop("TMPDIR")
        if previous is not None:
            os.environ["TMPDIR"] = previous


def use_default_start_method() -> None:
    """Start processes by the platform's own method, in which loaders start their workers.

    joblib sets its own method as the default in its processes, which cannot start loader workers.
    """
    multiprocessing.set_start_method(None, force=True)


def end_workers() -> None:
    """Stop the loader workers that remain after an error, in order.

    The error's frames keep them alive until the interpreter exits, and by then the directory of
    their sockets is gone: each would print traces.
    """
    # Torch raises anywhere when it detects that a worker did not exit with code 0.
    with suppress(RuntimeError):
        workers = [child for child in multiprocessing.active_children() if child.daemon]
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join(_WORKER_END_S)


@contextmanager
def _forward_signals(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Forward this process's signals to the child; yields the received ones."""
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if child.poll() is None:
            child.send_signal(number)

    is_main = threading.current_thread() is threading.main_thread()  # which alone gets them
    forwarded = (signal.SIGTERM, signal.SIGINT) if is_main else ()
    previous = {number: signal.signal(number, forward) for number in forwarded}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
